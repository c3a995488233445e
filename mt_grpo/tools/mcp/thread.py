"""The daemon thread whose event loop holds the sessions of all MCP servers of this process."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

STOP_SECONDS = 15.0
"""How long the end of the process waits for its servers; the library kills one that does not end sooner than that."""


class Stoppable(Protocol):
    """What has a server behind it."""

    def stop(self) -> None:
        """Asks for the end. Called in the thread."""
        ...

    async def ended(self) -> None:
        """Waits until nothing is left of it."""
        ...


class McpThread:
    """The thread and its loop. A server outlives the event loop of a rollout, and works while the optimiser does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.open: set[Stoppable] = set()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="mt-grpo-mcp")
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the thread, awaited in any loop; cancelled with whoever awaits it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the thread and blocks; what interrupts the wait (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stops every server, waits until they have ended, `STOP_SECONDS` at most, and ends the thread."""

        async def stop() -> None:
            ending = list(self.open)
            for server in ending:
                server.stop()
            await asyncio.gather(*[server.ended() for server in ending])

        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(stop(), self.loop)], timeout=STOP_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=1.0)


_current: McpThread | None = None
_lock = threading.Lock()


def mcp_thread() -> McpThread:
    """The thread of this process, started on first use."""
    global _current
    with _lock:
        if _current is None:
            _current = McpThread()
        return _current


def _forget() -> None:
    """A forked process has none of its parent's threads, and leaves its parent's servers alone."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


@atexit.register
def close_servers() -> None:
    """Stops all MCP servers of this process; a later call of a tool starts its server again."""
    global _current
    if _current is not None:
        thread, _current = _current, None
        thread.close()


os.register_at_fork(after_in_child=_forget)
