"""Whose weights a server holds: its weight version names the run, and by that the process that can be looked for."""

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
    A name for a run of this process: host, machine (as it was booted, and its process numbering, which containers have
    of their own), process, its start, and what tells two runs of one process apart.
    """
    process = os.getpid()
    return f"{socket.gethostname()}-{_machine()}-{process}-{_start(process)}-{uuid.uuid4().hex[:6]}"


def weight_label(run: str | None, version: int | str) -> str:
    """The weight version a server is given: `RUN:STEP`, or the step alone where no run is named."""
    return str(version) if run is None else f"{run}:{version}"


def released(label: str) -> str:
    """The same, of a run that is over."""
    return f"{label}:{_RELEASED}"


@dataclass(frozen=True)
class Holder:
    """
    What a server's weight version says.

    Args:
        run (`str`): The run.
        step (`str`): Optimiser step of the weights, or `proof`.
        words (`str`): The process, in words.
        here (`bool`): Whether it can be looked for from here.
        over (`bool`): Whether the run gave the server back, or its process is gone, or is this one.
    """

    run: str
    step: str
    words: str
    here: bool
    over: bool


def holder(label: str) -> Holder | None:
    """The run that a weight version names; `None` for versions that runs of ours did not set."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    process, here = int(match["process"]), match["machine"] == _machine()
    gone = here and (process == os.getpid() or _start(process) != int(match["start"]))
    words = f"process {process} on {match['host']}, step {match['step']}"
    return Holder(match["run"], match["step"], words, here, gone or label.endswith(f":{_RELEASED}"))


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _start(process: int) -> int | None:
    """When a process started, in ticks since the machine did; `None` where it is gone, or only waits to be noticed."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rsplit(")", 1)[1].split()
    return None if state in ("Z", "X") else int(fields[18])
