"""
How options that take names or mappings are read: from a recipe, a command line (a mapping as JSON) or a
script. Plain values, as in `rules`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean

VERIFIERS = "verifiers:"
"""What `env` begins with where it names an environment of verifiers."""

AGENT_OPTIONS = ("function", "command", "host")
"""Keys of `agent` as a mapping; it has one of the first two."""

USER_OPTIONS: dict[str, tuple[type, ...]] = {
    "base_url": (str,),
    "model": (str,),
    "system_prompt": (str,),
    "api_key_env": (str,),
    "stop_phrase": (str,),
    "max_turns": (int,),
    "timeout": (int, float),
    "max_retries": (int,),
    "request": (Mapping,),
}
"""Keys of `simulated_user`, the first three needed, and what they take; see `mt_grpo.envs.simulated_user`."""

DEFAULT_RULE: dict[str, Any] = {"name": "lambda_to_go", "lam": 0.8, "scales": "batch"}
"""The credit rule where none is chosen. docs/designs.md says why."""

OUTCOME_RULE = "grpo_or"
"""The same without turn rewards: TRL's, which gives the outcome to every token of a conversation."""


def is_bare(name: str) -> bool:
    """Whether it is a name in a registry, and no path of a module or a file."""
    return "." not in name and ":" not in name


def names_model(name: str) -> bool:
    """Whether an outcome reward is named that is a reward model: a folder with one, or an id on the Hub."""
    if ":" in name or name.endswith(".py"):  # a path of something in a file, or JSON
        return False
    return "/" in name or (Path(name) / "config.json").is_file()


def parse_reward(entry: Any) -> tuple[Any, dict[str, Any]]:
    """
    A reward as a recipe, a command line (the mapping as JSON) or a script lists it: its name, path or object, and the
    options that it is made with.
    """
    if isinstance(entry, str) and entry.lstrip().startswith("{"):
        try:
            entry = json.loads(entry)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"The reward {entry!r} is not valid JSON ({error.msg} at character {error.pos})."
            ) from error
    if not isinstance(entry, Mapping):
        return entry, {}
    if not isinstance(entry.get("name"), str):
        raise ConfigError(
            f"The reward {dict(entry)!r} has no name: give the name or the path of a reward class and its options, "
            "such as `{name: information_gain, column: answer}`."
        )
    return entry["name"], {name: value for name, value in entry.items() if name != "name"}


def chosen_rule(rule: str | dict[str, Any] | None, has_turn_rewards: bool) -> str | dict[str, Any]:
    """The credit rule of a run: the one that was chosen, or a default."""
    if rule is not None:
        return rule
    return dict(DEFAULT_RULE) if has_turn_rewards else OUTCOME_RULE


def parse_rule(rule: Any) -> str | dict[str, Any]:
    """
    A credit rule as a recipe, a command line (the mapping as JSON) or a script gives it.

    Raises:
        ConfigError: If it is neither a name nor a mapping with one.
    """
    if isinstance(rule, str) and rule.lstrip().startswith("{"):
        try:
            rule = json.loads(rule)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"`advantage_estimator` is {rule!r}, which is not valid JSON ({error.msg} at character {error.pos})."
            ) from error
    if isinstance(rule, Mapping) and isinstance(rule.get("name"), str):
        return dict(rule)
    if isinstance(rule, str):
        return rule
    raise ConfigError(
        f"`advantage_estimator` is {rule!r}: give the name of a rule, or a mapping of its `name` and its options, "
        'such as `{"name": "mt_grpo", "turn_coef": 0.5}`.'
    )


def rule_name(rule: str | Mapping[str, Any]) -> str:
    """The name of a rule that `parse_rule` returned."""
    return rule if isinstance(rule, str) else rule["name"]


def parse_mapping(value: Any, key: str) -> Any:
    """
    What a text stands for where an option takes a mapping, as on the command line: JSON, or YAML. Any other value is
    returned as it is.
    """
    if not isinstance(value, str):
        return value
    with contextlib.suppress(json.JSONDecodeError):  # YAML takes the number 1e-3 for a text
        return json.loads(value)
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"`{key}` is {value!r}, which is not a JSON mapping.") from None


def parse_user(user: Any) -> dict[str, Any]:
    """A simulated user as a recipe, a command line (the mapping as JSON) or a script gives it."""
    user = parse_mapping(user, "simulated_user")
    needed = list(USER_OPTIONS)[:3]
    if not isinstance(user, Mapping):
        raise ConfigError(f"`simulated_user` is {user!r}: give a mapping of {', '.join(needed)} and further options.")
    if "api_key" in user:
        raise ConfigError(
            "`simulated_user: api_key` would write a key into a file: put it into an environment variable, and name "
            "that in `api_key_env`."
        )
    for name, value in user.items():
        if name not in USER_OPTIONS:
            raise ConfigError(f"`simulated_user` has an unknown key {name!r}{did_you_mean(name, USER_OPTIONS)}.")
        kinds = USER_OPTIONS[name]
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            wanted = {str: "text", int: "a whole number", float: "a number", Mapping: "a mapping"}[kinds[-1]]
            raise ConfigError(f"`simulated_user: {name}` is {value!r}: give {wanted}.")
    for name in needed:
        if not user.get(name):
            raise ConfigError(f"`simulated_user` has no `{name}`: it needs {', '.join(needed)}.")
    if not user["base_url"].startswith(("http://", "https://")):
        raise ConfigError(
            f"`simulated_user: base_url` is {user['base_url']!r}: give a URL such as `http://127.0.0.1:8001/v1`."
        )
    for name in ("model", "messages", "stream"):
        if name in (user.get("request") or {}):
            raise ConfigError(f"`simulated_user: request` sets `{name}`, which is set for it: leave that out.")
    if user.get("stop_phrase") == "":
        raise ConfigError("`simulated_user: stop_phrase` is empty, which every reply has: give one, or leave it out.")
    for name, least in (("max_turns", 1), ("max_retries", 0)):
        if user.get(name) is not None and user[name] < least:
            raise ConfigError(f"`simulated_user: {name}` is {user[name]}: set {least} or more.")
    if user.get("timeout") is not None and not user["timeout"] > 0:
        raise ConfigError(f"`simulated_user: timeout` is {user['timeout']}: set seconds above 0.")
    return {name: value for name, value in user.items() if value is not None}


def parse_agent(agent: Any, key: str = "agent") -> dict[str, str]:
    """An agent as a recipe, a command line (the mapping as JSON) or a script gives it."""
    if isinstance(agent, str) and agent.lstrip().startswith("{"):
        agent = parse_mapping(agent, key)
    if isinstance(agent, str):
        agent = {"function": agent}
    forms = 'the path of a function, such as `my_agent.solve`, or `{command: "node agent.js"}`'
    if not isinstance(agent, Mapping):
        raise ConfigError(f"`{key}` is {agent!r}: give {forms}.")
    for name, value in agent.items():
        if name not in AGENT_OPTIONS:
            raise ConfigError(f"`{key}` has an unknown key {name!r}{did_you_mean(name, AGENT_OPTIONS)}.")
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"`{key}: {name}` is {value!r}: give text.")
    if ("function" in agent) == ("command" in agent):
        raise ConfigError(f"`{key}` has to name one thing that runs: {forms}.")
    if "command" in agent:
        try:
            program = shlex.split(agent["command"])[0]
        except ValueError as error:
            raise ConfigError(f"`{key}: command` cannot be split into words ({error}): close its quotes.") from error
        if shutil.which(program) is None:
            raise ConfigError(
                f"`{key}: command` begins with {program!r}, which is no program here: install it, or give its path."
            )
    return dict(agent)


def verifiers_name(env: Any) -> str | None:
    """The name of the environment of verifiers that `env` stands for; `None` where it is none of verifiers'."""
    if not isinstance(env, str) or not env.startswith(VERIFIERS):
        return None
    name = env.removeprefix(VERIFIERS).strip()
    if not name:
        raise ConfigError(f"`env: {env}` names no environment: write `{VERIFIERS}NAME`.")
    return name


def parse_env_config(config: Any, key: str = "env_config") -> dict[str, Any]:
    """The options of an environment as a recipe, a command line (the mapping as JSON) or a script gives them."""
    config = parse_mapping(config, key)
    if not isinstance(config, Mapping):
        raise ConfigError(f"`{key}` is {config!r}: give a mapping from names of options to values.")
    return dict(config)
