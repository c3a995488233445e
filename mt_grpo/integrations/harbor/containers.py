"""Whose containers run on a machine: labels that outlive their run, and what a killed run left behind."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

import psutil

from mt_grpo.errors import ConfigError

ENGINES = ("docker", "podman")
"""Sandboxes whose containers run on this machine, by the name of their program."""
BUBBLEWRAP = "bubblewrap"
"""The sandbox that has no containers, see `bubblewrap.py`."""
OWNER = "mt-grpo.owner"
"""The label of a container with the process that it belongs to."""
PROCESSES = 512
"""Most processes of a container."""
LIFETIME = 24 * 3600
"""Seconds after which a container ends by itself, also when its run is gone."""
PROJECT = "com.docker.compose.project"
HOST = "host.docker.internal"
"""The name of this machine in its containers."""
PATIENCE = 60.0
"""Seconds that the engine may take to answer."""


@functools.cache
def owner() -> str:
    """This process: host, number, and when it began, since numbers are used again."""
    return f"{socket.gethostname()}/{os.getpid()}/{psutil.Process().create_time():.0f}"


def write_overlay(path: Path, *, reaches_host: bool, storage_mb: int | None = None) -> Path:
    """
    Writes what is added to a task's compose file: a label, limits of processes and of the size of a file, a lifetime,
    a quick end, and the name of this machine where an agent in it asks the policy.
    """
    main: dict[str, object] = {
        "labels": {OWNER: owner()},
        "pids_limit": PROCESSES,
        "command": ["sh", "-c", f"sleep {LIFETIME}"],
        "stop_signal": "SIGKILL",  # the first process ignores SIGTERM, and would be waited for
    }
    if storage_mb is not None:  # engines bound the whole of a disk on few file systems
        main["ulimits"] = {"fsize": storage_mb * 2**20}
    if reaches_host:
        main["extra_hosts"] = [f"{HOST}:host-gateway"]
    networks = {"default": {"labels": {OWNER: owner()}}}  # it is made before the container is
    path.write_text(json.dumps({"services": {"main": main}, "networks": networks}))  # JSON is YAML
    return path


def remove_leftovers(engine: str, everything: bool = False) -> list[str]:
    """
    Removes containers that runs of this machine left, with networks, volumes and images; with `everything` those of
    runs that go on too. Returns a kind and a name of each.
    """
    if engine not in ENGINES or shutil.which(engine) is None:
        return []
    removed: list[str] = []

    def remove(found: list[_Found]) -> None:
        for kind, name, _ in found:
            force = () if kind == "network" else ("--force",)
            ended = _ask(engine, kind, "rm", *force, *(("--volumes",) if kind == "container" else ()), name)
            if ended.returncode == 0:
                removed.append(f"{kind} {name}")

    ours = [
        found
        for kind in ("container", "network", "image")
        for found in _listed(engine, kind, OWNER)
        if everything or is_gone(found.labels[OWNER])
    ]
    # what else was composed with a container of ours has the label of its project alone
    for project in {found.labels[PROJECT] for found in ours if PROJECT in found.labels}:
        remove([found for kind in _KINDS for found in _listed(engine, kind, f"{PROJECT}={project}")])
    names = {f"{found.kind} {found.name}" for found in ours}.difference(removed)
    remove([found for found in ours if f"{found.kind} {found.name}" in names])
    return removed


class _Found(NamedTuple):
    """A container, network, volume or image."""

    kind: str
    name: str
    labels: dict[str, str]


_KINDS = ("container", "network", "volume", "image")
"""In the order in which they can be removed."""


def _ask(engine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([engine, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`{engine} {' '.join(arguments)}` did not answer within {PATIENCE:g} s.") from None


def _listed(engine: str, kind: str, label: str) -> list[_Found]:
    """What has a label: podman lists an array, docker an object on each line with labels in one text."""
    every = ("--all",) if kind == "container" else ()
    listed = _ask(engine, kind, "ls", *every, "--filter", f"label={label}", "--format", "json")
    if listed.returncode:
        raise ConfigError(f"{engine} does not list what it has: {listed.stderr.strip()[-300:]}")
    text, found = listed.stdout.strip(), []
    for each in json.loads(text) or [] if text.startswith(("[", "null")) else map(json.loads, text.splitlines()):
        told = {key.lower(): value for key, value in each.items()}
        name, labels = told.get("names") or told.get("name") or told["id"], told.get("labels") or {}
        if isinstance(labels, str):
            labels = dict(one.split("=", 1) for one in labels.split(",") if "=" in one)
        found.append(_Found(kind, name[0] if isinstance(name, list) else name, labels))
    return found


def is_gone(whose: str) -> bool:
    """Whether the process that a label names was one of this machine, and has ended."""
    try:
        host, pid, began = whose.split("/")
        if host != socket.gethostname():
            return False
        return abs(psutil.Process(int(pid)).create_time() - float(began)) > 2
    except psutil.NoSuchProcess:
        return True
    except ValueError:  # no label of ours
        return False
