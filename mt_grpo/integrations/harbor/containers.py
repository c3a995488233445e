"""Containers of tasks on a machine: their images, the labels that outlive a run, and what a killed run left behind."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from mt_grpo.data.terminal import own_folder
from mt_grpo.errors import ConfigError

SHOWN_LOG = 20_000  # most characters of a log that are kept, from its end
_LISTED = 4_000  # most bytes of the names of files that an agent wrote


class TaskError(Exception):
    """A task could not be started or verified: a failure of the infrastructure, and no reward of the policy's."""


@dataclass(frozen=True)
class Verified:
    """What a trial came to, the seconds that its container took to start, and when it had, by the monotonic clock."""

    rewards: dict[str, float]
    verifier_log: str
    agent_log: str = ""
    agent_error: str | None = None
    start_seconds: float = 0.0
    started: float = 0.0
    files_changed: str = ""


def list_changed(folders: Iterable[str], since: float) -> str:
    """A script that prints which files of folders were written since a time, but the shell's and the verifier's."""
    left_out = " -o ".join(f"-path {path}" for path in ("'*/.shell'", "/logs", "/tests"))
    found = f"find {shlex.join(folders)} -xdev \\( {left_out} \\) -prune -o -type f -newermt @{since:.2f} -print"
    return f"{found} 2> /dev/null | sort | head -c {_LISTED}"


ENGINES = ("docker", "podman")  # sandboxes whose containers run on this machine, by the name of their program
BUBBLEWRAP = "bubblewrap"  # the sandbox that has no containers, see `bubblewrap.py`
OWNER = "mt-grpo.owner"  # the label of a container with the process that it belongs to
PROCESSES = 512  # most processes of a container
LIFETIME = 24 * 3600  # seconds after which a container ends by itself, also when its run is gone
PROJECT = "com.docker.compose.project"
HOST = "host.docker.internal"  # the name of this machine in its containers
ENGINE_SECONDS = 60.0  # seconds that the engine may take to answer
_DIALS = 10.0  # seconds in which a connection from a container has to be made


@functools.cache
def owner() -> str:
    """This process: host, number, and when it began, since numbers are used again."""
    return f"{socket.gethostname()}/{os.getpid()}/{_began(os.getpid()):.0f}"


def _began(pid: int) -> float:
    """When a process began, in seconds after the machine did: a clock that is set changes the time of both."""
    boot = psutil.boot_time()  # first, as older versions of psutil keep it
    return psutil.Process(pid).create_time() - boot


def write_overlay(path: Path, *, through: str | None, storage_mb: int | None = None) -> Path:
    """
    Writes what is added to a task's compose file: label, limits, lifetime, quick end, and the name of this machine for
    the service `through` whose network the container has.
    """
    main: dict[str, object] = {
        "labels": {OWNER: owner()},
        "pids_limit": PROCESSES,
        "command": ["sh", "-c", f"exec sleep {LIFETIME}"],
        "stop_signal": "SIGKILL",  # the first process ignores SIGTERM, and would be waited for
    }
    if storage_mb is not None:  # engines bound the whole of a disk on few file systems
        main["ulimits"] = {"fsize": storage_mb * 2**20}
    services = {"main": main}
    if through is not None:
        services.setdefault(through, {})["extra_hosts"] = [f"{HOST}:host-gateway"]
    networks = {"default": {"labels": {OWNER: owner()}}}  # it is made before the container is
    path.write_text(json.dumps({"services": services, "networks": networks}))  # JSON is YAML
    return path


def remove_leftovers(engine: str, everything: bool = False) -> list[str]:
    """Removes what runs of this machine left, or `everything`; returns a kind and a name of each."""
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
    remove([found for found in ours if f"{found.kind} {found.name}" not in removed])
    return removed


class _Found(NamedTuple):
    """A container, network, volume or image."""

    kind: str
    name: str
    labels: dict[str, str]


_KINDS = ("container", "network", "volume", "image")  # in the order in which they can be removed


def _ask(engine: str, *arguments: str, seconds: float = ENGINE_SECONDS) -> subprocess.CompletedProcess[str]:
    command = [engine, *arguments]
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`{' '.join(command)}` did not answer within {seconds:g} s.") from None


def _failure(engine: str, *arguments: str, seconds: float = ENGINE_SECONDS) -> str | None:
    """Why the engine cannot do something; nothing where it has done it."""
    try:
        done = _ask(engine, *arguments, seconds=seconds)
    except ConfigError as error:
        return str(error)
    return f"{done.stdout}{done.stderr}".strip()[-_SHOWN:] if done.returncode else None


def _listed(engine: str, kind: str, label: str) -> list[_Found]:
    """What has a label, by what the engine says of each: docker lists images without their labels."""
    every = ("--all",) if kind == "container" else ()
    listed = _ask(engine, kind, "ls", *every, "--filter", f"label={label}", "--quiet")
    if listed.returncode:
        raise ConfigError(f"{engine} does not list what it has: {listed.stderr.strip()[-300:]}")
    found, names = [], listed.stdout.split()
    for each in json.loads(_ask(engine, kind, "inspect", *names).stdout or "[]") if names else ():
        told = {key.lower(): value for key, value in each.items()}
        labels = told.get("labels") or (told.get("config") or {}).get("Labels") or {}
        name = [*(told.get("repotags") or ()), told.get("name") or told.get("id")][0]  # an image may have lost its tag
        found.append(_Found(kind, name.lstrip("/"), labels))
    return found


def is_gone(whose: str) -> bool:
    """Whether the process that a label names was one of this machine, and has ended."""
    try:
        host, pid, began = whose.split("/")
        if host != socket.gethostname():
            return False
        return abs(_began(int(pid)) - float(began)) > 2
    except psutil.NoSuchProcess:
        return True
    except ValueError:  # no label of ours
        return False


REPOSITORY = "localhost/mt-grpo"
"""Images that are built here: their tag is a hash of the folder that they are built from."""
_AT_ONCE = min(4, os.cpu_count() or 1)
_SHOWN = 700  # most characters of what a failed build printed, from its end
_here: set[tuple[str, str]] = set()  # engines and the images that they are known to have


@contextlib.contextmanager
def one_process(name: str) -> Iterator[None]:
    """A block in which no other process of this user is that has the same name."""
    with (own_folder("mt-grpo-images", "locks of images") / name.replace("/", "_")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class _Image:
    """What containers of a task begin with: an image of a registry, or one that is built from a folder."""

    name: str
    task: Path
    seconds: float
    context: Path | None = None

    def is_here(self, engine: str) -> bool:
        return _ask(engine, "image", "inspect", self.name).returncode == 0

    def volumes(self, engine: str) -> list[str]:
        """The folders that it declares as volumes: an image of its container has nothing of what was written there."""
        told = _ask(engine, "image", "inspect", "--format", "{{json .Config.Volumes}}", self.name).stdout
        return sorted(json.loads(told or "null") or ())

    def get(self, engine: str) -> float | None:
        """Builds or pulls it; returns the seconds that took, or nothing where it is here already."""
        if (engine, self.name) in _here:
            return None
        begun = time.monotonic()
        with one_process(self.name):  # others of the run want it too
            if self.is_here(engine):
                _here.add((engine, self.name))
                return None
            what = ["pull", self.name]
            if self.context is not None:
                what = ["build", "--tag", self.name, str(self.context)]
            failed = _failure(engine, *what, seconds=self.seconds)
        if failed is not None:
            cannot = "pulled" if self.context is None else "built"
            mend = self.task / "task.toml" if self.context is None else self.context / "Dockerfile"
            raise ConfigError(
                f"The image of the task {self.task} cannot be {cannot}: {failed}\nMend {mend}, or take the task out."
            )
        _here.add((engine, self.name))
        return time.monotonic() - begun


def image_of(environment: Path, pulled: str | None, seconds: float) -> _Image | None:
    """The image of a task's folder `environment`; nothing where services are composed, which Harbor builds."""
    from harbor.utils.container_cache import docker_build_context_hash

    task = environment.parent
    if (environment / "docker-compose.yaml").is_file():
        return None
    if pulled is not None:
        return _Image(pulled, task, seconds)
    if not (environment / "Dockerfile").is_file():
        return None
    return _Image(f"{REPOSITORY}:{docker_build_context_hash(context=environment)}", task, seconds, environment)


_NUMBERS = {"environment": ("memory_mb", "storage_mb", "build_timeout_sec"), "verifier": ("timeout_sec",)}
"""Numbers of `task.toml` that are read here, by their tables."""


def read_task(task: Path) -> dict[str, Any]:
    """What a task's `task.toml` says; refuses a file that cannot be read, or has values of another kind."""
    path, faults, config = task / "task.toml", [], {}
    try:
        config = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        faults.append(f"cannot be read ({error})")
    for table in ("environment", "verifier", "metadata"):
        given = config.get(table, {})
        if not isinstance(given, dict):
            faults.append(f"has `{table} = {given!r}`, which is no table")
            continue
        for name in _NUMBERS.get(table, ()):
            value, is_time = given.get(name, 1), name.endswith("timeout_sec")  # of which nothing is done in 0 seconds
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf or (is_time and not value):
                least = "above 0" if is_time else "from 0 on"
                faults.append(f"has `{name} = {value!r}` in `[{table}]`, which is no number {least}")
        if table == "environment" and not isinstance(given.get("docker_image", ""), str):
            faults.append(f"has `docker_image = {given['docker_image']!r}`, which is no name")
    if faults:
        raise ConfigError(f"{path} {faults[0]}: mend it, or take the task out.")
    return config


def image_of_task(task: str) -> _Image | None:
    """The image of a task's containers, see `image_of`."""
    folder = Path(task)
    told = read_task(folder).get("environment", {})
    return image_of(folder / "environment", told.get("docker_image"), told.get("build_timeout_sec", 600.0))


def get_images(engine: str, images: Iterable[_Image]) -> None:
    """Builds or pulls images that are not here, a few at once, with a line for each."""
    wanted = {image.name: image for image in images if (engine, image.name) not in _here}
    begun, took = time.monotonic(), 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        getting = {pool.submit(image.get, engine): image for image in wanted.values()}
        try:
            for done, future in enumerate(as_completed(getting), 1):
                if (seconds := future.result()) is None:
                    continue
                took += 1
                left = (time.monotonic() - begun) / took * (len(getting) - done)
                more = f", {timedelta(seconds=round(left))} left" if done < len(getting) else ""
                print(
                    f"Image {done} of {len(getting)}: {getting[future].task.name}, {seconds:.0f} s{more}",
                    file=sys.stderr,
                    flush=True,
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def no_way_here(engine: str, image: str, host: str) -> str | None:
    """Why a container of an image does not reach a port of this machine under a name; nothing where it does."""
    with socket.create_server(("0.0.0.0", 0)) as door:  # the system takes the connection
        dial = f"timeout {_DIALS:g} bash -c ': > /dev/tcp/{host}/{door.getsockname()[1]}'"
        options = "run", "--rm", "--label", f"{OWNER}={owner()}", "--add-host", f"{HOST}:host-gateway"
        fault = _failure(engine, *options, "--entrypoint", "bash", image, "-c", dial)
    return None if fault is None else fault or f"no answer within {_DIALS:g} s"
