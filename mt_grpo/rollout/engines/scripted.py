"""An engine with fixed answers and latencies, for tests and benchmarks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mt_grpo.rollout.engine import Sample, SamplingParams


class ScriptedEngine:
    """
    Answers from a script, and records its requests.

    Args:
        tokenizer: Tokenizer that encodes the script.
        script (`Sequence[str]` or `Callable[[str, int], str | list[int] | Exception]`): One answer per turn, the same
            for all conversations; or a function of session and turn index. An exception is raised.
        latency (`float` or `Callable[[str, int], float]`, *optional*, defaults to `0.0`): Seconds a request takes.
        context_length (`int`, *optional*, defaults to `32768`): Most tokens of context and action together.
    """

    def __init__(
        self,
        tokenizer: Any,
        script: Sequence[str] | Callable[[str, int], str | list[int] | Exception],
        latency: float | Callable[[str, int], float] = 0.0,
        context_length: int = 32768,
    ) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._script = script if callable(script) else lambda session, turn: script[turn]
        self._latency = latency if callable(latency) else lambda session, turn: latency
        self._turns: Counter[str] = Counter()
        self.requests: list[tuple[str, list[int], Sample]] = []

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        """The script's answer, cut at `max_tokens`; token `i` has log-probability `-(i + 1) / 100`."""
        turn = self._turns[session]
        self._turns[session] += 1
        seconds = self._latency(session, turn)
        if seconds:
            await asyncio.sleep(seconds)
        answer = self._script(session, turn)
        if isinstance(answer, Exception):
            raise answer
        ids = self.tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else list(answer)
        reason = "stop" if sampling.max_tokens is None or len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        sample = Sample(ids, [-(index + 1) / 100 for index in range(len(ids))], reason)
        self.requests.append((session, list(context), sample))
        return sample

    def release(self, session: str) -> None:
        """Lets a session of the same name start over."""
        del self._turns[session]

    async def close(self) -> None:
        """Does nothing."""
