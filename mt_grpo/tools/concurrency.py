"""How many calls of one tool run at once, in all conversations of a process."""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class ConcurrencyLimit:
    """
    Lets so many calls of a tool run at once, in the order they came. It is one for all event loops of the process: an
    evaluation, or another cell of a notebook, may run in a loop of its own.

    Args:
        size (`int`): Calls at once.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> ConcurrencyLimit:
        """The copy of a tool is limited together with it."""
        return self

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = loop.create_future()
            self._waiting.append((loop, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was this call's turn when it was cancelled
                self._release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        """Hands a place to the next call that waits, or keeps it for one that comes."""
        with self._lock:
            while self._waiting:
                loop, turn = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(self._grant, turn)
                    return
                except RuntimeError:  # that loop is closed, and what waited there is gone
                    continue
            self._free += 1

    def _grant(self, turn: asyncio.Future[None]) -> None:
        if turn.done():  # cancelled while it waited
            self._release()
        else:
            turn.set_result(None)
