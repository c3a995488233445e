"""The owner of a server: its weight version names the run that set it, and the run's process."""

from __future__ import annotations

import os
import re
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

_RELEASED = "released"
_LABEL = re.compile(
    rf"(?P<run>(?P<host>.+)-(?P<machine>\w+\.\w+)-(?P<process>\d+)-(?P<start>\d+)-\w+):(?P<step>\w+)(:{_RELEASED})?"
)


def new_run() -> str:
    """
    A name for a run of this process. It has the host, the machine (its boot, and its process numbering, since each
    container has its own), the process, its start, and a part that differs between two runs of one process.
    """
    process = os.getpid()
    return f"{socket.gethostname()}-{_machine()}-{process}-{_start(process)}-{uuid.uuid4().hex[:6]}"


def weight_label(run: str | None, version: int | str) -> str:
    """The weight version that a server gets: `RUN:STEP`, or only the step if no run is given."""
    return str(version) if run is None else f"{run}:{version}"


def released(label: str) -> str:
    """The weight version of a run that is over."""
    return f"{label}:{_RELEASED}"


@dataclass(frozen=True)
class Owner:
    """The run that a server's weight version names."""

    run: str
    step: str
    words: str
    here: bool
    over: bool


def read_owner(label: str) -> Owner | None:
    """The run that a weight version names; `None` if no run of this project set it."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    process, here = int(match["process"]), match["machine"] == _machine()
    gone = here and (process == os.getpid() or _start(process) != int(match["start"]))
    words = f"process {process} on {match['host']}, step {match['step']}"
    return Owner(match["run"], match["step"], words, here, gone or label.endswith(f":{_RELEASED}"))


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _start(process: int) -> int | None:
    """When a process started, in ticks since the machine booted; `None` if it is gone, or has ended as a zombie."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rsplit(")", 1)[1].split()
    return None if state in ("Z", "X") else int(fields[18])
