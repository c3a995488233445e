"""
What a credit rule is given: the rewards of a batch of groups, and how values compare within a group: centred and
scaled, where NaN is a value that is left out: it becomes 0, and is in no mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from mt_grpo.errors import ConfigError

Scale = Literal["group", "batch", "none"]

Scales = Literal["each", "one", "batch"]
"""
Whether outcome and turn rewards are divided by their own deviations, or both by that of what they sum to: in what
`scale_rewards` says, or in the whole batch where that says `group`.
"""


Share = Annotated[float, Interval(ge=0, le=1)]
"""A discount, or the λ of an average of returns."""

EPSILON = 1e-4
"""Added to the standard deviation before dividing, as TRL does."""

ROUNDING = 2.0**-24
"""Two numbers are equal if they differ by less than this share of them: float32 cannot tell them apart."""


def without_rounding(differences: Tensor, size: Tensor) -> Tensor:
    """Differences of numbers of a size; 0 for those of rounding, of which `EPSILON` would make a signal."""
    return torch.where(differences.abs() < ROUNDING * size.nan_to_num(nan=0.0).clamp(min=EPSILON), 0.0, differences)


def minus_group_min(grouped: Tensor) -> Tensor:
    """Values of shape (N, G, K) minus the least of their group at their turn, 0 for equal ones; NaN stays."""
    least = grouped.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    return without_rounding(grouped - least, torch.maximum(grouped.abs(), least.abs()))


def to_go(rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sums of rewards from each turn on, (B, K), float64, equal in any order (Knuth's two-sum)."""
    rewards = rewards.double()
    returns = torch.empty_like(rewards)
    total, lost = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for turn in range(rewards.shape[1] - 1, -1, -1):
        total, lost = gamma * total, gamma * lost
        longer = total + rewards[:, turn]
        added = longer - total
        lost = lost + (total - (longer - added)) + (rewards[:, turn] - added)
        total = longer
        returns[:, turn] = total + lost
    return returns


def centre(values: Tensor, group_size: int) -> Tensor:
    """Values of shape (B, K) minus the mean of their turn in their group."""
    grouped = values.view(len(values) // group_size, group_size, values.shape[1])
    # Shifted by the group's least first, so that equal values come out as exactly 0.
    shifted = minus_group_min(grouped)
    centred = (shifted - shifted.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
    return without_rounding(centred, shifted).reshape(values.shape)


def largest_deviation(values: Tensor, group_size: int, scale: Scale) -> Tensor:
    """
    The largest standard deviation (ddof 1) over turns plus `EPSILON`, `(B, 1)`; 1 for `"none"`. The largest, since
    another may happen to be 0. For values `(B, 1)` it is what TRL's `GRPOTrainer` divides by.
    """
    if scale == "none":
        return values.new_ones(len(values), 1)
    grouped = values.view(-1, group_size if scale == "group" else len(values), values.shape[1])
    largest = deviation(grouped, dim=1).amax(dim=2) + EPSILON
    return largest.repeat_interleave(grouped.shape[1], dim=0)


def divisor(totals: Tensor, group_size: int, scales: Scales, scale: Scale) -> Tensor | None:
    """What divides outcome and turn rewards alike, (B, 1), by what they sum to, (B, K); `None` if each has its own."""
    if scales == "each":
        return None
    return largest_deviation(totals, group_size, "batch" if scales == "batch" and scale == "group" else scale)


def deviation(values: Tensor, dim: int) -> Tensor:
    """Standard deviation with ddof 1 along `dim`, which is kept; NaN is left out; 0 for fewer than two values."""
    squares = (values - values.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    return (squares / ((~values.isnan()).sum(dim=dim, keepdim=True) - 1).clamp(min=1)).sqrt()


class MissingField(ConfigError):
    """A rule needs a field of `RewardBatch` that is not filled in."""

    def __init__(self, rule: str, field: str) -> None:
        super().__init__(f"The advantage estimator {rule!r} needs the `{field}` of a `RewardBatch`: fill them in.")
        self.field = field


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
        state_ids (`Tensor`, *optional*): Shape (B, K), int64: equal in the turns of a group that begin in the same
            state.
        state_scores (`Tensor`, *optional*): Shape (B, K): the `StateScore` of the state after each turn; NaN if there
            is none.
        turn_streams (`Tensor`, *optional*): Shape (S, B, K): each turn reward by itself, not weighted.
        outcome_streams (`Tensor`, *optional*): Shape (R, B): each outcome reward by itself, not weighted.
        stream_weights (`Tensor`, *optional*): Shape (S + R,): the weights of both.
        num_branches (`int`, *optional*, defaults to `1`): So many rows in a row continue the same trunk.
        branch_at (`int`, *optional*, defaults to `0`): Turns that these rows share.
        names (`tuple[str, ...]`, *optional*): Of the S turn rewards, then of the R outcome rewards.

    There are two kinds of NaN. An *absent* reward is one that does not apply to a trajectory which ran: the policy
    decided that. Rules that are unbiased count it as 0. A *failed* trajectory, which the engine or the environment
    ended, has no turns and no rewards: `failed` names it, and every rule leaves it out of its means.
    """

    turn_rewards: Tensor
    outcome_rewards: Tensor
    turn_mask: Tensor
    result_mask: Tensor
    group_size: int
    state_ids: Tensor | None = None
    state_scores: Tensor | None = None
    turn_streams: Tensor | None = None
    outcome_streams: Tensor | None = None
    stream_weights: Tensor | None = None
    num_branches: int = 1
    branch_at: int = 0
    names: tuple[str, ...] = ()

    @property
    def failed(self) -> Tensor:
        """The trajectories that the engine or the environment ended, shape (B,), bool."""
        return ~self.turn_mask.any(dim=1)

    def of_outcomes(self, rewards: Tensor | None = None) -> Tensor:
        """Outcome rewards, shape (B,), float64: 0 for an absent one, NaN for a failed trajectory."""
        rewards = self.outcome_rewards if rewards is None else rewards
        return rewards.double().nan_to_num(nan=0.0).masked_fill(self.failed, torch.nan)

    def of_turns(self, rewards: Tensor | None = None) -> Tensor:
        """Turn rewards, shape (B, K), float64: 0 for an absent one or no turn, NaN for a failed trajectory."""
        rewards = self.turn_rewards if rewards is None else rewards
        return rewards.double().nan_to_num(nan=0.0).masked_fill(self.failed[:, None], torch.nan)

    def needed(self, rule: str, field: str) -> Tensor:
        """A field that one rule cannot do without; `MissingField` if the batch lacks it."""
        value: Tensor | None = getattr(self, field)
        if value is None:
            raise MissingField(rule, field)
        return value

    def part_names(self, kind: Literal["turn", "outcome"]) -> list[str]:
        """Of each reward of a kind, the name of what it earns: `turn reward NAME`; a single outcome is `outcome`."""
        streams = self.turn_streams if kind == "turn" else self.outcome_streams
        count = 0 if streams is None else len(streams)
        if kind == "outcome" and count < 2:
            return ["outcome"]
        names = self.names[:count] if kind == "turn" else self.names[-count:]
        whole = "turn reward" if kind == "turn" else "outcome"
        return [f"{whole} {name}" for name in names or range(1, count + 1)]

    def against_group(
        self, values: Tensor, baseline: str, scale_rewards: Scale = "group", scale: Tensor | None = None
    ) -> Tensor:
        """Values (B, K) minus their turn's mean in the group, divided by `scale` (B, 1) or the largest deviation."""
        if scale is None:
            scale = largest_deviation(values, self.group_size, scale_rewards)
        return self.term(centre(values, self.group_size) / scale, values, scale, baseline)

    def against_others(
        self, values: Tensor, baseline: str, scale_rewards: Scale = "group", scale: Tensor | None = None
    ) -> Tensor:
        """Values of trajectories, (B, 1), minus the mean of the other members, divided by their deviation or scale."""
        others = (~self.failed).view(-1, self.group_size).sum(dim=1).repeat_interleave(self.group_size)[:, None] - 1
        if scale is None:
            scale = largest_deviation(values, self.group_size, scale_rewards)
        centred = centre(values, self.group_size) / scale * (others + 1) / others.clamp(min=1)
        return self.term(centred, values, scale, baseline)

    def term(
        self,
        value: Tensor,
        earned: Tensor,
        scale: Tensor,
        baseline: str,
        others: Mapping[str, Tensor] | None = None,
        scale_told: bool = True,
    ) -> Tensor:
        """
        A summand of the advantage: `value`, as the rule computed it, which `explain` takes apart. It is what
        trajectories `earned`, linear in the rewards, less a `baseline` of this name and with `others` by name, all
        divided by `scale`. `scale_told` says whether a turn of the advantage has one such scale.
        """
        return value

    def advantages(self, total: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A sum of terms as advantages, (B, K), 0 where a turn does not exist; in the dtype of the rewards."""
        return ((0.0 + total) * self.turn_mask).to(dtype or self.turn_rewards.dtype)
