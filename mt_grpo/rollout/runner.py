"""Prompts in, trajectories out: one coroutine a conversation, nothing waits for the slowest."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.execution import fail_unanswered
from mt_grpo.rollout.engine import Engine, EngineError, SamplingParams
from mt_grpo.rollout.history import History, check_history
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.rollout.token_check import SanityCheck
from mt_grpo.rollout.token_row import TokenRow, token_row
from mt_grpo.token_tree import common_prefix
from mt_grpo.trajectory import Message, StopReason, Trajectory, Turn

_NEVER = 1 << 30  # collections of a younger generation until a full one


@dataclass(frozen=True)
class RolloutLimits:
    """
    What bounds a conversation; `None` is no bound.

    Args:
        max_completion_tokens (`int`, *optional*): Tokens after the prompt, environment's included, in one trajectory.
        max_turn_tokens (`int`, *optional*): Tokens sampled in one turn.
        rollout_timeout (`float`, *optional*): Seconds one conversation may take.
        max_concurrent (`int`, *optional*): Conversations under way at once.
    """

    max_completion_tokens: int | None = None
    max_turn_tokens: int | None = None
    rollout_timeout: float | None = None
    max_concurrent: int | None = None


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
    Runs conversations of one environment against one engine.

    Args:
        env (`MultiTurnToolEnv`): The conversation rules.
        engine (`Engine`): Samples the turns.
        limits (`RolloutLimits`, *optional*): Bounds.
        template_kwargs (`dict`, *optional*): Variables for the chat template.
        history (`str`, *optional*, defaults to `"keep"`), compact_every (`int`, *optional*): See `History`.
        sanity_check_mode (`str`, *optional*, defaults to `"disable"`): See `SanityCheck`.
    """

    def __init__(
        self,
        env: MultiTurnToolEnv,
        engine: Engine,
        limits: RolloutLimits | None = None,
        template_kwargs: dict[str, Any] | None = None,
        history: str = "keep",
        compact_every: int | None = None,
        sanity_check_mode: str = "disable",
    ) -> None:
        check_history(history, compact_every)
        self.history, self.compact_every = history, compact_every
        self.env = env
        self.engine = engine
        self.limits = limits or RolloutLimits()
        self.renderer = ChatRenderer(engine.tokenizer, env.tool_schemas, template_kwargs, env.protocol.tags)
        self.sanity = SanityCheck(self.renderer, sanity_check_mode) if sanity_check_mode != "disable" else None
        self.under_way: dict[str, Trajectory] = {}
        """Conversations that are not finished, by session, for who wants to look."""

    async def run(
        self,
        requests: list[RolloutRequest],
        sampling: SamplingParams,
        on_finish: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """
        Runs conversations concurrently.

        Args:
            requests (`list[RolloutRequest]`): What to run.
            sampling (`SamplingParams`): How tokens are drawn; budget, stop strings and seed are set for each turn.
            on_finish (`Callable`, *optional*): Called with each trajectory as soon as it is finished; its
                `render_mismatch` is checked after that.

        Returns:
            `list[Trajectory]` in the order of `requests`. A conversation that fails is among them, with its
            `StopReason` and what it had.
        """
        trajectories: list[Trajectory | None] = [None] * len(requests)
        queue = iter(enumerate(requests))
        loop = asyncio.get_running_loop()
        checker, checks = ThreadPoolExecutor(1), []  # a check reads the whole context; nobody waits for it

        async def work(queue: Iterator[tuple[int, RolloutRequest]]) -> None:
            for index, request in queue:
                trajectories[index] = await self._converse(request, sampling)
                if on_finish is not None:
                    on_finish(trajectories[index])
                if self.sanity is not None and self.history == "keep":
                    checks.append(loop.run_in_executor(checker, self._check, trajectories[index]))

        # a full collection reads every token of every context, and stops all conversations for that long
        thresholds = gc.get_threshold()
        outermost = thresholds[2] != _NEVER
        gc.set_threshold(*thresholds[:2], _NEVER)
        workers = min(len(requests), self.limits.max_concurrent or len(requests))
        tasks = [asyncio.ensure_future(work(queue)) for _ in range(workers)]
        try:
            await asyncio.gather(*tasks)
            await asyncio.gather(*checks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            checker.shutdown(wait=False, cancel_futures=True)
            if outermost:
                gc.set_threshold(*thresholds)
            await self.engine.close()
        return trajectories

    async def _converse(self, request: RolloutRequest, sampling: SamplingParams) -> Trajectory:
        prompt = [{"role": "user", "content": request.prompt}] if isinstance(request.prompt, str) else request.prompt
        trajectory = Trajectory(prompt, session=request.session, row=request.row)
        asyncio.current_task().set_name(f"conversation {request.session!r}")
        self.under_way[request.session] = trajectory
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self.limits.rollout_timeout):
                trajectory.stop_reason = await self._take_turns(trajectory, sampling, request)
        except TimeoutError:
            if self.limits.rollout_timeout is None:  # not the runner's limit: the engine failed to name its error
                raise
            trajectory.stop_reason = StopReason.TIMEOUT
            trajectory.error = f"The conversation took longer than {self.limits.rollout_timeout:g} s."
        except EngineError as error:
            trajectory.stop_reason, trajectory.error = StopReason.ENGINE_ERROR, str(error)
        finally:
            self.engine.release(request.session)
            del self.under_way[request.session]
        trajectory.seconds = time.perf_counter() - start
        if trajectory.turns and trajectory.stop_reason in (StopReason.TIMEOUT, StopReason.ENV_ERROR):
            fail_unanswered(trajectory.turns[-1])
        return trajectory

    def _check(self, trajectory: Trajectory) -> None:
        difference = self.sanity.check(trajectory)
        trajectory.render_mismatch = difference.cause if difference else None

    async def _take_turns(
        self, trajectory: Trajectory, sampling: SamplingParams, request: RolloutRequest
    ) -> StopReason:
        history = History(self.renderer, self.history, self.compact_every)
        try:
            prompt = self.env.start(request.prompt)
            trajectory.prompt, suffix = prompt, history.begin(prompt)
        except Exception as error:  # an environment is the user's code: its failure ends this conversation only
            trajectory.error = f"{type(error).__name__}: {error}"
            return StopReason.ENV_ERROR
        context: list[int] = []
        rewritten: list[int] | None = None
        prompt_length = len(suffix)
        most = self.engine.context_length
        if self.limits.max_completion_tokens is not None:
            most = min(most, prompt_length + self.limits.max_completion_tokens)
        while True:
            added = len(suffix) if rewritten is None else common_prefix(suffix[::-1], rewritten[::-1], 0)
            if rewritten is None:
                context += suffix
            else:
                context = rewritten
            budget, exhausted = self._budget(len(context), len(context) - prompt_length)
            if budget < 1:
                return exhausted
            index = len(trajectory.turns)
            start = time.perf_counter()
            drawing = replace(
                sampling,
                max_tokens=budget,
                stop=self.env.stop,
                stop_token_ids=(self.renderer.end_id,),  # a base model may not know it as an end of its own
                seed=derive_seed(request.seed, index),
            )
            sample = await self.engine.generate(context, drawing, trajectory.session)
            length = len(context)
            if rewritten is None:
                trajectory.tree.extend(suffix, sample.ids, sample.logprobs)
            else:
                trajectory.tree.add_turn(context, sample.ids, sample.logprobs)
            context += sample.ids
            text = self.renderer.text(sample.ids)
            turn = Turn(
                index,
                {"role": "assistant", "content": text},
                finish_reason=sample.finish_reason,
                num_tokens=len(sample.ids),
                context_length=length,
                observation_length=added if index else 0,
                fork_cause=None if rewritten is None else self.history,
                seconds=time.perf_counter() - start,
                weight_version=sample.weight_version,
            )
            trajectory.turns.append(turn)
            if sample.finish_reason == "length":
                return exhausted
            try:
                stop_reason = await self.env.step(turn, trajectory, text, self.engine.tokenizer)
                if stop_reason is not None:
                    return stop_reason
                extension = history.extend(trajectory, sample.ids, most)
            except Exception as error:  # likewise
                trajectory.error = f"{type(error).__name__}: {error}"
                return StopReason.ENV_ERROR
            if extension is None:
                return self._budget(most, most - prompt_length)[1]
            suffix, rewritten = extension

    def _budget(self, context_length: int, used: int) -> tuple[int, StopReason]:
        """Tokens the next turn may sample, and what ends the conversation when they are sampled."""
        bounds = [(self.engine.context_length - context_length, StopReason.CONTEXT_FULL)]
        if self.limits.max_completion_tokens is not None:
            bounds.append((self.limits.max_completion_tokens - used, StopReason.TOKEN_BUDGET))
        if self.limits.max_turn_tokens is not None:
            bounds.append((self.limits.max_turn_tokens, StopReason.LENGTH))
        return min(bounds, key=lambda bound: bound[0])

    def completion(self, trajectory: Trajectory) -> TokenRow:
        """See `token_row`."""
        return token_row(trajectory, self.renderer, self.env.env_mask)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
