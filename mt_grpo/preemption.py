"""
How a run or a command is ended by a signal. Machines that are wanted back: a scheduler sends a signal, and a while
later ends what is left. The signal is only noted. The trainer looks between two optimizer steps, when its processes
agree whether one of them was told; then it writes a checkpoint and ends with a status of its own, by which the
scheduler knows to begin it again. A command that is ended by Ctrl-C, SIGTERM, or SIGHUP, which a terminal sends as it
closes, says in one line which it was and what is kept.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from mt_grpo.errors import UserError
from mt_grpo.trajectory import visible

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
def _handled(numbers: Iterable[int], handle: Callable[[int, Any], None]) -> Iterator[dict[int, Any]]:
    """Has `handle` called at signals in the block, which gets the handlers that they had before and have after it."""
    before = {number: signal.signal(number, handle) or signal.SIG_DFL for number in numbers}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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

    try:
        with _handled(numbers, hear) as before:
            if _heard.keys() & set(numbers):
                on_first()
            yield
    finally:
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


# A command

_STORE_TIMEOUT = timedelta(seconds=5)  # of the launcher's store
_RESEND_SECONDS = 0.05  # seconds after which a signal that was lost comes once more
_ENDINGS: dict[int, str] = {
    signal.SIGINT: "interrupted by Ctrl-C",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "ended by SIGHUP",
}


@functools.cache
def speaks(of: str) -> bool:
    """Whether this process says a thing: of those that torch's launcher began, the first that has it to say."""
    group = os.environ
    if group.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch.distributed import DistError, TCPStore

        with suppress(DistError):  # the first host is gone
            store = TCPStore(group["MASTER_ADDR"], int(group["MASTER_PORT"]), is_master=False, timeout=_STORE_TIMEOUT)
            return store.add(f"mt-grpo {group['TORCHELASTIC_RESTART_COUNT']} {of}", 1) == 1
    return True


def is_said_here(record: logging.LogRecord) -> bool:
    """A filter that shows a warning once of all processes of a run: its words tell, not its numbers and quotations."""
    return speaks(re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "", record.getMessage()))


def print_error(error: UserError) -> None:
    """Shows the sentence of an error, unless the user has read it, or another process of the run says one like it."""
    if not error.told and speaks(type(error).__name__):
        print(f"mt-grpo: {visible(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
    error.told = True


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Within it, when modules are imported and nothing has begun, a signal ends the process with its line."""

    def end(number: int, frame: object) -> None:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"mt-grpo: {_ENDINGS[number]}.\n".encode())
        os._exit(128 + number)

    main = threading.current_thread() is threading.main_thread()  # others may set no handler
    with _handled([number for number in _ENDINGS if main and signal.getsignal(number) is not signal.SIG_IGN], end):
        yield


def run_interruptibly(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Runs a command; the first signal raises `KeyboardInterrupt(number)` in it, a second one does not wait."""
    times: list[float] = []
    launched = os.environ.get("WORLD_SIZE", "1") not in ("0", "1")  # another text is refused with the recipe

    def interrupt(number: int, frame: object) -> None:
        if launched and times and time.monotonic() - times[0] < ECHO:
            return
        times.append(time.monotonic())
        raise KeyboardInterrupt(number)

    def again(lost: sys.UnraisableHookArgs) -> None:
        """A signal that came in a destructor, say, where Python drops what is raised, comes once more."""
        if isinstance(lost.exc_value, KeyboardInterrupt) and lost.exc_value.args:
            times.clear()
            threading.Timer(_RESEND_SECONDS, os.kill, (os.getpid(), lost.exc_value.args[0])).start()
        else:
            hook(lost)

    hook, sys.unraisablehook = sys.unraisablehook, again
    # a shell that runs a command in the background has it ignore Ctrl-C, and nohup SIGHUP
    heard = [number for number in _ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
    with _handled(heard, interrupt):
        try:
            return command(arguments)
        except KeyboardInterrupt as error:
            for number in heard:
                signal.signal(number, signal.SIG_IGN)
            number, *kept = error.args if isinstance(next(iter(error.args), None), int) else (signal.SIGINT,)
            if os.environ.get("RANK", "0") == "0":
                ending = _ENDINGS.get(number) or f"ended by {signal.Signals(number).name}"  # of torch's launcher
                with suppress(OSError):  # the terminal may be gone
                    print(" ".join([f"mt-grpo: {ending}.", *kept]), file=sys.stderr, flush=True)
            if len(times) > 1:  # ends the process here, with the same status for a shell
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return 128 + number
        finally:
            sys.unraisablehook = hook
