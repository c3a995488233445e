"""The model's forward over packed trees, and TRL's batches through it."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl import GRPOTrainer

from mt_grpo.training.attention import TreeLayout, UnsupportedModelError, check_model, register
from mt_grpo.training.config import ConfigError
from mt_grpo.training.head import score
from mt_grpo.training.packing import FlatTree, Packed, pack


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


def prepare_forward(trainer: GRPOTrainer) -> None:
    """
    Readies the policy and the reference of a trainer for its `forward`.

    Raises:
        ConfigError: If `forward` cannot train with the other options.
        UnsupportedModelError: If a model cannot run over packed trees.
    """
    args = trainer.args
    if args.forward == "turn_by_turn" and trainer.accelerator.num_processes > 1:
        raise ConfigError("`forward: turn_by_turn` runs on one process only; set `forward: tree`.")
    if args.forward != "padded" and trainer.aux_loss_enabled:
        raise ConfigError(
            f"`forward: {args.forward}` has no loss that balances experts, because that depends on every token of a "
            "batch; set `router_aux_loss_coef: 0.0`, or `forward: padded`."
        )
    if args.forward == "tree":
        for policy in filter(None, (trainer.model, trainer.ref_model)):
            enable_trees(trainer.accelerator.unwrap_model(policy), args.cast_lm_head_to_fp32)


def keep_outputs_exact(accelerator: Accelerator) -> None:
    """
    Keeps FSDP2 from rounding what the model returns to the precision it computes in: log-probs in bfloat16 have three
    digits, and the ratio of two of them is off by a percent.
    """
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.mixed_precision_policy is not None:
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


def enable_trees(model: PreTrainedModel | PeftModel, cast_head_to_fp32: bool | None = None) -> None:
    """
    Teaches a causal language model to run over packed trees: `model(input_ids, position_ids, tree=TreeInput(...))`
    returns a tuple `(logps, entropies)`. Every other forward, and generation, is as before.

    The forward itself is extended, not called around, so that whatever wraps the model (DDP's gradient hooks, FSDP's
    and ZeRO-3's gathering of weights, autocast) sees one ordinary forward. Backbone and head are looked up on each
    call, because wrappers replace them.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model, not wrapped for training yet.
        cast_head_to_fp32 (`bool`, *optional*): Computes logits in float32, outside autocast, as TRL's
            `cast_lm_head_to_fp32` does; unset it stays as it was, at first `False`.

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
    enabled = "_forward_without_trees" in vars(model)
    if cast_head_to_fp32 is not None or not enabled:
        model._head_in_float32 = bool(cast_head_to_fp32)
    if enabled:
        return
    model._attention_without_trees = model.config._attn_implementation.removeprefix("tree_or_")
    # a reference model is made with the policy's configuration, where the name may be ours already
    model.config._attn_implementation = register(model.config._attn_implementation.removeprefix("tree_or_"))
    model._forward_without_trees = model.forward  # a bound method: a deep copy of the model has its own

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against the signature
    def forward(self: PreTrainedModel, *args: Any, tree: TreeInput | None = None, **kwargs: Any) -> Any:
        if tree is None:
            return self._forward_without_trees(*args, **kwargs)
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
        predictor = torch.from_numpy(tree.packed.predictor).to(hidden.device)
        scored = hidden.index_select(0, predictor)
        return _through_head(self.get_output_embeddings(), scored, tree, self._head_in_float32)

    model.forward = types.MethodType(forward, model)


def _through_head(module: nn.Module, hidden: Tensor, tree: TreeInput, cast_to_fp32: bool) -> tuple[Tensor, Tensor]:
    """
    Scores hidden states inside the output layer's own forward: a layer that is sharded by itself has its weights
    gathered, and their gradients reduced, by hooks that only a call of the module fires.
    """
    head = _linear(module)

    def scoring(hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden.to(head.weight.device)
        label = torch.from_numpy(tree.packed.label).to(hidden.device)
        if not cast_to_fp32:
            return score(hidden, head.weight, head.bias, label, tree.temperature)
        with torch.autocast(hidden.device.type, enabled=False):
            return score(hidden.float(), head.weight, head.bias, label, tree.temperature)

    usual = vars(head).get("forward")
    head.forward = scoring
    try:
        return module(hidden)
    finally:
        if usual is None:
            del head.forward
        else:
            head.forward = usual


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
    layout = TreeLayout(packed, attention)
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
