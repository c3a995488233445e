"""Waits of tests: each has an end, and says what it saw."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

LIMIT = 300.0
"""Seconds that a wait may take on a busy machine; pytest ends a test after 600, and knows only where it stood."""


def _looks(
    condition: Callable[[], object],
    provided: Callable[[], object] = lambda: True,
    seen: Callable[[], object] | None = None,
    limit: float = LIMIT,
) -> Iterator[None]:
    end = time.monotonic() + limit
    while not (value := condition()):
        told = seen or (lambda: repr(value))
        assert provided(), f"It cannot happen any more: {told()}"
        assert time.monotonic() < end, f"It did not happen within {limit:.0f} s: {told()}"
        yield


def until(condition: Callable[[], object], *options: Any, **more: Any) -> None:
    """
    Looks again and again until a condition holds.

    Args:
        condition: What has to become true. What it raises ends the wait.
        provided: What has to hold as long as the condition does not: a process runs, a request is not answered yet.
        seen: Told where the wait fails; the condition's own value by default.
        limit: Seconds.
    """
    for _ in _looks(condition, *options, **more):
        time.sleep(0.02)


async def until_true(condition: Callable[[], object], *options: Any, **more: Any) -> None:
    """The same as `until`, in a coroutine."""
    for _ in _looks(condition, *options, **more):
        await asyncio.sleep(0.001)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a coroutine as a test, in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT):
                await test(**fixtures)

        asyncio.run(limited())

    return run
