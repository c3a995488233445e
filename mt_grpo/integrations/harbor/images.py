"""Images of tasks: what a container begins with is built or pulled once on a machine, before it is needed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from mt_grpo.errors import ConfigError

REPOSITORY = "localhost/mt-grpo"
"""Images that are built here: their tag is a hash of the folder that they are built from."""
_AT_ONCE = min(4, os.cpu_count() or 1)
_SHOWN = 700
"""Most characters of what a failed build printed, from its end."""
_here: set[tuple[str, str]] = set()
"""Engines and the images that they are known to have."""


@dataclass(frozen=True)
class Image:
    """What containers of a task begin with: an image of a registry, or one that is built from a folder."""

    name: str
    task: Path
    seconds: float
    context: Path | None = None

    def is_here(self, engine: str) -> bool:
        """Whether the engine has it already."""
        return _run(engine, "image", "inspect", self.name, seconds=60.0) is None

    def get(self, engine: str) -> float | None:
        """Builds or pulls it; returns the seconds that took, or nothing where it is here already."""
        if (engine, self.name) in _here:
            return None
        begun, locks = time.monotonic(), Path(tempfile.gettempdir(), f"mt-grpo-images-{os.getuid()}")
        locks.mkdir(exist_ok=True)
        with (locks / self.name.replace("/", "_")).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of the run want it too
            if self.is_here(engine):
                _here.add((engine, self.name))
                return None
            what = ["pull", self.name]
            if self.context is not None:
                what = ["build", "--tag", self.name, str(self.context)]
            failed = _run(engine, *what, seconds=self.seconds)
        if failed is not None:
            cannot = "pulled" if self.context is None else "built"
            mend = self.task / "task.toml" if self.context is None else self.context / "Dockerfile"
            raise ConfigError(
                f"The image of the task {self.task} cannot be {cannot}: {failed}\nMend {mend}, or take the task out."
            )
        _here.add((engine, self.name))
        return time.monotonic() - begun


def image_of(environment: Path, pulled: str | None, seconds: float) -> Image | None:
    """The image of a task's folder `environment`; nothing where services are composed, which Harbor builds."""
    from harbor.utils.container_cache import docker_build_context_hash

    task = environment.parent
    if (environment / "docker-compose.yaml").is_file():
        return None
    if pulled is not None:
        return Image(pulled, task, seconds)
    if not (environment / "Dockerfile").is_file():
        return None
    return Image(f"{REPOSITORY}:{docker_build_context_hash(context=environment)}", task, seconds, environment)


def image_of_task(task: str) -> Image | None:
    """The image of a task's containers, see `image_of`."""
    folder = Path(task)
    told = tomllib.loads((folder / "task.toml").read_text()).get("environment", {})
    return image_of(folder / "environment", told.get("docker_image"), told.get("build_timeout_sec", 600.0))


def get_images(engine: str, images: Iterable[Image]) -> None:
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


def _run(engine: str, *arguments: str, seconds: float) -> str | None:
    """Runs the engine; returns why it failed, if it did."""
    try:
        done = subprocess.run(
            [engine, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {seconds:g} s."
    return None if done.returncode == 0 else done.stdout.strip()[-_SHOWN:]
