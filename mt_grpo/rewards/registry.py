"""The rewards that a recipe lists: by name, by dotted path or as objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any, Literal, TypeVar, cast

from mt_grpo.errors import UserError
from mt_grpo.imports import Registry, check_name, did_you_mean, import_object
from mt_grpo.options.rules import unknown_reward
from mt_grpo.options.values import is_bare, parse_reward
from mt_grpo.rewards.base import FunctionReward, OutcomeReward, RewardFunc, ScoreFunction, StateScore, TurnReward

Judge = TypeVar("Judge", bound=Callable[..., Any])

REWARDS: Registry[RewardFunc | type[RewardFunc]] = Registry("reward", "mt_grpo.rewards")
"""The rewards that a recipe can list by name."""

KINDS: dict[str, type[RewardFunc]] = {"turn": TurnReward, "outcome": OutcomeReward, "state": StateScore}
OPTIONS = {"turn": "turn_reward_funcs", "outcome": "outcome_reward_funcs", "state": "state_score"}
"""The option that names those of a kind."""


class RewardListError(UserError, ValueError):
    """A list of rewards that cannot be used. The message is one sentence fit for the user."""


def reward(name: str) -> Callable[[Judge], Judge]:
    """
    Registers a reward: a `TurnReward` or `OutcomeReward` that needs no arguments, or a plain TRL reward function.

    Args:
        name (`str`): Its name in recipes, logs and `Trajectory.rewards`.

    Raises:
        RegistrationError: If the name is no word, or another file has registered it.
    """
    check_name(name, "reward")

    def register(thing: Judge) -> Judge:
        # a class that is no reward is refused where it is listed
        entry = cast(type[RewardFunc], thing) if isinstance(thing, type) else FunctionReward(thing)
        entry.name = name
        REWARDS.add(name, entry, thing.__module__)
        return thing

    return register


def load_rewards(
    entries: Sequence[str | Mapping[str, Any] | Callable[..., Any] | RewardFunc | type[RewardFunc]],
    kind: Literal["turn", "outcome", "state"],
) -> list[RewardFunc]:
    """
    Turns the entries of `turn_reward_funcs`, `outcome_reward_funcs` or `state_score` into reward objects.

    Args:
        entries (`Sequence`): Each is a registered name, a path for `import_object`, a `RewardFunc`, a subclass of it
            that needs no arguments, a mapping of the `name` or path of a subclass and its arguments, or (outcome
            rewards only) a plain TRL reward function.
        kind (`str`): `"turn"`, `"outcome"` or `"state"`.

    Raises:
        ValueError: If an entry is not a reward, is a reward of the other kind, has the name of an earlier entry, or
            does not take its arguments.
    """
    rewards: dict[str, RewardFunc] = {}
    for entry in entries:
        reward = _load(entry, kind)
        if reward.name in rewards:
            raise RewardListError(f"The {kind} reward {reward.name!r} is listed twice: give one another `name`.")
        for number in ("weight", "maximum"):
            value = getattr(reward, number)
            if not isinstance(value, Real) or not isfinite(value):
                raise RewardListError(
                    f"The {kind} reward {reward.name!r} has the `{number}` {value!r:.80}: set a finite number."
                )
        rewards[reward.name] = reward
    return list(rewards.values())


def _load(entry: Any, kind: str) -> RewardFunc:
    entry, options = parse_reward(entry)
    value = _resolve(entry, kind) if isinstance(entry, str) else entry
    label = entry if isinstance(entry, str) else getattr(entry, "name", getattr(entry, "__name__", str(entry)))
    if options:
        _check_options(value, options, label, kind)
    reward_class = value if isinstance(value, type) else type(value)
    if issubclass(reward_class, KINDS[kind]):
        return _instantiate(value, options, label, kind) if isinstance(value, type) else value
    for other in KINDS.keys() - {kind}:
        if issubclass(reward_class, KINDS[other]):
            raise RewardListError(f"{label!r} is a reward for {other}s: list it in `{OPTIONS[other]}`.")
    if isinstance(value, type | RewardFunc) or not callable(value):
        raise RewardListError(f"The {kind} reward {label!r} is not a reward: subclass {KINDS[kind].__name__}.")
    if kind != "outcome":
        raise RewardListError(
            f"The {kind} reward {label!r} is a plain function, which judges whole completions: subclass "
            f"{KINDS[kind].__name__}, or list it in `outcome_reward_funcs`."
        )
    return ScoreFunction(value) if ScoreFunction.fits(value) else FunctionReward(value)


def _resolve(entry: str, kind: str) -> Any:
    if not is_bare(entry):
        return import_object(entry, what=f"{kind} reward")
    if entry not in REWARDS:
        raise RewardListError(unknown_reward(entry, kind, REWARDS))
    return REWARDS[entry]


def _check_options(value: Any, options: dict[str, Any], label: str, kind: str) -> None:
    """Whether what a mapping names is a class whose parameters the options are."""
    parameters = inspect.signature(value).parameters.values() if isinstance(value, type) else []
    known = [item.name for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters)
    for option in options:
        if option not in known and not takes_any:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            raise RewardListError(
                f"The {kind} reward {label!r} has no option {option!r}{did_you_mean(option, known)}: {has}."
            )


def _instantiate(reward_class: type[RewardFunc], options: dict[str, Any], label: str, kind: str) -> RewardFunc:
    try:
        return reward_class(**options)
    except UserError:
        raise
    except Exception as error:  # whatever the user's class raises
        if options:
            raise RewardListError(
                f"The {kind} reward {label!r} cannot be made with the options {options!r} "
                f"({type(error).__name__}: {error})."
            ) from error
        raise RewardListError(
            f"The {kind} reward {label!r} is a class that cannot be made without arguments "
            f"({type(error).__name__}: {error}): give them with its name, as `{{name: {label}, ...}}`, or list an "
            "instance."
        ) from error
