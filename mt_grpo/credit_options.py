"""Rules over the options of rewards and credit, which need no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose

SIGNALLESS = ("keep", "resample", "leave_out")
"""What `groups_without_signal` can say, see `mt_grpo.training.reward_batch`."""

BRANCH_RULE = "branch_to_go"
"""The credit rule of conversations that branch."""


def check_signalless(options: Mapping[str, Any]) -> None:
    """
    Whether `groups_without_signal` is known, and goes together with the other options.

    Raises:
        ConfigError: If not.
    """
    choice = options["groups_without_signal"]
    choose("groups_without_signal", choice, SIGNALLESS)
    for name in ("entropy_coef", "use_adaptive_entropy"):
        if choice != "keep" and options[name]:
            raise ConfigError(
                f"`groups_without_signal: {choice}` takes groups out of the loss, and `{name}: {options[name]}` "
                "learns from all that is sampled: leave one of them out."
            )


def check_rule(options: Mapping[str, Any], rule: str) -> None:
    """
    Whether the options have what a credit rule needs.

    Args:
        options (`Mapping`): With `turn_advantage_coef` and `state_score` among them.
        rule (`str`): Name of the credit rule.

    Raises:
        ConfigError: If not.
    """
    coef = options["turn_advantage_coef"]
    if coef is not None and not math.isfinite(coef):
        raise ConfigError(f"`turn_advantage_coef` is {coef}: give a finite number.")
    if rule == "state_baseline" and options["state_score"] is None:
        raise ConfigError(
            "`advantage_estimator: state_baseline` needs a score of states: name a `StateScore` in `state_score`."
        )


def check_branches(options: Mapping[str, Any], rule: str) -> None:
    """
    Whether conversations can branch as the options say.

    Args:
        options (`Mapping`): With `branch_at`, `num_branches`, `num_generations`, `max_env_steps` and
            `environments` among them.
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
    steps = options["max_env_steps"]
    if steps is not None and at > steps and options["environments"] is None:  # else each may have its own number
        raise ConfigError(
            f"`branch_at: {at}` is never reached, since a conversation has {steps + 1} turns at most with "
            f"`max_env_steps: {steps}`: lower the first, or raise the second."
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


def parse_reward(entry: Any) -> tuple[Any, dict[str, Any]]:
    """
    A reward as a recipe, a command line (the mapping as JSON) or a script lists it: its name, path or object, and the
    options that it is made with.

    Raises:
        ConfigError: If it is a mapping without a `name`, or JSON that cannot be read.
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
