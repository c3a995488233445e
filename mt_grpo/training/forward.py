"""What a trainer readies before its first forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError
from mt_grpo.forward.model import enable_trees
from mt_grpo.training.sampling import trained_truncation


def prepare_forward(trainer: GRPOTrainer) -> dict[str, Any]:
    """
    Readies the policy and the reference of a trainer for its `forward`.

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


def keep_outputs_exact(accelerator: Accelerator) -> None:
    """
    Keeps FSDP2 from rounding what the model returns, and gradients on their way between ranks, to the precision it
    computes in: log-probs in bfloat16 have three digits, and the ratio of two of them is off by a percent; a sum of
    gradients loses what the small ones add. accelerate has no key for either.
    """
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.mixed_precision_policy is not None:
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, output_dtype=None, reduce_dtype=torch.float32
        )
