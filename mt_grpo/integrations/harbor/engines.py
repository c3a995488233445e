"""Harbor's Docker and Podman, with images that were made before, and with labels and limits of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harbor.constants import MAIN_SERVICE_NAME
from harbor.environments.base import ExecResult
from harbor.environments.docker.docker import DockerEnvironment
from harbor.environments.podman import PodmanEnvironment
from harbor.models.task.config import EnvironmentConfig as EnvironmentOfTask
from harbor.models.trial.paths import TrialPaths

from mt_grpo.concurrency import in_thread
from mt_grpo.integrations.harbor.containers import write_overlay
from mt_grpo.integrations.harbor.images import image_of

_DOWN_AGAIN = (2.0, 5.0, 10.0, 20.0)
"""Seconds between attempts to take a container down."""


class _Prepared(DockerEnvironment):
    """Starts from an image that is there, and adds the overlay of `write_overlay`."""

    def __init__(
        self,
        environment_dir: Path,
        environment_name: str,
        session_id: str,
        trial_paths: TrialPaths,
        task_env_config: EnvironmentOfTask,
        *,
        reaches_host: bool = False,
        extra_docker_compose: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        self._image = image_of(environment_dir, task_env_config.docker_image, task_env_config.build_timeout_sec)
        if self._image is not None:
            task_env_config = task_env_config.model_copy(update={"docker_image": self._image.name})
        self._container: str | None = None
        overlay = write_overlay(
            trial_paths.trial_dir / f"{session_id}.json",
            reaches_host=reaches_host,
            storage_mb=task_env_config.storage_mb,
        )
        super().__init__(
            environment_dir,
            environment_name,
            session_id,
            trial_paths,
            task_env_config,
            extra_docker_compose=[*extra_docker_compose, overlay],
            **options,
        )

    async def start(self, force_build: bool) -> None:
        if self._image is not None:
            await in_thread(partial(self._image.get, self.type().value), "mt-grpo-image")
        await super().start(force_build)

    async def _run_docker_compose_command(self, command: list[str], *arguments: Any, **options: Any) -> ExecResult:
        """Takes containers down again where that fails: the engine's service may be restarting."""
        for seconds in (*_DOWN_AGAIN, None):
            try:
                return await super()._run_docker_compose_command(command, *arguments, **options)
            except RuntimeError:
                if command[0] != "down" or seconds is None:
                    raise
                await asyncio.sleep(seconds)
        raise AssertionError("the last of them raises")

    async def _compose_exec(
        self,
        command: str,
        *,
        service: str,
        cwd: str | None,
        env: dict[str, str] | None,
        timeout_sec: int | None,
        user: str | int | None,
    ) -> ExecResult:
        """Asks the engine itself: compose takes twice as long, and leaves processes behind over podman."""
        if service != MAIN_SERVICE_NAME:
            return await super()._compose_exec(
                command, service=service, cwd=cwd, env=env, timeout_sec=timeout_sec, user=user
            )
        if self._container is None:
            self._container = await self._platform._resolve_service_container(service)
        options = [] if cwd is None else ["--workdir", cwd]
        options += [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        options += (
            [] if user is None else ["--user", "0" if user == "root" else str(user)]
        )  # a name is looked up in files
        process = await asyncio.create_subprocess_exec(
            *self._engine_cmd("exec", *options, self._container, *self._platform.exec_shell_args(command)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        return await self._collect_buffered_output(process, timeout_sec=timeout_sec)


class Docker(_Prepared):
    """Of the sandbox `docker`."""


class Podman(_Prepared, PodmanEnvironment):
    """Of the sandbox `podman`."""


ENVIRONMENTS = {"docker": Docker, "podman": Podman}
