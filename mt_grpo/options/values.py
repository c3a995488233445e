"""
How options that take names or mappings are read: from a recipe, a command line (a mapping as JSON) or a
script. Plain values, as in `rules`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml
from annotated_types import Ge, Gt, MinLen
from typing_extensions import TypedDict

from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean

VERIFIERS = "verifiers:"
"""What `env` begins with where it names an environment of verifiers."""


Text = Annotated[str, MinLen(1)]


class _UserNeeds(TypedDict):
    base_url: Text
    model: Text
    system_prompt: Text


class UserOptions(_UserNeeds, total=False):
    """Keys of `simulated_user`; see `mt_grpo.envs.simulated_user`."""

    api_key_env: str
    stop_phrase: Text
    max_turns: Annotated[int, Ge(1)]
    timeout: Annotated[float, Gt(0)]
    max_retries: Annotated[int, Ge(0)]
    request: Mapping[str, Any]


class AgentOptions(TypedDict, total=False):
    """Keys of `agent` as a mapping; it has one of the first two."""

    function: Text
    command: Text
    host: Text


DEFAULT_RULE: dict[str, Any] = {"name": "lambda_to_go", "lam": 0.8, "scales": "batch"}
"""The credit rule where none is chosen. benchmarks/reports/designs.md says why."""

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


def parse_reward(entry: object) -> tuple[Any, dict[str, Any]]:
    """
    A reward as a recipe, a command line (the mapping as JSON) or a script lists it: its name, path or object, and the
    options that it is made with.
    """
    given = _parse_braces(entry, "The reward")
    if not isinstance(given, Mapping):
        return given, {}
    if not isinstance(given.get("name"), str):
        raise ConfigError(
            f"The reward {dict(given)!r} has no name: give the name or the path of a reward class and its options, "
            "such as `{name: information_gain, column: answer}`."
        )
    return given["name"], {name: value for name, value in given.items() if name != "name"}


def chosen_rule(rule: str | dict[str, Any] | None, has_turn_rewards: bool) -> str | dict[str, Any]:
    """The credit rule of a run: the one that was chosen, or a default."""
    if rule is not None:
        return rule
    return dict(DEFAULT_RULE) if has_turn_rewards else OUTCOME_RULE


def parse_rule(rule: object) -> str | dict[str, Any]:
    """A credit rule as a recipe, a command line (the mapping as JSON) or a script gives it."""
    given = _parse_braces(rule, "The credit rule")
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        return dict(given)
    raise ConfigError(
        f"`advantage_estimator` is {given!r}: give the name of a rule, or a mapping of its `name` and its options, "
        'such as `{"name": "mt_grpo", "turn_coef": 0.5}`.'
    )


def rule_name(rule: str | Mapping[str, Any]) -> str:
    """The name of a rule that `parse_rule` returned."""
    return rule if isinstance(rule, str) else rule["name"]


def parse_mapping(value: object, key: str) -> Any:
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


def _parse_braces(value: object, what: str) -> Any:
    """The mapping that a text in JSON stands for, where an option takes plain text too; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} {value!r} is not valid JSON ({error.msg} at character {error.pos}).") from error


def _validated(options: type, given: object, key: str) -> dict[str, Any]:
    """A mapping as pydantic takes it; else one sentence about the first thing that is wrong with it."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config  # not for `--help`: it takes a moment

    closed = with_config(ConfigDict(extra="forbid", strict=True))(options)
    try:
        return TypeAdapter(closed).validate_python(given)
    except ValidationError as error:
        wrong = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")  # likely of a missing key
    known = get_type_hints(options)
    needed = [key for key in known if key in options.__required_keys__]  # type: ignore[attr-defined]
    name = ".".join(map(str, wrong["loc"]))
    if wrong["type"] == "extra_forbidden":
        raise ConfigError(f"`{key}` has an unknown key {name!r}{did_you_mean(name, known)}.")
    if wrong["type"] == "missing":
        raise ConfigError(f"`{key}` has no `{name}`: it needs {', '.join(needed)}.")
    if not name:
        raise ConfigError(f"`{key}` is {given!r}: give a mapping of {', '.join(needed or known)}.")
    raise ConfigError(f"`{key}: {name}` is {wrong['input']!r}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}.")


def parse_user(user: object) -> dict[str, Any]:
    """A simulated user as a recipe, a command line (the mapping as JSON) or a script gives it."""
    user = parse_mapping(user, "simulated_user")
    if isinstance(user, Mapping):
        if "api_key" in user:
            raise ConfigError(
                "`simulated_user: api_key` would write a key into a file: put it into an environment variable, and "
                "name that in `api_key_env`."
            )
        user = {name: value for name, value in user.items() if value is not None}
    user = _validated(UserOptions, user, "simulated_user")
    if not user["base_url"].startswith(("http://", "https://")):
        raise ConfigError(
            f"`simulated_user: base_url` is {user['base_url']!r}: give a URL such as `http://127.0.0.1:8001/v1`."
        )
    for name in ("model", "messages", "stream"):
        if name in user.get("request", {}):
            raise ConfigError(f"`simulated_user: request` sets `{name}`, which is set for it: leave that out.")
    return user


def parse_agent(agent: object, key: str = "agent") -> dict[str, str]:
    """An agent as a recipe, a command line (the mapping as JSON) or a script gives it."""
    if isinstance(agent, str):
        agent = parse_mapping(agent, key) if agent.lstrip().startswith("{") else {"function": agent}
    forms = 'the path of a function, such as `my_agent.solve`, or `{command: "node agent.js"}`'
    if not isinstance(agent, Mapping):
        raise ConfigError(f"`{key}` is {agent!r}: give {forms}.")
    agent = _validated(AgentOptions, agent, key)
    if ("function" in agent) == ("command" in agent):
        raise ConfigError(f"`{key}` has to name one thing that runs: {forms}.")
    if "command" in agent:
        try:
            program = next(iter(shlex.split(agent["command"])), "")
        except ValueError as error:
            raise ConfigError(f"`{key}: command` cannot be split into words ({error}): close its quotes.") from error
        if shutil.which(program) is None:
            raise ConfigError(
                f"`{key}: command` begins with {program!r}, which is no program here: install it, or give its path."
            )
    return agent


def verifiers_name(env: object) -> str | None:
    """The name of the environment of verifiers that `env` stands for; `None` where it is none of verifiers'."""
    if not isinstance(env, str) or not env.startswith(VERIFIERS):
        return None
    name = env.removeprefix(VERIFIERS).strip()
    if not name:
        raise ConfigError(f"`env: {env}` names no environment: write `{VERIFIERS}NAME`.")
    return name


def parse_env_config(config: object, key: str = "env_config") -> dict[str, Any]:
    """The options of an environment as a recipe, a command line (the mapping as JSON) or a script gives them."""
    config = parse_mapping(config, key)
    if not isinstance(config, Mapping):
        raise ConfigError(f"`{key}` is {config!r}: give a mapping from names of options to values.")
    return dict(config)


def _parse_factories(given: object) -> Any:
    """A factory in TRL's form: its path or itself; or several by name, as a mapping or as one in JSON or YAML."""
    is_mapping = isinstance(given, str) and given.lstrip().startswith("{")
    return parse_mapping(given, "environment_factory") if is_mapping else given


PARSERS: dict[str, Callable[[Any], Any]] = {
    "environment_factory": _parse_factories,
    "agent": parse_agent,
    "env_config": parse_env_config,
    "simulated_user": parse_user,
    "advantage_estimator": parse_rule,
}
"""How the options that may be mappings are read."""
