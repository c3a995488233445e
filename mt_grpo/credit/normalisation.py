"""Centring and scaling of rewards within groups. NaN is a value that is left out: it becomes 0, and is in no mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class Between:
    """In an annotation: the least and the greatest value of a rule's option."""

    least: float
    greatest: float


Share = Annotated[float, Between(0, 1)]
"""A discount, or the λ of an average of returns."""

EPSILON = 1e-4
"""Added to the standard deviation before dividing, as TRL does."""


def normalize(rewards: Tensor, group_size: int, scale: Scale) -> Tensor:
    """
    Centres rewards of shape (B,) by their group's mean and divides by a standard deviation (ddof 1) plus `EPSILON`.

    The result equals the advantages of TRL's `GRPOTrainer` for the same `scale_rewards`.
    """
    return normalize_turns(rewards[:, None], group_size, scale)[:, 0]


def normalize_turns(values: Tensor, group_size: int, scale: Scale) -> Tensor:
    """
    Centres values of shape (B, K) by the mean of their turn in their group, and divides by one deviation for all
    turns: the largest of them.

    With a deviation for each turn, or that of the sum over turns, members that earn the same in different turns would
    be divided by `EPSILON` where that deviation happens to be 0.
    """
    return centre(values, group_size) / largest_deviation(values, group_size, scale)


def centre(values: Tensor, group_size: int) -> Tensor:
    """Values of shape (B, K) minus the mean of their turn in their group."""
    grouped = values.view(-1, group_size, values.shape[1])
    # Values are shifted by the group's least first, so that equal ones come out as 0 without a rounding error, which
    # division by EPSILON would make ten thousand times as large.
    shifted = grouped - grouped.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    centred = (shifted - shifted.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
    return centred.reshape(values.shape)


def largest_deviation(values: Tensor, group_size: int, scale: Scale) -> Tensor:
    """The largest standard deviation over turns plus `EPSILON`, shape (B, 1); 1 for the scale `"none"`."""
    if scale == "none":
        return values.new_ones(len(values), 1)
    grouped = values.view(-1, group_size if scale == "group" else len(values), values.shape[1])
    largest = deviation(grouped, dim=1).amax(dim=2) + EPSILON
    return largest.repeat_interleave(grouped.shape[1], dim=0)


def deviation(values: Tensor, dim: int) -> Tensor:
    """Standard deviation with ddof 1 along `dim`, which is kept; NaN is left out; 0 for fewer than two values."""
    squares = (values - values.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    return (squares / ((~values.isnan()).sum(dim=dim, keepdim=True) - 1).clamp(min=1)).sqrt()
