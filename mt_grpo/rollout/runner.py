"""
Prompts in, trajectories out: one coroutine per conversation, and none waits for another. A conversation may be
continued several times from one of its turns on.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mt_grpo.concurrency import ConcurrencyLimit, abandon, begin, call, in_thread, run
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.env import ConversationEnded, Outcome, StepEnv, checked_outcome
from mt_grpo.envs.source import EnvLike, check_source, close_each, source_of, warn_of_unclosed
from mt_grpo.envs.tool_env import fail_unanswered
from mt_grpo.errors import EngineError, describe_error, find_fault
from mt_grpo.media import MODEL_TAKES
from mt_grpo.options.rules import check_history
from mt_grpo.rollout.engine import Engine, PlacingEngine, SamplingParams
from mt_grpo.rollout.media import MediaEncoder
from mt_grpo.rollout.policy import ConversationPolicy, RolloutLimits, Sampler, derive_seed
from mt_grpo.rollout.token_check import SanityCheck
from mt_grpo.rollout.token_row import TokenRow, token_row
from mt_grpo.servers.env_servers import conversation
from mt_grpo.tools.results import cut
from mt_grpo.trajectory import Message, StopReason, Trajectory

GRACE = 2.0
"""Seconds that an environment may take to end once it is cancelled; then it is left to itself."""
LONGEST_ERROR = 10_000
"""Characters of an environment's error that are kept."""
_NEVER = 1 << 30  # collections of a younger generation until a full one


@dataclass
class RolloutRequest:
    """
    One conversation to run.

    Args:
        prompt (`str` or `list[dict]`): The user's words, or messages.
        session (`str`): Identifier, unique within a run of the runner; its order is the engine's batch order.
        row (`dict`): The dataset row, kept with the trajectory.
        seed (`int`): Seed of the conversation's random stream.
    """

    prompt: str | list[Message]
    session: str
    row: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


class RolloutRunner:
    """
    Runs conversations against one engine.

    Args:
        env (`EnvLike`): What the environment of each conversation is made from.
        engine (`Engine`): Samples the turns.
        limits (`RolloutLimits`, *optional*): Bounds.
        template_kwargs (`dict`, *optional*): Variables for the chat template.
        history (`str`, *optional*, defaults to `"keep"`), compact_every (`int`, *optional*): See `History`.
        sanity_check_mode (`str`, *optional*, defaults to `"disable"`): See `SanityCheck`.
        images (`MediaEncoder`, *optional*): Encodes the images of conversations. The engine must be an `MediaEngine`.
    """

    def __init__(
        self,
        env: EnvLike,
        engine: Engine,
        limits: RolloutLimits | None = None,
        template_kwargs: dict[str, Any] | None = None,
        history: str = "keep",
        compact_every: int | None = None,
        sanity_check_mode: str = "disable",
        images: MediaEncoder | None = None,
    ) -> None:
        check_history(history, compact_every)
        check_source(env)
        self.history, self.env, self.engine = history, env, engine
        self.limits = limits or RolloutLimits()
        self.sampler = Sampler(engine, self.limits, template_kwargs or {}, history, compact_every, images)
        first = next(iter(source_of(env).prototypes()), None)
        tools, protocol = (None, None) if first is None else (first.tool_schemas, first.protocol)
        self.renderer = self.sampler.renderer(tools, protocol.tags if protocol is not None else ())
        self.sanity = SanityCheck(self.renderer, sanity_check_mode) if sanity_check_mode != "disable" else None
        self.under_way: dict[str, Trajectory] = {}
        """Conversations that are not finished, by session."""
        self._running = 0  # calls of `run` that have not ended
        self._places = None if self.limits.max_concurrent is None else ConcurrencyLimit(self.limits.max_concurrent)
        self._entrance = ConcurrencyLimit(1)  # whoever waits for several places takes all of them before another

    async def run(
        self,
        requests: list[RolloutRequest],
        sampling: SamplingParams,
        on_finish: Callable[[Trajectory], None] | None = None,
        keep_environments: bool = False,
        branching: Branching | None = None,
        on_check: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """
        Runs conversations concurrently. Several batches may run at once, in one event loop: limits hold for all of
        them together, and conversations begin in the order of the calls.

        Args:
            requests (`list[RolloutRequest]`): What to run.
            sampling (`SamplingParams`): How tokens are drawn; budget, stop strings and seed are set for each turn.
            on_finish (`Callable`, *optional*): Called with each trajectory as soon as it is finished; its
                `render_mismatch` is checked after that.
            on_check (`Callable`, *optional*): Called with each trajectory once that is checked too, or need not be.
            keep_environments (`bool`, *optional*, defaults to `False`): Whether finished trajectories keep their
                environments, for rewards to look at; the caller closes them with `close_environments`.
            branching (`Branching`, *optional*): How conversations branch: of so many requests in a row, which are of
                one prompt, the first is a conversation, and the others branch from it.

        Returns:
            `list[Trajectory]` in the order of `requests`. A conversation that fails is among them, with its
            `StopReason` and what it had.
        """
        finished: dict[int, Trajectory] = {}
        size = 1 if branching is None else branching.number
        queue = iter(range(0, len(requests), size))
        unclosed: list[str] = []
        checks: list[asyncio.Future[None]] = []
        one_check = ConcurrencyLimit(1)  # it reads the whole context, and no conversation waits for it
        converse = partial(self._converse, sampling, keep_environments, unclosed)

        async def check(sanity: SanityCheck, trajectory: Trajectory) -> None:
            async with one_check:
                difference = await in_thread(partial(sanity.check, trajectory), "mt-grpo-check")
            trajectory.render_mismatch = difference.cause if difference else None
            if on_check is not None:
                on_check(trajectory)

        def finish(index: int, trajectory: Trajectory, policy: ConversationPolicy) -> None:
            finished[index] = trajectory
            if on_finish is not None:
                on_finish(trajectory)
            if self.sanity is not None and self.history == "keep" and trajectory.turns and not policy.rewrote:
                checks.append(asyncio.ensure_future(check(self.sanity.by(policy.renderer), trajectory)))
            elif on_check is not None:
                on_check(trajectory)

        async def work(queue: Iterator[int]) -> None:
            for first in queue:
                async with self._place(size):
                    if branching is None:
                        finish(first, *await converse(requests[first]))
                        continue
                    group = BranchedConversation(branching.at, requests[first : first + size], self.engine)
                    await group.run(
                        converse, lambda number, *held, first=first: finish(first + number, *held), unclosed
                    )

        at_once = (self.limits.max_concurrent or len(requests)) // size
        workers = min(len(requests), max(at_once, 1))
        self._running += 1
        with _full_collections.put_off():
            tasks = [asyncio.ensure_future(work(queue)) for _ in range(workers)]
            try:
                await asyncio.gather(*tasks)
                await asyncio.gather(*checks)
            except BaseException:  # whoever called gets no trajectory, and can close none of them
                unclosed += await close_each(finished.values())
                raise
            finally:
                for task in (*tasks, *checks):
                    task.cancel()
                await asyncio.gather(*tasks, *checks, return_exceptions=True)
                warn_of_unclosed(unclosed)
                self._running -= 1
                if not self._running:  # else the engine is in use
                    await self.engine.close()
        return [finished[index] for index in range(len(requests))]

    @asynccontextmanager
    async def _place(self, size: int) -> AsyncIterator[None]:
        """Waits until a conversation, or one with its branches, may begin."""
        if self._places is None:
            yield
            return
        async with AsyncExitStack() as held:
            async with self._entrance:
                for _ in range(min(size, self._places.size)):
                    await held.enter_async_context(self._places)
            yield

    async def _converse(
        self,
        sampling: SamplingParams,
        keep_environment: bool,
        unclosed: list[str],
        request: RolloutRequest,
        before_turn: Callable[..., Awaitable[None]] | None = None,
        branch: Branch | None = None,
    ) -> tuple[Trajectory, ConversationPolicy]:
        """Runs one conversation, from its request or from a branch on, and ends it whatever happens."""
        if branch is None:
            said = request.prompt
            prompt = [{"role": "user", "content": said}] if isinstance(said, str) else said
            trajectory = Trajectory(prompt, session=request.session, row=request.row, start=time.time())
            policy = ConversationPolicy(self.sampler, trajectory, sampling, request.seed)
            holding = self._hold(request, policy, trajectory)
        else:
            trajectory, policy = branch.trajectory, branch.policy
            holding = self._go_on(branch)
        if before_turn is not None:
            policy.before_turn = partial(before_turn, policy, trajectory)
        finished, start = False, time.perf_counter() - trajectory.seconds
        self.under_way[request.session] = trajectory
        try:
            running = begin(holding, f"conversation {request.session!r}")
            try:
                await self._wait(running, policy, trajectory, start)
            finally:
                if not running.done():
                    policy.end(policy.ended or StopReason.TIMEOUT)
                    running.cancel()
                    await asyncio.wait([running], timeout=GRACE)
                    abandon(running)
                self.engine.release(request.session)
                del self.under_way[request.session]
            self._end(trajectory, running, policy)
            assert trajectory.stop_reason is not None  # `_end` has set it
            policy.end(trajectory.stop_reason)  # tasks that the environment left behind may still ask for turns
            if policy.failure is not None:  # a bug of the engine, whatever the environment made of it
                raise policy.failure
            trajectory.seconds = time.perf_counter() - start
            if trajectory.turns and trajectory.stop_reason in (StopReason.TIMEOUT, StopReason.ENV_ERROR):
                fail_unanswered(trajectory.turns[-1])
            finished = True
            return trajectory, policy
        finally:
            if not (finished and keep_environment):
                unclosed += await close_each([trajectory])

    async def _wait(
        self, running: asyncio.Future[Outcome], policy: ConversationPolicy, trajectory: Trajectory, start: float
    ) -> None:
        """Waits for a conversation as long as it may take; then tells the policy which limit ended it."""
        whole, idle = self.limits.rollout_timeout, self.limits.idle_timeout
        while not running.done():
            left = [] if whole is None else [start + whole - time.perf_counter()]
            if idle is not None and not isinstance(trajectory.environment, StepEnv):
                left.append(idle - policy.idle())
            if left and min(left) <= 0:
                policy.end(StopReason.TIMEOUT if left[0] <= 0 and whole is not None else StopReason.ENV_ERROR)
                return
            await asyncio.wait([running], timeout=min(left, default=None))

    async def _hold(self, request: RolloutRequest, policy: ConversationPolicy, trajectory: Trajectory) -> Outcome:
        MODEL_TAKES.set(self.sampler.takes)
        prompt = request.prompt
        if not isinstance(prompt, str):
            prompt = list(await policy.opened(prompt, of_row=True))
        row = {**request.row, "prompt": prompt}
        with conversation():
            trajectory.environment = env = await source_of(self.env).make(row)
            return checked_outcome(await env.run(policy, row), env)

    async def _go_on(self, branch: Branch) -> Outcome:
        MODEL_TAKES.set(self.sampler.takes)
        with conversation():
            return checked_outcome(await branch.env.resume(branch.policy, branch.messages), branch.env)

    def _end(self, trajectory: Trajectory, running: asyncio.Future[Outcome], policy: ConversationPolicy) -> None:
        """Writes into a trajectory why its conversation ended."""
        if policy.ended is StopReason.TIMEOUT:
            trajectory.stop_reason = policy.ended
            trajectory.error = f"The conversation took longer than {self.limits.rollout_timeout:g} s."
        elif policy.ended is not None:
            trajectory.stop_reason = policy.ended
            trajectory.error = f"The environment took longer than {self.limits.idle_timeout:g} s between two turns."
        elif running.cancelled():
            trajectory.stop_reason, trajectory.error = StopReason.ENV_ERROR, "The environment cancelled itself."
        elif (error := running.exception()) is None:
            outcome = running.result()
            trajectory.stop_reason = outcome.stop_reason or StopReason.ENV_DONE
            trajectory.answer, trajectory.info = outcome.answer, outcome.info
            trajectory.env_rewards = outcome.rewards
        elif isinstance(error, ConversationEnded):
            trajectory.stop_reason = error.stop_reason
        elif isinstance(error, EngineError):
            trajectory.stop_reason, trajectory.error = StopReason.ENGINE_ERROR, str(error)
        else:  # an environment is the user's code: its failure ends this conversation only
            fault = find_fault(error)
            trajectory.stop_reason, trajectory.error = StopReason.ENV_ERROR, cut(describe_error(error), LONGEST_ERROR)
            trajectory.where, trajectory.traceback = fault.where, cut(fault.traceback, LONGEST_ERROR)

        if trajectory.stop_reason is StopReason.CONTEXT_FULL and not trajectory.turns:
            trajectory.error = policy.no_room

    def completion(self, trajectory: Trajectory) -> TokenRow:
        """See `token_row`."""
        return token_row(trajectory, self.renderer, self._env_mask(trajectory))

    def _env_mask(self, trajectory: Trajectory) -> int:
        try:
            prototypes = source_of(self.env).of_row(trajectory.row).prototypes()
        except ValueError:  # the row names none of several: its conversation has failed
            return 0
        return prototypes[0].env_mask if prototypes else 0


class _FullCollections:
    """Full garbage collections of this process, which runs put off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._thresholds = gc.get_threshold()

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Puts them off: one reads every token of every context, and stops all conversations."""
        with self._lock:
            if not self._runs:
                self._thresholds = gc.get_threshold()
                gc.set_threshold(*self._thresholds[:2], _NEVER)
            self._runs += 1
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    gc.set_threshold(*self._thresholds)


_full_collections = _FullCollections()


def generate(
    env: MultiTurnToolEnv,
    prompts: Sequence[str | list[Message]],
    llm: Engine,
    sampling_params: SamplingParams | None = None,
) -> dict[str, list[Any]]:
    """
    Runs whole conversations and waits for them, without training; also `env.generate(prompts, llm)`. It works in a
    running event loop (a notebook) too.

    Args:
        env (`MultiTurnToolEnv`): The environment.
        prompts (`Sequence[str | list[dict]]`): User messages or message lists, one per conversation.
        llm (`Engine`): Samples the turns.
        sampling_params (`SamplingParams`, *optional*): Temperature, top-p and the like; `max_tokens` bounds one turn.

    Returns:
        `dict` of lists, with one entry per prompt: `ids`, the tokens after the prompt; `mask`, 1 for tokens that the
        model sampled and `env_mask` for those of the environment; `messages`, the same as messages.
    """
    sampling = sampling_params or SamplingParams()
    runner = RolloutRunner(env, llm, RolloutLimits(max_turn_tokens=sampling.max_tokens))
    requests = [
        RolloutRequest(prompt, session=f"{index:06d}", seed=derive_seed(sampling.seed, index))
        for index, prompt in enumerate(prompts)
    ]
    trajectories = run(runner.run(requests, sampling))
    rows = [runner.completion(trajectory) for trajectory in trajectories]
    return {
        "ids": [row.ids for row in rows],
        "mask": [row.mask for row in rows],
        "messages": [trajectory.completion for trajectory in trajectories],
    }


MultiTurnToolEnv.generate = generate  # a method of the environment's, though rollouts are a room above it


@dataclass(frozen=True)
class Branching:
    """How conversations branch."""

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
        """Holds the conversations."""

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
        images=dict(trajectory.images),
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
