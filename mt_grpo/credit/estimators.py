"""
Credit rules: pure tensor functions from rewards to one advantage per turn, in one registry.

`mt_grpo` is the rule of MT-GRPO (Zeng et al. 2025, arXiv 2505.11821), in the form of its public code, where the
coefficient weighs the turn term. `grpo_or` and `grpo_mr` are the baselines of that paper. Eq. 12 of the paper, which
discounts turn advantages over later turns, is left out.

Axes: B trajectory, G group member, K turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mt_grpo.errors import ConfigError
from mt_grpo.imports import Registry, check_name, did_you_mean

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4
"""Added to the standard deviation before dividing, as TRL does."""


@dataclass(frozen=True)
class RewardBatch:
    """
    The rewards of a batch of groups.

    Args:
        turn_rewards (`Tensor`): Shape (B, K); NaN if the turn does not exist, or no turn reward applies to it.
        outcome_rewards (`Tensor`): Shape (B,); NaN if no outcome reward applies.
        turn_mask (`Tensor`): Shape (B, K), bool: whether the turn exists.
        result_mask (`Tensor`): Shape (B, K), bool: whether a tool result follows the turn.
        group_size (`int`): Rows i*G .. i*G+G-1 answer the same prompt.
    """

    turn_rewards: Tensor
    outcome_rewards: Tensor
    turn_mask: Tensor
    result_mask: Tensor
    group_size: int


AdvantageEstimator = Callable[..., Tensor]
"""
`(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor` of shape (B, K). A rule may
have further options of its own. It may leave out `turn_coef` or `scale_rewards` if it does not use them.
"""

ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator", "mt_grpo.credit")
"""The estimators that a recipe can name in `advantage_estimator`."""


WHOLE: set[str] = set()
"""The estimators that give all turns of a trajectory the same advantage."""


def advantage_estimator(name: str, *, splits_turns: bool = True) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """
    Registers an estimator under a name.

    Args:
        name (`str`): Its name in recipes.
        splits_turns (`bool`, *optional*, defaults to `True`): Whether turns of one trajectory can get different
            advantages. Such a rule is refused with a loss that weighs whole sequences.

    Raises:
        RegistrationError: If the name is no word, or another file has registered it.
    """
    check_name(name, "advantage estimator")

    def register(function: AdvantageEstimator) -> AdvantageEstimator:
        ADVANTAGE_ESTIMATORS.add(name, function, function.__module__)
        (WHOLE.discard if splits_turns else WHOLE.add)(name)
        return function

    return register


def splits_turns(name: str) -> bool:
    """Whether the estimator of that name can give turns of one trajectory different advantages."""
    return name not in WHOLE


def get_estimator(name: str) -> AdvantageEstimator:
    """
    Looks an estimator up.

    Raises:
        ConfigError: If there is none of that name. The message lists the known ones and the nearest.
    """
    if name not in ADVANTAGE_ESTIMATORS:
        known = ", ".join(ADVANTAGE_ESTIMATORS)
        raise ConfigError(
            f"The advantage estimator {name!r} is not one of {known}{did_you_mean(name, ADVANTAGE_ESTIMATORS)}."
        )
    return ADVANTAGE_ESTIMATORS[name]


@advantage_estimator("mt_grpo")
def mt_grpo(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """
    The position-aware rule of MT-GRPO: the turn advantage goes to the turns up to the first tool result.

    A^O is the normalised outcome reward. A^T is the normalised sum of the trajectory's turn rewards. The turns up to
    and including the first one that a tool result follows get A^O + turn_coef × A^T. Later turns get A^O. In a
    trajectory without a tool result every turn gets the normalised sum of both rewards.

    Args:
        batch (`RewardBatch`): The rewards.
        turn_coef (`float`, *optional*, defaults to `1.0`): Weight of the turn advantage.
        scale_rewards (`str`, *optional*, defaults to `"group"`): What the centred rewards are divided by: the standard
            deviation of the `"group"`, of the whole `"batch"`, or nothing (`"none"`).

    Returns:
        `Tensor`: Advantages, shape (B, K), float32; 0 where a turn does not exist. An outcome that does not apply is
        0, and is left out of the group's mean and standard deviation. A trajectory to which no turn reward applies has
        the turn reward 0.
    """
    outcome = _normalize(batch.outcome_rewards, batch.group_size, scale_rewards)
    turn = _normalize(_turn_sums(batch), batch.group_size, scale_rewards)
    merged = _normalize(_merged(batch), batch.group_size, scale_rewards)
    earlier_results = batch.result_mask.cumsum(dim=1) - batch.result_mask.long()
    split = outcome[:, None] + turn_coef * turn[:, None] * (earlier_results == 0)
    has_result = batch.result_mask.any(dim=1, keepdim=True)
    return torch.where(has_result, split, merged[:, None]) * batch.turn_mask


@advantage_estimator("grpo_or", splits_turns=False)
def grpo_or(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """GRPO on the outcome reward alone: its advantage on every turn, shape (B, K). `turn_coef` has no effect."""
    return _normalize(batch.outcome_rewards, batch.group_size, scale_rewards)[:, None] * batch.turn_mask


@advantage_estimator("grpo_mr", splits_turns=False)
def grpo_mr(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """GRPO on the sum of turn and outcome rewards: its advantage on every turn, (B, K). `turn_coef` has no effect."""
    return _normalize(_merged(batch), batch.group_size, scale_rewards)[:, None] * batch.turn_mask


def _turn_sums(batch: RewardBatch) -> Tensor:
    """
    Sum of each trajectory's turn rewards, shape (B,); NaN for a trajectory without any turn.

    A trajectory to which no turn reward applies counts as 0: the policy decides whether it calls tools, so leaving it
    out of the group's mean would bias the gradient.
    """
    return batch.turn_rewards.float().nansum(dim=1).masked_fill(~batch.turn_mask.any(dim=1), torch.nan)


def _merged(batch: RewardBatch) -> Tensor:
    """Sum of turn and outcome rewards, shape (B,); NaN where neither applies."""
    rewards = torch.cat([batch.turn_rewards, batch.outcome_rewards[:, None]], dim=1).float()
    return rewards.nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)


def _normalize(rewards: Tensor, group_size: int, scale: Scale) -> Tensor:
    """
    Centres rewards of shape (B,) by their group's mean and divides by a standard deviation (ddof 1) plus `EPSILON`.

    NaN is left out of both, and becomes 0. The result equals the advantages of TRL's `GRPOTrainer` for the same
    `scale_rewards`.
    """
    grouped = rewards.float().view(-1, group_size)
    # Rewards are shifted by the group's least first, so that equal ones come out as 0 without a rounding error, which
    # division by EPSILON would make ten thousand times as large.
    shifted = grouped - grouped.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    centred = (shifted - shifted.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
    if scale == "group":
        centred = centred / (_std(grouped, dim=1) + EPSILON)
    elif scale == "batch":
        centred = centred / (_std(grouped.reshape(1, -1), dim=1) + EPSILON)
    return centred.reshape(-1)


def _std(rewards: Tensor, dim: int) -> Tensor:
    """Standard deviation with ddof 1 along `dim`, which is kept; NaN is left out; 0 for fewer than two values."""
    squares = (rewards - rewards.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    return (squares / ((~rewards.isnan()).sum(dim=dim, keepdim=True) - 1).clamp(min=1)).sqrt()
