"""The parts that an advantage is the sum of: what was earned, by the name of the reward, and what was taken off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_grpo.credit.normalisation import ROUNDING, Scale, centre, largest_deviation
from mt_grpo.credit.rule import Credit, RewardBatch


@dataclass(frozen=True)
class Term:
    """
    A summand of an advantage: what was earned less a baseline, divided by a scale. All but `value` only explain it.
    """

    value: Tensor
    scale: Tensor | None
    parts: Mapping[str, Tensor]
    baseline: str
    where: Tensor | None = None


def credit_of(batch: RewardBatch, *terms: Term, dtype: torch.dtype | None = None) -> Credit:
    """The sum of terms, and its parts."""
    values = [term.value if term.where is None else torch.where(term.where, term.value, 0.0) for term in terms]
    total = sum(values, torch.zeros_like(batch.turn_rewards, dtype=torch.double))
    advantages = (total * batch.turn_mask).to(dtype or batch.turn_rewards.dtype)
    nowhere = torch.full_like(total, torch.nan)
    parts: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for term, value in zip(terms, values, strict=True):
        where = batch.turn_mask if term.where is None else batch.turn_mask & term.where
        rest = value * batch.turn_mask
        for name, earned in term.parts.items():
            divided = earned if term.scale is None else earned / term.scale
            part = torch.where(where, divided.nan_to_num(nan=0.0), 0.0)
            parts[name] = parts[name] + part if name in parts else part
            rest = rest - part
        parts[term.baseline] = parts[term.baseline] + rest if term.baseline in parts else rest
        if term.scale is not None:
            for name in [*term.parts, term.baseline]:
                scales[name] = torch.where(where, term.scale, scales.get(name, nowhere))
    return Credit(advantages, parts, scales)


def against_group(
    batch: RewardBatch,
    values: Tensor,
    parts: Mapping[str, Tensor],
    baseline: str,
    scale_rewards: Scale,
    weight: float | Tensor = 1.0,
    where: Tensor | None = None,
    scale: Tensor | None = None,
) -> Term:
    """The term of values that are centred in their group and divided by the largest of their deviations over turns."""
    if scale is None:
        scale = largest_deviation(values, batch.group_size, scale_rewards)
    value = weight * (centre(values, batch.group_size) / scale)
    return Term(value, scale, {name: weight * part for name, part in parts.items()}, baseline, where)


def turn_parts(batch: RewardBatch) -> dict[str, Tensor]:
    """
    Weighted turn rewards by the name of their part, shape (B, K), float64, 0 where one is absent. Without streams, or
    with streams that the turn rewards are not the sum of, there is one part for all.
    """
    number = 0 if batch.turn_streams is None else len(batch.turn_streams)
    names = [f"turn reward {name}" for name in stream_names(batch)[:number]]
    weights = None if batch.stream_weights is None else batch.stream_weights[:number]
    return _split("turn reward", batch.turn_rewards, batch.turn_streams, weights, names)


def outcome_parts(batch: RewardBatch) -> dict[str, Tensor]:
    """The same for outcome rewards, shape (B, 1). A single one is `outcome`, without its name."""
    number = 0 if batch.outcome_streams is None else len(batch.outcome_streams)
    names = [f"outcome {name}" for name in stream_names(batch)[-number:]] if number > 1 else ["outcome"]
    weights = None if batch.stream_weights is None else batch.stream_weights[-number:]
    parts = _split("outcome", batch.outcome_rewards, batch.outcome_streams, weights, names)
    return {name: rewards[:, None] for name, rewards in parts.items()}


def earned(by: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is earned by each part: `by(rewards)`, linear."""
    return {name: by(rewards) for name, rewards in parts.items()}


def stream_names(batch: RewardBatch) -> list[str]:
    """Names of turn rewards, then of outcome rewards; their numbers where the batch has no names."""
    if batch.turn_streams is None or batch.outcome_streams is None:
        return []
    numbers = [*range(1, len(batch.turn_streams) + 1), *range(1, len(batch.outcome_streams) + 1)]
    return list(batch.names) or [str(number) for number in numbers]


def _split(
    whole: str, rewards: Tensor, streams: Tensor | None, weights: Tensor | None, names: list[str]
) -> dict[str, Tensor]:
    total = rewards.double().nan_to_num(nan=0.0)
    if streams is None or weights is None or not names:
        return {whole: total} if total.any() else {}
    if len(names) == 1:
        return {names[0]: total}
    weighted = weights.double().view(-1, *[1] * total.ndim) * streams.double().nan_to_num(nan=0.0)
    if ((weighted.sum(dim=0) - total).abs() > 4 * ROUNDING * weighted.abs().sum(dim=0)).any():
        return {whole: total}
    return dict(zip(names, weighted, strict=True))
