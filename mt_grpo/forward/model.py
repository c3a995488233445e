"""
What one forward is given, how it is scored, and what it returns: packed trees, for any decoder that uses transformers'
attention interface; or rows, one for each root-to-leaf sequence or for each turn.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward.attention import TreeLayout
from mt_grpo.forward.interface import base_model, extend_attention, has_own_attention, packed_row
from mt_grpo.forward.lm_head import Sampling, Truncation, at_labels, backbone_name, output_layer, score_states
from mt_grpo.forward.media import Media, RowMedia, media_tokens, real_ids, row_inputs, with_blank
from mt_grpo.forward.packing import FlatTree, Packed, SequenceGroup, cannot_pack, flatten, pack
from mt_grpo.forward.recurrence import extend_recurrence, over_tree, recurrent_layers
from mt_grpo.forward.routes import Replayer, route_shape, router_loss
from mt_grpo.media import IMAGE
from mt_grpo.token_tree import TokenTree

FORWARDS = ("tree", "padded", "turn_by_turn")
"""Every token once; a padded row for each root-to-leaf sequence; one forward per turn."""


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """The tokens to score, and how."""

    trees: Sequence[FlatTree | TokenTree] = ()
    leaves: Sequence[Sequence[TokenTree]] = ()
    """More trees for `"tree"` to score beside each tree, at temperature 1 and without truncation."""
    media: Media = field(default_factory=dict)
    """The images, videos and sounds of the trees, by the id of their tokens."""
    forward: str = "tree"  # one of `FORWARDS`
    attention: str = "auto"  # the attention kernel of `"tree"`
    temperature: float = 1.0
    truncation: Truncation | None = None
    router_loss: bool = False  # whether the loss that balances experts is wanted too
    group: SequenceGroup | None = None  # the processes that compute a row of `"tree"` together
    candidates: Sequence[np.ndarray] = ()
    """For each tree, `(len(tokens), k)`, further tokens that are scored in the place of each of its tokens."""
    top: int = 0
    """How many of the likeliest tokens are wanted in the place of each trained token; without gradient, truncation."""
    shared: bool = False
    """Whether every process of the group has this same plan; else they compute all plans one after the other."""

    @cached_property
    def all_trees(self) -> list[FlatTree]:
        """The trees, then the leaves, then what only keeps processes in step: each makes a forward."""
        trees = [*self.trees, *chain.from_iterable(self.leaves)]
        trees = with_blank(trees, self.media) if self.media else trees
        found = [flatten(tree) if isinstance(tree, TokenTree) else tree for tree in trees]
        if not any(len(tree.tokens) for tree in found):
            found.append(FlatTree(np.zeros(1, dtype=np.int64), np.full(1, -1)))
        return found

    def split(self, size: int) -> list[ForwardPlan]:
        """Plans of up to `size` trees each; one of none where there are none."""
        return [
            replace(
                self,
                trees=self.trees[start : start + size],
                leaves=self.leaves[start : start + size],
                candidates=self.candidates[start : start + size],
            )
            for start in range(0, len(self.trees) or 1, size)
        ]

    def beside(self, label: Tensor, tree: np.ndarray, column: np.ndarray) -> Tensor:
        """Labels `(M,)`, or with the candidates beside each `(M, 1 + k)`, of tokens in these trees and columns."""
        if not self.candidates:
            return label
        width = self.candidates[0].shape[1]
        found = [self.candidates[one][place] for one, place in zip(tree, column, strict=True)]
        others = torch.from_numpy(np.stack(found) if found else np.empty((0, width), dtype=np.int64))
        return torch.cat([label[:, None], others.to(label.device)], dim=1)


DEFAULT_PLAN = ForwardPlan()


@dataclass(frozen=True, eq=False)
class Scores:
    """
    Scores of the `M` trained tokens of a plan's trees, `(M,)` each: the tree (leaves come after trees), the token's
    index there, its turn, log-prob and entropy; and the loss that balances experts, if the plan asks for it. With
    candidates log-probs are `(M, 1 + k)`. Where the likeliest tokens are asked for, log-probs are `(M, 1 + top)`, of
    the token itself and of those, and `(M, top)` ids stand for entropies.
    """

    tree: np.ndarray
    column: np.ndarray
    turn: np.ndarray
    logps: Tensor
    entropies: Tensor
    router_loss: Tensor | None = None

    def by_turn(self, num_turns: Sequence[int], values: Tensor | None = None) -> list[list[Tensor]]:
        """The log-probs, or other values, of each turn of trees with so many turns."""
        values = self.logps if values is None else values
        order = torch.from_numpy(np.lexsort((self.column, self.turn, self.tree))).to(values.device)
        bases = np.cumsum([0, *num_turns])
        sizes = np.bincount(bases[self.tree] + self.turn, minlength=bases[-1])
        pieces = iter(values[order].split(sizes.tolist()))
        return [[next(pieces) for _ in range(count)] for count in num_turns]

    def turn_means(self, num_turns: Sequence[int], first: int = 0) -> list[list[float]]:
        """The mean log-prob per token of each turn of the trees from number `first` on; 0 for a turn without any."""
        if not num_turns:
            return []
        wanted = np.flatnonzero(self.tree >= first)
        values = self.logps.detach()[torch.from_numpy(wanted).to(self.logps.device)].double().cpu().numpy()
        bases = np.cumsum([0, *num_turns])
        number = bases[self.tree[wanted] - first] + self.turn[wanted]
        counts = np.bincount(number, minlength=bases[-1]).clip(min=1)
        means = (np.bincount(number, values, minlength=bases[-1]) / counts).tolist()
        return [means[begin:end] for begin, end in pairwise(bases)]


def score(model: nn.Module, plan: ForwardPlan) -> Scores:
    """The log-probs of a plan's trained tokens, differentiable."""
    ways = {"tree": _score_trees, "padded": _score_rows, "turn_by_turn": score_turns}
    return ways[plan.forward](model, plan)


# Packed trees


def _score_trees(model: nn.Module, plan: ForwardPlan) -> Scores:
    """One forward over a plan's trees in one row, in which prefixes that they share are computed once."""
    packed = pack(plan.all_trees)
    plain = packed.tree >= len(plan.trees) if plan.leaves else None
    if plan.group is None or plan.shared:
        return _score_packed(model, packed, plan, plain)
    rows = plan.group.gather((packed, plain))  # the group computes one after the other
    return [_score_packed(model, row, plan, plain) for row, plain in rows][plan.group.rank]


def _score_packed(
    model: nn.Module, packed: Packed, plan: ForwardPlan = DEFAULT_PLAN, plain: np.ndarray | None = None
) -> Scores:
    """One forward over a packed row. Labels where `plain`, `(M,)`, are scored at temperature 1 and not truncated."""
    device = next(model.parameters()).device
    row = packed if plan.group is None else packed.at_least(plan.group.size)
    layout = TreeLayout(row, plan.attention, plan.group)
    mine = slice(None) if layout.share is None else layout.share.tokens
    input_ids, position_ids = (
        torch.from_numpy(array[mine]).to(device)[None] for array in (row.input_ids, row.position_ids)
    )
    scores = model(input_ids=input_ids, position_ids=position_ids, tree=_TreeInput(row, layout, plan, plain))
    return Scores(packed.tree, packed.column, packed.turn, *scores)


@dataclass(frozen=True, eq=False)
class _TreeInput:
    """A packed row, as an argument that passes through wrappers unchanged: DDP, FSDP, DeepSpeed, PEFT, autocast."""

    packed: Packed
    layout: TreeLayout
    plan: ForwardPlan
    plain: np.ndarray | None = None


def enable_trees(model: PreTrainedModel | PeftModel, cast_head_to_fp32: bool | None = None) -> None:
    """
    Makes a causal language model able to run over packed trees: `model(input_ids, position_ids, tree=_TreeInput(...))`
    then returns `(logps, entropies)`. The model's own forward is extended, so that DDP, FSDP and ZeRO-3 see one
    ordinary forward; backbone and head are looked up on each call, because wrappers replace them.
    """
    if isinstance(model, PeftModel):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise cannot_pack(f"{type(model).__name__} learns a prompt before every sequence")
        model = model.get_base_model()
    check_model(model)
    enabled = "_forward_without_trees" in vars(model)
    if cast_head_to_fp32 is not None or not enabled:
        model._head_in_float32 = bool(cast_head_to_fp32)
    if enabled:
        return
    extend_attention(model)
    shape = route_shape(model.config)
    model._carries_layout = bool(recurrent_layers(model)) or shape is not None
    if model._carries_layout:
        extend_recurrence(model, model.config.get_text_config().num_hidden_layers)
    model._replayer = None if shape is None else Replayer(model, shape)
    model._forward_without_trees = model.forward  # a bound method: a deep copy of the model has its own

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against the signature
    def forward(self: PreTrainedModel, *args: Any, tree: _TreeInput | None = None, **kwargs: Any) -> Any:
        if tree is None:
            return self._forward_without_trees(*args, **kwargs)
        outputs = _backbone_outputs(self, tree, kwargs["input_ids"], kwargs["position_ids"])  # PEFT adds others
        config = self.config.get_text_config()
        alone = sum(kind in ("mlp", "moe") for kind in getattr(config, "layer_types", None) or [])  # one token each
        missing = len(set(range(config.num_hidden_layers)) - tree.layout.layers) - alone
        if missing:
            name = type(self).__name__
            raise cannot_pack(f"{missing} layers of {name} do not go through transformers' attention interface")
        scores = _label_scores(self, tree, outputs)
        if not tree.plan.router_loss:
            return scores
        copies = torch.from_numpy(tree.packed.copies).to(scores[0].device)[None]  # TRL's loss is of a padded batch
        return (*scores, router_loss(config, outputs.router_logits, copies))

    model.forward = types.MethodType(forward, model)


def _backbone_outputs(
    model: PreTrainedModel, tree: _TreeInput, input_ids: Tensor, position_ids: Tensor
) -> ModelOutput:
    backbone = getattr(model, backbone_name(model) or "")
    seen: dict[str, Any] = {}
    hears: AbstractContextManager[None] = nullcontext()
    if tree.plan.media and (input_ids < 0).any():
        media = RowMedia(backbone, tree.packed, tree.plan.media, input_ids.device)
        hears, seen, places = media.sounds(), media.features(), media.positions()
        position_ids = position_ids if places is None else places
        input_ids = real_ids(input_ids, model.config)
    given = {"position_ids": position_ids, "tree_layout": tree.layout, **seen}
    if tree.plan.router_loss:
        given["output_router_logits"] = True
    parameters = inspect.signature(backbone.forward).parameters
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {name: value for name, value in given.items() if name in parameters}
    routes, shared, replayer, share = tree.packed.routes, tree.packed.shared_routes, model._replayer, tree.layout.share
    if routes is not None and share is not None:
        routes, shared = routes[share.tokens], shared if share.group.rank == 0 else (0, 0)  # they are counted once
    replays: AbstractContextManager[None] = nullcontext()
    if routes is not None and replayer is not None:
        replays = replayer.replaying(tree.layout, routes, shared)
    carried = over_tree(model, tree.layout) if model._carries_layout else nullcontext()
    with packed_row(tree.layout), replays, carried, hears:
        return backbone(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False, **given)


def _label_scores(model: PreTrainedModel, tree: _TreeInput, outputs: ModelOutput) -> tuple[Tensor, ...]:
    """Log-probs and entropies, `(M,)`, of the labels of a row."""
    predictor, label, plain, share = tree.packed.predictor, tree.packed.label, tree.plain, tree.layout.share
    labels = None if share is None else share.labels(predictor)
    if share is not None and labels is not None:
        scored = labels.of(labels.scored)
        predictor, label = predictor[labels.of(labels.had)] - share.tokens.start, label[scored]
        plain = None if plain is None else plain[scored]
    scores = score_states(
        model,
        outputs,
        torch.from_numpy(predictor),
        tree.plan.beside(torch.from_numpy(label), tree.packed.tree, tree.packed.column),
        Sampling(tree.plan.temperature, tree.plan.truncation, plain, tree.plan.top),
        model._head_in_float32,
        labels,
    )
    return scores if labels is None else labels.join(scores)


# Rows


def _score_rows(model: nn.Module, plan: ForwardPlan) -> Scores:
    """
    One forward with a row for each root-to-leaf sequence, padded on the right. Each token is scored in the first row
    that has it, with logits only where a row has a trained token, if the model can choose.
    """
    trees = plan.all_trees
    paths = [(number, path) for number, tree in enumerate(trees) for path in tree.paths()]
    device = next(model.parameters()).device
    rows = [torch.from_numpy(trees[number].tokens[path]) for number, path in paths]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    lengths = torch.tensor([len(path) for _, path in paths])
    mask = (torch.arange(ids.size(1)) < lengths[:, None]).long().to(device)
    seen = [np.zeros(len(tree.tokens), dtype=bool) for tree in trees]
    places: list[np.ndarray] = []
    for row, (number, path) in enumerate(paths):
        tree = trees[number]
        depth = np.flatnonzero((tree.turns[path] >= 0) & ~seen[number][path])
        seen[number][path] = True
        column, same = path[depth], np.ones_like(depth)
        places.append(np.stack([row * same, depth, number * same, column, tree.turns[column]]))
    row, depth, number, column, turn = np.concatenate(places, axis=1)
    at = torch.from_numpy(row).to(device)
    label = ids[at, torch.from_numpy(depth).to(device)]
    predictor = depth - 1 - ids.size(1)  # from the end, since an adapter may put tokens before every row
    asked: dict[str, Any] = {"output_router_logits": True} if plan.router_loss else {}
    keeps = inspect.signature(base_model(model).forward).parameters.get("logits_to_keep")
    if keeps is not None and "Tensor" in str(keeps.annotation):  # else logits of every token of every row
        kept, predictor = np.unique(predictor, return_inverse=True)
        asked["logits_to_keep"] = torch.from_numpy(kept).to(device)
    inputs = row_inputs(model, ids, plan.media) if plan.media else {"input_ids": ids}
    output = model(**inputs, attention_mask=mask, use_cache=False, **asked)
    chosen = torch.from_numpy(predictor).to(output.logits.device)
    logits = output.logits[at.to(output.logits.device), chosen]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / plan.temperature
    if plan.truncation is not None:
        logits = plan.truncation.apply(logits, label)
    balance = router_loss(base_model(model).config, output.router_logits, mask) if plan.router_loss else None
    return Scores(number, column, turn, *at_labels(logits, plan.beside(label, number, column), plan.top), balance)


def score_turns(model: nn.Module, plan: ForwardPlan, keep_logits: bool = True) -> Scores:
    """One forward for each turn in its context, with nothing shared: the oracle of the tree forward."""
    device = next(model.parameters()).device
    places: list[np.ndarray] = []
    found: list[tuple[Tensor, Tensor]] = []
    for number, tree in enumerate(plan.all_trees):
        parent = np.arange(-1, len(tree.tokens) - 1) if tree.parent is None else tree.parent
        for turn in np.unique(tree.turns[tree.turns >= 0]):
            left = np.flatnonzero(tree.turns == turn)
            while len(left):  # where the history was rewritten, what answers a turn is on another branch
                path = [int(left[-1])]
                while parent[path[-1]] >= 0:
                    path.append(int(parent[path[-1]]))
                path = path[::-1]
                action, left = left[np.isin(left, path)], left[~np.isin(left, path)]
                before = np.searchsorted(path, action) - 1 - len(path)  # from the end
                keep = {} if keep_logits else {"logits_to_keep": int(-before[0])}
                ids = torch.from_numpy(tree.tokens[path]).to(device)[None]
                inputs = row_inputs(model, ids, plan.media) if plan.media else {"input_ids": ids}
                if plan.media:  # without a mask Qwen's Omni models place images as words
                    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
                logits = model(**inputs, use_cache=False, **keep).logits[0][before.tolist()].float() / plan.temperature
                label = torch.from_numpy(tree.tokens[action]).to(logits.device)
                if plan.truncation is not None:
                    logits = plan.truncation.apply(logits, label)
                label = plan.beside(label, np.full_like(action, number), action)
                found.append(at_labels(logits, label, plan.top))
                places.append(np.stack([np.full_like(action, number), action, np.full_like(action, turn)]))
    if not found:  # a backward needs something to flow through
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False).logits
        nothing = logits.float()[0, :0]
        label = plan.beside(torch.zeros(0, dtype=torch.long, device=device), *np.empty((2, 0), dtype=np.int64))
        found, places = [at_labels(nothing, label, plan.top)], [np.empty((3, 0), dtype=np.int64)]
    logps, entropies = (torch.cat(values) for values in zip(*found, strict=True))
    tree_of, column, turn_of = np.concatenate(places, axis=1)
    return Scores(tree_of, column, turn_of, logps, entropies)


# Which models can run over packed trees


def check_model(model: PreTrainedModel) -> None:
    """Refuses a causal language model that cannot run over packed trees, or may score them wrongly unseen."""
    reason = _obstacle(model)
    if reason is not None:
        raise cannot_pack(f"{type(model).__name__} {reason}")


def _obstacle(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    # cannot run
    in_file = "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(model).__module__]) and not model._is_stateful
    if not (model._supports_attention_backend or in_file or has_own_attention(model) or recurrent_layers(model)):
        return "does not go through transformers' attention interface"
    if any(map(_attends_by_name, model.modules())):
        return "picks the tokens that it attends to (sparse attention)"
    if backbone_name(model) is None or output_layer(model) is None:
        return "has no linear output layer apart from the rest"
    # the probe has no images and no other sequence to attend to
    if config.is_encoder_decoder or (model.config is not config and not media_tokens(model.config)):
        return "is more than a text decoder"
    if model.config is not config:
        backbone = getattr(model, backbone_name(model) or "")
        parameters = inspect.signature(backbone.forward).parameters
        if IMAGE in media_tokens(model.config) and "mm_encoder_outputs" not in parameters:
            return "takes no features of images"
        both_ways = getattr(config, "use_bidirectional_attention", None) == "vision"  # some of Gemma 4
        if both_ways or "token_type_ids" in parameters:
            return "attends among the tokens of an image in both directions"
    # the probe is too small to fill an expert
    if getattr(config, "expert_capacity", None):
        return "routes by the batch"
    return None


def _attends_by_name(module: nn.Module) -> bool:
    """Whether a layer does something else for attentions that are neither of these two, and ours has another name."""
    forward = inspect.unwrap(type(module).forward)
    return isinstance(forward, types.FunctionType) and ("eager", "sdpa") in forward.__code__.co_consts


def check_sequence_parallel(model: PreTrainedModel | PeftModel, size: int) -> None:
    """Refuses a model whose rows several processes cannot compute together."""
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    heads, name = getattr(model.config.get_text_config(), "num_attention_heads", None), type(model).__name__
    if isinstance(heads, int) and heads % size:
        fitting = " or ".join(str(number) for number in range(2, heads + 1) if heads % number == 0)
        raise UnsupportedModelError(
            f"{name} has {heads} attention heads, which {size} processes cannot share equally: set `sp_size` to "
            f"{fitting}, or leave it out."
        )
    reasons = {
        "has layers whose state runs along the row": recurrent_layers(model),
        "computes its attention itself": has_own_attention(model),
        "takes images or sounds": bool(media_tokens(model.config)),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise UnsupportedModelError(
            f"{name} {reason}, so several processes cannot compute its rows together: leave `sp_size` out."
        )
