"""
What builds the environments that a run's options describe, by type. Each type registers itself in its own file, which
is imported where a run names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from mt_grpo.envs.source import EnvLike
from mt_grpo.envs.tool_env import MultiTurnToolEnv
from mt_grpo.imports import import_object
from mt_grpo.options.values import TYPES, env_type
from mt_grpo.tools import in_processes, load_tools_file

TRLFactory = Callable[[], Any] | dict[str, Callable[[], Any]]
"""What TRL's trainer takes: something that makes an environment, or a dictionary by the column `environment`."""

_Build = Callable[[Mapping[str, Any]], EnvLike]
"""Makes an environment, or several by name, from the options of a run."""

_BUILDS: dict[str, _Build] = {}


def environment(name: str) -> Callable[[_Build], _Build]:
    """Registers what builds a type of environment; `name` is in `mt_grpo.options.values.TYPES`."""

    def add(build: _Build) -> _Build:
        _BUILDS[name] = build
        return build

    return add


def build_environment(options: Mapping[str, Any]) -> EnvLike:
    """The environment that options describe; the module of its type is imported."""
    name = env_type(options)
    importlib.import_module(TYPES[name].module)
    return _BUILDS[name](options)


@environment("tools")
def tool_environment(options: Mapping[str, Any]) -> MultiTurnToolEnv:
    """Tools that the model calls until it answers."""
    return MultiTurnToolEnv(**tool_arguments(options))


@environment("class")
def environment_at(options: Mapping[str, Any]) -> EnvLike:
    """What a path leads to: a class with tools is made from the options, anything else is the environment itself."""
    found = import_object(options["env"], what="environment")
    if isinstance(found, type) and issubclass(found, MultiTurnToolEnv):
        return found(**tool_arguments(options))
    return found


def tool_arguments(options: Mapping[str, Any], protocol: str = "tags", max_steps: int | None = 5) -> dict[str, Any]:
    """The arguments of a `MultiTurnToolEnv` of a run; `protocol` and `max_steps` where the options leave them open."""
    tools = named_tools(options["tools"], options["tools_config_file"])
    return {
        "tools": in_processes(tools, options["tool_processes"]) if options["tool_processes"] else tools,
        "system_prompt": options["system_prompt"],
        "max_steps": max_steps if options["max_env_steps"] is None else options["max_env_steps"],
        "protocol": options["call_protocol"] or protocol,
        "env_mask": options["env_mask"],
        "tool_timeout": options["tool_timeout"],
    }


def named_tools(named: list[Any] | None, file: str | None) -> list[Any]:
    """Tools of a list and of a file."""
    return [*(named or []), *([] if file is None else load_tools_file(file))]
