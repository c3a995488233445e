"""
The end of a run whose machines are wanted back: a scheduler sends a signal, and a while later ends what is left. The
signal is only noted. The trainer looks between two optimizer steps, when its processes agree whether one of them was
told; then it writes a checkpoint and ends with a status of its own, by which the scheduler knows to begin it again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mt_grpo.errors import UserError

STATUS = 75  # the exit status of a run that is to be begun again: `EX_TEMPFAIL` of sysexits.h
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
FOLDER = "MT_GRPO_PREEMPTION"  # the environment variable with a folder that the processes of a launcher share with it
ECHO = 2.0  # seconds in which SIGTERM may come a second time by another way, as from a launcher that passes it on

_heard: dict[int, float] = {}  # when each signal came first


class PreemptedError(UserError, SystemExit):
    """A run has ended because its machines are wanted back. A script that does not catch it ends with `STATUS`."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = STATUS


@contextmanager
def listening(*numbers: int, on_first: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Notes signals within it, in the main thread alone; a second SIGTERM does what it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and time.monotonic() - _heard.get(number, time.monotonic()) > ECHO:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        _heard.setdefault(number, time.monotonic())
        on_first()

    before = {number: signal.signal(number, hear) or signal.SIG_DFL for number in numbers}
    if _heard.keys() & set(numbers):
        on_first()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _heard.clear()


def heard() -> str | None:
    """The signal that this process was told by, itself or its launcher; `None` where it was not."""
    names = [signal.Signals(number).name for number in _heard]
    if FOLDER in os.environ:
        names += [path.name for path in Path(os.environ[FOLDER]).glob("SIG*")]
    return names[0] if names else None


def leave() -> int:
    """Tells a launcher, if there is one, that the run is preempted. Returns the process's exit status."""
    if FOLDER not in os.environ:
        return STATUS
    Path(os.environ[FOLDER], "preempted").touch()
    return 0  # at another status the launcher would begin again at once, on machines that are wanted back


def left(folder: Path) -> bool:
    """Whether a process of a launcher has called `leave`."""
    return (folder / "preempted").exists()
