"""Continues a conversation several times from one of its turns on."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mt_grpo.concurrency import call
from mt_grpo.envs.env import StepEnv
from mt_grpo.envs.source import close_each
from mt_grpo.rollout.engine import Engine, PlacingEngine
from mt_grpo.rollout.policy import ConversationPolicy
from mt_grpo.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from mt_grpo.rollout.runner import RolloutRequest


@dataclass(frozen=True)
class Branching:
    """
    How conversations branch.

    Args:
        at (`int`): Turns that the branches of a conversation share.
        number (`int`): Branches of a conversation, itself included.
    """

    at: int
    number: int


@dataclass
class Branch:
    """A copy of an unfinished conversation, which goes on by itself."""

    env: StepEnv
    policy: ConversationPolicy
    trajectory: Trajectory
    messages: list[Message]


class BranchedConversation:
    """
    A conversation and those that branch from it. They begin as one; when it has had its turns, its environment is
    forked, and each goes on with a seed and a budget of its own. If it ends before, the others are copies of it.

    Args:
        at (`int`): Turns that they share.
        requests (`Sequence[RolloutRequest]`): The conversation, and those that branch from it.
        engine (`Engine`): Samples the turns.
    """

    def __init__(self, at: int, requests: Sequence[RolloutRequest], engine: Engine) -> None:
        self._at, self._requests, self._engine = at, requests, engine
        self._copies: list[Branch] = []
        self._tasks: list[asyncio.Future[Any]] = []
        self._start = time.perf_counter()

    async def run(
        self,
        converse: Callable[..., Awaitable[tuple[Trajectory, ConversationPolicy]]],
        finish: Callable[[int, Trajectory, ConversationPolicy], None],
        unclosed: list[str],
    ) -> None:
        """
        Holds the conversations.

        Args:
            converse (`Callable`): Holds the conversation of a request: from a `branch` on, or from its beginning, with
                a callable that is awaited `before_turn`.
            finish (`Callable`): Called with the number of each, its trajectory and its policy when it is finished.
            unclosed (`list[str]`): Gets the reasons why copies of the environment could not be closed.
        """

        async def split(policy: ConversationPolicy, trajectory: Trajectory, messages: Sequence[Message]) -> None:
            if len(trajectory.turns) != self._at or self._copies:
                return
            for request in self._requests[1:]:
                self._copies.append(await self._fork(request, policy, trajectory, messages))
            self._tasks += [asyncio.ensure_future(follow(*each)) for each in enumerate(self._copies, 1)]

        async def follow(number: int, branch: Branch) -> None:
            finish(number, *await converse(self._requests[number], branch=branch))

        try:
            trajectory, policy = await converse(self._requests[0], before_turn=split)
            finish(0, trajectory, policy)
            await asyncio.gather(*self._tasks)
        except BaseException:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            unclosed += await close_each(branch.trajectory for branch in self._copies)
            raise
        if not self._tasks:
            # copies that were made before one could not be
            unclosed += await close_each(branch.trajectory for branch in self._copies)
            for number, request in enumerate(self._requests[1:], 1):
                finish(number, _copied(trajectory, request, trajectory.environment), policy)

    async def _fork(
        self, request: RolloutRequest, policy: ConversationPolicy, parent: Trajectory, messages: Sequence[Message]
    ) -> Branch:
        env, name = parent.environment, type(parent.environment).__name__
        twin = await call(env.fork, what=f"{name}.fork", timeout=env.step_timeout)
        if not isinstance(twin, StepEnv) or twin is env:
            raise TypeError(f"{name}.fork returned {'itself' if twin is env else type(twin).__name__}: return a copy.")
        trajectory = _copied(parent, request, twin)
        trajectory.seconds = time.perf_counter() - self._start  # `rollout_timeout` bounds the whole of it
        twin.row, twin.session = {**request.row, "prompt": request.prompt}, request.session
        twin.turns = list(trajectory.turns)
        if isinstance(self._engine, PlacingEngine):
            self._engine.join(request.session, parent.session)
        return Branch(twin, policy.fork(trajectory, request.seed), trajectory, list(messages))


def _copied(trajectory: Trajectory, request: RolloutRequest, env: Any) -> Trajectory:
    """A copy of a trajectory for another request."""
    return replace(
        trajectory,
        turns=copy.deepcopy(trajectory.turns),
        tree=trajectory.tree.fork(),
        session=request.session,
        row=request.row,
        env_rewards=dict(trajectory.env_rewards),
        info=dict(trajectory.info),
        rewards={},
        answer_logprobs={},
        branch_of=trajectory.session,
        environment=env,
    )
