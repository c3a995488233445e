"""Containers that start ahead of their conversations (`sandbox_pool`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from mt_grpo.errors import describe_error

if TYPE_CHECKING:
    from mt_grpo.integrations.harbor.trial import BegunTrial

logger = logging.getLogger(__name__)

_JITTER = 0.2  # most seconds between two starts, which are drawn, so that several processes do not start in step


class Pool:
    """Trials whose containers start ahead of their conversations, for each batch at most `size` that wait."""

    def __init__(self, size: int, begin: Callable[[str], Awaitable[BegunTrial]]) -> None:
        self.size, self._begin = size, begin
        self._batches: list[_Batch] = []

    @contextlib.asynccontextmanager
    async def ahead(self, tasks: Sequence[str]) -> AsyncIterator[None]:
        """In the block trials of these tasks begin, in this order; those that nobody took are dropped after it."""
        batch = _Batch(self.size, list(tasks), self._begin)
        self._batches.append(batch)
        filling = asyncio.ensure_future(batch.fill())
        try:
            yield
        finally:
            self._batches.remove(batch)
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
            for failure in await asyncio.gather(*(each.drop() for _, each in batch.begun), return_exceptions=True):
                if failure is not None:
                    logger.warning("A container that nobody took is left: %s", describe_error(failure))

    async def take(self, task: str) -> BegunTrial:
        """A trial of a task: the first that has begun, or another."""
        for batch in self._batches:
            if (begun := batch.take(task)) is not None:
                return begun
        return await self._begin(task)


class _Batch:
    """What has begun for the conversations of one batch."""

    def __init__(self, size: int, tasks: list[str], begin: Callable[[str], Awaitable[BegunTrial]]) -> None:
        self._size, self._tasks, self._begin = size, tasks, begin
        self._taken = asyncio.Event()
        self.begun: list[tuple[str, BegunTrial]] = []

    async def fill(self) -> None:
        """Begins trials as places become free."""
        while self._tasks:
            if len(self.begun) >= self._size:
                self._taken.clear()
                await self._taken.wait()
                continue
            task = self._tasks.pop(0)
            with contextlib.suppress(Exception):  # whoever needs it begins it again, and says why that fails
                self.begun.append((task, await self._begin(task)))
            await asyncio.sleep(random.uniform(0, _JITTER))

    def take(self, task: str) -> BegunTrial | None:
        """The first that has begun; nothing where the conversation has come before its trial, which it begins."""
        for number, (name, begun) in enumerate(self.begun):
            if name == task:
                del self.begun[number]
                self._taken.set()
                return begun
        with contextlib.suppress(ValueError):  # a row that nobody announced
            self._tasks.remove(task)
        return None
