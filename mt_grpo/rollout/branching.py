"""Conversations that begin as one and branch: after some turns the environment is forked, and each goes on alone."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mt_grpo.concurrency import Future, call
from mt_grpo.envs.env import StepEnv
from mt_grpo.envs.source import close_each
from mt_grpo.rollout.engine import Engine, PlacingEngine
from mt_grpo.rollout.policy import ConversationPolicy, RolloutRequest
from mt_grpo.trajectory import Message, Trajectory


@dataclass(frozen=True)
class Branching:
    """How conversations branch: of `number` requests in a row the first is one, and the others leave it at a turn."""

    at: int
    number: int


@dataclass
class Branch:
    """A copy of an unfinished conversation, which goes on by itself."""

    env: StepEnv
    policy: ConversationPolicy
    trajectory: Trajectory
    messages: list[Message]


BeforeTurn = Callable[[ConversationPolicy, Trajectory, Sequence[Message]], Awaitable[None]]
"""What is called before each turn of a conversation, with the messages that it will be sampled after."""


class Conversations(Protocol):
    """What runs the conversations of a batch."""

    unclosed: list[str]

    async def converse(
        self, request: RolloutRequest, before_turn: BeforeTurn | None = None, branch: Branch | None = None
    ) -> tuple[Trajectory, ConversationPolicy]:
        """Runs one conversation."""

    def finish(self, index: int, trajectory: Trajectory, policy: ConversationPolicy) -> None:
        """Takes one that is finished."""


class BranchedConversation:
    """A conversation and those that branch from it, with forked environments, seeds and budgets."""

    def __init__(self, at: int, requests: Sequence[RolloutRequest], first: int, engine: Engine) -> None:
        self._at, self._requests, self._first, self._engine = at, requests, first, engine
        self._start = time.perf_counter()

    async def run(self, batch: Conversations) -> None:
        """Runs the conversations."""
        copies: list[Branch] = []
        tasks: list[Future] = []

        async def split(policy: ConversationPolicy, trajectory: Trajectory, messages: Sequence[Message]) -> None:
            if len(trajectory.turns) != self._at or copies:
                return
            for request in self._requests[1:]:
                copies.append(await self._fork(request, policy, trajectory, messages))
            tasks.extend(asyncio.ensure_future(follow(*each)) for each in enumerate(copies, 1))

        async def follow(number: int, branch: Branch) -> None:
            batch.finish(self._first + number, *await batch.converse(self._requests[number], branch=branch))

        try:
            trajectory, policy = await batch.converse(self._requests[0], before_turn=split)
            batch.finish(self._first, trajectory, policy)
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            batch.unclosed += await close_each(branch.trajectory for branch in copies)
            raise
        if not tasks:
            # copies that were made before one could not be
            batch.unclosed += await close_each(branch.trajectory for branch in copies)
            for number, request in enumerate(self._requests[1:], 1):
                batch.finish(self._first + number, _copied(trajectory, request, trajectory.environment), policy)

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


def _copied(trajectory: Trajectory, request: RolloutRequest, env: object) -> Trajectory:
    """A copy of a trajectory for another request."""
    return replace(
        trajectory,
        turns=copy.deepcopy(trajectory.turns),
        media=dict(trajectory.media),
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
