"""Which tasks of Harbor there are: their folders as rows, and whether a sandbox for them can be used here."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset

from mt_grpo.data.terminal import embedded_tasks
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.integrations.harbor.bubblewrap import check_usable, read_machine
from mt_grpo.integrations.harbor.containers import (
    BUBBLEWRAP,
    ENGINES,
    get_images,
    image_of_task,
    read_task,
    remove_leftovers,
)
from mt_grpo.trajectory import Row

_DISK = 1e9  # bytes for a sandbox, below which the doctor warns
logger = logging.getLogger(__name__)

TASK = "task"  # the column with the folder of a row's task


class Tasks:
    """Folders of tasks as rows: `prompt` is a task's instruction, `task` its folder; `embedded` are our own."""

    def __init__(self, sandbox: str, tasks: str, eval_tasks: str | None = None) -> None:
        self.sandbox = sandbox
        _check_usable(self.sandbox)
        if removed := remove_leftovers(self.sandbox):
            logger.warning("Removed what an earlier run left: %s", ", ".join(removed))
        given = {"train": tasks, "eval": eval_tasks}
        self._folders = {
            split: str(embedded_tasks(split)) if folder == "embedded" else folder for split, folder in given.items()
        }
        for name, folder in zip(("tasks", "eval_tasks"), self._folders.values(), strict=True):
            if folder is not None and not (isinstance(folder, (str, os.PathLike)) and task_folders(folder)):
                raise ConfigError(
                    f"`{name}: {folder}` has no tasks of Harbor: a task is a folder with `task.toml` and "
                    "`instruction.md`."
                )

    def rows(self, split: str) -> Dataset | None:
        """The tasks of a split; metadata that is of one type in some tasks, and of another in others, is text."""
        if (folder := self._folders[split]) is None:
            return None
        rows = [_task_row(path) for path in task_folders(folder)]
        for name in {name for row in rows for name in row}:
            having = [row for row in rows if name in row]
            if len({float if type(row[name]) is int else type(row[name]) for row in having}) > 1:
                for row in having:
                    row[name] = str(row[name])
        return Dataset.from_list(rows)

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
        elif self.sandbox == BUBBLEWRAP:
            for task in rows.unique(TASK):
                read_machine(Path(task))


def check_sandbox(name: str) -> None:
    """Refuses a sandbox that Harbor does not have."""
    if name != BUBBLEWRAP:
        _check_installed()
        from harbor.models.environment_type import EnvironmentType

        _check_known("sandbox", name, [kind.value for kind in EnvironmentType])


def agent_config(given: str | Mapping[str, Any]) -> Any:
    """Harbor's configuration of an agent."""
    _check_installed()
    from harbor.models.agent.name import AgentName
    from harbor.models.trial.config import AgentConfig
    from pydantic import ValidationError

    if not isinstance(given, (str, Mapping)):
        raise ConfigError(f"`agent: {given}` is no agent: give a name, or options of Harbor's `AgentConfig`.")
    options = {"name": given} if isinstance(given, str) else dict(given)
    if unknown := options.keys() - AgentConfig.model_fields.keys():
        raise ConfigError(f"`agent` has no option {min(unknown)!r}: it has those of Harbor's `AgentConfig`.")
    try:
        config = AgentConfig(**options)
    except ValidationError as error:
        raise ConfigError(f"`agent: {options}` is refused by Harbor: {error.errors()[0]['msg']}") from error
    if config.name is not None and ":" not in config.name:
        _check_known("agent", config.name, sorted(AgentName.values()))
    return config


def _check_installed() -> None:
    """Refuses a machine without Harbor."""
    if importlib.util.find_spec("harbor") is None:
        raise ConfigError(
            "`env: {type: harbor}` needs Harbor, which is not installed: `pip install mt-grpo[harbor]`, with Python "
            "3.12 or later. `sandbox: bubblewrap` goes without."
        )


def _check_known(option: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = did_you_mean(name, known)
        raise ConfigError(f"`{option}: {name}` is none of Harbor's{near}: it has {', '.join(known)}.")


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


def task_folders(folder: str | os.PathLike[str]) -> list[Path]:
    """The folders of tasks in a folder, by name; a folder that is a task itself is its only one."""
    root = Path(folder).expanduser()
    found = [root] if (root / "task.toml").is_file() else sorted(path.parent for path in root.glob("*/task.toml"))
    return [path for path in found if (path / "instruction.md").is_file()]


def _task_row(path: Path) -> Row:
    """A task as a row: its instruction, its folder, and what `[metadata]` says in plain values."""
    told = read_task(path).get("metadata", {})
    metadata = {key: value for key, value in told.items() if isinstance(value, (str, int, float))}
    prompt = (path / "instruction.md").read_text(errors="replace").strip()
    return {**metadata, "prompt": prompt, TASK: str(path.resolve()), "name": path.name}
