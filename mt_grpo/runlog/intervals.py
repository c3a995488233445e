"""Means with intervals, and how often a question is answered in several attempts. Imports numpy alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 9999
_MOST_DRAWN = 2**22
"""Rows that are drawn at a time."""


@dataclass(frozen=True)
class Estimate:
    """A mean over so many rows and its interval, which fewer than two rows do not have."""

    mean: float | None
    low: float | None
    high: float | None
    rows: int


def bootstrap(values: np.ndarray, seed: int = 0) -> Estimate:
    """
    The mean of rows and its percentile interval by the bootstrap (Efron 1979): rows are drawn again with replacement.

    Args:
        values (`np.ndarray`): A value per row, of shape `(rows,)`; NaN where it has none, and does not count.
        seed (`int`, *optional*, defaults to 0): Draws the rows.
    """
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


def pass_at(right: np.ndarray, attempts: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """
    How likely at least one of `k` attempts at a question is right (pass@k), and all of them are (pass^k): the share of
    the subsets of `k` of its attempts, which is unbiased (Chen et al. 2021, 2107.03374, equation 1; Yao et al. 2024,
    2406.12045).

    Args:
        right (`np.ndarray`), attempts (`np.ndarray`): Of each question, shape `(questions,)`.
        k (`int`): Attempts.

    Returns:
        Two arrays of shape `(questions,)`, NaN for questions with fewer attempts.
    """
    right, attempts = right.astype(float), attempts.astype(float)
    none, every = np.ones(len(right)), np.ones(len(right))
    for drawn in range(k):
        left = np.maximum(attempts - drawn, 1)
        none *= np.maximum(attempts - right - drawn, 0) / left
        every *= np.maximum(right - drawn, 0) / left
    known = attempts >= k
    return np.where(known, 1 - none, np.nan), np.where(known, every, np.nan)
