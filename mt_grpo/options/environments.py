"""
The kinds of environment that `env: {type: NAME, ...}` can name, and the older options that mean the same. Plain
values, as in `values`; `mt_grpo.envs.registry` builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose, did_you_mean
from mt_grpo.options.table import RunOptions
from mt_grpo.options.values import VERIFIERS, AgentOptions, UserOptions, parse_mapping, verifiers_name

OF_TOOLS = (
    *("tools", "tools_config_file", "tool_processes", "system_prompt", "max_env_steps", "call_protocol", "env_mask"),
    "tool_timeout",
)
"""Options of a run that an environment with tools takes."""

OF_GAMES = ("tag", "max_turns", "step_timeout")
OF_USERS, OF_AGENTS = tuple(get_type_hints(UserOptions)), tuple(get_type_hints(AgentOptions))
BROUGHT = "mt_grpo.integrations"


@dataclass(frozen=True)
class EnvType:
    """
    A kind of environment.

    Args:
        module: Registers what builds it, see `mt_grpo.envs.registry`. It is imported where a run names the type.
        keys: Its own keys.
        needs: How many of these, from the first on, have to be given.
        takes: Options of a run that it may have for itself.
        option: The older option that means the same. Its value is that of the only key, or else a mapping of the keys.
        paths: Keys that name code.
    """

    module: str
    keys: tuple[str, ...] = ()
    needs: int = 1
    takes: tuple[str, ...] = OF_TOOLS
    option: str | None = None
    paths: tuple[str, ...] = ()


TYPES = {
    "tools": EnvType("mt_grpo.envs.registry", needs=0),
    "simulated_user": EnvType("mt_grpo.envs.simulated_user", OF_USERS, 0, option="simulated_user"),
    "interactions": EnvType(f"{BROUGHT}.verl", ("file",), option="interaction_config_file"),
    "class": EnvType("mt_grpo.envs.registry", ("path",), takes=(*OF_TOOLS, "environment_urls"), option="env"),
    "trl": EnvType(f"{BROUGHT}.trl", ("factory",), option="environment_factory"),
    "agent": EnvType(f"{BROUGHT}.openai_api", OF_AGENTS, 0, ("call_protocol",), "agent"),
    "scheduler": EnvType(
        f"{BROUGHT}.swift",
        ("name",),
        takes=("max_turns", "loss_scale", "system_prompt", "call_protocol", "tool_timeout"),
        option="multi_turn_scheduler",
    ),
    "verifiers": EnvType(f"{BROUGHT}.verifiers", ("name", "config"), takes=("call_protocol",)),
    "gym": EnvType(f"{BROUGHT}.gym", ("make", "parse", *OF_GAMES), takes=(), paths=("make", "parse")),
    "textarena": EnvType(
        f"{BROUGHT}.textarena", ("game", "opponent", "max_turns", "options"), takes=(), paths=("opponent",)
    ),
    "openenv": EnvType(
        f"{BROUGHT}.openenv",
        ("action", "url", "observe", "client", *OF_GAMES),
        takes=("environment_urls",),
        paths=("action", "observe", "client"),
    ),
}
"""By the names that `type` takes."""

ALIASES = {kind.option: name for name, kind in TYPES.items() if kind.option is not None}
"""Types by the older options that mean them. `env: verifiers:NAME` is `verifiers`, and none of the options `tools`."""


def env_type(options: Mapping[str, Any]) -> str:
    """The type of environment that options of a run describe."""
    if isinstance(options["env"], Mapping):
        return options["env"]["type"]
    if verifiers_name(options["env"]) is not None:
        return "verifiers"
    return next((kind for name, kind in ALIASES.items() if options[name] is not None), "tools")


def with_env_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """
    Options of a run in which each `env: {type: NAME, ...}`, those of `environments` included, is written as the
    options that mean the same.

    Raises:
        ConfigError: If a type is unknown, has no such key or lacks one, or an option is set beside it that it sets.
    """
    written = _of_env(options, "env")
    environments = parse_mapping(written.get("environments"), "environments")
    if isinstance(environments, Mapping):
        written["environments"] = {name: _of_named(given, name) for name, given in environments.items()}
    return written


def _of_named(given: Any, name: str) -> Any:
    if not isinstance(given, Mapping):
        return given
    return _of_env({"env": given} if "type" in given else given, f"environments: {name}")


def _of_env(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    env = options.get("env")
    if isinstance(env, str) and env.lstrip().startswith("{"):
        env = parse_mapping(env, key)
    if not isinstance(env, Mapping):
        return dict(options)
    if "type" not in env:
        raise ConfigError(f"`{key}` has no `type`: name one of {', '.join(TYPES)}.")
    choose(f"{key}: type", env["type"], TYPES)
    kind, name = TYPES[env["type"]], f"`{key}` of the type `{env['type']}`"
    takes = (*kind.keys, *kind.takes)
    for option in env:
        if option not in ("type", *takes):
            raise ConfigError(
                f"{name} has an unknown key {option!r}{did_you_mean(option, takes)}: it takes {', '.join(takes)}."
            )
    for option in kind.keys[: kind.needs]:
        if not env.get(option):
            raise ConfigError(f"{name} has no `{option}`: give it.")
    own = {option: value for option, value in env.items() if option in kind.keys}
    shared = {option: value for option, value in env.items() if option not in ("type", *kind.keys)}
    made = {"env": None, **_as_options(env["type"], own), **shared}
    for option, value in options.items():
        if option == "env" or value is None or value == _DEFAULTS.get(option):
            continue
        if option in ALIASES:
            raise ConfigError(f"{name} and `{option}` both say who answers the model: leave one of them out.")
        if option in made:
            raise ConfigError(f"`{option}` is set both in {name} and beside it: leave one of them out.")
    return {**options, **made}


def _as_options(name: str, own: dict[str, Any]) -> dict[str, Any]:
    """A type's own keys as options of a run; those of games have none of their own and stay a mapping in `env`."""
    kind = TYPES[name]
    if name == "verifiers":
        return {"env": f"{VERIFIERS}{own['name']}", "env_config": own.get("config")}
    if kind.option is not None:
        return {kind.option: own[kind.keys[0]] if len(kind.keys) == 1 else own}
    return {"env": {"type": name, **own}} if own else {}


_DEFAULTS = {field.name: field.default for field in fields(RunOptions)}
