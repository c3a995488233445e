"""The owner of a server: its weight version names the run that set it, and the run's process."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import uuid
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from mt_grpo.errors import WeightSyncError
from mt_grpo.servers.http import RequestFailed, ServerControl

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


def weight_version(server: ServerControl) -> str:
    """The weight version of a server."""
    return str(server.get("/weight_info", itemgetter("weight_version")))


def check_owner(server: ServerControl, run: str) -> None:
    """Makes sure that no other run uses a server."""
    other = read_owner(weight_version(server))
    if other is None or other.run == run or other.over:
        return
    end = "end it first" if other.here else "end it first, or restart the server if that run was killed"
    raise WeightSyncError(
        f"The vLLM server at {server.base_url} holds the weights of another run ({other.words}): give this run a "
        f"server of its own on another port (`vllm_server_port`), or {end}."
    )


def check_still_owner(server: ServerControl, label: str) -> None:
    """Makes sure that a server held the weights of `label` while it was sampled from."""
    version = weight_version(server)
    if version in (label, released(label)):
        return
    other = read_owner(version)
    if other is None:
        raise RequestFailed(f"The server at {server.base_url} was restarted.", True, unreachable=True)
    raise WeightSyncError(
        f"The vLLM server at {server.base_url} was given the weights of another run ({other.words}) while this run "
        "sampled from it, so that these conversations are not trained on: give each run a server of its own, on "
        "another port (`vllm_server_port`)."
    )


def give_back(server: ServerControl, run: str) -> None:
    """Tells a server that a run is over, if the server can be reached and holds the run's weights."""
    with contextlib.suppress(RequestFailed):
        version = weight_version(server)
        held = read_owner(version)
        if held is not None and held.run == run and version != released(version):
            server.post("/update_weight_version", {"new_version": released(f"{run}:{held.step}")})


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
