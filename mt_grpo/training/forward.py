"""The model's forward over packed trees, and TRL's batches through it."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from mt_grpo.training.attention import TreeLayout, UnsupportedModelError, check_model, register
from mt_grpo.training.head import score
from mt_grpo.training.packing import FlatTree, Packed, balance, pack, unique_tokens


@dataclass(frozen=True)
class TreeScores:
    """
    What a model's forward returns for a packed row of `M` scored tokens.

    Args:
        logps (`Tensor`): `(M,)` log-probabilities.
        entropies (`Tensor`): `(M,)` entropies in nats.
    """

    logps: Tensor
    entropies: Tensor


@dataclass(frozen=True, eq=False)
class TreeInput:
    """A packed row on its way through wrappers that know nothing of it: DDP, FSDP, DeepSpeed, PEFT, autocast."""

    packed: Packed
    layout: TreeLayout
    temperature: float


def enable_trees(model: PreTrainedModel | PeftModel) -> None:
    """
    Teaches a causal language model to run over packed trees: `model(input_ids, position_ids, tree=TreeInput(...))`
    returns a tuple `(logps, entropies)`. Every other forward, and generation, is as before.

    The forward itself is extended, not called around, so that whatever wraps the model (DDP's gradient hooks, FSDP's
    and ZeRO-3's gathering of weights, autocast) sees one ordinary forward. Backbone and head are looked up on each
    call, because wrappers replace them.

    Raises:
        UnsupportedModelError: If the model cannot run over packed trees.
    """
    if isinstance(model, PeftModel):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise UnsupportedModelError(
                f"{type(model).__name__} learns a prompt before every sequence, so trees cannot be packed for it; "
                "set `forward: padded`."
            )
        model = model.get_base_model()
    check_model(model)
    original = model.config._attn_implementation
    if original.startswith("tree_or_"):
        return
    model.config._attn_implementation = register("sdpa" if original == "eager" else original)
    plain = model.forward

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against the signature
    def forward(self: PreTrainedModel, *args: Any, tree: TreeInput | None = None, **kwargs: Any) -> Any:
        if tree is None:
            return plain(*args, **kwargs)
        device = kwargs["input_ids"].device
        hidden = self.base_model(
            input_ids=kwargs["input_ids"],
            position_ids=kwargs["position_ids"],
            # a mask of four dimensions is passed on as it is: transformers builds none
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            use_cache=False,
            tree_layout=tree.layout,
        ).last_hidden_state[0]
        missing = self.config.get_text_config().num_hidden_layers - len(tree.layout.layers)
        if missing:
            raise UnsupportedModelError(
                f"{missing} layers of {type(self).__name__} do not pass keyword arguments to their attention, so "
                "trees cannot be packed for it; set `forward: padded`."
            )
        head = _linear(self.get_output_embeddings())
        weight, bias = (
            parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for parameter in (head.weight, head.bias)
        )
        predictor = torch.from_numpy(tree.packed.predictor).to(hidden.device)
        label = torch.from_numpy(tree.packed.label).to(weight.device)
        return score(hidden.index_select(0, predictor).to(weight.device), weight, bias, label, tree.temperature)

    model.forward = types.MethodType(forward, model)


def _linear(head: nn.Module) -> nn.Linear:
    if isinstance(head, ModulesToSaveWrapper):
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapter]
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(
            f"The output layer is a {type(head).__name__}, not a linear layer, so trees cannot be packed for it; set "
            "`forward: padded`."
        )
    return head


def run(model: nn.Module, packed: Packed, attention: str = "auto", temperature: float = 1.0) -> TreeScores:
    """
    One forward over a packed row.

    Args:
        model (`nn.Module`): A model given to `enable_trees`, as it is or wrapped for training.
        packed (`Packed`): The row.
        attention (`str`, *optional*, defaults to `"auto"`): `"auto"`, `"segment"`, `"flex"` or `"dense"`.
        temperature (`float`, *optional*, defaults to `1.0`): Divides the logits.
    """
    device = next(model.parameters()).device
    layout = TreeLayout(packed, device, attention)
    input_ids, position_ids = (
        torch.from_numpy(array).to(device)[None] for array in (packed.input_ids, packed.position_ids)
    )
    return TreeScores(
        *model(input_ids=input_ids, position_ids=position_ids, tree=TreeInput(packed, layout, temperature))
    )


def batch_trees(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    loss_mask: Tensor,
    completion_mask: Tensor,
    parents: Tensor | None = None,
) -> tuple[list[FlatTree], list[int]]:
    """
    The rows of a TRL batch as trees.

    Args:
        prompt_ids, prompt_mask (`Tensor`): `(B, P)`, padded on the left.
        completion_ids, completion_mask (`Tensor`): `(B, T)`, padded on the right.
        loss_mask (`Tensor`): `(B, T)` 1 where a token is scored.
        parents (`Tensor`, *optional*): `(B, T)` completion column of the token each token follows; -1 is the last
            token of the prompt, -2 the one before. `None` where every row is one sequence.

    Returns:
        The trees, and the length of each prompt.
    """
    arrays = (prompt_ids, prompt_mask, completion_ids, completion_mask, loss_mask)
    prompts, prompt_masks, completions, masks, scored = (array.detach().cpu().numpy() for array in arrays)
    above = None if parents is None else parents.cpu().numpy()
    trees, lengths = [], []
    for row in range(len(prompts)):
        prompt = prompts[row][prompt_masks[row].astype(bool)]
        size = int(masks[row].sum())
        turns = np.full(len(prompt) + size, -1, dtype=np.int64)
        turns[len(prompt) :] = np.where(scored[row][:size] > 0, 0, -1)
        follows = None
        if above is not None:
            follows = np.r_[np.arange(-1, len(prompt) - 1), above[row][:size] + len(prompt)]
        trees.append(FlatTree(np.concatenate([prompt, completions[row][:size]]), turns, follows))
        lengths.append(len(prompt))
    return trees, lengths


def batch_logps(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    loss_mask: Tensor,
    parents: Tensor | None = None,
    *,
    attention: str = "auto",
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """
    Log-probabilities and entropies of a TRL batch from one packed forward, whatever its rows share computed once.
    Every call is one forward on every rank, also where nothing is scored, so ranks that hold different amounts stay
    in step.

    Args:
        As `batch_trees`, and `attention` and `temperature` as `run`.

    Returns:
        Two `(B, T)` tensors, 0 where `loss_mask` is 0.
    """
    trees, lengths = batch_trees(prompt_ids, prompt_mask, completion_ids, loss_mask, completion_mask, parents)
    packed = pack(trees)
    scores = run(model, packed, attention, temperature)
    row = torch.from_numpy(packed.tree).to(scores.logps.device)
    column = torch.from_numpy(packed.column - np.array(lengths)[packed.tree]).to(scores.logps.device)
    logps, entropies = (
        values.new_zeros(completion_ids.shape).index_put((row, column), values)
        for values in (scores.logps, scores.entropies)
    )
    return logps, entropies


def regroup(batches: Sequence[dict[str, Any]], groups: str = "group_ids") -> list[dict[str, Any]]:
    """
    Deals the rows of micro-batches again so that the rows of a group meet in one micro-batch, where they share their
    prompt, and so that the micro-batches hold about as many unique tokens.

    Groups that do not fill whole micro-batches lie next to each other and are cut where a micro-batch ends.

    Args:
        batches (`list[dict]`): Micro-batches of equal size, as TRL buffers them: tensors whose first dimension is the
            row, and anything else, which is left alone.
        groups (`str`, *optional*, defaults to `"group_ids"`): Key of the `(B,)` tensor that numbers the groups.

    Returns:
        As many micro-batches, of the same rows.
    """
    ids = torch.cat([batch[groups] for batch in batches]).tolist()
    size = len(batches[0][groups])
    members: dict[int, list[int]] = {}
    for row, group in enumerate(ids):
        members.setdefault(group, []).append(row)
    order = list(members)
    if all(size % len(rows) == 0 for rows in members.values()) and len({len(r) for r in members.values()}) == 1:
        keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        stacked = [torch.cat([batch[key] for batch in batches]) for key in keys]
        trees, _ = batch_trees(stacked[0], stacked[1], stacked[2], stacked[3], stacked[3])
        weights = [unique_tokens([trees[row] for row in members[group]]) for group in order]
        order = [order[index] for bin in balance(weights, len(batches)) for index in bin]
    rows = torch.tensor([row for group in order for row in members[group]], device=batches[0][groups].device)
    dealt: list[dict[str, Any]] = [dict(batch) for batch in batches]
    for key, value in batches[0].items():
        if isinstance(value, Tensor) and value.dim() and len(value) == size:
            whole = torch.cat([batch[key] for batch in batches])[rows]
            for number, batch in enumerate(dealt):
                batch[key] = whole[number * size : (number + 1) * size]
    return dealt
