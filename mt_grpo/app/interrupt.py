"""
How a command ends early: with one sentence about what is wrong; after Ctrl-C, SIGTERM, and SIGHUP, which a terminal
sends as it closes, with one line that says which it was and what is kept.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mt_grpo.errors import UserError
from mt_grpo.trajectory import visible

_ECHO_SECONDS = 2.0  # seconds in which a launcher passes on what all of its processes have got already
_RESEND_SECONDS = 0.05  # seconds after which a signal that was lost comes once more
_ENDINGS = {
    signal.SIGINT: "interrupted by Ctrl-C",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "ended by SIGHUP",
}


def print_error(error: UserError) -> None:
    """Shows the sentence of an error, unless the user has read it."""
    if not error.told:
        print(f"mt-grpo: {visible(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
    error.told = True


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Within it, when modules are imported and nothing has begun, a signal ends the process with its line."""

    def end(number: int, frame: object) -> None:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"mt-grpo: {_ENDINGS[number]}.\n".encode())
        os._exit(128 + number)

    heard = [number for number in _ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():  # others may set no handler
        heard = []
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_interruptibly(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Runs a command; the first signal raises `KeyboardInterrupt(number)` in it, a second one does not wait."""
    times: list[float] = []
    launched = int(os.environ.get("WORLD_SIZE", 1)) > 1

    def interrupt(number: int, frame: object) -> None:
        if launched and times and time.monotonic() - times[0] < _ECHO_SECONDS:
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
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        return command(arguments)
    except KeyboardInterrupt as error:
        for number in heard:
            signal.signal(number, signal.SIG_IGN)
        number, *kept = error.args if isinstance(next(iter(error.args), None), int) else (signal.SIGINT,)
        if os.environ.get("RANK", "0") == "0":
            ending = _ENDINGS.get(number) or f"ended by {signal.Signals(number).name}"  # torch's launcher hears more
            with suppress(OSError):  # the terminal may be gone
                print(" ".join([f"mt-grpo: {ending}.", *kept]), file=sys.stderr, flush=True)
        if len(times) > 1:  # ends the process here, with the same status for a shell
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        return 128 + number
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
