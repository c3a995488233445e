"""
The event loop in which `async` agents run. It is not the one that serves them: an agent that blocks it, with a client
that is not `async` for instance, waits for a server that goes on.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any

from mt_grpo.envs.threads import guarded

STUCK = 2.0
"""Seconds without a sign of life after which further agents get another loop."""


class _Loop:
    """A daemon thread with an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._asked: float | None = None  # since when it has not shown that it lives
        threading.Thread(target=self.loop.run_forever, daemon=True, name="mt-grpo-agents").start()

    @property
    def stuck(self) -> bool:
        return self._asked is not None and time.monotonic() - self._asked > STUCK

    def ask(self) -> None:
        """Asks for a sign of life."""
        if self._asked is None:
            self._asked = time.monotonic()
            self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._asked = None


_current: _Loop | None = None
_lock = threading.Lock()


async def run_agent(work: Coroutine[Any, Any, Any], name: str) -> Any:
    """
    Runs an agent's coroutine beside this loop. All agents of a process share one, so they may share clients and locks.

    Args:
        work (`Coroutine`): Cancelled where this call is; it is not waited for then.
        name (`str`): Of its task.
    """
    global _current
    with _lock:
        if _current is None or _current.stuck:
            _current = _Loop()
        agents = _current
    agents.ask()

    async def named() -> Any:
        asyncio.current_task().set_name(name)
        return await guarded(work)

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(named(), agents.loop))


def _forget() -> None:
    """A forked process has no threads of its parent."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
