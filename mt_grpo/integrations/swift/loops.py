"""Event loops for coroutines of the user's that may block: a few threads, so that none stands in the trainer's way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from mt_grpo.envs.threads import OutOfTime, guarded

MOST = 8
"""Loops at once. Coroutines that share one and block hold each other up, as they would in one loop."""


class _Loop:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.users = 0
        threading.Thread(target=self._work, daemon=True, name="scheduler loop").start()

    def _work(self) -> None:
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(left, timeout=1) if left else asyncio.sleep(0))
        finally:
            self.loop.close()


_loops: list[_Loop] = []
_lock = threading.Lock()


async def run_apart(
    function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, idle: Callable[[], float], timeout: float | None
) -> Any:
    """
    Awaits an `async` function of the user's in another thread's loop.

    Args:
        function (`Callable`), *args: What to call, there.
        idle (`Callable`): Seconds for which nothing but the function itself has been waited for.
        timeout (`float`, *optional*): As many as that are allowed; then it is left to itself.

    Raises:
        OutOfTime: If it takes longer.
    """
    with _lock:
        if len(_loops) < MOST:
            _loops.append(_Loop())
        chosen = min(_loops, key=lambda one: one.users)
        chosen.users += 1

    async def work() -> Any:
        return await guarded(function(*args))

    future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), chosen.loop))
    stuck = False
    try:
        while not future.done():
            left = None if timeout is None else max(timeout - idle(), 0.01)
            await asyncio.wait([future], timeout=left)
            stuck = not future.done() and timeout is not None and idle() >= timeout
            if stuck:
                raise OutOfTime(f"{function.__qualname__} took longer than {timeout:g} s between two responses.")
        return future.result()
    finally:
        future.cancel()
        _leave(chosen, stuck)


def _leave(chosen: _Loop, stuck: bool) -> None:
    """A loop ends with the last that uses it; one in which something may be stuck takes no others."""
    with _lock:
        chosen.users -= 1
        if (stuck or not chosen.users) and chosen in _loops:
            _loops.remove(chosen)
        if not chosen.users:
            chosen.loop.call_soon_threadsafe(chosen.loop.stop)
