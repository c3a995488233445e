"""The forwards with which a trainer computes log-probs, in place of TRL's padded one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError
from mt_grpo.forward.model import enable_trees
from mt_grpo.forward.probe import prove
from mt_grpo.forward.reference import turn_by_turn_logps
from mt_grpo.training.batch import TokenColumns, batch_logps
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.sampling import trained_truncation


def prepare_forward(trainer: GRPOTrainer) -> dict[str, Any]:
    """
    Prepares the policy and the reference of a trainer for its `forward`.

    Returns:
        `temperature` and `truncation` of the distribution that is sampled from.

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
        if args.tree_attention == "flex" and trainer.accelerator.device.type == "cpu":
            raise ConfigError(
                "`tree_attention: flex` needs a GPU, and this run is on a CPU: leave it out, or set `tree_attention: "
                "segment`."
            )
        for policy in filter(None, (trainer.model, trainer.ref_model)):
            enable_trees(trainer.accelerator.unwrap_model(policy), args.cast_lm_head_to_fp32)
    return {"temperature": args.temperature, "truncation": trained_truncation(args)}


def completion_logps(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    columns: TokenColumns,
    args: MTGRPOConfig,
    distribution: dict[str, Any],
    batch_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Log-probabilities and entropies of the completions of a TRL batch, by `forward: tree` or `forward: turn_by_turn`.

    Args:
        model (`nn.Module`): The policy or the reference.
        input_ids, attention_mask (`Tensor`): `(B, P + T)`, prompts padded on the left, completions on the right.
        columns (`TokenColumns`): Of the completions, `(B, T)`.
        args (`MTGRPOConfig`): The run's options.
        distribution (`dict`): As `prepare_forward` returns it.
        batch_size (`int`, *optional*): Rows in one forward; all where none is given.

    Returns:
        Two `(B, T)` tensors, 0 where a token is not trained.
    """
    split = input_ids.size(1) - columns.scored.size(1)
    prompt_ids, ids = input_ids[:, :split], input_ids[:, split:]
    prompt_mask, mask = attention_mask[:, :split], attention_mask[:, split:]
    if args.forward == "turn_by_turn":
        return turn_by_turn_logps(
            model, prompt_ids, prompt_mask, ids, columns.scored, columns.turn_ids, columns.parent, **distribution
        )
    tensors = [prompt_ids, prompt_mask, ids, mask, columns.scored]
    tensors += [] if columns.parent is None else [columns.parent]
    pieces = zip(*(tensor.split(batch_size or len(ids)) for tensor in tensors), strict=True)
    results = [batch_logps(model, *piece, attention=args.tree_attention, **distribution) for piece in pieces]
    logps, entropies = (torch.cat(values) for values in zip(*results, strict=True))
    return logps, entropies


def keep_outputs_exact(accelerator: Accelerator) -> None:
    """
    Keeps FSDP2 from rounding the model's outputs, and gradients between ranks, to the precision that it computes in.
    Log-probs in bfloat16 have three digits, so a ratio of two would be off by a percent, and a sum of gradients would
    lose the small ones. accelerate has no key for either.
    """
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.mixed_precision_policy is not None:
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, output_dtype=None, reduce_dtype=torch.float32
        )


def prove_forward(trainer: GRPOTrainer, length: int) -> None:
    """
    Proves `forward: tree` for the policy as it is wrapped for training, and for a separate reference model, once for
    rows of up to `length` tokens. Every rank calls it at the same point. In evaluation it does
    nothing.

    Raises:
        UnsupportedModelError: If a model scores packed trees differently from each turn alone.
    """
    if trainer.args.forward != "tree" or not trainer.model.training:
        return
    with trainer.accelerator.autocast():
        for model in filter(None, (trainer.model_wrapped, trainer.ref_model)):
            prove(
                model,
                length,
                attention=trainer.args.tree_attention,
                mixed_precision=trainer.accelerator.mixed_precision,
            )
