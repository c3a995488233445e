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
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

DRAWS = 2000


@dataclass(frozen=True)
class Interval:
    """
    An estimate and its interval.

    Args:
        value (`float`, *optional*): The estimate; `None` where the groups tell none.
        low, high (`float`, *optional*): The ends of the 95 % interval; `None` where it has none.
    """

    value: float | None
    low: float | None
    high: float | None

    @property
    def told(self) -> bool:
        """Whether the groups tell anything: not where the interval is all that a cosine, or a ratio, can be."""
        return (self.low, self.high) not in ((-1.0, 1.0), (0.0, None))


@dataclass(frozen=True)
class Direction:
    """
    What the groups tell of a rule.

    Args:
        cosine (`Interval`): Between the expected gradient of the rule and the true one. It tells bias alone.
        signal_to_noise (`Interval`): Length of the rule's expected gradient / root of its summed variances, in that of
            the reference. It tells noise alone.
        step (`Interval`): Between the rule's gradient over the groups of one optimiser step and the true gradient, as
            expected. It tells bias and noise together.
    """

    cosine: Interval
    signal_to_noise: Interval
    step: Interval


@dataclass(frozen=True, eq=False)
class Comparison:
    """
    Rules on the same groups.

    Args:
        directions (`dict[str, Direction | None]`): By rule; `None` for one that gives every turn 0.
        groups (`int`): Their number.
        ascents (`dict[str, Tensor]`): Of each rule, how far its steps go along the true gradient: `step` times the
            length of that gradient, which all rules share and noisy groups tell last. The estimate, then a value per
            draw, (1 + D,).
    """

    directions: dict[str, Direction | None]
    groups: int
    ascents: dict[str, Tensor]

    @property
    def best(self) -> str:
        """The rule with the largest `step`."""
        return max(self.ascents, key=lambda name: self.ascents[name][0].item())

    @property
    def known(self) -> bool:
        """Whether the steps of the best rule are shown to go along the true gradient: `step` is above 0."""
        best = self.directions[self.best]
        return best is not None and best.step.low is not None and best.step.low > 0

    def behind(self, rule: str, other: str) -> bool:
        """Whether the `step` of a rule is shown to be smaller than another's: the whole paired interval is below 0."""
        return _below(self.ascents[rule] - self.ascents[other], self.groups)


@dataclass(frozen=True, eq=False)
class Judgement:
    """
    Rules by what each does worst: by all rewards together, or by one of them alone. A cosine with the gradient of all
    rewards is high where a rule follows many easy ones and loses the one that decides.

    Args:
        items (`dict[str, Comparison]`): The same rules on the same groups and draws, by what they are compared on;
            those whose direction is `known` count.
    """

    items: dict[str, Comparison]

    @property
    def told(self) -> dict[str, Comparison]:
        """What the groups tell something of."""
        return {name: item for name, item in self.items.items() if item.known}

    @property
    def known(self) -> bool:
        return bool(self.told)

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
    def best(self) -> str:
        """The rule with the largest least share."""
        return max(self.scores, key=lambda rule: self.scores[rule][0].item())

    def worst(self, rule: str) -> str:
        """The item that a rule does worst."""
        return min(self.shares[rule], key=lambda name: self.shares[rule][name][0].item())

    def behind(self, rule: str, other: str) -> bool:
        """Whether the score of a rule is shown to be smaller than another's: the whole paired interval is below 0."""
        return _below(self.scores[rule] - self.scores[other], next(iter(self.told.values())).groups)


def _below(gap: Tensor, groups: int) -> bool:
    return _ends(gap[1:], groups, -math.inf, math.inf)[1] < 0


def compare_rules(
    gradients: Mapping[str, Tensor], reference: Tensor, groups_per_step: float, *, draws: int = DRAWS, seed: int = 0
) -> Comparison:
    """
    Compares the gradients of rules with that of an unbiased reference.

    Args:
        gradients (`Mapping[str, Tensor]`): By rule, the gradient that each group estimates, (N, P); any length.
        reference (`Tensor`): The same of a rule without bias, (N, P).
        groups_per_step (`float`): Groups of an optimiser step.
        draws (`int`, *optional*, defaults to 2000): Draws of the bootstrap.
        seed (`int`, *optional*, defaults to 0): Of these draws; they are the same for all rules.

    Raises:
        ValueError: If there are fewer than two groups.
    """
    count = len(reference)
    if count < 2:
        raise ValueError("Directions are means over pairs of groups, and there is one group.")
    chosen = torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(seed))
    drawn = torch.zeros(draws, count, dtype=torch.double).scatter_add_(1, chosen, torch.ones(draws, count).double())
    weights = torch.cat([torch.ones(1, count, dtype=torch.double), drawn])  # the groups as they are come first
    truth = _Moments.of(reference.double(), reference.double(), weights)
    directions: dict[str, Direction | None] = {}
    ascents: dict[str, Tensor] = {}
    for name, estimates in gradients.items():
        own = _Moments.of(estimates.double(), reference.double(), weights)
        directions[name], ascents[name] = None, torch.zeros(1 + draws, dtype=torch.double)
        if not estimates.any():
            continue
        size = own.length.clamp(min=0) + own.spread / groups_per_step
        ascents[name] = own.inner / size.sqrt()
        directions[name] = Direction(
            cosine=_interval(_ratio(own.inner, own.length * truth.length), count, -1.0, 1.0),
            signal_to_noise=_interval(own.signal_to_noise / truth.signal_to_noise, count, 0.0, math.inf),
            step=_interval(_ratio(own.inner, size * truth.length), count, -1.0, 1.0),
        )
    return Comparison(directions, count, ascents)


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
    value = values[0].item()
    low, high = _ends(values[1:], count, least, most)
    return Interval(value if math.isfinite(value) else None, low, high if math.isfinite(high) else None)


def _ends(values: Tensor, count: int, least: float, most: float) -> tuple[float, float]:
    """The interval of drawn values. One that is NaN may be anything between `least` and `most`."""
    tail, last = _tail(count), len(values) - 1
    low = values.nan_to_num(nan=least, posinf=most, neginf=least).sort().values[math.floor(tail * last)]
    high = values.nan_to_num(nan=most, posinf=most, neginf=least).sort().values[math.ceil((1 - tail) * last)]
    return low.item(), high.item()


def _tail(count: int) -> float:
    """The share of draws on each side of a 95 % interval, from the quantile of Student's t (Cornish and Fisher)."""
    z, freedom = NormalDist().inv_cdf(0.975), count - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return NormalDist().cdf(-math.sqrt(count / freedom) * t)
