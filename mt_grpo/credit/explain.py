"""
What an advantage is the sum of: what each reward earned, and the baselines that were taken off.

A rule is linear in the rewards, but for its baselines and the scales that it divides by (`RewardBatch.term`). So it is
called on the batch to note these, on each reward alone to see what that earns, and once for each part with all other
parts left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mt_grpo.credit.batch import ROUNDING, RewardBatch, Scale
from mt_grpo.credit.rule import AdvantageEstimator, Credit, Rule, bind_rule, call_rule
from mt_grpo.errors import defined_at


def estimate_parts(
    rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None, scale_rewards: Scale = "group"
) -> Credit:
    """
    The advantages of `estimate`, with its arguments and errors, and their parts.

    Returns:
        `Credit`: Its advantages, shape (B, K), float32, and their parts and scales, shape (B, K), float64; advantages
        and parts are 0 where a turn does not exist. A rule of a user's own has the parts that it returns.
    """
    credit = call_rule(rule, batch, turn_coef=turn_coef, scale_rewards=scale_rewards)
    return explain(credit, rule, batch, turn_coef=turn_coef, scale_rewards=scale_rewards)


def explain(
    credit: Credit, rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None, scale_rewards: Scale = "group"
) -> Credit:
    """The same credit with its parts, where it comes from a built-in rule."""
    function, options = bind_rule(rule, turn_coef=turn_coef, scale_rewards=scale_rewards)
    if defined_at(function):
        return credit
    # a coefficient of 0 would hide which reward is in which term
    shown = {**options, "turn_coef": options["turn_coef"] or 1.0} if "turn_coef" in options else options
    terms = _terms(function, options, batch)
    left = [term.value for term in terms]
    where = [
        _apply(function, shown, batch, {number: torch.ones_like(term.value)}) for number, term in enumerate(terms)
    ]
    parts: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}

    def add(name: str, values: dict[int, Tensor]) -> None:
        part = _apply(function, options, batch, values)
        parts[name] = parts[name] + part if name in parts else part
        for number, value in values.items():
            left[number] = left[number] - value
            if terms[number].scale_told:
                nowhere = torch.full_like(part, torch.nan)
                scales[name] = torch.where(where[number] != 0, terms[number].scale, scales.get(name, nowhere))

    for name, (alone, ones) in _each_reward(batch).items():
        has_part = [bool(term.earned.nan_to_num().any()) for term in _terms(function, shown, ones)]
        of_kind: dict[str, dict[int, Tensor]] = {}
        for number, own in enumerate(_terms(function, options, alone)):
            if has_part[number]:
                of_kind.setdefault(own.kind, {})[number] = _divided(own.earned, terms[number])
        for kind, values in of_kind.items():
            add(f"{name}{kind}", values)
    for number, term in enumerate(terms):
        for name, amount in term.others.items():
            add(name, {number: _divided(amount, term)})
        add(term.baseline, {number: left[number]})
    return Credit(credit.advantages, parts, scales)


@dataclass(frozen=True)
class _Term:
    """The arguments of `RewardBatch.term`."""

    value: Tensor
    earned: Tensor
    scale: Tensor
    baseline: str
    others: dict[str, Tensor] = field(default_factory=dict)
    scale_told: bool = True

    @property
    def kind(self) -> str:
        """Ends the names of parts that are compared otherwise than with the group: ` (same state)`."""
        return self.baseline.partition("baseline")[2]


@dataclass(frozen=True, kw_only=True)
class _Watched(RewardBatch):
    """A batch that sees the terms of a rule, and decides what the rule goes on with."""

    watch: Callable[[_Term], Tensor]

    def term(self, *arguments: Any, **named: Any) -> Tensor:
        return self.watch(_Term(*arguments, **named))

    def advantages(self, total: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return super().advantages(total, torch.double)


def _terms(function: AdvantageEstimator, options: dict[str, Any], batch: RewardBatch) -> list[_Term]:
    """The terms of a rule on a batch."""
    terms: list[_Term] = []

    def watch(term: _Term) -> Tensor:
        terms.append(term)
        return term.value

    function(_Watched(**vars(batch), watch=watch), **options)
    return terms


def _apply(
    function: AdvantageEstimator, options: dict[str, Any], batch: RewardBatch, values: dict[int, Tensor]
) -> Tensor:
    """What a rule makes of other values for some of its terms, by their number, and of 0 for the rest; (B, K)."""
    numbers = itertools.count()

    def watch(term: _Term) -> Tensor:
        return values.get(next(numbers), torch.zeros_like(term.value))

    advantages = function(_Watched(**vars(batch), watch=watch), **options)
    assert isinstance(advantages, Tensor)
    return advantages


def _divided(amount: Tensor, term: _Term) -> Tensor:
    return (amount / term.scale).nan_to_num(nan=0.0)


def by_reward(batch: RewardBatch) -> dict[str, RewardBatch]:
    """
    A batch for each reward, by the name of its part, in which all others are 0. A single outcome reward is `outcome`,
    without its name. Without streams, or with streams that the rewards are not the sum of, turn rewards are one part.
    """
    return {name: alone for name, (alone, _) in _each_reward(batch).items()}


def _each_reward(batch: RewardBatch) -> dict[str, tuple[RewardBatch, RewardBatch]]:
    """Of each reward a batch with it alone, and one in which it is 1. 0 × NaN leaves absent rewards absent."""
    fields = ("turn_rewards", "outcome_rewards", "turn_streams", "outcome_streams")
    zeros: dict[str, Any] = {name: 0 * value for name in fields if (value := getattr(batch, name)) is not None}
    none = replace(batch, **zeros)
    found = {}
    kinds: tuple[Literal["turn", "outcome"], ...] = ("outcome", "turn")
    for kind in kinds:
        rewards, streams = getattr(batch, f"{kind}_rewards"), getattr(batch, f"{kind}_streams")
        parts = _split(batch, kind)
        for number, (name, values) in enumerate(parts.items()):
            alone: dict[str, Any] = {f"{kind}_rewards": values.masked_fill(rewards.isnan(), torch.nan)}
            ones: dict[str, Any] = {f"{kind}_rewards": torch.ones_like(values)}
            if streams is not None:
                own = torch.zeros(len(streams), *[1] * values.ndim, dtype=torch.bool, device=values.device)
                own[number if len(parts) == len(streams) else slice(None)] = True
                alone[f"{kind}_streams"] = torch.where(own, streams, 0.0)
                ones[f"{kind}_streams"] = own.expand_as(streams).to(streams.dtype)
            found[name] = replace(none, **alone), replace(none, **ones)
    return found


def _split(batch: RewardBatch, kind: Literal["turn", "outcome"]) -> dict[str, Tensor]:
    """Weighted rewards of a kind by the name of their part, float64, 0 where one is absent."""
    rewards, streams = getattr(batch, f"{kind}_rewards"), getattr(batch, f"{kind}_streams")
    total = rewards.double().nan_to_num(nan=0.0)
    whole = "turn reward" if kind == "turn" else "outcome"
    if streams is None or batch.stream_weights is None or not (names := batch.part_names(kind)):
        return {whole: total} if total.any() else {}
    if len(names) == 1:
        return {names[0]: total}
    weights = batch.stream_weights[: len(names)] if kind == "turn" else batch.stream_weights[-len(names) :]
    weighted = weights.double().view(-1, *[1] * total.ndim) * streams.double().nan_to_num(nan=0.0)
    if ((weighted.sum(dim=0) - total).abs() > 4 * ROUNDING * weighted.abs().sum(dim=0)).any():
        return {whole: total}
    return dict(zip(names, weighted, strict=True))
