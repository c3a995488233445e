"""Tasks of Harbor as rows."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset

from mt_grpo.data.terminal import embedded_tasks
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.integrations.harbor.bubblewrap import check_usable, read_machine
from mt_grpo.integrations.harbor.containers import BUBBLEWRAP, ENGINES, remove_leftovers
from mt_grpo.integrations.harbor.images import get_images, image_of_task

_DISK = 1e9  # bytes for a sandbox, below which the doctor warns
logger = logging.getLogger(__name__)

TASK = "task"
"""The column with the folder of a row's task."""


class Tasks:
    """
    Folders of tasks as rows: `prompt` is a task's instruction, `task` its folder, and its metadata further columns.

    Args:
        sandbox (`str`): What runs containers, by Harbor's name, or `bubblewrap`.
        tasks (`str`): A folder of tasks, or of one; `embedded` are small ones of our own.
        eval_tasks (`str`, *optional*): The same for evaluation.

    Raises:
        ConfigError: If Harbor is not installed, has no such sandbox, or cannot use it here; if a folder has no tasks.
    """

    def __init__(self, sandbox: str, tasks: str, eval_tasks: str | None = None) -> None:
        self.sandbox = harbor_value("sandbox", sandbox)
        _check_usable(self.sandbox)
        if removed := remove_leftovers(self.sandbox):
            logger.warning("Removed what an earlier run left: %s", ", ".join(removed))
        given = {"train": tasks, "eval": eval_tasks}
        self._folders = {
            split: str(embedded_tasks(split)) if folder == "embedded" else folder for split, folder in given.items()
        }
        for name, folder in zip(("tasks", "eval_tasks"), self._folders.values(), strict=True):
            if folder is not None and not _task_folders(folder):
                raise ConfigError(
                    f"`{name}: {folder}` has no tasks of Harbor: a task is a folder with `task.toml` and "
                    "`instruction.md`."
                )

    def rows(self, split: str) -> Dataset | None:
        """The tasks of a split."""
        folder = self._folders[split]
        return None if folder is None else Dataset.from_list([_task_row(path) for path in _task_folders(folder)])

    in_sandboxes: ClassVar[bool] = True

    def examine(self, rows: Any, at_once: int) -> Iterator[tuple[bool, str, str]]:
        """Whether sandboxes start here, and their images and disk are here."""
        yield True, f"`{self.sandbox}` is here and answers", ""  # else there were no environment
        tasks = list(dict.fromkeys(row[TASK] for row in rows.select_columns(TASK)))
        place = tempfile.gettempdir() if self.sandbox == BUBBLEWRAP else "/var/lib"
        if self.sandbox == BUBBLEWRAP:
            for task in tasks:
                read_machine(Path(task))
            yield True, f"{len(tasks)} tasks need no image", ""
        elif self.sandbox in ENGINES:
            images = [image for image in map(image_of_task, tasks) if image is not None]
            here = sum(image.is_here(self.sandbox) for image in images)
            mend = "the others are built or pulled before the first batch" if here < len(images) else ""
            yield not mend, f"{here} of the images of {len(tasks)} tasks are here", mend
        else:
            return
        free = shutil.disk_usage(place).free
        mend = "free some, or run fewer at once" if free < at_once * _DISK else ""
        yield not mend, f"{free / 1e9:.1f} GB of disk are free for {at_once} sandboxes at once", mend

    def check(self, rows: Dataset, name: str) -> None:
        """Refuses rows without a task, and gets the images of the others."""
        if TASK not in rows.column_names:
            raise ConfigError(
                f"The {name} has no column `{TASK}`: give the folder of each row's task there, or leave "
                "`dataset_name` out."
            )
        if self.sandbox in ENGINES:
            get_images(self.sandbox, filter(None, map(image_of_task, rows.unique(TASK))))
        if self.sandbox == BUBBLEWRAP:
            for task in rows.unique(TASK):
                read_machine(Path(task))


def harbor_value(option: str, given: str | Mapping[str, Any]) -> Any:
    """The name of a `sandbox` that Harbor has, or its configuration of an `agent`."""
    if given == BUBBLEWRAP:
        return given
    if importlib.util.find_spec("harbor") is None:
        raise ConfigError(
            "`env: {type: harbor}` needs Harbor, which is not installed: `pip install mt-grpo[harbor]`, with Python "
            "3.12 or later. `sandbox: bubblewrap` goes without."
        )
    from harbor.models.agent.name import AgentName
    from harbor.models.environment_type import EnvironmentType
    from harbor.models.trial.config import AgentConfig
    from pydantic import ValidationError

    if option == "sandbox":
        known = [kind.value for kind in EnvironmentType]
        value: Any = given
    else:
        options = {"name": given} if isinstance(given, str) else dict(given)
        try:
            if unknown := options.keys() - AgentConfig.model_fields.keys():
                raise ConfigError(
                    f"`agent` has no option {sorted(unknown)[0]!r}: it has those of Harbor's `AgentConfig`."
                )
            config = AgentConfig(**options)
        except ValidationError as error:
            raise ConfigError(f"`agent: {options}` is refused by Harbor: {error.errors()[0]['msg']}") from error
        if config.name is None or ":" in config.name:
            return config
        known, value = sorted(AgentName.values()), config.name
    if value not in known:
        raise ConfigError(
            f"`{option}: {value}` is none of Harbor's{did_you_mean(str(value), known)}: it has {', '.join(known)}."
        )
    return value if option == "sandbox" else config


def _check_usable(sandbox: str) -> None:
    """Asks Harbor whether a sandbox can be used: its program answers, its credentials are there."""
    if sandbox == BUBBLEWRAP:
        return check_usable()
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType

    try:
        EnvironmentFactory.run_preflight(EnvironmentType(sandbox))
    except (Exception, SystemExit) as error:  # Harbor ends its own command with the reason
        raise ConfigError(f"`sandbox: {sandbox}` cannot be used on this machine: {error}") from error


def _task_folders(folder: str) -> list[Path]:
    """The folders of tasks in a folder, by name; a folder that is a task itself is its only one."""
    root = Path(folder).expanduser()
    if (root / "task.toml").is_file():
        return [root]
    return sorted(path.parent for path in root.glob("*/task.toml") if (path.parent / "instruction.md").is_file())


def _task_row(path: Path) -> dict[str, Any]:
    """A task as a row: its instruction, its folder, and what `[metadata]` says in plain values."""
    try:
        config = tomllib.loads((path / "task.toml").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / 'task.toml'} cannot be read ({error}): mend it, or take the task out.") from error
    metadata = {
        key: value for key, value in config.get("metadata", {}).items() if isinstance(value, (str, int, float))
    }
    prompt = (path / "instruction.md").read_text(errors="replace").strip()
    return {**metadata, "prompt": prompt, TASK: str(path.resolve()), "name": path.name}
