"""
How many calls of a kind run at once, and how long one may take: places and clocks that all event loops of a process
share. A call that waits for a place takes no time of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Iterator

_LOOK = 0.1  # seconds between looks at a call whose clock stands


class CallClock:
    """Counts the seconds of a call without those in which it waits for a `ConcurrencyLimit`; shared by its threads."""

    def __init__(self) -> None:
        self._outer = _current.get()
        self._lock = threading.Lock()
        self._since = time.perf_counter()
        self._counted = 0.0
        self._stops = 0

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[CallClock]:
        """A running clock for the task or thread that is started in the block."""
        clock = cls()
        token = _current.set(clock)
        try:
            yield clock
        finally:
            _current.reset(token)

    @property
    def seconds(self) -> float:
        """So far."""
        with self._lock:
            return self._counted if self._stops else self._counted + time.perf_counter() - self._since

    def left(self, seconds: float) -> float:
        """Seconds to wait for its end before the clock is checked again, for a timeout of `seconds`."""
        return max(seconds - self.seconds, _LOOK if self._stops else 0.0)

    def end(self) -> None:
        """Stops the clock for good."""
        with self._lock:
            if not self._stops:
                self._counted += time.perf_counter() - self._since
            self._stops += 1

    def stop(self) -> None:
        """Stops the clock, and those of the calls that made this one."""
        self.end()
        if self._outer is not None:
            self._outer.stop()

    def resume(self) -> None:
        """Ends what one `stop` began; the clock runs once all have ended."""
        with self._lock:
            self._stops -= 1
            self._since = time.perf_counter()
        if self._outer is not None:
            self._outer.resume()


_current: contextvars.ContextVar[CallClock | None] = contextvars.ContextVar(
    "the clock of the call that this task or thread is", default=None
)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Stops the clock of the current call while the block waits."""
    clock = _current.get()
    if clock is None:
        yield
        return
    clock.stop()
    try:
        yield
    finally:
        clock.resume()


class ConcurrencyLimit:
    """A FIFO semaphore shared by all event loops of the process; waiting counts toward no call's timeout."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> ConcurrencyLimit:
        """The copy of a tool is limited together with it."""
        return self

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            with waiting():
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was this call's turn when it was cancelled
                self._release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        """Wakes the next waiter, or frees the place."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(self._grant, turn)
                    return
                except RuntimeError:  # that loop is closed, and what waited there is gone
                    continue
            self._free += 1

    def _grant(self, turn: asyncio.Future[None]) -> None:
        if turn.done():  # cancelled while it waited
            self._release()
        else:
            turn.set_result(None)
