"""
Prompts in, trajectories out: one coroutine per conversation, and none waits for another. Where conversations branch,
several begin as one: after some turns the environment is forked, and each goes on alone.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mt_grpo.concurrency import ConcurrencyLimit, Conversation, abandon, begin, call, in_thread, run
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.env import ConversationEnded, Outcome, StepEnv, checked_outcome
from mt_grpo.envs.source import EnvLike, check_source, close_each, source_of, warn_of_unclosed
from mt_grpo.envs.tool_env import fail_unanswered
from mt_grpo.errors import EngineError, describe_error, find_fault
from mt_grpo.media import MODEL_TAKES
from mt_grpo.options.rules import check_history
from mt_grpo.rollout.endpoint import ChatEndpoint, EndpointPolicy
from mt_grpo.rollout.engines import Engine, PlacingEngine, SamplingParams
from mt_grpo.rollout.escaped_text import MediaEncoder
from mt_grpo.rollout.policy import ConversationPolicy, RolloutLimits, RolloutRequest, Sampler, derive_seed
from mt_grpo.rollout.token_row import SanityCheck, TokenRow, token_row
from mt_grpo.tools.function import cut
from mt_grpo.trajectory import Message, StopReason, Trajectory

GRACE = 2.0
"""Seconds that an environment may take to end once it is cancelled; then it is left to itself."""
_LONGEST_ERROR = 10_000  # characters of an environment's error that are kept
_NEVER = 1 << 30  # collections of a younger generation until a full one


@dataclass(frozen=True)
class Branching:
    """How conversations branch: of `number` requests in a row the first is one, and the others leave it at a turn."""

    at: int
    number: int


@dataclass
class _Branch:
    """A copy of an unfinished conversation, which goes on by itself."""

    env: StepEnv
    policy: ConversationPolicy
    trajectory: Trajectory
    messages: list[Message]


_BeforeTurn = Callable[[ConversationPolicy, Trajectory, Sequence[Message]], Awaitable[None]]
"""What is called before each turn of a conversation, with the messages that it will be sampled after."""


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
        media (`MediaEncoder`, *optional*): Encodes the media of conversations. The engine must be a `MediaEngine`.
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
        media: MediaEncoder | None = None,
    ) -> None:
        check_history(history, compact_every)
        check_source(env)
        self.history, self.env, self.engine = history, env, engine
        self.limits = limits or RolloutLimits()
        self.sampler = Sampler(engine, self.limits, template_kwargs or {}, history, compact_every, media)
        first = next(iter(source_of(env).prototypes()), None)
        tools, protocol = (None, None) if first is None else (first.tool_schemas, first.protocol)
        tags = protocol.tags if protocol is not None else ()
        self.renderer, self.renderer_of = self.sampler.renderer(tools, tags), partial(self.sampler.renderer, tags=tags)
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
        returns: bool = True,
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
            returns (`bool`, *optional*, defaults to `True`): Whether trajectories are kept to return them. Else
                `on_finish` alone gets them, and whoever has one closes its environment.

        Returns:
            `list[Trajectory]` in the order of `requests`. A conversation that fails is among them, with its
            `StopReason` and what it had.
        """
        size = 1 if branching is None else branching.number
        batch = _Batch(self, sampling, keep_environments, on_finish, on_check, returns)

        # 1. Workers, as many as conversations may be under way, take them in order
        async def work(queue: Iterator[int]) -> None:
            for first in queue:
                async with self._place(size):
                    if branching is None:
                        batch.finish(first, *await batch.converse(requests[first]))
                    else:
                        group = requests[first : first + size]
                        await _BranchedConversation(branching.at, group, first, self.engine).run(batch)

        queue = iter(range(0, len(requests), size))
        at_once = (self.limits.max_concurrent or len(requests)) // size
        self._running += 1
        async with AsyncExitStack() as held:
            held.enter_context(_full_collections.put_off())
            await held.enter_async_context(source_of(self.env).ahead([request.row for request in requests[::size]]))
            tasks = [asyncio.ensure_future(work(queue)) for _ in range(min(len(requests), max(at_once, 1)))]
            try:
                await asyncio.gather(*tasks)
                # 2. Their tokens are checked aside: no conversation waits for that
                await asyncio.gather(*batch.checks)
            except BaseException:  # whoever called gets no trajectory, and can close none of them
                batch.unclosed += await close_each(batch.finished.values())
                raise
            finally:
                # 3. Nothing of the batch goes on after it; the last batch closes the engine
                for task in (*tasks, *batch.checks):
                    task.cancel()
                await asyncio.gather(*tasks, *batch.checks, return_exceptions=True)
                warn_of_unclosed(batch.unclosed)
                self._running -= 1
                if not self._running:  # else the engine is in use
                    await self.engine.close()
        return [batch.finished[index] for index in sorted(batch.finished)]

    @asynccontextmanager
    async def _place(self, size: int) -> AsyncIterator[None]:
        """Waits for the places of a conversation and its branches."""
        if self._places is None:
            yield
            return
        async with AsyncExitStack() as held:
            async with self._entrance:
                for _ in range(min(size, self._places.size)):
                    await held.enter_async_context(self._places)
            yield

    def completion(self, trajectory: Trajectory) -> TokenRow:
        """See `token_row`."""
        try:
            source = source_of(self.env).of_row(trajectory.row)
        except ValueError:  # the row names none of several: its conversation has failed
            return token_row(trajectory, self.renderer)
        env = next(iter(source.prototypes()), trajectory.environment or source.given)
        return token_row(trajectory, self.renderer, getattr(env, "env_mask", 0))


class _Batch:
    """The conversations of one call of `RolloutRunner.run`."""

    def __init__(
        self,
        runner: RolloutRunner,
        sampling: SamplingParams,
        keep_environments: bool,
        on_finish: Callable[[Trajectory], None] | None,
        on_check: Callable[[Trajectory], None] | None,
        returns: bool,
    ) -> None:
        self._runner, self._limits, self._sampling = runner, runner.limits, sampling
        self._keep_environments, self._on_finish, self._on_check = keep_environments, on_finish, on_check
        self._returns = returns
        self._one_check = ConcurrencyLimit(1)  # it reads the whole context
        self.finished: dict[int, Trajectory] = {}
        self.unclosed: list[str] = []
        self.checks: list[asyncio.Future[None]] = []

    def finish(self, index: int, trajectory: Trajectory, policy: ConversationPolicy) -> None:
        """Takes the finished conversation of a request, and has its tokens checked."""
        if self._returns:
            self.finished[index] = trajectory
        if self._on_finish is not None:
            self._on_finish(trajectory)
        runner = self._runner
        if runner.sanity is not None and runner.history == "keep" and trajectory.turns and not policy.rewrote:
            self.checks.append(asyncio.ensure_future(self._check(runner.sanity.by(policy.renderer), trajectory)))
        elif self._on_check is not None:
            self._on_check(trajectory)

    async def _check(self, sanity: SanityCheck, trajectory: Trajectory) -> None:
        async with self._one_check:
            difference = await in_thread(partial(sanity.check, trajectory), "mt-grpo-check")
        trajectory.render_mismatch = difference.cause if difference else None
        if self._on_check is not None:
            self._on_check(trajectory)

    async def converse(
        self, request: RolloutRequest, before_turn: _BeforeTurn | None = None, branch: _Branch | None = None
    ) -> tuple[Trajectory, ConversationPolicy]:
        """Runs one conversation, from its request or from a branch, until it ends, fails or is out of time."""
        # 1. Its trajectory and policy
        if branch is None:
            said = request.prompt
            prompt = [{"role": "user", "content": said}] if isinstance(said, str) else said
            trajectory = Trajectory(prompt, session=request.session, row=request.row, start=time.time())
            kind = EndpointPolicy if isinstance(self._runner.engine, ChatEndpoint) else ConversationPolicy
            policy = kind(self._runner.sampler, trajectory, self._sampling, request.seed)
            policy.again = request.again
        else:
            trajectory, policy = branch.trajectory, branch.policy
        if before_turn is not None:
            policy.before_turn = partial(before_turn, policy, trajectory)
        finished, start = False, time.perf_counter() - trajectory.seconds
        self._runner.under_way[request.session] = trajectory
        try:
            # 2. Its environment runs as long as it may
            running = begin(self._hold(request, policy, trajectory, branch), f"conversation {request.session!r}")
            try:
                await self._wait(running, policy, trajectory, start)
            finally:
                if not running.done():
                    policy.ended = policy.ended or StopReason.TIMEOUT
                    running.cancel()
                    await asyncio.wait([running], timeout=GRACE)
                abandon(running)
                self._runner.engine.release(request.session)
                del self._runner.under_way[request.session]
            # 3. Why it ended; a bug of the engine ends the run, whatever the environment made of it
            self._end(trajectory, running, policy)
            assert trajectory.stop_reason is not None  # `_end` has set it
            policy.ended = trajectory.stop_reason  # tasks that the environment left behind may still ask for turns
            if policy.failure is not None:
                raise policy.failure
            trajectory.seconds = time.perf_counter() - start
            if trajectory.turns and trajectory.stop_reason in (StopReason.TIMEOUT, StopReason.ENV_ERROR):
                fail_unanswered(trajectory.turns[-1])
            finished = True
            return trajectory, policy
        finally:
            # 4. Its environment is closed, unless rewards look at it first
            if not (finished and self._keep_environments):
                self.unclosed += await close_each([trajectory])

    async def _hold(
        self, request: RolloutRequest, policy: ConversationPolicy, trajectory: Trajectory, branch: _Branch | None
    ) -> Outcome:
        MODEL_TAKES.set(self._runner.sampler.takes)
        with Conversation.begun():
            if branch is not None:
                return checked_outcome(await branch.env.resume(policy, branch.messages), branch.env)
            prompt = request.prompt
            if not isinstance(prompt, str):
                prompt = list(await policy.opened(prompt, of_row=True))
            row = {**request.row, "prompt": prompt}
            trajectory.environment = env = await source_of(self._runner.env).make(row)
            return checked_outcome(await env.run(policy, row), env)

    async def _wait(
        self, running: asyncio.Future[Outcome], policy: ConversationPolicy, trajectory: Trajectory, start: float
    ) -> None:
        """Waits for a conversation until a time limit; then tells the policy which one ended it."""
        whole, idle = self._limits.rollout_timeout, self._limits.idle_timeout
        while not running.done():
            left = [] if whole is None else [start + whole - time.perf_counter()]
            if idle is not None and not isinstance(trajectory.environment, StepEnv):
                left.append(idle - policy.idle())
            if left and min(left) <= 0:
                over = left[0] <= 0 and whole is not None
                policy.ended = StopReason.TIMEOUT if over else StopReason.ENV_ERROR
                return
            await asyncio.wait([running], timeout=min(left, default=None))

    def _end(self, trajectory: Trajectory, running: asyncio.Future[Outcome], policy: ConversationPolicy) -> None:
        """Sets stop reason, error and outcome of a trajectory."""
        if policy.ended is StopReason.TIMEOUT:
            trajectory.stop_reason, trajectory.where = policy.ended, policy.stands
            trajectory.error = f"The conversation took longer than {self._limits.rollout_timeout:g} s."
        elif policy.ended is not None:
            trajectory.stop_reason, trajectory.where = policy.ended, policy.stands
            trajectory.error = f"The environment took longer than {self._limits.idle_timeout:g} s between two turns."
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
            trajectory.stop_reason, trajectory.error = StopReason.ENV_ERROR, cut(describe_error(error), _LONGEST_ERROR)
            trajectory.where, trajectory.traceback = fault.where, cut(fault.traceback, _LONGEST_ERROR)

        if trajectory.stop_reason is StopReason.CONTEXT_FULL and not trajectory.turns:
            trajectory.error = policy.no_room


class _BranchedConversation:
    """A conversation and those that branch from it, with forked environments, seeds and budgets."""

    def __init__(self, at: int, requests: Sequence[RolloutRequest], first: int, engine: Engine) -> None:
        self._at, self._requests, self._first, self._engine = at, requests, first, engine
        self._start = time.perf_counter()

    async def run(self, batch: _Batch) -> None:
        """Runs the conversations."""
        copies: list[_Branch] = []
        tasks: list[asyncio.Future[None]] = []

        async def split(policy: ConversationPolicy, trajectory: Trajectory, messages: Sequence[Message]) -> None:
            if len(trajectory.turns) != self._at or copies:
                return
            for request in self._requests[1:]:
                copies.append(await self._fork(request, policy, trajectory, messages))
            tasks.extend(asyncio.ensure_future(follow(*each)) for each in enumerate(copies, 1))

        async def follow(number: int, branch: _Branch) -> None:
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
    ) -> _Branch:
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
        return _Branch(twin, policy.fork(trajectory, request.seed), trajectory, list(messages))


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


class _FullCollections:
    """Postpones full garbage collections of this process while runs are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._thresholds = gc.get_threshold()

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """No full collection in the block: one reads every token of every context, and stops all conversations."""
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
