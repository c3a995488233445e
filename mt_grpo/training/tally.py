"""Means over a log window. Sums and their divisors are kept apart until they are logged."""

from __future__ import annotations

from collections import Counter


class Tally:
    """
    Sums by name, each per unit (trajectory, call, turn K), and the number of each unit. A name that a batch lacks
    counts as 0 there. The weight of a batch is its number of units.

        tally.count("trajectory", 8)
        tally.add("stop/answered", 6, per="trajectory")   # logged as 0.75, and as 6 / 16 with another 8 that have none
    """

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._per: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._largest: dict[str, float] = {}

    def count(self, unit: str, number: float) -> None:
        """Adds `number` to the count of a unit."""
        self._counts[unit] += number

    def add(self, name: str, total: float, per: str) -> None:
        """Adds `total` to the sum that is logged as `name`, divided by the number of the unit `per`."""
        self._sums[name] += total
        self._per[name] = per

    def largest(self, name: str, value: float) -> None:
        """Adds a value to a name whose largest value is logged."""
        self._largest[name] = max(value, self._largest.get(name, value))

    def merge(self, other: Tally) -> None:
        """Adds what another tally has."""
        self._sums.update(other._sums)
        self._per |= other._per
        self._counts.update(other._counts)
        for name, value in other._largest.items():
            self.largest(name, value)

    def means(self) -> dict[str, float]:
        """The values to log; 0 if there is nothing to divide by."""
        means = {name: total / (self._counts[self._per[name]] or 1) for name, total in self._sums.items()}
        return means | self._largest
