"""What the forwards of an optimiser step computed for each trained token, as rows of the run's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mt_grpo.runlog.schema import session_id
from mt_grpo.runlog.writer import finite

_STEP, _BATCH = 40, 24  # bits: a row of a batch of 16 million, of 65,536 batches of a step


def number_rows(step: int, k: int, rows: Tensor) -> Tensor:
    """A number per row, `(B,)`, that says which conversation it is, wherever the row is trained."""
    return (step << _STEP) + (k << _BATCH) + rows


def _row_of(number: int) -> tuple[int, int, int]:
    """Step, batch and row of what `number_rows` returns."""
    return number >> _STEP, (number >> _BATCH) % (1 << (_STEP - _BATCH)), number % (1 << _BATCH)


@dataclass(frozen=True)
class Outputs:
    """
    One micro-batch, on its device, so that nothing waits for it within the step. All but `row_ids` are `(B, T)`.

    Args:
        row_ids (`Tensor`): `(B,)`, see `number_rows`.
        scored (`Tensor`): Bool, where a token is trained.
        difference, entropies, ratios, clipped (`Tensor`): See `mt_grpo.runlog.schema.UPDATES`.
    """

    row_ids: Tensor
    scored: Tensor
    difference: Tensor
    entropies: Tensor
    ratios: Tensor
    clipped: Tensor

    @classmethod
    def of(cls, inputs: dict[str, Any], logps: Tensor, entropies: Tensor, trainer: Any) -> Outputs:
        """
        Of the micro-batch whose loss TRL computes.

        Args:
            inputs (`dict`): The micro-batch.
            logps, entropies (`Tensor`): `(B, T)`, from its forward.
            trainer (`GRPOTrainer`): Whose loss it is.
        """
        logps = logps.detach()
        scored = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        old = inputs.get("old_per_token_logps", logps)
        ratios = (logps - old).exp()
        return cls(
            inputs["row_ids"],
            scored,
            (logps - inputs["sampling_per_token_logps"]).half(),
            entropies.detach().half(),
            ratios.half(),
            clip_flags(logps - old, inputs["advantages"], scored, trainer),
        )


def clip_flags(log_ratios: Tensor, advantages: Tensor, scored: Tensor, trainer: Any) -> Tensor:
    """
    Where TRL's loss clips the ratio, so that the token has no gradient, or with `cispo` a bounded weight.

    Args:
        log_ratios, advantages, scored (`Tensor`): `(B, T)`.
        trainer (`GRPOTrainer`): With the options of the loss.

    Returns:
        `Tensor`: Bool, `(B, T)`.
    """
    if trainer.importance_sampling_level == "sequence":
        mean = (log_ratios * scored).sum(dim=1, keepdim=True) / scored.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratios = mean.expand_as(log_ratios)
    ratios = log_ratios.exp()
    if trainer.loss_type == "cispo":
        return (ratios > trainer.epsilon_high) & (advantages > 0)
    if trainer.loss_type in ("sapo", "vespo"):  # they weigh ratios smoothly
        return torch.zeros_like(scored)
    clipped = (ratios < 1 - trainer.epsilon_low) & (advantages < 0)
    clipped |= (ratios > 1 + trainer.epsilon_high) & (advantages > 0)
    if trainer.args.delta is not None:
        clipped |= (ratios > trainer.args.delta) & (advantages < 0)
    return clipped


def update_rows(outputs: list[Outputs]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """
    The rows that a step trained.

    Returns:
        Rows with the columns of `UPDATES`, except `updated_step`, and of each the summary for the index.
    """
    rows, summaries = [], []
    for output in outputs:
        row_ids, scored, *values = (
            tensor.cpu().numpy()
            for tensor in (
                output.row_ids,
                output.scored,
                output.difference,
                output.entropies,
                output.ratios,
                output.clipped,
            )
        )
        for number, trained, *of_row in zip(row_ids.tolist(), scored, *values, strict=True):
            columns = np.flatnonzero(trained)
            if not len(columns):  # left out of the loss
                continue
            step, k, row = _row_of(number)
            difference, entropies, ratios, clipped = (value[columns] for value in of_row)
            rows.append(
                {
                    "session": session_id("train", step, k, row),
                    "mode": "train",
                    "step": step,
                    "k": k,
                    "columns": columns.astype(np.int32),
                    "difference": difference,
                    "entropies": entropies,
                    "ratios": ratios,
                    "clipped": clipped.astype(np.int8),
                }
            )
            compared = difference[~np.isnan(difference)]  # the environment's tokens have no log-prob of the engine
            summaries.append(
                {
                    "mismatch": finite(float(np.abs(compared).max(initial=0.0))),
                    "entropy": finite(float(entropies.mean(dtype=np.float64))),
                    "clipped": finite(float(clipped.mean())),
                }
            )
    return rows, summaries
