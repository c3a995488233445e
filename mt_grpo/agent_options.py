"""What the options of one agent may say together: who answers the model, a scheduler, a simulated user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose, did_you_mean

LOSS_SCALES = ("all", "last_round")
"""Which of a scheduler's responses are trained."""

PARTNERS = ("simulated_user", "interaction_config_file", "env", "environment_factory")
"""Options of which one at most says who answers the model's words."""

BRANCH_RULE = "branch_to_go"
"""The credit rule of conversations that branch."""

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


def check_branches(options: Mapping[str, Any], rule: str) -> None:
    """
    Whether conversations can branch as the options say.

    Args:
        options (`Mapping`): With `branch_at`, `num_branches` and `num_generations` among them.
        rule (`str`): Name of the credit rule.

    Raises:
        ConfigError: If they cannot, or the credit rule is not the one for branches.
    """
    at, number, group = options["branch_at"], options["num_branches"], options["num_generations"]
    if at is None and rule == BRANCH_RULE:
        raise ConfigError(
            f"`advantage_estimator: {rule}` is the rule of conversations that branch: set `branch_at`, or choose "
            "`reward_to_go`."
        )
    if at is None:
        return
    if at < 1:
        raise ConfigError(f"`branch_at` is {at}; it counts the turns that branches share, so set 1 or more.")
    if number < 2:
        raise ConfigError(f"`num_branches` is {number}; set 2 or more, or leave `branch_at` out.")
    if group % number or group == number:
        raise ConfigError(
            f"`num_generations: {group}` does not make two conversations or more of `num_branches: {number}` each: "
            f"set it to {2 * number} or a larger multiple of {number}."
        )
    if rule != BRANCH_RULE:
        raise ConfigError(
            f"`branch_at` needs `advantage_estimator: {BRANCH_RULE}`: {rule!r} does not know which members of a group "
            "share turns, and would be biased."
        )


def check_trunks(options: Mapping[str, Any], rows: int) -> None:
    """
    Whether all branches of a conversation are on one process.

    Args:
        options (`Mapping`): With `branch_at` and `num_branches` among them.
        rows (`int`): Conversations that a process samples at once.

    Raises:
        ConfigError: If they are not.
    """
    if options["branch_at"] is not None and rows % options["num_branches"]:
        raise ConfigError(
            f"`num_branches: {options['num_branches']}` does not divide the {rows} conversations that a process "
            "samples at once, and a conversation branches on one process: change it, or "
            "`per_device_train_batch_size`."
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
