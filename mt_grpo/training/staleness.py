"""
What makes it right to train on conversations of earlier weights: how far they are from the policy, and a smaller step
where that is too far.

TRL computes the old log-probs with the weights of the moment, and multiplies the loss by their ratio to the sampled
ones, cut at `vllm_importance_sampling_clip_max`. With one iteration PPO's own clip does nothing, so this cut is the
only bound per token. How far the whole batch is from the policy says the effective sample size of the ratios of whole
conversations, which predicts a collapse (arXiv 2602.17616).
"""

from __future__ import annotations

import logging
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather
from transformers import TrainerCallback

FEW = 0.25
"""Effective share of a batch below which its steps are made smaller."""

logger = logging.getLogger(__name__)


def effective_sample_size(output: dict[str, Any]) -> float:
    """
    The share of a batch that counts where conversations are weighed by the ratio of the policy's probability to that
    of the weights they were sampled with: `(Σ w)² / (n Σ w²)`. This is a collective call.

    Args:
        output (`dict`): This process's batch: `old_per_token_logps`, `sampling_per_token_logps` (NaN where no engine
            sampled a token), `completion_mask` and `tool_mask`, each `(B, T)`.

    Returns:
        `float`: Over the `n` conversations of all processes with a trained token: 1 where all weigh the same, `1 / n`
        where a single one has all the weight; NaN without one.
    """
    trained = output["completion_mask"] * output["tool_mask"]
    log_ratios = (output["old_per_token_logps"] - output["sampling_per_token_logps"]) * trained
    sums = gather(log_ratios.nan_to_num(nan=0.0).double().sum(dim=1))[gather(trained.bool().any(dim=1))]
    if not len(sums):
        return float("nan")
    weights = (sums - sums.max()).exp()
    return (weights.sum() ** 2 / (len(sums) * (weights**2).sum())).item()


STEP_FACTOR = "step_factor"
"""In a batch: what the learning rate of its steps is multiplied by. So a checkpoint has it."""


class SmallerSteps(TrainerCallback):
    """
    Multiplies the learning rate of the optimiser steps that train a batch by the batch's effective share, where that
    is below `FEW`, and says so.
    """

    def __init__(self) -> None:
        self._changed: list[tuple[dict[str, Any], float, float]] = []
        self._said = False

    def factor(self, effective: float) -> float:
        """What the learning rate is multiplied by for a batch of this effective share."""
        factor = effective if effective < FEW else 1.0
        if factor < 1.0 and not self._said and PartialState().is_main_process:
            self._said = True
            logger.warning(
                "Of a batch only %.0f %% counts, since it was sampled with weights too far from those it trains. The "
                "learning rate of its steps is multiplied by that, here and wherever it is below %.0f %% "
                "(`staleness/effective_sample_size`). If that stays so, lower `max_staleness` or `learning_rate`.",
                100 * effective,
                100 * FEW,
            )
        return factor

    def before(self, optimizer: Any, factor: float) -> None:
        """Before the backward pass of a batch of this factor; DeepSpeed takes its step in it."""
        if factor < 1.0 and not self._changed:
            for group in optimizer.param_groups:
                small = group["lr"] * factor
                self._changed.append((group, group["lr"], small))
                group["lr"] = small

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.undo()

    def undo(self) -> None:
        """Gives the optimizer its learning rate back, after a step or where one is broken off."""
        for group, rate, small in self._changed:
            if group["lr"] == small:  # else a schedule has gone on already, as DeepSpeed's does
                group["lr"] = rate
        self._changed = []
