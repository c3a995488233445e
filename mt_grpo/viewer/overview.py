"""A run at a glance: curves over its steps, and the numbers on top of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mt_grpo.trajectory import StopReason
from mt_grpo.viewer.columns import REWARD, SPREAD, Columns, short_name

POINTS = 400
"""Points of a curve; more steps than that are put together, as means of equally many."""

ENDED = (StopReason.ANSWERED, StopReason.ENV_DONE)
"""Conversations that came to their own end."""

PARTS = ("sampling", "rewards", "sync", "training")
"""Where the time of a step goes."""

EDGE = 5
"""Steps at each end of a run that are compared, at most."""


def overview(columns: Columns, steps: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """
    Curves of the training batches.

    Args:
        columns (`Columns`): The run's conversations.
        steps (`list[dict]`): Lines of kind `step` of its index.
        metrics (`list[dict]`): Lines of `metrics.jsonl`.

    Returns:
        `dict`: `step`, the optimiser steps taken before; curves with a value per step, `None` where there is none:
        `reward`, `rewards` by name, `stops` (shares of the conversations that were cut off, by reason), `health` by
        name, `turns`; `time` with its own `step` and `PARTS` in seconds; `held_out`, a point per evaluation; `tokens`,
        counts of the whole run.
    """
    train = np.flatnonzero(columns.is_text("mode", "train"))
    step = columns.numbers("step")[train]
    axis, place = np.unique(step, return_inverse=True)

    def mean(values: np.ndarray) -> np.ndarray:
        return _means(values, place, len(axis))

    number = {name: columns.numbers(name)[train] for name in ("reward", "turns", "errors", "mismatch", "entropy")}
    stops = {}
    for reason in StopReason:
        share = mean(columns.is_text("stop", reason.value)[train].astype(float))
        if reason not in ENDED and np.nansum(share):
            stops[reason.value] = share
    health = {
        "groups without signal": mean(_dead(columns)[train]),
        "engine − trainer": mean(number["mismatch"]),
        "tokens clipped": mean(columns.numbers("clipped")[train]),
        "entropy": mean(number["entropy"]),
        "gradient norm": _of_metrics(metrics, "grad_norm", axis),
        "with a failed call": mean((number["errors"] > 0).astype(float)),
    }
    return {
        "step": _points(axis),
        "reward": _points(mean(number["reward"])),
        "rewards": {
            short_name(name): _points(mean(columns.numbers(REWARD + name)[train])) for name in columns.rewards
        },
        "turns": _points(mean(number["turns"])),
        "stops": {name: _points(share) for name, share in stops.items()},
        "health": {name: _points(values) for name, values in health.items()},
        "time": {name: _points(np.array([each[name] for each in steps], float)) for name in ("step", *PARTS)},
        "held_out": _held_out(columns),
        "tokens": _tokens(columns, train),
    }


def ends(values: list[float | None]) -> tuple[float, float] | None:
    """Means of the first and of the last steps of a curve; `None` where it has none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    few = max(1, min(EDGE, len(known) // 3))
    return float(np.mean(known[:few])), float(np.mean(known[-few:]))


def _dead(columns: Columns) -> np.ndarray:
    """1 for members of groups that all earned the same, NaN for those that are no group."""
    spread = columns.numbers(SPREAD)
    return np.where(np.isnan(spread), np.nan, (spread == 0).astype(float))


def _means(values: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.bincount(place, np.where(known, values, 0.0), size) / np.bincount(place, known, size)


def _of_metrics(metrics: list[dict[str, Any]], name: str, axis: np.ndarray) -> np.ndarray:
    """A metric by the steps taken before; `metrics.jsonl` counts the step itself."""
    known = {row["step"] - 1: row[name] for row in metrics if row.get(name) is not None}
    return np.array([known.get(int(step), np.nan) for step in axis], float)


def _held_out(columns: Columns) -> list[dict[str, Any]]:
    """Each evaluation: `step`, mean `reward`, the share `right`, and `questions`."""
    mask = columns.is_text("mode", "eval")
    step = columns.numbers("step")
    points = []
    for at in np.unique(step[mask]):
        here = mask & (step == at)
        right, reward = (columns.numbers(name)[here] for name in ("right", "reward"))
        points.append({"step": int(at), "reward": _mean(reward), "right": _mean(right), "questions": int(here.sum())})
    return points


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _tokens(columns: Columns, train: np.ndarray) -> dict[str, int]:
    """Sampled in training, and computed for it: those of the token trees."""
    return {name: int(columns.numbers(name)[train].sum()) for name in ("tokens", "unique")}


def _points(values: np.ndarray) -> list[float | None]:
    """As JSON, at most `POINTS` of them."""
    if len(values) > POINTS:
        edges = np.linspace(0, len(values), POINTS + 1).astype(int)
        values = _means(values, np.repeat(np.arange(POINTS), np.diff(edges)), POINTS)
    return [None if np.isnan(value) else float(value) for value in values]
