"""
How well a rule's gradient points where the rewards rise, from a few groups: which rule suits the rewards of a run.

Each group gives each rule one estimate of the gradient, v_i, and the reference another, u_i, whose mean is the true
gradient. Means of a few groups are mostly noise, and noise makes every cosine smaller. So each squared length and each
inner product of means is a mean over *pairs of different groups*, in which noise has no part:

    <v, u> = Σ_{i ≠ j} v_i · u_j / (N (N − 1))

Intervals are 95 % bootstrap intervals: groups are drawn again with repetition, and a group is paired with no copy of
itself. They lie between percentiles, which are further apart the fewer groups there are (Hesterberg 2015, arXiv
1411.5279, "expanded percentile").

Axes: N group, P projected gradient, D draw of the bootstrap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from torch import Tensor

ALL = "all rewards"
"""What all rewards together are named."""
TURN = "turn reward"
"""What the names of turn rewards begin with."""
_DRAWS = 2000
_FEW = 0.25  # share of the groups: a gradient that fewer of them carry may be another one in the next groups
_NEAR = 0.2  # rules whose steps go less than this share behind the farthest ones are near them


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval."""

    value: float | None
    low: float | None
    high: float | None

    @property
    def told(self) -> bool:
        """Whether the groups tell anything: not where the interval is all that a cosine, or a ratio, can be."""
        return (self.low, self.high) not in ((-1.0, 1.0), (0.0, None))


@dataclass(frozen=True)
class Direction:
    """What the groups tell of a rule."""

    cosine: Interval
    signal_to_noise: Interval
    step: Interval


@dataclass(frozen=True, eq=False)
class Comparison:
    """Rules on the same groups."""

    directions: dict[str, Direction | None]
    groups: int
    ascents: dict[str, Tensor]
    carriers: float
    """As many groups of equal squared length carry as much of the true gradient: few, if most have none of it."""

    @property
    def best(self) -> str:
        """The rule with the largest `step`."""
        return max(self.ascents, key=lambda name: self.ascents[name][0].item())

    @property
    def known(self) -> bool:
        """Whether the steps of the best rule are shown to go along the true gradient: all of its `step` is above 0."""
        best = self.directions[self.best]
        return best is not None and best.step.told and best.step.low is not None and best.step.low > 0

    def behind(self, rule: str, other: str) -> bool:
        """Whether the `step` of a rule is shown to be smaller than another's: the whole paired interval is below 0."""
        return _below(self.ascents[rule] - self.ascents[other], self.groups)


@dataclass(frozen=True, eq=False)
class Judgement:
    """
    Rules by what their steps do worst, against the gradient of all rewards and of each outcome that has one and does
    not go against the others. Turn rewards are in all of them by their weights; by themselves they count only where
    the groups do not tell the gradient of all. Of rules near the farthest one, `best` gives early turns most of an
    outcome, since what hardly shows yet is in no gradient; and it is one of `preferred` if that is near.
    """

    items: dict[str, Comparison]
    with_all: dict[str, Tensor] = field(default_factory=dict)
    with_others: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)
    preferred: tuple[str, ...] = ()
    """Rules that keep every outcome and the proportion of rewards, the default first."""

    @functools.cached_property
    def told(self) -> dict[str, Comparison]:
        """What steps are judged by."""
        known = {name: item for name, item in self.items.items() if item.known}
        if ALL in known:
            left = [name for name in known if name == ALL or self._goes_along(name) and not name.startswith(TURN)]
        else:
            left = [name for name in known if not _below(self.with_others[name], known[name].groups)]
        return {name: known[name] for name in left}

    def _goes_along(self, name: str) -> bool:
        """Whether a reward is shown to go along all of them."""
        return _below(-self.with_all[name], self.items[name].groups)

    @property
    def silent(self) -> list[str]:
        """What the groups do not tell the gradient of."""
        return [name for name, item in self.items.items() if not item.known]

    @property
    def rare(self) -> list[str]:
        """Outcomes whose gradient is not told, and comes from few groups; also all rewards together."""
        items = {name: self.items[name] for name in self.silent if not name.startswith(TURN)}
        return [name for name, item in items.items() if item.carriers < _FEW * item.groups]

    @property
    def opposed(self) -> list[str]:
        """Rewards without a part that are shown to go against the others."""
        left = [name for name in self.with_others if name not in self.told and self.items[name].known]
        if ALL in self.told:
            left = [name for name in left if not self._goes_along(name)]
        return [name for name in left if _below(self.with_others[name], self.items[name].groups)]

    @property
    def known(self) -> bool:
        """
        Whether a rule is shown to be good for something, and none of it is worse for the steps of all rules. Turn
        rewards do not name a rule where all rewards together are not told because of an outcome that is rare.
        """
        if ALL not in self.told and self.rare:
            return False
        return bool(self.told) and self.scores[self.farthest][0].item() > 0

    @functools.cached_property
    def shares(self) -> dict[str, dict[str, Tensor]]:
        """By rule and item, how far its steps go, in what those of the best rule there do: 1 for that; (1 + D,)."""
        shares: dict[str, dict[str, Tensor]] = {}
        for name, item in self.told.items():
            most = item.ascents[item.best][0]
            for rule, ascent in item.ascents.items():
                shares.setdefault(rule, {})[name] = ascent / most
        return shares

    @functools.cached_property
    def scores(self) -> dict[str, Tensor]:
        """By rule, the least of its shares, (1 + D,)."""
        return {rule: torch.stack(list(shares.values())).amin(dim=0) for rule, shares in self.shares.items()}

    @property
    def farthest(self) -> str:
        """The rule with the largest score."""
        return max(self.scores, key=lambda rule: self.scores[rule][0].item())

    @property
    def best(self) -> str:
        """Of the rules near the farthest one, that which keeps most of an outcome; of equal ones the default."""
        near = {rule: score[0].item() for rule, score in self.scores.items() if self.near(rule)}
        order = {rule: -place for place, rule in enumerate(self.preferred)}
        last = -len(order)
        # rounded, since some that keep all of it do so but for rounding
        return max(near, key=lambda rule: (round(self.kept.get(rule, 1.0), 2), order.get(rule, last), near[rule]))

    def near(self, rule: str) -> bool:
        """Whether a rule goes less than a fifth behind the farthest one."""
        return self.scores[rule][0].item() >= (1 - _NEAR) * self.scores[self.farthest][0].item()

    def share(self, rule: str, name: str) -> Interval:
        """One of `shares` with its interval."""
        return _interval(self.shares[rule][name], self.told[name].groups, -math.inf, math.inf)

    def worst(self, rule: str) -> str:
        """The item that a rule does worst."""
        return min(self.shares[rule], key=lambda name: self.shares[rule][name][0].item())

    def behind(self, rule: str, other: str) -> bool:
        """Whether the score of a rule is shown to be smaller than another's: the whole paired interval is below 0."""
        return _below(self.scores[rule] - self.scores[other], next(iter(self.told.values())).groups)


def judge_rules(
    gradients: Mapping[str, Tensor],
    truths: Mapping[str, Tensor],
    groups_per_step: float,
    kept: Mapping[str, float],
    preferred: tuple[str, ...] = (),
    *,
    draws: int = _DRAWS,
) -> Judgement:
    """Judges the steps of rules."""
    whole = truths[ALL].double()
    weights = _weights(len(whole), draws)

    def along(reward: Tensor, truth: Tensor) -> Tensor:
        return _Moments.of(reward, truth, weights).ascent(groups_per_step)

    rewards = {name: truth.double() for name, truth in truths.items() if name != ALL}
    return Judgement(
        items={name: _compare_rules(gradients, truth, groups_per_step, draws=draws) for name, truth in truths.items()},
        with_all={name: along(reward, whole) for name, reward in rewards.items()},
        with_others={name: along(reward, whole - reward) for name, reward in rewards.items()},
        kept=dict(kept),
        preferred=preferred,
    )


def _below(values: Tensor, groups: int) -> bool:
    """Whether a value is shown to be below 0: the whole interval of its draws is, which come after it."""
    return _ends(values[1:], groups, -math.inf, math.inf)[1] < 0


def _compare_rules(
    gradients: Mapping[str, Tensor], reference: Tensor, groups_per_step: float, *, draws: int = _DRAWS
) -> Comparison:
    """Compares the gradients of rules with that of an unbiased reference."""
    weights = _weights(len(reference), draws)
    truth = _Moments.of(reference.double(), reference.double(), weights)
    directions: dict[str, Direction | None] = {}
    ascents: dict[str, Tensor] = {}
    for name, estimates in gradients.items():
        own = _Moments.of(estimates.double(), reference.double(), weights)
        directions[name], ascents[name] = None, own.ascent(groups_per_step)
        if not estimates.any():
            continue
        size = own.size(groups_per_step)
        directions[name] = Direction(
            cosine=_interval(_ratio(own.inner, own.length * truth.length), len(reference), -1.0, 1.0),
            signal_to_noise=_interval(own.signal_to_noise / truth.signal_to_noise, len(reference), 0.0, math.inf),
            step=_interval(_ratio(own.inner, size * truth.length), len(reference), -1.0, 1.0),
        )
    sizes = reference.double().square().sum(dim=1)
    return Comparison(directions, len(reference), ascents, (sizes.sum().square() / sizes.square().sum()).item())


def _weights(count: int, draws: int) -> Tensor:
    """How often each group is in the groups as they are, all ones, and in each draw, (1 + D, N)."""
    if count < 2:
        raise ValueError("Directions are means over pairs of groups, and there is one group.")
    chosen = torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(0))
    drawn = torch.zeros(draws, count, dtype=torch.double).scatter_add_(1, chosen, torch.ones(draws, count).double())
    return torch.cat([torch.ones(1, count, dtype=torch.double), drawn])


@dataclass(frozen=True, eq=False)
class _Moments:
    """Of a rule, for the groups as they are and for each draw, (1 + D,) each."""

    length: Tensor  # squared, of the expected gradient
    spread: Tensor  # summed variances of the gradient of a group
    inner: Tensor  # of the expected gradient and the true one

    @classmethod
    def of(cls, estimates: Tensor, reference: Tensor, weights: Tensor) -> _Moments:
        products = estimates @ estimates.T
        length = _over_pairs(products, weights)
        second = weights @ products.diagonal() / weights.sum(dim=1)
        return cls(length, second - length, _over_pairs(estimates @ reference.T, weights))

    def size(self, groups_per_step: float) -> Tensor:
        """The squared length of a step, as expected."""
        return self.length.clamp(min=0) + self.spread / groups_per_step

    def ascent(self, groups_per_step: float) -> Tensor:
        """How far a step of length 1 goes along the true gradient, times the length of that; 0 for no gradient."""
        size = self.size(groups_per_step)
        return self.inner / torch.where(size > 0, size, 1.0).sqrt()

    @property
    def signal_to_noise(self) -> Tensor:
        return (self.length.clamp(min=0) / torch.where(self.spread > 0, self.spread, torch.nan)).sqrt()


def _over_pairs(products: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of products, (N, N), over pairs of different groups, (1 + D,); NaN where a draw has one group."""
    squares = weights.square()
    total = ((weights @ products) * weights).sum(dim=1) - squares @ products.diagonal()
    return total / (weights.sum(dim=1).square() - squares.sum(dim=1))


def _ratio(inner: Tensor, squared: Tensor) -> Tensor:
    """A cosine, (1 + D,); NaN where one of the lengths is not told from 0."""
    return (inner / torch.where(squared > 0, squared, torch.nan).sqrt()).clamp(-1.0, 1.0)


def _interval(values: Tensor, count: int, least: float, most: float) -> Interval:
    """The first value with the interval of the others."""
    ends = _ends(values[1:], count, least, most)
    value, low, high = (each if math.isfinite(each) else None for each in (values[0].item(), *ends))
    return Interval(value, low, high)


def _ends(values: Tensor, count: int, least: float, most: float) -> tuple[float, float]:
    """The interval of drawn values. One that is NaN may be anything between `least` and `most`."""
    tail, last = _tail(count), len(values) - 1
    ordered = values.nan_to_num(nan=most, posinf=most, neginf=least).sort().values
    high = ordered[math.ceil((1 - tail) * last)]
    if values.isnan().any():
        ordered = values.nan_to_num(nan=least, posinf=most, neginf=least).sort().values
    return ordered[math.floor(tail * last)].item(), high.item()


def _tail(count: int) -> float:
    """The share of draws on each side of a 95 % interval, from the quantile of Student's t (Cornish and Fisher)."""
    z, freedom = NormalDist().inv_cdf(0.975), count - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return NormalDist().cdf(-math.sqrt(count / freedom) * t)
