"""The time of calls of users' code: what they wait for a place among other calls is not theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LOOK = 0.1  # seconds between looks at a call that waits


class CallClock:
    """Counts the seconds of a call, those left out in which it waits for a place; one for all threads of the call."""

    def __init__(self) -> None:
        self._outer = _current.get()
        self._lock = threading.Lock()
        self._since = time.perf_counter()
        self._counted = 0.0
        self._stops = 0

    @property
    def seconds(self) -> float:
        """So far."""
        with self._lock:
            return self._counted if self._stops else self._counted + time.perf_counter() - self._since

    def left(self, seconds: float) -> float:
        """For how long its end can be waited for, if it may take so many seconds, before it is looked at again."""
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


_current: ContextVar[CallClock | None] = ContextVar("the clock of the call that this task or thread is", default=None)


@contextmanager
def timed() -> Iterator[CallClock]:
    """A clock, which runs, for the task or thread that is begun in the block."""
    clock = CallClock()
    token = _current.set(clock)
    try:
        yield clock
    finally:
        _current.reset(token)


@contextmanager
def waiting() -> Iterator[None]:
    """The call that this belongs to waits for a place in the block."""
    clock = _current.get()
    if clock is None:
        yield
        return
    clock.stop()
    try:
        yield
    finally:
        clock.resume()
