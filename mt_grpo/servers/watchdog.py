"""
Runs a server, and ends it together with the process that asked for it, whatever ends that: `watchdog.py PARENT
COMMAND`. It is run as a script, and imports nothing of this package, so that it begins at once.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

POLL = 1.0
"""Seconds between two looks."""
TIME_TO_END = 20.0
"""Seconds that the server has to end by itself."""
_DIE_WITH_PARENT = 1  # of prctl


def _main(parent: int, command: list[str]) -> int:
    """Starts a server, ends it when the process that asked for it is gone, and returns its status."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # they are for the parent
        signal.signal(ignored, signal.SIG_IGN)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_begin)
    while server.poll() is None and os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], POLL)
        if readable and not os.read(0, 1):
            break
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(TIME_TO_END)
    return server.wait()


def _begin() -> None:
    for restored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(restored, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2:]))
