"""Means with intervals, and how often a question is answered in several attempts. Imports numpy alone."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 9999
_MOST_DRAWN = 2**22  # rows that are drawn at a time


@dataclass(frozen=True)
class Estimate:
    """A mean over so many rows and its interval, which fewer than two rows do not have."""

    mean: float | None
    low: float | None
    high: float | None
    rows: int


def bootstrap(values: np.ndarray, seed: int = 0) -> Estimate:
    """The mean of values `(rows,)`, without NaN, and its percentile interval by the bootstrap (Efron 1979)."""
    values = values[~np.isnan(values)]
    size = len(values)
    if size < 2:
        return Estimate(float(values[0]) if size else None, None, None, size)
    rng, means = np.random.default_rng(seed), np.empty(RESAMPLES)
    at_once = max(1, _MOST_DRAWN // size)
    for begin in range(0, RESAMPLES, at_once):
        end = min(begin + at_once, RESAMPLES)
        means[begin:end] = values[rng.integers(0, size, (end - begin, size))].mean(axis=1)
    low, high = np.percentile(means, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Estimate(float(values.mean()), float(low), float(high), size)


_FEWEST_STEPS, _FEWEST = 20, 5
"""Steps, and steps that count, below which there is no interval: it would be too short for steps that are alike."""


def over_steps(values: np.ndarray) -> Estimate:
    """
    The mean of values of neighbouring steps `(steps,)`, with the interval of Student's t: of `n` with a correlation
    `r` of neighbours `n (1 - r) / (1 + r)` count. `r` is found too small by `(1 + 3 r) / n` (Marriott and Pope 1954).
    """
    count, mean = float(len(values)), float(values.mean())
    rest = values - mean
    if (square := float(rest @ rest)) > 0:
        alike = float(rest[1:] @ rest[:-1]) / square
        alike = min(max(0.0, alike + (1 + 3 * alike) / count), 1.0)
        count *= (1 - alike) / (1 + alike)
    if len(values) < _FEWEST_STEPS or count < _FEWEST:
        return Estimate(mean, None, None, len(values))
    half = _student(count - 1) * float(values.std(ddof=1)) / count**0.5
    return Estimate(mean, mean - half, mean + half, len(values))


def _student(freedom: float) -> float:
    """The quantile of Student's t for `CONFIDENCE` (Cornish and Fisher's expansion)."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))


def pass_at(right: np.ndarray, attempts: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """
    pass@k and pass^k of questions with `attempts` of which `right` are right, `(questions,)` each; NaN with fewer
    attempts than `k`. Unbiased: shares of subsets of `k` (Chen et al. 2021, 2107.03374, equation 1; Yao et al. 2024,
    2406.12045).
    """
    right, attempts = right.astype(float), attempts.astype(float)
    none, every = np.ones(len(right)), np.ones(len(right))
    for drawn in range(k):
        left = np.maximum(attempts - drawn, 1)
        none *= np.maximum(attempts - right - drawn, 0) / left
        every *= np.maximum(right - drawn, 0) / left
    known = attempts >= k
    return np.where(known, 1 - none, np.nan), np.where(known, every, np.nan)
