"""The model's forward over packed trees, for any decoder that uses transformers' attention interface."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward.attention.layout import TreeLayout
from mt_grpo.forward.interface import (
    PREFIX,
    extend_own_attention,
    has_own_attention,
    own_attention,
    packed_row,
    register,
    use_attention,
)
from mt_grpo.forward.lm_head import Sampling, backbone_name, output_layer, score_states
from mt_grpo.forward.media import (
    inject_audio_embeddings,
    media_tokens,
    packed_audio_embeddings,
    packed_features,
    packed_positions,
    real_ids,
    takes_features,
)
from mt_grpo.forward.packing import Packed, pack
from mt_grpo.forward.plan import DEFAULT_PLAN, ForwardPlan, Scores
from mt_grpo.forward.recurrent_layers import (
    extend_blocks,
    extend_recurrent_layers,
    over_tree,
    recurrent_layers,
)
from mt_grpo.forward.routes import Replayer, route_shape, router_loss
from mt_grpo.forward.sequence_parallel import long_enough
from mt_grpo.media import IMAGE


@dataclass(frozen=True, eq=False)
class TreeInput:
    """A packed row, as an argument that passes through wrappers unchanged: DDP, FSDP, DeepSpeed, PEFT, autocast."""

    packed: Packed
    layout: TreeLayout
    plan: ForwardPlan
    plain: np.ndarray | None = None


def enable_trees(model: PreTrainedModel | PeftModel, cast_head_to_fp32: bool | None = None) -> None:
    """
    Makes a causal language model able to run over packed trees. `model(input_ids, position_ids, tree=TreeInput(...))`
    then returns a tuple `(logps, entropies)`. Every other forward, and generation, stays as it is.

    The model's own forward is extended. So everything that wraps the model (DDP's gradient hooks, FSDP's and ZeRO-3's
    gathering of weights, autocast) sees one ordinary forward. Backbone and head are looked up on each call, because
    wrappers replace them.
    """
    if isinstance(model, PeftModel):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise UnsupportedModelError(
                f"{type(model).__name__} learns a prompt before every sequence, so trees cannot be packed for it; "
                "set `forward: padded`."
            )
        model = model.get_base_model()
    check_model(model)
    enabled = "_forward_without_trees" in vars(model)
    if cast_head_to_fp32 is not None or not enabled:
        model._head_in_float32 = bool(cast_head_to_fp32)
    if enabled:
        return
    # a reference model is made with the policy's configuration, which may have our name already
    model._attention_without_trees = model.config._attn_implementation.removeprefix(PREFIX)
    extend_own_attention(model)
    use_attention(model, register(own_attention(model)))
    extend_recurrent_layers(model)
    extend_blocks(model, model.config.get_text_config().num_hidden_layers)
    shape = route_shape(model.config)
    model._replayer = None if shape is None else Replayer(model, shape)
    model._forward_without_trees = model.forward  # a bound method: a deep copy of the model has its own

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against the signature
    def forward(self: PreTrainedModel, *args: Any, tree: TreeInput | None = None, **kwargs: Any) -> Any:
        if tree is None:
            return self._forward_without_trees(*args, **kwargs)
        outputs = _backbone_outputs(self, tree, kwargs["input_ids"], kwargs["position_ids"])  # PEFT adds others
        config = self.config.get_text_config()
        alone = sum(kind in ("mlp", "moe") for kind in getattr(config, "layer_types", None) or [])  # one token each
        missing = len(set(range(config.num_hidden_layers)) - tree.layout.layers) - alone
        if missing:
            raise UnsupportedModelError(
                f"{missing} layers of {type(self).__name__} do not go through transformers' attention interface, so "
                "trees cannot be packed for it; set `forward: padded`."
            )
        scores = _label_scores(self, tree, outputs)
        if not tree.plan.router_loss:
            return scores
        copies = torch.from_numpy(tree.packed.copies).to(scores[0].device)[None]  # TRL's loss is of a padded batch
        return (*scores, router_loss(config, outputs.router_logits, copies))

    model.forward = types.MethodType(forward, model)


def _label_scores(model: PreTrainedModel, tree: TreeInput, outputs: Any) -> tuple[Tensor, ...]:
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
        torch.from_numpy(label),
        Sampling(tree.plan.temperature, tree.plan.truncation, plain),
        model._head_in_float32,
        labels,
    )
    return scores if labels is None else labels.join(scores)


def _backbone_outputs(model: PreTrainedModel, tree: TreeInput, input_ids: Tensor, position_ids: Tensor) -> Any:
    backbone = getattr(model, backbone_name(model) or "")
    seen: dict[str, Any] = {}
    heard = None
    images = tree.plan.media
    if images and (input_ids < 0).any():
        # before anything runs over the tree: the towers for images and sounds have no trees
        heard = packed_audio_embeddings(backbone, tree.packed, images, input_ids.device)
        seen = packed_features(backbone, tree.packed, images, input_ids.device)
        places = packed_positions(backbone, tree.packed, images, input_ids.device)
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
    with packed_row(tree.layout), replays, over_tree(model, tree.layout), inject_audio_embeddings(backbone, heard):
        return backbone(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False, **given)


def score_trees(model: nn.Module, plan: ForwardPlan) -> Scores:
    """One forward over a plan's trees in one row, in which prefixes that they share are computed once."""
    packed = pack(plan.all_trees)
    plain = packed.tree >= len(plan.trees) if plan.leaves else None
    if plan.group is None or plan.shared:
        return score_packed(model, packed, plan, plain)
    rows = plan.group.gather((packed, plain))  # the group computes one after the other
    return [score_packed(model, row, plan, plain) for row, plain in rows][plan.group.rank]


def score_packed(
    model: nn.Module, packed: Packed, plan: ForwardPlan = DEFAULT_PLAN, plain: np.ndarray | None = None
) -> Scores:
    """One forward over a packed row. Labels where `plain`, `(M,)`, are scored at temperature 1 and not truncated."""
    device = next(model.parameters()).device
    row = packed if plan.group is None else long_enough(packed, plan.group.size)
    layout = TreeLayout(row, plan.attention, plan.group)
    mine = slice(None) if layout.share is None else layout.share.tokens
    input_ids, position_ids = (
        torch.from_numpy(array[mine]).to(device)[None] for array in (row.input_ids, row.position_ids)
    )
    scores = model(input_ids=input_ids, position_ids=position_ids, tree=TreeInput(row, layout, plan, plain))
    return Scores(packed.tree, packed.column, packed.turn, *scores)


def check_model(model: PreTrainedModel) -> None:
    """
    Refuses a causal language model that cannot run over packed trees, or that may score them wrongly in a way that
    `mt_grpo.forward.probe` cannot see.
    """
    reason = _obstacle(model)
    if reason is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} {reason}, so trees cannot be packed for it; set `forward: padded`."
        )


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


def _attends_by_name(module: nn.Module) -> bool:
    """Whether a layer does something else for attentions that are neither of these two, and ours has another name."""
    forward = inspect.unwrap(type(module).forward)
    return isinstance(forward, types.FunctionType) and ("eager", "sdpa") in forward.__code__.co_consts


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
        if IMAGE in media_tokens(model.config) and not takes_features(backbone):
            return "takes no features of images"
        both_ways = getattr(config, "use_bidirectional_attention", None) == "vision"  # some of Gemma 4
        if both_ways or "token_type_ids" in inspect.signature(backbone.forward).parameters:
            return "attends among the tokens of an image in both directions"
    # the probe is too small to fill an expert
    if getattr(config, "expert_capacity", None):
        return "routes by the batch"
    return None
