"""
What the rewards of a batch tell, and what a rule makes of them: how much each varies within groups and goes with the
outcome; the share of turn rewards that does not reach the turn that earned it; what of the outcome reaches early turns
and what turn rewards weigh beside it; and what an advantage is the sum of: what each reward earned, and the baselines
that were taken off.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from mt_grpo.credit.rule import (
    EPSILON,
    ROUNDING,
    AdvantageEstimator,
    Credit,
    RewardBatch,
    Rule,
    Scale,
    bind_rule,
    call_rule,
    centre,
    deviation,
    estimate,
    to_go,
)
from mt_grpo.errors import defined_at

_MOST_TURNS = 16
"""Turns of the longest trajectory whose rewards are examined; of more, as many that are spread evenly."""
_FEWEST_TURNS = 4
"""Turns of a conversation in which it is asked what of the outcome reaches the first one."""
_SURE = 4.0
"""A slope is shown if it is so many of its standard errors: of ten points, one in five hundred by chance."""


@dataclass(frozen=True)
class RewardAudit:
    """
    One reward over a batch. A number is `None` if there is nothing to compute it from.

    A trajectory earns the sum of a turn reward over its turns. From `group_variance` on, a reward that does not apply
    counts as 0, as in `reward_to_go`. Failed trajectories are left out.

    Args:
        applies (`float`, *optional*): Share of the trajectories to which it applies.
        mean, std (`float`, *optional*): Of what these trajectories earn.
        group_variance (`float`, *optional*): Variance within a group, its mean over groups of two or more.
        equal_groups (`float`, *optional*): Share of these groups whose members all earn the same.
        correlation (`float`, *optional*): With the weighted sum of outcome rewards, over all trajectories.
        group_correlation (`float`, *optional*): The same within groups: both minus the means of their groups.
        sign_agreement (`float`, *optional*): Of a turn reward: among the turns at which both the outcome and the
            weighted reward from the turn on differ from their means in the group, the share where both are above or
            both below.
    """

    applies: float | None
    mean: float | None
    std: float | None
    group_variance: float | None
    equal_groups: float | None
    correlation: float | None
    group_correlation: float | None
    sign_agreement: float | None


@dataclass(frozen=True)
class Audit:
    """
    A batch and its rewards.

    Args:
        groups (`int`): Groups.
        groups_without_signal (`float`): Share of the groups whose advantages are 0 at every turn.
        sign_agreement (`float`, *optional*): As in `RewardAudit`, of the weighted sum of all turn rewards.
        rewards (`tuple[RewardAudit, ...]`): Turn rewards, then outcome rewards.
    """

    groups: int
    groups_without_signal: float
    sign_agreement: float | None
    rewards: tuple[RewardAudit, ...]


def without_signal(advantages: Tensor, group_size: int) -> Tensor:
    """The groups whose advantages, of shape (B, K), are 0 at every turn; shape (B / G,), bool."""
    return ~advantages.view(-1, group_size * advantages.shape[1]).any(dim=1)


def audit_rewards(batch: RewardBatch, advantages: Tensor) -> Audit:
    """
    Audits the rewards of a batch by the advantages (B, K) that a rule made of them. `ValueError` without streams or
    weights.
    """
    if batch.turn_streams is None or batch.outcome_streams is None or batch.stream_weights is None:
        raise ValueError("An audit needs a `RewardBatch` with each reward by itself and with the weights of all.")
    size, exists, ran = batch.group_size, batch.turn_mask.cpu(), ~batch.failed.cpu()
    turns, outcomes = batch.turn_streams.cpu().double(), batch.outcome_streams.cpu().double()
    # one column per reward, (B, N): NaN where it does not apply; then 0 there, and NaN for a failed trajectory
    sums = turns.new_empty(turns.shape[:2])
    for reward, values in enumerate(turns):
        sums[reward] = to_go(values.nan_to_num(nan=0.0))[:, 0].masked_fill(values.isnan().all(dim=1), torch.nan)
    scores = torch.cat([sums, outcomes]).T
    earned = scores.nan_to_num(nan=0.0).masked_fill(~ran[:, None], torch.nan)
    outcome = batch.of_outcomes().cpu().double()[:, None]
    within, outcome_within = centre(earned, size), centre(outcome, size)

    several = ran.view(-1, size).sum(dim=1)
    comparable = several > 1
    grouped = within.view(len(several), size, within.shape[1])[comparable]
    variances = grouped.square().sum(dim=1) / (several[comparable, None] - 1)
    equal = (grouped == 0).all(dim=1).double()

    weights = batch.stream_weights.cpu().double()[: len(turns)]
    weighed = turns * weights[:, None, None]
    agreements = [_agreement(batch, rewards, outcome_within, exists) for rewards in weighed]
    whole = _correlations(centre(earned, len(earned)), centre(outcome, len(earned)))
    in_groups = _correlations(within, outcome_within)
    audits = []
    for index, column in enumerate(scores.T):
        present = column[~column.isnan()]
        audits.append(
            RewardAudit(
                applies=_number(len(present) / ran.sum()),
                mean=_number(present.mean()),
                std=_number(deviation(present, dim=0).squeeze()) if len(present) else None,
                group_variance=_number(variances[:, index].mean()),
                equal_groups=_number(equal[:, index].mean()),
                correlation=whole[index],
                group_correlation=in_groups[index],
                sign_agreement=agreements[index] if index < len(turns) else None,
            )
        )
    return Audit(
        groups=len(several),
        groups_without_signal=without_signal(advantages, size).double().mean().item(),
        sign_agreement=_agreement(batch, batch.turn_rewards.cpu().double(), outcome_within, exists),
        rewards=tuple(audits),
    )


def _agreement(batch: RewardBatch, rewards: Tensor, outcome: Tensor, exists: Tensor) -> float | None:
    """The share of turns at which the signs of a turn reward, (B, K), and of the outcome, (B, 1), agree."""
    failed = batch.failed.cpu()[:, None]
    turn = centre(to_go(rewards.nan_to_num(nan=0.0).masked_fill(failed, torch.nan)), batch.group_size)
    both = (turn.sign() * outcome.sign())[exists]
    return _number((both[both != 0] > 0).double().mean())


def _correlations(columns: Tensor, other: Tensor) -> list[float | None]:
    """The correlation of each centred column, (B, N), with a centred one, (B, 1)."""
    spread = (columns.square().sum(dim=0) * other.square().sum()).sqrt()
    return [_number(value) for value in (columns * other).sum(dim=0).div(spread).clamp(-1.0, 1.0)]


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else value.item()


@dataclass(frozen=True)
class Uncredited:
    """
    Shares of the turn rewards of a batch, by absolute weighted value. `None` where no turn earned anything.

    Args:
        at_turn (`float`, *optional*): Share that does not reach the turn that earned it.
        up_to_turn (`float`, *optional*): Share that reaches neither this turn nor one before it.
    """

    at_turn: float | None
    up_to_turn: float | None


def uncredited_turn_rewards(
    rule: Rule,
    batch: RewardBatch,
    *,
    turn_coef: float | None = None,
    scale_rewards: Scale = "group",
    most_turns: int = _MOST_TURNS,
) -> Uncredited:
    """
    How much of the turn rewards of a batch does not reach the turn that earned it. Arguments and errors are those of
    `estimate`.

    For each turn k the rewards that trajectories earned at k are made smaller, each by another factor, and the rule is
    asked again. The reward of a trajectory at k reaches a turn if the advantage of that turn changes. A reward of 0
    has no share. Neither has one in a group where all other members failed, or of a turn that branches share where all
    other trunks failed: it is compared with nothing.

    With a tool result after each of 12 turns that earn the same, `mt_grpo` leaves 11 / 12 away from their turns, which
    all reach the first turn. `grpo_or` leaves everything away, `reward_to_go` nothing.

    The rule is called once, and once more for each turn at which something was earned. If these are more than
    `most_turns`, so many of them, evenly spread, stand for all. What changes the deviation by which an advantage is
    divided counts as reaching it.
    """
    earned = batch.of_turns().nan_to_num(nan=0.0).abs() * batch.turn_mask
    earned = earned.masked_fill(~_is_compared(batch), 0.0)
    turns = earned.any(dim=0).nonzero()[:, 0].tolist()
    if not turns:
        return Uncredited(None, None)
    if len(turns) > most_turns:
        turns = [turns[index * len(turns) // most_turns] for index in range(most_turns)]

    def advantages(rewards: RewardBatch) -> Tensor:
        # a rule that draws draws the same each time, and so does the run
        with torch.random.fork_rng(devices=[earned.device] if earned.is_cuda else []):
            return estimate(rule, rewards, turn_coef=turn_coef, scale_rewards=scale_rewards)

    before = advantages(batch)
    # members that earn the same differ then, and rewards stay between what they were and 0
    draws = torch.Generator().manual_seed(0)
    factors = torch.rand(len(earned), generator=draws, dtype=torch.double).to(earned.device) / 2
    total = missed = lost = 0.0
    for turn in turns:
        of_turn = earned[:, turn]
        changed = advantages(_with_less(batch, turn, factors)) != before
        total += of_turn.sum().item()
        missed += of_turn[~changed[:, turn]].sum().item()
        lost += of_turn[~changed[:, : turn + 1].any(dim=1)].sum().item()
    return Uncredited(missed / total, lost / total)


def _is_compared(batch: RewardBatch) -> Tensor:
    """The turns that have others of their group to be compared with, shape (B, K), bool."""
    lives = (~batch.failed).view(-1, batch.group_size // batch.num_branches, batch.num_branches)
    has_members, has_trunks = lives.sum(dim=(1, 2)) > 1, lives.any(dim=2).sum(dim=1) > 1
    shared = torch.arange(batch.turn_mask.shape[1], device=lives.device) < batch.branch_at
    return torch.where(shared, has_trunks[:, None], has_members[:, None]).repeat_interleave(batch.group_size, dim=0)


def _with_less(batch: RewardBatch, turn: int, factors: Tensor) -> RewardBatch:
    """The batch with the rewards of a turn times factors, (B,). A rule is given the dtypes that the run gives it."""
    rewards = batch.turn_rewards.clone()
    rewards[:, turn] *= factors
    if batch.turn_streams is None:
        return replace(batch, turn_rewards=rewards)
    streams = batch.turn_streams.clone()
    streams[:, :, turn] *= factors
    return replace(batch, turn_rewards=rewards, turn_streams=streams)


def outcome_at_first_turn(rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None) -> float | None:
    """
    The share of an outcome's advantage that reaches the first turn, in that of the turn that gets most. With a
    discount γ and K turns it is γ^(K − 1). The outcome is made up, 1 for every second trunk of a group, since those of
    a first policy are often all the same; and so are conversations of `long_length` turns, since of unequal ones even
    an unbiased rule gives a turn more that few members reach. `None` where there are none, or no outcome reward.
    """
    length = long_length(batch)
    if length is None or batch.outcome_streams is not None and not len(batch.outcome_streams):
        return None
    _, options = bind_rule(rule, turn_coef=turn_coef, scale_rewards="group")
    # without a scale, what an outcome adds is told by itself
    scale: Scale = "none" if "scale_rewards" in options else "group"
    places = torch.arange(batch.turn_mask.shape[1], device=batch.turn_mask.device).expand_as(batch.turn_mask)
    trunks = torch.arange(len(places), device=places.device) % batch.group_size // batch.num_branches
    exists, outcomes = places < length, (trunks % 2).to(batch.outcome_rewards.dtype)
    turns = torch.zeros_like(batch.turn_rewards).masked_fill(~exists, torch.nan)
    made_up = replace(
        batch,
        turn_rewards=turns,
        outcome_rewards=outcomes,
        turn_mask=exists,
        result_mask=exists,
        state_ids=None if batch.state_ids is None else places.to(batch.state_ids.dtype),
        state_scores=None if batch.state_scores is None else turns.to(batch.state_scores.dtype),
        turn_streams=turns[None],
        outcome_streams=outcomes[None],
        stream_weights=torch.ones(2, dtype=torch.double, device=places.device),
        names=(),
    )
    with torch.random.fork_rng(devices=[places.device] if places.is_cuda else []):
        reached = estimate(rule, made_up, turn_coef=turn_coef, scale_rewards=scale).double().abs()
    most = reached.amax(dim=1).sum().item()
    return reached[:, 0].sum().item() / most if most > 0 else None


def long_length(batch: RewardBatch) -> int | None:
    """The mean length of conversations of `_FEWEST_TURNS` turns or more; `None` where there are none."""
    lengths = batch.turn_mask.sum(dim=1)
    long = lengths[lengths >= _FEWEST_TURNS].double()
    return round(long.mean().item()) if len(long) else None


def scale_ratio(
    rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None, scale_rewards: Scale = "group"
) -> float | None:
    """
    What the rule divides outcomes by / what it divides turn rewards by, the median over turns. `None` if they are not
    divided apart from each other, or no turn has both deviations.
    """
    scales = estimate_parts(rule, batch, turn_coef=turn_coef, scale_rewards=scale_rewards).scales
    outcome, turn = (
        [scale for name, scale in scales.items() if name.startswith(kind) and not name.endswith("baseline")]
        for kind in ("outcome", "turn reward")
    )
    # of a rule with a scale for each turn
    function, options = bind_rule(rule, turn_coef=turn_coef, scale_rewards=scale_rewards)
    turn = turn or [term.scale for term in _terms(function, options, batch) if not term.scale_told]
    if not outcome or not turn:
        return None
    of_outcome, of_turns = torch.stack(outcome).amax(dim=0), torch.stack(turn).amax(dim=0)
    differ = batch.turn_mask & (of_outcome > 2 * EPSILON) & (of_turns > 2 * EPSILON)
    ratios = (of_outcome / of_turns)[differ]
    return ratios.median().item() if len(ratios) else None


def pull_apart(outcomes: Sequence[float], turns: Sequence[float]) -> bool:
    """Whether of two means over steps, in their order, that of outcomes is shown to fall while the other rises."""
    return _slope(outcomes) < -_SURE and _slope(turns) > _SURE


def _slope(values: Sequence[float]) -> float:
    """The slope of a line through values, in its standard errors; 0 for fewer than three."""
    count = len(values)
    if count < 3:
        return 0.0
    middle, mean = (count - 1) / 2, fmean(values)
    spread = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * value for place, value in enumerate(values)) / spread
    rest = sum((value - mean - slope * (place - middle)) ** 2 for place, value in enumerate(values))
    error = math.sqrt(rest / (count - 2) / spread)
    return slope / max(error, 1e-12)


# What an advantage is the sum of


def estimate_parts(
    rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None, scale_rewards: Scale = "group"
) -> Credit:
    """
    The advantages of `estimate`, with its arguments and errors, and their parts and scales, shape (B, K), float64;
    parts are 0 where a turn does not exist. A rule of a user's own has the parts that it returns.
    """
    credit = call_rule(rule, batch, turn_coef=turn_coef, scale_rewards=scale_rewards)
    return explain(credit, rule, batch, turn_coef=turn_coef, scale_rewards=scale_rewards)


def explain(
    credit: Credit, rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None, scale_rewards: Scale = "group"
) -> Credit:
    """
    The same credit with its parts, where it comes from a built-in rule. A rule is linear in the rewards, but for its
    baselines and the scales that it divides by (`RewardBatch.term`). So it is called on the batch to note these, on
    each reward alone to see what that earns, and once for each part with all other parts left out.
    """
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
