"""Instances of users' classes that are made once and used by one conversation after another."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from mt_grpo.envs.source import CLOSE_TIMEOUT
from mt_grpo.envs.threads import call
from mt_grpo.tools.results import describe_error

logger = logging.getLogger(__name__)


class InstancePool:
    """
    Instances that a factory makes, as many as are in use at once. Those that are free are closed when the pool is no
    longer used, or the process ends, where their class has a `close`.

    Args:
        factory (`Callable`): Makes an instance.
        first (`Any`): The instance to begin with, which tells name and methods of the class.
    """

    def __init__(self, factory: Callable[[], Any], first: Any) -> None:
        self.first = first
        self.name = type(first).__name__
        # as in TRL: of the class, since the instance's properties would be evaluated
        self.methods = [name for name, _ in inspect.getmembers(type(first), predicate=inspect.isfunction)]
        self._factory = factory
        self._free = [first]
        if "close" in self.methods:
            over, closed = threading.Event(), threading.Event()
            # an interpreter that ends starts no thread, so this one waits for it
            threading.Thread(
                target=_close_all, args=(self._free, over, closed), daemon=True, name=f"close {self.name}"
            ).start()
            weakref.finalize(self, _end, over, closed)

    def __len__(self) -> int:
        return len(self._free)

    async def take(self, timeout: float | None) -> Any:
        """
        A free instance, or one that is made for it.

        Args:
            timeout (`float`, *optional*): Seconds that the factory may take.
        """
        if self._free:
            return self._free.pop()
        making = asyncio.ensure_future(call(self._factory, what=f"the factory of {self.name}", timeout=timeout))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._give_late)
            raise

    def give(self, instance: Any) -> None:
        """Takes an instance back, for the next conversation."""
        self._free.append(instance)

    async def drop(self, instance: Any) -> None:
        """Closes an instance that nobody is to use again."""
        if "close" in self.methods:
            await call(instance.close, what=f"{self.name}.close", timeout=CLOSE_TIMEOUT)

    def _give_late(self, making: asyncio.Future[Any]) -> None:
        if not making.cancelled() and making.exception() is None:
            self.give(making.result())


def _close_all(free: list[Any], over: threading.Event, closed: threading.Event) -> None:
    over.wait()
    while free:
        instance = free.pop()
        try:
            closing = instance.close()
            if inspect.isawaitable(closing):
                asyncio.run(_awaited(closing))
        except Exception as error:  # whatever the user's class raises
            logger.warning("%s could not be closed: %s", type(instance).__name__, describe_error(error))
    closed.set()


async def _awaited(closing: Any) -> None:
    await closing


def _end(over: threading.Event, closed: threading.Event) -> None:
    over.set()
    closed.wait(CLOSE_TIMEOUT)
