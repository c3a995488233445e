"""Whether a turn reward stays as it is when later turns are cut off, as rules that credit single turns need it."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from mt_grpo.rewards.base import StateScore, TurnReward
from mt_grpo.rewards.scoring import RewardError, call_one
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import Trajectory


def cut_after(trajectory: Trajectory, index: int) -> Trajectory:
    """
    The trajectory as it was when a turn had been replied to.

    What is only known at its end is left out: the stop reason, the duration, rewards and what the environment says of
    the whole conversation. The environment itself, which rewards may look at, is the one at the end. Log-probs of the
    right answer stay up to the state that the turn led to.

    Args:
        trajectory (`Trajectory`): A finished trajectory; it stays as it is.
        index (`int`): The last turn to keep.
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
    )


def score_cut(
    funcs: Sequence[TurnReward | StateScore], samples: Sequence[tuple[Trajectory, int]]
) -> Coroutine[Any, Any, dict[str, str]]:
    """
    Scores turns once more, on their trajectories cut off after them, and finds the rewards that differ.

    A reward whose value on the *whole* trajectory differs from the recorded one too is not deterministic, and nothing
    is said of it. Like `score_trajectories`, this calls all rewards before it returns.

    Args:
        funcs (`Sequence[TurnReward | StateScore]`): The rewards and state scores.
        samples (`Sequence[tuple[Trajectory, int]]`): Scored trajectories, each with the index of a turn.

    Returns:
        A coroutine of `dict[str, str]`: for each reward that depends on later turns, by its name, what was found.
    """
    calls = []
    for trajectory, index in samples:
        cut = cut_after(trajectory, index)
        for func in funcs:
            whole = call_one(func, trajectory, trajectory.turns[index], trajectory)
            recorded = trajectory.rewards["state" if isinstance(func, StateScore) else "turn"][func.name][index]
            turn = f"turn {index + 1} of {len(trajectory.turns)} of trajectory {trajectory.session!r}"
            calls.append((func.name, turn, recorded, whole, call_one(func, cut, cut.turns[index], cut)))

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
    logprobs: list[list[float]] = [[] for _ in range(tree.num_turns)]
    for index in tree.depth_first():
        if tree.nodes[index].turn >= 0:
            logprobs[tree.nodes[index].turn] += tree.nodes[index].logprobs
    cut = TokenTree()
    for turn, action in enumerate(tree.actions()[:num_turns]):
        path = tree.path_of_turn(turn)
        cut.add_turn(path[: len(path) - len(action)], action, logprobs[turn])
    return cut
