"""Runs every reward over a batch of trajectories, async ones concurrently."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

from mt_grpo.errors import UserError, describe_error, find_fault
from mt_grpo.rewards.base import FunctionReward, OutcomeReward, RewardFunc, StateScore, TurnReward
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import Trajectory

_Pending = Callable[[], Coroutine[object, object, Any]]
"""Waits for the value of a reward that was called."""


class RewardError(UserError, RuntimeError):
    """A reward failed. The message is one sentence that names the reward, the failure, the trajectory and its row."""


@dataclass
class Scores:
    """
    The rewards of a batch. A value is `None` if the reward does not apply, or if the trajectory failed.

    Args:
        turn (`list[list[list[float | None]]]`): Indexed [turn reward][trajectory][turn].
        outcome (`list[list[float | None]]`): Indexed [outcome reward][trajectory].
        state (`list[list[list[float | None]]]`): Indexed [state score][trajectory][turn].
    """

    turn: list[list[list[float | None]]]
    outcome: list[list[float | None]]
    state: list[list[list[float | None]]] = field(default_factory=list)


def score_trajectories(
    turn_funcs: Sequence[TurnReward],
    outcome_funcs: Sequence[OutcomeReward],
    trajectories: list[Trajectory],
    extra: dict[str, Any] | None = None,
    state_scores: Sequence[StateScore] = (),
) -> Coroutine[object, object, Scores]:
    """
    Scores a batch and records the values in `Trajectory.rewards`. A trajectory that failed is not scored.

    All rewards are called in the caller's thread, before this returns, because they may expect the main thread
    (signals) or the trainer's. The body of an `async def` reward runs where the result is awaited, which raises
    `RewardError` if a reward raises, or returns neither a finite number nor `None`.
    """
    judged = [trajectory for trajectory in trajectories if not trajectory.failed]
    # first what processes do together: a reward that ends this process would leave the others waiting
    together = {func: _call_on_all(func, judged, extra) for func in outcome_funcs if func.collective}
    of_turns = [
        _call_one(func, each, turn, each)
        for func in (*turn_funcs, *state_scores)
        for each in judged
        for turn in each.turns
    ]
    of_outcomes = [together[func] if func in together else _call_on_all(func, judged, extra) for func in outcome_funcs]

    async def wait() -> Scores:
        calls = [*of_turns, *(call for calls in of_outcomes for call in calls)]
        found = iter(await _gather([call() for call in calls]))
        by_turn = [[[next(found) for _ in each.turns] for each in judged] for _ in (*turn_funcs, *state_scores)]
        turn = [spread(values, trajectories, lambda failed: [None] * len(failed.turns)) for values in by_turn]
        outcome = []
        for func in outcome_funcs:
            values = next(found) if isinstance(func, FunctionReward) and judged else [next(found) for _ in judged]
            outcome.append(spread(values, trajectories))
        scores = Scores(turn[: len(turn_funcs)], outcome, turn[len(turn_funcs) :])
        kinds: dict[str, Sequence[RewardFunc]] = {"outcome": outcome_funcs, "turn": turn_funcs}
        if state_scores:
            kinds["state"] = state_scores
        for index, trajectory in enumerate(trajectories):
            trajectory.rewards = {
                kind: {func.name: values[index] for func, values in zip(funcs, getattr(scores, kind), strict=True)}
                for kind, funcs in kinds.items()
            }
        return scores

    return wait()


def spread(
    values: Sequence[object], trajectories: Sequence[Trajectory], fill: Callable[[Trajectory], object] = lambda _: None
) -> list[Any]:
    """Values of trajectories that did not fail, over all, with `fill` for the missing; else `ValueError`."""
    judged = [index for index, trajectory in enumerate(trajectories) if not trajectory.failed]
    found = dict(zip(judged, values, strict=True))
    return [found[index] if index in found else fill(trajectory) for index, trajectory in enumerate(trajectories)]


async def _gather(coroutines: list[Coroutine[object, object, Any]]) -> list[Any]:
    """Waits for all, then raises the first failure in their order, so that the same one is reported every time."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _call_on_all(func: OutcomeReward, trajectories: list[Trajectory], extra: dict[str, Any] | None) -> list[_Pending]:
    """Calls an outcome reward on each trajectory; a plain function is called once, and gives a list."""
    if not isinstance(func, FunctionReward):
        return [_call_one(func, trajectory, trajectory) for trajectory in trajectories]
    if not trajectories:
        func.score_nothing()
        return []
    rows = [trajectory.row for trajectory in trajectories]
    form = "texts" if trajectories[0].texts is not None else "lists of messages"  # as prompts are
    given = f", whose completions are {form}," if type(func) is FunctionReward else ""
    scope = f"a batch of {len(trajectories)}{given} that begins with "

    def numbers(values: list[object]) -> list[float | None]:
        return [_number(func, value, one) for value, one in zip(values, trajectories, strict=True)]

    return [_call(func, lambda: func.score_batch(trajectories, rows, extra), numbers, trajectories[0], scope)]


def _call_one(func: RewardFunc, trajectory: Trajectory, *args: object) -> _Pending:
    """Calls a reward with `args` and the row; waiting for its value raises `RewardError` where it fails."""
    return _call(
        func, lambda: func.score(*args, **trajectory.row), lambda value: _number(func, value, trajectory), trajectory
    )


_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)  # of the process, or of a coroutine that is closed


def _call(
    func: RewardFunc,
    call: Callable[[], object],
    read: Callable[[Any], object],
    trajectory: Trajectory,
    scope: str = "",
) -> _Pending:
    """Calls a reward, and returns a function that waits for its value; unlike a coroutine it need not be awaited."""
    value, failure = None, None
    try:
        value = call()
    except _ENDS:
        raise
    except BaseException as error:  # whatever the user's reward raises
        failure = error

    async def wait() -> Any:
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in one
        task.set_name(f"reward {func.name!r}")  # shown in the warning if it cannot be cancelled
        try:
            if failure is not None:
                raise failure
            found = await value if inspect.isawaitable(value) else value
        except _ENDS:
            raise
        except BaseException as error:  # likewise
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise
            raise _failure(func, error, trajectory, scope) from error
        return read(found)

    return wait


_LARGEST = 1e12
"""What a reward may be: the records of a run hold sums of rewards up to a thousand times that."""


def _number(func: RewardFunc, value: object, trajectory: Trajectory) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, (str, bytes)) or not isinstance(value, SupportsFloat):
            raise TypeError(f"it returned {value!r:.80}: return a number")
        number = float(value)
        if not abs(number) <= _LARGEST:  # NaN is not either
            bounds = f"a number between {-_LARGEST:g} and {_LARGEST:g}"
            mend = bounds if math.isfinite(number) else "a finite number, or `None` where it does not apply"
            raise ValueError(f"it returned {number:g}: return {mend}")
    except Exception as error:  # whatever the user's value raises
        raise _failure(func, error, trajectory) from error
    return number


def _failure(func: RewardFunc, error: BaseException, trajectory: Trajectory, scope: str = "") -> RewardError:
    row = json.dumps(trajectory.row, default=str, ensure_ascii=False)
    row = row if len(row) <= 200 else row[:199] + "…"
    reason = " ".join(describe_error(error).split())
    where = find_fault(error).where
    return RewardError(
        f"The reward {func.name!r} failed with {reason} (on {scope}trajectory {trajectory.session!r}, row {row}"
        f"{f', in {where}' if where else ''})."
    )


def cut_after(trajectory: Trajectory, index: int) -> Trajectory:
    """
    The trajectory when a turn had been replied to, without what is only known at its end; its environment is the one
    at the end.
    """
    return replace(
        trajectory,
        turns=trajectory.turns[: index + 1],
        tree=_cut_tree(trajectory.tree, index + 1),
        answer=trajectory.turns[index].answer,
        stop_reason=None,
        error=None,
        rewards={},
        render_mismatch=None,
        seconds=0.0,
        env_rewards={},
        info={},
        answer_logprobs={name: values[: index + 2] for name, values in trajectory.answer_logprobs.items()},
        teacher_log_ratios=trajectory.teacher_log_ratios[: index + 1],
        teacher_logprobs=trajectory.teacher_logprobs[: index + 1],
    )


def score_cut(
    funcs: Sequence[TurnReward | StateScore],
    samples: Sequence[tuple[Trajectory, int]],
    teacher_knows_end: bool = False,
) -> Coroutine[object, object, dict[str, str]]:
    """
    Scores turns once more, on their trajectories cut off after them: for each reward that depends on later turns, by
    its name, what was found. A reward whose value on the *whole* trajectory differs from the recorded one too is not
    deterministic, and nothing is said of it. Like `score_trajectories`, this calls all rewards before it returns.
    """
    calls = []
    for trajectory, index in samples:
        cut = cut_after(trajectory, index)
        if teacher_knows_end:
            cut.teacher_log_ratios = [None] * len(cut.teacher_log_ratios)
        for func in funcs:
            whole = _call_one(func, trajectory, trajectory.turns[index], trajectory)
            recorded = trajectory.rewards["state" if isinstance(func, StateScore) else "turn"][func.name][index]
            turn = f"turn {index + 1} of {len(trajectory.turns)} of trajectory {trajectory.session!r}"
            calls.append((func.name, turn, recorded, whole, _call_one(func, cut, cut.turns[index], cut)))

    async def compare() -> dict[str, str]:
        found: dict[str, str] = {}
        for name, turn, recorded, whole, cut in calls:
            try:
                repeated = _equal(await whole(), recorded)
            except RewardError:  # one that cannot be called twice
                repeated = False
            try:
                value = await cut()
            except RewardError as error:
                value, differs = f"the failure {error.__cause__!r}", True
            else:
                differs = not _equal(value, recorded)
            if repeated and differs:
                found.setdefault(name, f"{turn} earned {recorded}, and {value} with the later turns cut off")
        return found

    return compare()


def _equal(value: float | None, other: float | None) -> bool:
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-9)


def _cut_tree(tree: TokenTree, num_turns: int) -> TokenTree:
    logprobs, cut = tree.action_logprobs(), TokenTree()
    for turn, action in enumerate(tree.actions()[:num_turns]):
        path = tree.path_of_turn(turn)
        cut.add_turn(path[: len(path) - len(action)], action, logprobs[turn])
    return cut
