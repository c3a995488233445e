"""Trajectories in, rewards out: runs every reward over a batch, async ones concurrently."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from mt_grpo.rewards.base import FunctionReward, OutcomeReward, RewardFunc, TurnReward
from mt_grpo.trajectory import Trajectory


class RewardError(RuntimeError):
    """A reward failed. The message is one sentence that names the reward, the failure, the trajectory and its row."""


@dataclass
class Scores:
    """
    The rewards of a batch; `None` where a reward does not apply, and for a trajectory that failed.

    Args:
        turn (`list[list[list[float | None]]]`): Indexed [turn reward][trajectory][turn].
        outcome (`list[list[float | None]]`): Indexed [outcome reward][trajectory].
    """

    turn: list[list[list[float | None]]]
    outcome: list[list[float | None]]


async def score_trajectories(
    turn_funcs: Sequence[TurnReward],
    outcome_funcs: Sequence[OutcomeReward],
    trajectories: list[Trajectory],
    extra: dict[str, Any] | None = None,
) -> Scores:
    """
    Scores a batch and records the values in `Trajectory.rewards`. No reward is asked about a trajectory that failed.

    Args:
        turn_funcs (`Sequence[TurnReward]`): Scored on every turn of every trajectory.
        outcome_funcs (`Sequence[OutcomeReward]`): Scored on every trajectory.
        trajectories (`list[Trajectory]`): The batch; `Trajectory.row` holds the columns.
        extra (`dict`, *optional*): Keyword arguments for plain TRL reward functions beyond the columns.

    Returns:
        `Scores`: One value for each reward and trajectory (and turn).

    Raises:
        RewardError: If a reward raises, or returns what is not a finite number; only `None` says that it does not
            apply.
    """
    judged = [trajectory for trajectory in trajectories if not trajectory.failed]
    turn, outcome = await _gather(
        [
            _gather([_score_turn_func(func, judged) for func in turn_funcs]),
            _gather([_score_outcome_func(func, judged, extra) for func in outcome_funcs]),
        ]
    )
    turn = [spread(values, trajectories, lambda failed: [None] * len(failed.turns)) for values in turn]
    outcome = [spread(values, trajectories) for values in outcome]
    for index, trajectory in enumerate(trajectories):
        trajectory.rewards = {
            "outcome": {func.name: values[index] for func, values in zip(outcome_funcs, outcome, strict=True)},
            "turn": {func.name: values[index] for func, values in zip(turn_funcs, turn, strict=True)},
        }
    return Scores(turn, outcome)


def score(
    turn_funcs: Sequence[TurnReward],
    outcome_funcs: Sequence[OutcomeReward],
    trajectories: list[Trajectory],
    extra: dict[str, Any] | None = None,
) -> Scores:
    """`score_trajectories` for callers outside an event loop; sync rewards run on the calling thread."""
    return asyncio.run(score_trajectories(turn_funcs, outcome_funcs, trajectories, extra))


def spread(
    values: Sequence[Any], trajectories: Sequence[Trajectory], fill: Callable[[Trajectory], Any] = lambda _: None
) -> list[Any]:
    """
    Values of the trajectories that did not fail as values of all: `fill` makes those of the others.

    Raises:
        ValueError: If there is another number of values than of trajectories that did not fail.
    """
    judged = [index for index, trajectory in enumerate(trajectories) if not trajectory.failed]
    found = dict(zip(judged, values, strict=True))
    return [found[index] if index in found else fill(trajectory) for index, trajectory in enumerate(trajectories)]


def combine(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The weighted sum of the rewards that apply; `None` when none does."""
    terms = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(terms) if terms else None


async def _gather(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Runs all to their end, then raises the first failure in order: which one is reported is not a race."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def _score_turn_func(func: TurnReward, trajectories: list[Trajectory]) -> list[list[float | None]]:
    return await _gather(
        [
            _gather([_score_one(func, trajectory, turn, trajectory) for turn in trajectory.turns])
            for trajectory in trajectories
        ]
    )


async def _score_outcome_func(
    func: OutcomeReward, trajectories: list[Trajectory], extra: dict[str, Any] | None
) -> list[float | None]:
    if not trajectories:
        return []
    if not isinstance(func, FunctionReward):
        return await _gather([_score_one(func, trajectory, trajectory) for trajectory in trajectories])
    if not trajectories:
        return []
    try:
        values = await func.score_batch(trajectories, [trajectory.row for trajectory in trajectories], extra)
    except Exception as error:  # whatever the user's function raises
        raise _failure(func, error, trajectories[0], f"a batch of {len(trajectories)} that begins with ") from error
    return [_number(func, value, trajectory) for value, trajectory in zip(values, trajectories, strict=True)]


async def _score_one(func: RewardFunc, trajectory: Trajectory, *args: Any) -> float | None:
    try:
        value = func.score(*args, **trajectory.row)
        if inspect.isawaitable(value):
            value = await value
    except Exception as error:  # whatever the user's reward raises
        raise _failure(func, error, trajectory) from error
    return _number(func, value, trajectory)


def _number(func: RewardFunc, value: Any, trajectory: Trajectory) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
        if math.isnan(number):
            raise ValueError("it returned nan: return `None` where it does not apply")
        if math.isinf(number):
            raise ValueError(f"it returned {number}, which is not a finite number")
    except Exception as error:  # whatever the user's value raises
        raise _failure(func, error, trajectory) from error
    return number


def _failure(func: RewardFunc, error: Exception, trajectory: Trajectory, scope: str = "") -> RewardError:
    row = json.dumps(trajectory.row, default=str, ensure_ascii=False)
    row = row if len(row) <= 200 else row[:199] + "…"
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return RewardError(
        f"The reward {func.name!r} failed with {reason} on {scope}trajectory {trajectory.session!r}, row {row}."
    )
