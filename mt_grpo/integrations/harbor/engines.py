"""Harbor's Docker and Podman, with images that were made before, and with labels and limits of ours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harbor.environments.docker.docker import DockerEnvironment
from harbor.environments.podman import PodmanEnvironment
from harbor.models.task.config import EnvironmentConfig as EnvironmentOfTask
from harbor.models.trial.paths import TrialPaths

from mt_grpo.concurrency import in_thread
from mt_grpo.integrations.harbor.containers import write_overlay
from mt_grpo.integrations.harbor.images import image_of


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
        overlay = write_overlay(trial_paths.trial_dir / f"{session_id}.json", reaches_host=reaches_host)
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


class Docker(_Prepared):
    """Of the sandbox `docker`."""


class Podman(_Prepared, PodmanEnvironment):
    """Of the sandbox `podman`."""


ENVIRONMENTS = {"docker": Docker, "podman": Podman}
