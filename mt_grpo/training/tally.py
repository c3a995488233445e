"""Means over a log window: sums, and the numbers they are divided by, are kept apart until they are logged."""

from __future__ import annotations

from collections import Counter


class Tally:
    """
    Sums by name, each of a unit (trajectories, calls, turns K), and how many of each unit there were. What a batch did
    not have counts as 0 in it, whether or not another batch had it; a batch weighs as much as it has units.

        tally.count("trajectory", 8)
        tally.add("stop/answered", 6, per="trajectory")   # logged as 0.75, and as 6 / 16 with another 8 that have none
    """

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._per: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._largest: dict[str, float] = {}

    def count(self, unit: str, number: float) -> None:
        """There were `number` more of a unit."""
        self._counts[unit] += number

    def add(self, name: str, total: float, per: str) -> None:
        """Adds `total` to the sum that is logged as `name`, divided by the number of the unit `per`."""
        self._sums[name] += total
        self._per[name] = per

    def largest(self, name: str, value: float) -> None:
        """A value of which the largest is logged."""
        self._largest[name] = max(value, self._largest.get(name, value))

    def merge(self, other: Tally) -> None:
        """Adds what another tally has."""
        self._sums.update(other._sums)
        self._per |= other._per
        self._counts.update(other._counts)
        for name, value in other._largest.items():
            self.largest(name, value)

    def means(self) -> dict[str, float]:
        """What is logged; 0 where there was nothing to divide by."""
        means = {name: total / (self._counts[self._per[name]] or 1) for name, total in self._sums.items()}
        return means | self._largest
