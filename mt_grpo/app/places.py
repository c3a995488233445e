"""Files and folders that a recipe names: what is missing is found before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import FORMATS, check_place, looks_like_path
from mt_grpo.option_rules import is_bare, parse_agent, parse_reward

KINDS = {"tools": "tool", "turn_reward_funcs": "turn reward", "outcome_reward_funcs": "outcome reward"}


def check_places(values: Mapping[str, Any], command: str) -> None:
    """
    Looks for the model, the rows and the code that a recipe names as files, and for a folder that the run can write.

    Args:
        values (`Mapping`): What recipe and command line say.
        command (`str`): For which command.

    Raises:
        ConfigError: If the folder cannot be, or a model or rows are missing.
        ImportPathError: If a file or a module is missing.
    """
    if command == "train":
        check_writable(values.get("output_dir") or ".")
    _check_model(values["model_name_or_path"])
    if command == "serve":
        return
    if values.get("dataset_name"):  # classes of `environment_factory` may need none
        _check_dataset(values["dataset_name"])
    if values.get("external_plugins"):  # a plugin may change where modules are found
        return
    if values.get("agent") and "function" in (agent := parse_agent(values["agent"])):
        check_place(agent["function"], "agent")
    for option, what in KINDS.items():
        listed = values.get(option) or []
        for entry in [listed] if isinstance(listed, str) else listed:
            name, _ = parse_reward(entry)
            if not is_bare(name):
                check_place(name, what)


def check_writable(folder: str) -> None:
    """
    Whether a folder can be made, or written to where it is there.

    Raises:
        ConfigError: If it cannot.
    """
    path = Path(folder).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"`output_dir: {folder}` cannot be a folder, since {there} is a file: name another.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"`output_dir: {folder}` cannot be written, since {there} is not yours to write to.")


def _check_model(name: str) -> None:
    if looks_like_path(name) and not Path(name).expanduser().exists():
        raise ConfigError(f"The model {name!r} cannot be loaded: there is no such folder (from {Path.cwd()}).")


def _check_dataset(name: str) -> None:
    source = name.partition(":")[2] or name
    path = Path(source).expanduser()
    if not path.exists() and (path.suffix in FORMATS or looks_like_path(source)):
        raise ConfigError(f"There is no file or folder {source!r} (the current folder is {Path.cwd()}).")
