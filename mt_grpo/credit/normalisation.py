"""Centring and scaling of rewards within groups. NaN is a value that is left out: it becomes 0, and is in no mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]

Scales = Literal["each", "one", "batch"]
"""
Whether outcome and turn rewards are divided by their own deviations, or both by that of what they sum to: in what
`scale_rewards` says, or in the whole batch where that says `group`.
"""


@dataclass(frozen=True)
class Between:
    """In an annotation: the least and the greatest value of a rule's option."""

    least: float
    greatest: float


Share = Annotated[float, Between(0, 1)]
"""A discount, or the λ of an average of returns."""

EPSILON = 1e-4
"""Added to the standard deviation before dividing, as TRL does."""

ROUNDING = 2.0**-24
"""Two numbers are equal if they differ by less than this share of them: float32 cannot tell them apart."""


def without_rounding(differences: Tensor, size: Tensor) -> Tensor:
    """
    Differences between numbers of a size, with 0 for those that rounding explains. Division by `EPSILON` would make
    these ten thousand times as large, and a signal of them.
    """
    return torch.where(differences.abs() < ROUNDING * size.nan_to_num(nan=0.0).clamp(min=EPSILON), 0.0, differences)


def minus_group_min(grouped: Tensor) -> Tensor:
    """Values of shape (N, G, K) minus the least of their group at their turn, 0 for equal ones; NaN stays."""
    least = grouped.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    return without_rounding(grouped - least, torch.maximum(grouped.abs(), least.abs()))


def to_go(rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """
    Discounted sums of rewards from each turn on, shape (B, K), float64. What each addition rounds off is added in the
    end (Knuth's two-sum), so that members that earn the same in another order have the same sum.
    """
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
    grouped = values.view(-1, group_size, values.shape[1])
    # Shifted by the group's least first, so that equal values come out as exactly 0.
    shifted = minus_group_min(grouped)
    centred = (shifted - shifted.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
    return without_rounding(centred, shifted).reshape(values.shape)


def largest_deviation(values: Tensor, group_size: int, scale: Scale) -> Tensor:
    """
    The largest standard deviation (ddof 1) over turns plus `EPSILON`, shape (B, 1); 1 for the scale `"none"`.

    With a deviation for each turn, or that of the sum over turns, members that earn the same in different turns would
    be divided by `EPSILON` where that deviation happens to be 0. Values of shape (B, 1) that are centred and divided
    by it are the advantages of TRL's `GRPOTrainer` for the same `scale_rewards`.
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
