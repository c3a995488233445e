"""
The rules of the paper, in the form of its public code: `mt_grpo` (Zeng et al. 2025, arXiv 2505.11821), where the
coefficient weighs the turn term, and its baselines `grpo_or` and `grpo_mr`.

Axes: B trajectory, G group member, K turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mt_grpo.credit.batch import RewardBatch
from mt_grpo.credit.normalisation import Scale, Scales, divisor, to_go
from mt_grpo.credit.rule import advantage_estimator


@advantage_estimator("mt_grpo", sums_turns=True)
def mt_grpo(
    batch: RewardBatch, *, turn_coef: float = 1.0, scales: Scales = "each", scale_rewards: Scale = "group"
) -> Tensor:
    """
    The position-aware rule of MT-GRPO: the turn advantage goes to the turns up to the first tool result.

    A^O is the normalised outcome reward. A^T is the normalised sum of the trajectory's turn rewards. The turns up to
    and including the first one that a tool result follows get A^O + turn_coef × A^T. Later turns get A^O. In a
    trajectory without a tool result every turn gets the normalised sum of both rewards. The paper normalises outcome
    and turn rewards each by its own deviation; with `scales: one` all are divided by that of `reward_to_go`.

    Bias: none (× G / (G − 1)) with one tool boundary, `turn_coef` 1 and `scale_rewards: none`. With several boundaries
    the turns after the first tool result get nothing for the turn rewards that they earn, see
    `uncredited_turn_rewards`. With another `turn_coef` trajectories without a tool result weigh turn rewards by 1 all
    the same, see `bias_of_turn_coef`. `reward_to_go` has neither bias.

    Args:
        batch (`RewardBatch`): The rewards.
        turn_coef (`float`, *optional*, defaults to `1.0`): Weight of the turn advantage.
        scales (`str`, *optional*, defaults to `"each"`): `"each"`, `"one"` for both, or `"batch"`: one for both, that
            of the whole batch where `scale_rewards` is `"group"`.
        scale_rewards (`str`, *optional*, defaults to `"group"`): What the centred rewards are divided by: the standard
            deviation of the `"group"`, of the whole `"batch"`, or nothing (`"none"`).

    Returns:
        `Tensor`: Advantages, shape (B, K), float32; 0 where a turn does not exist. An outcome that does not apply is
        0, and is left out of the group's mean and standard deviation. A trajectory to which no turn reward applies has
        the turn reward 0.
    """
    earlier_results = batch.result_mask.cumsum(dim=1) - batch.result_mask.long()
    has_result = batch.result_mask.any(dim=1, keepdim=True)
    outcome, turns = batch.outcome_rewards.double()[:, None], _sum(batch.of_turns())
    totals = outcome + turn_coef * to_go(batch.of_turns())
    scale = divisor(totals, batch.group_size, scales, scale_rewards)
    of_outcome = batch.against_group(outcome, "outcome baseline", scale_rewards, scale)
    of_turns = turn_coef * batch.against_group(turns, "turn baseline", scale_rewards, scale)
    of_both = batch.against_group(_both(batch), "baseline", scale_rewards, scale)
    of_turns = torch.where(has_result & (earlier_results == 0), of_turns, 0.0)
    total = torch.where(has_result, of_outcome, 0.0) + of_turns + torch.where(has_result, 0.0, of_both)
    return batch.advantages(total, torch.float32)


@advantage_estimator("grpo_or", splits_turns=False, sums_turns=True)
def grpo_or(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """GRPO on the outcome reward alone: its advantage on every turn, shape (B, K). `turn_coef` has no effect."""
    outcome = batch.outcome_rewards.double()[:, None]
    return batch.advantages(batch.against_group(outcome, "outcome baseline", scale_rewards), torch.float32)


@advantage_estimator("grpo_mr", splits_turns=False, sums_turns=True)
def grpo_mr(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """GRPO on the sum of turn and outcome rewards: its advantage on every turn, (B, K). `turn_coef` has no effect."""
    return batch.advantages(batch.against_group(_both(batch), "baseline", scale_rewards), torch.float32)


def _sum(rewards: Tensor) -> Tensor:
    """Sum of each trajectory's rewards, shape (B, 1)."""
    return to_go(rewards)[:, :1]


def _both(batch: RewardBatch) -> Tensor:
    """Sum of each trajectory's turn and outcome rewards, shape (B, 1); NaN where none applies."""
    rewards = torch.cat([batch.turn_rewards, batch.outcome_rewards[:, None]], dim=1)
    return _sum(rewards.nan_to_num(nan=0.0)).masked_fill(rewards.isnan().all(dim=1, keepdim=True), torch.nan)


def bias_of_turn_coef(batch: RewardBatch, turn_coef: float) -> str | None:
    """
    How `mt_grpo` is biased on a batch by its coefficient, as half a sentence; `None` where it is not.

    Args:
        batch (`RewardBatch`): The rewards.
        turn_coef (`float`): The weight of the turn advantage.
    """
    without = (~batch.result_mask.any(dim=1) & ~batch.failed).sum().item()
    if turn_coef == 1 or not without or not batch.turn_rewards.nan_to_num(nan=0.0).any():
        return None
    return (
        f"{without} of {len(batch.result_mask)} trajectories have no tool result, and weigh turn rewards by 1 instead "
        f"of `turn_coef` {turn_coef}"
    )
