"""What the options of one agent may say together: who answers the model, a scheduler, a simulated user."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose, did_you_mean

LOSS_SCALES = ("all", "last_round")
"""Which of a scheduler's responses are trained."""

PARTNERS = ("simulated_user", "interaction_config_file", "env", "environment_factory", "agent")
"""Options of which one at most says who answers the model's words."""


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


def check_partner(options: Mapping[str, Any], place: str = "") -> None:
    """
    Whether the options say once at most who answers the model's words.

    Args:
        options (`Mapping`): With `PARTNERS` among them.
        place (`str`, *optional*): Where they stand, for the error.

    Raises:
        ConfigError: If they say it twice.
    """
    given = [name for name in PARTNERS if options[name] is not None]
    if len(given) > 1:
        raise ConfigError(
            f"{place}`{given[0]}` and `{given[1]}` both say who answers the model: leave one of them out."
        )


def parse_user(user: Any) -> dict[str, Any]:
    """
    A simulated user as a recipe, a command line (the mapping as JSON) or a script gives it.

    Raises:
        ConfigError: If it is no mapping, or one of its keys or values is wrong.
    """
    if isinstance(user, str):
        try:
            user = json.loads(user)
        except json.JSONDecodeError as error:
            raise ConfigError(f"`simulated_user` is {user!r}, which is not a JSON mapping.") from error
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
    """
    An agent as a recipe, a command line (the mapping as JSON) or a script gives it.

    Args:
        agent (`str` or `Mapping`): A path of a function, or a mapping of `AGENT_OPTIONS`.
        key (`str`, *optional*): Where it stands, for errors.

    Raises:
        ConfigError: If it is neither, or its command names no program.
    """
    if isinstance(agent, str) and agent.lstrip().startswith("{"):
        try:
            agent = json.loads(agent)
        except json.JSONDecodeError as error:
            raise ConfigError(f"`{key}` is {agent!r}, which is not a JSON mapping.") from error
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


def check_agent(options: Mapping[str, Any], key: str = "") -> None:
    """
    Holds the options of one environment that may be an agent's or of verifiers against each other.

    Args:
        options (`Mapping`): `agent`, `env` and `env_config`, and what stands beside them.
        key (`str`, *optional*): Where it stands, for errors.

    Raises:
        ConfigError: If they contradict each other.
    """
    place = f" of `{key}`" if key else ""
    own = verifiers_name(options["env"]) is not None
    if options["env_config"] is not None:
        parse_env_config(options["env_config"], f"{key}: env_config" if key else "env_config")
        if not own:
            raise ConfigError(f"`env_config`{place} has an effect with `env: {VERIFIERS}NAME` only: leave it out.")
    if options["agent"] is not None:
        parse_agent(options["agent"], f"{key}: agent" if key else "agent")
    elif not own:
        return
    what, who = ("env", "an environment of verifiers") if own else ("agent", "an agent")
    for name in ("tools", "tools_config_file", "system_prompt", "max_env_steps"):
        if options[name]:
            raise ConfigError(
                f"`{name}` and `{what}`{place} are both set, and {who} brings its own tools, messages and end: "
                f"leave `{name}` out."
            )


def verifiers_name(env: Any) -> str | None:
    """
    The name of the environment of verifiers that `env` stands for; `None` where it is none of verifiers'.

    Raises:
        ConfigError: If it names none.
    """
    if not isinstance(env, str) or not env.startswith(VERIFIERS):
        return None
    name = env.removeprefix(VERIFIERS).strip()
    if not name:
        raise ConfigError(f"`env: {env}` names no environment: write `{VERIFIERS}NAME`.")
    return name


def parse_env_config(config: Any, key: str = "env_config") -> dict[str, Any]:
    """
    The options of an environment as a recipe, a command line (the mapping as JSON) or a script gives them.

    Raises:
        ConfigError: If they are no mapping.
    """
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            raise ConfigError(f"`{key}` is {config!r}, which is not a JSON mapping.") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"`{key}` is {config!r}: give a mapping from names of options to values.")
    return dict(config)


def check_scheduler(options: Mapping[str, Any], key: str = "") -> None:
    """
    Holds the options of one environment that may be a scheduler's against each other.

    Args:
        options (`Mapping`): `multi_turn_scheduler`, and what stands beside it.
        key (`str`, *optional*): Where it stands, for errors.

    Raises:
        ConfigError: If they contradict each other.
    """
    place = f" of `{key}`" if key else ""
    if options["multi_turn_scheduler"] is None:
        for name, default in (("max_turns", None), ("loss_scale", "all")):
            if options[name] != default:
                raise ConfigError(
                    f"`{name}`{place} has an effect with `multi_turn_scheduler` only: leave it out"
                    f"{', and set `max_env_steps`' if name == 'max_turns' else ''}."
                )
        return
    choose("loss_scale", options["loss_scale"], LOSS_SCALES)
    if options["max_turns"] is not None and not options["max_turns"] > 0:
        raise ConfigError(f"`max_turns`{place} is {options['max_turns']}; set a number above 0, or leave it out.")
    for name in ("tools", "tools_config_file", *PARTNERS):
        if options.get(name):
            raise ConfigError(
                f"`{name}` and `multi_turn_scheduler`{place} are both set, and a scheduler holds the conversation "
                "itself: leave one out."
            )
