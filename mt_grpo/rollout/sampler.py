"""What the conversations of a run share: engine, limits, renderers, and how seeds are derived."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mt_grpo.concurrency import ConcurrencyLimit, in_thread
from mt_grpo.rollout.engine import Engine, LocalEngine
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.trajectory import StopReason

T = TypeVar("T")
LONG = 2_000
"""Characters from which a text is encoded in a thread: about half a millisecond of work."""


@dataclass(frozen=True)
class RolloutLimits:
    """
    What bounds a conversation; `None` is no bound.

    Args:
        max_completion_tokens (`int`, *optional*): Tokens after the prompt, environment's included, in one trajectory.
        max_turn_tokens (`int`, *optional*): Tokens sampled in one turn.
        rollout_timeout (`float`, *optional*): Seconds one conversation may take.
        max_concurrent (`int`, *optional*): Conversations under way at once.
        idle_timeout (`float`, *optional*): Seconds that an environment may take to be made, and one with a loop of its
            own between two turns. A `StepEnv` has limits of its own.
    """

    max_completion_tokens: int | None = None
    max_turn_tokens: int | None = None
    rollout_timeout: float | None = None
    max_concurrent: int | None = None
    idle_timeout: float | None = None


class Sampler:
    """
    What the conversations of a run share: engine, limits, and a renderer for each set of tools.

    Args:
        engine (`Engine`): Samples the turns.
        limits (`RolloutLimits`): Bounds.
        template_kwargs (`dict`): Variables for the chat template.
        history (`str`), compact_every (`int`, *optional*): See `History`.
    """

    def __init__(
        self,
        engine: Engine,
        limits: RolloutLimits,
        template_kwargs: dict[str, Any],
        history: str,
        compact_every: int | None,
    ) -> None:
        self.engine, self.limits = engine, limits
        self.history, self.compact_every = history, compact_every
        self._template_kwargs = template_kwargs
        self._renderers: dict[tuple[str, tuple[str, ...]], ChatRenderer] = {}
        self._encoding = ConcurrencyLimit(1)

    def renderer(self, tools: list[dict[str, Any]] | None, tags: tuple[str, ...] = ()) -> ChatRenderer:
        """The renderer of conversations with these tools and tags."""
        key = json.dumps(tools, sort_keys=True), tags
        if key not in self._renderers:
            self._renderers[key] = ChatRenderer(self.engine.tokenizer, tools, self._template_kwargs, tags)
        return self._renderers[key]

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """
        Does what reads `size` characters: long work in a thread, so that the conversations of the event loop go on.
        One text is encoded at a time, so that the members of a group, which ask at once, encode their prompt once. An
        engine in this process samples requests that come at once as a batch: for it all work is done at once.
        """
        if size < LONG or isinstance(self.engine, LocalEngine):
            return work()
        async with self._encoding:
            return await in_thread(work, "mt-grpo-encode")

    def budget(self, context_length: int, used: int, max_tokens: int | None = None) -> tuple[int, StopReason]:
        """
        Tokens that a turn may sample, and what has cut it off when it samples as many.

        Args:
            context_length (`int`): Tokens of its context.
            used (`int`): Tokens after the prompt.
            max_tokens (`int`, *optional*): A bound of this turn.
        """
        bounds = [(self.engine.context_length - context_length, StopReason.CONTEXT_FULL)]
        if self.limits.max_completion_tokens is not None:
            bounds.append((self.limits.max_completion_tokens - used, StopReason.TOKEN_BUDGET))
        for most in (self.limits.max_turn_tokens, max_tokens):
            if most is not None:
                bounds.append((most, StopReason.LENGTH))
        return min(bounds, key=lambda bound: bound[0])


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
