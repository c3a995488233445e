"""Whose containers run on a machine: labels that outlive their run, and what a killed run left behind."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import psutil

ENGINES = ("docker", "podman")
"""Sandboxes whose containers run on this machine, by the name of their program."""
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


def write_overlay(path: Path, *, reaches_host: bool) -> Path:
    """
    Writes what is added to a task's compose file: a label, a limit of processes, a lifetime, a quick end, and the name
    of this machine where an agent in it asks the policy.
    """
    main: dict[str, object] = {
        "labels": {OWNER: owner()},
        "pids_limit": PROCESSES,
        "command": ["sh", "-c", f"sleep {LIFETIME}"],
        "stop_signal": "SIGKILL",  # the first process ignores SIGTERM, and would be waited for
    }
    if reaches_host:
        main["extra_hosts"] = [f"{HOST}:host-gateway"]
    path.write_text(json.dumps({"services": {"main": main}}))  # JSON is YAML
    return path


def remove_leftovers(engine: str) -> list[str]:
    """Removes containers that runs on this machine left, with their images and networks; returns their names."""
    if engine not in ENGINES or shutil.which(engine) is None:
        return []
    listed = _ask(engine, "ps", "--all", "--filter", f"label={OWNER}", "--format", "json")
    removed = []
    for name, image, labels in _containers(listed):
        if _is_gone(labels[OWNER]):
            _ask(engine, "rm", "--force", "--volumes", name)
            _ask(engine, "rmi", image)  # a tag of this conversation alone
            if project := labels.get(PROJECT):
                _ask(engine, "network", "rm", f"{project}_default")
            removed.append(name)
    return removed


def _ask(engine: str, *arguments: str) -> str:
    done = subprocess.run([engine, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.stdout


def _containers(listed: str) -> list[tuple[str, str, dict[str, str]]]:
    """Names, images and labels: podman lists an array, docker an object on each line with labels in one text."""
    found = json.loads(listed) if listed.startswith("[") else [json.loads(line) for line in listed.splitlines()]
    containers = []
    for each in found:
        names, labels = each["Names"], each["Labels"]
        if isinstance(labels, str):
            labels = dict(label.split("=", 1) for label in labels.split(",") if "=" in label)
        containers.append((names[0] if isinstance(names, list) else names, each["Image"], labels))
    return containers


def _is_gone(whose: str) -> bool:
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
