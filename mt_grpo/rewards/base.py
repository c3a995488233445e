"""The classes of rewards to subclass, the wrappers around plain reward functions, and the rewards a recipe lists."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

from mt_grpo.errors import UserError, refuse_first, users_code
from mt_grpo.imports import Registry, check_name, did_you_mean, import_object, unknown_option
from mt_grpo.media import part_text
from mt_grpo.options.rules import unknown_reward
from mt_grpo.options.values import is_bare, parse_reward
from mt_grpo.trajectory import Row, Trajectory, Turn

_PlainFunction = Callable[..., "list[float | None] | Awaitable[list[float | None]]"]
"""A TRL reward function: `f(prompts, completions, **columns) -> list[float | None]`, sync or async."""

Score = float | None | Awaitable[float | None]
"""What `score` returns: the reward, or `None` where it does not apply; a coroutine of it with `async def`."""

NOT_COLUMNS = ("prompt", "completion", "prompts", "completions", "completion_ids")
"""Columns that do not reach a TRL reward function: what was asked and answered has these names, or is for them."""


@runtime_checkable
class Adapter(Protocol):
    """An environment that stands for one of the user's, which reward functions get instead of it."""

    user_environment: Any


class RewardFunc(ABC):
    """
    Judges trajectories. Subclass `TurnReward` or `OutcomeReward`, never this class itself.

    Attributes:
        weight (`float`, *optional*, defaults to `1.0`): Factor of this reward in the weighted sum.
        maximum (`float`, *optional*, defaults to `1.0`): Largest value a trajectory can earn; reports show its share.
        name (`str`, *optional*, defaults to the name of the class): Name in logs and in `Trajectory.rewards`.
    """

    weight: float = 1.0
    maximum: float = 1.0
    name: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @abstractmethod
    def score(self, *args: Any, **row: Any) -> Score:
        """The reward, or `None` where it does not apply. May be `async def`."""


class TurnReward(RewardFunc):
    """
    Judges one turn by the trajectory up to it. Later turns must not change the reward: rules that credit single turns
    would take what the policy does afterwards for what the turn has earned.
    """

    @abstractmethod
    def score(self, turn: Turn, trajectory: Trajectory, *args: Any, **row: Any) -> Score:
        """
        The reward of a turn of a finished trajectory, given the columns of its row; `None` where it does not apply.
        May be `async def`.
        """


class StateScore(RewardFunc):
    """
    Says how good the state is that a turn leads to, by the trajectory up to it: a baseline, never a reward. Any scale
    will do, since what a score is worth is fitted on other groups (see the credit rule `state_baseline`).
    """

    @abstractmethod
    def score(self, turn: Turn, trajectory: Trajectory, *args: Any, **row: Any) -> Score:
        """
        The score of the state after a turn of a finished trajectory, given the columns of its row; `None` where there
        is none. Later turns must not change it: a baseline must not know what comes. May be `async def`.
        """


class OutcomeReward(RewardFunc):
    """Judges a whole trajectory."""

    collective: bool = False
    """Whether the processes of a run score together: each is called as often as the others, before other rewards."""

    @abstractmethod
    def score(self, trajectory: Trajectory, *args: Any, **row: Any) -> Score:
        """
        The reward of a finished trajectory, given the columns of its row; `None` where it does not apply. May be
        `async def`.
        """


class FunctionReward(OutcomeReward):
    """
    A plain TRL reward function as an outcome reward. It is called once for the whole batch, as TRL does: with texts
    where the prompts of the dataset are text, else with messages.

    Args:
        function (`Callable`): `f(prompts, completions, **columns) -> list[float | None]`, sync or async. One with a
            parameter `environments` gets the environments of the conversations.
    """

    brings: tuple[str, ...] = ()
    """Arguments of its own, beside what TRL gives and the columns."""

    def __init__(self, function: _PlainFunction) -> None:
        self.function = function
        self.takes_environments = _takes(function, "environments")
        self.name = getattr(function, "__name__", type(function).__name__)  # a partial or an object has none

    async def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        """Scores a batch of one."""
        return (await self.score_batch([trajectory], [row]))[0]

    def score_batch(
        self,
        trajectories: list[Trajectory],
        rows: list[Row],
        extra: dict[str, Any] | None = None,
    ) -> Awaitable[list[float | None]]:
        """
        Calls the function once for the whole batch, with columns as lists; awaited, it gives a reward per trajectory.
        """
        rewards = self.function(**{**self.arguments(trajectories, rows), **(extra or {})})
        return _counted(rewards, len(trajectories))

    def score_nothing(self) -> None:
        """Called in place of `score_batch` where this process has no conversation to score."""

    def arguments(self, trajectories: list[Trajectory], rows: list[Row]) -> dict[str, object]:
        """What the function is called with, as `score_batch` is."""
        columns = {key: [row[key] for row in rows] for key in rows[0] if key not in NOT_COLUMNS}
        given = [trajectory.environment for trajectory in trajectories]
        environments = [each.user_environment if isinstance(each, Adapter) else each for each in given]
        if self.takes_environments and any(environment is not None for environment in environments):
            columns["environments"] = environments
        return {
            "prompts": [each.prompt if each.texts is None else each.texts[0] for each in trajectories],
            "completions": [each.completion_in_trl if each.texts is None else each.texts[1] for each in trajectories],
            "completion_ids": [completion_ids(trajectory) for trajectory in trajectories],
            **columns,
        }


class ReadsAnswer:
    """A reward that takes the right answer from a column. All answers of a dataset are looked at before any work."""

    column: str = "answer"

    @abstractmethod
    def right_answer(self, value: object) -> object:
        """What the reward compares with, from a value of the column; `ValueError` where there is nothing."""


class ScoreFunction(OutcomeReward):
    """
    A reward function in verl's form, `compute_score(data_source, solution_str, ground_truth, extra_info)`, as an
    outcome reward. It is called for each conversation, with as many of the four as it takes.

    - `solution_str`: all that was said after the prompt, as text.
    - `ground_truth`: the column of that name, or `ground_truth` of the column `reward_model`, as in verl's rows.
    - `data_source`, `extra_info`: the columns of these names, or `None`.
    """

    SOLUTION = ("solution_str", "predict_str")
    """Names of the parameter by which such a function is known; the second is that of verl's geo3k."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    async def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        said = [message.get("content") or "" for message in trajectory.completion]
        text = "\n".join(each if isinstance(each, str) else "\n".join(map(part_text, each)) for each in said)
        given = {name: row.get(name) for name in ("data_source", "extra_info")} | {"ground_truth": self.truth(row)}
        given |= dict.fromkeys(self.SOLUTION, text)
        found: Any = self.function(**{name: value for name, value in given.items() if _takes(self.function, name)})
        found = await found if inspect.isawaitable(found) else found
        score: float | None = found["score"] if isinstance(found, Mapping) else found
        return score

    @classmethod
    def fits(cls, function: Any) -> bool:
        """Whether a function is in this form."""
        parameters = _parameters(function)
        return "ground_truth" in parameters and any(name in parameters for name in cls.SOLUTION)

    @staticmethod
    def truth(row: Row) -> object:
        """The right answer of a row; `KeyError` where it has none."""
        return row["ground_truth"] if "ground_truth" in row else row["reward_model"]["ground_truth"]


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """What a function takes; nothing for what is no function, or is written in C and does not say it."""
    try:
        return inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return {}


def _takes(function: _PlainFunction, name: str) -> bool:
    parameters = _parameters(function)
    return name in parameters or any(item.kind is item.VAR_KEYWORD for item in parameters.values())


async def _counted(rewards: object, number: int) -> list[float | None]:
    if inspect.isawaitable(rewards):
        rewards = await rewards
    if isinstance(rewards, (str, bytes, Mapping)) or not isinstance(rewards, Iterable):
        raise TypeError(f"it returned {rewards!r:.80}: return a list of numbers, one for each of {number} completions")
    listed = list(rewards)
    if len(listed) != number:
        raise ValueError(f"it returned {len(listed)} rewards for {number} completions")
    return listed


def completion_ids(trajectory: Trajectory) -> list[int]:
    """Token ids after the first context, in the first token sequence, with tool results but their images."""
    for sequence in trajectory.tree.sequences()[:1]:
        start = next((t for t, turn in enumerate(sequence.turns) if turn >= 0), len(sequence.turns))
        return [token for token in sequence.tokens[start:] if token >= 0]
    return []


Judge = TypeVar("Judge", bound=Callable[..., Any])

REWARDS: Registry[RewardFunc | type[RewardFunc]] = Registry("reward", "mt_grpo.rewards")
"""The rewards that a recipe can list by name."""

_KINDS: dict[str, type[RewardFunc]] = {"turn": TurnReward, "outcome": OutcomeReward, "state": StateScore}
_OPTIONS = {"turn": "turn_reward_funcs", "outcome": "outcome_reward_funcs", "state": "state_score"}
"""The option that names those of a kind."""


class RewardListError(UserError, ValueError):
    """A list of rewards that cannot be used. The message is one sentence fit for the user."""


def reward(name: str) -> Callable[[Judge], Judge]:
    """
    Registers a reward under its name in recipes, logs and `Trajectory.rewards`: a `TurnReward` or `OutcomeReward` that
    needs no arguments, or a plain TRL reward function. `RegistrationError` if the name is no word, or another file has
    registered it.
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
    The rewards of `turn_reward_funcs`, `outcome_reward_funcs` or `state_score`: names, paths, mappings of a name and
    arguments, classes, objects, and plain TRL reward functions as outcome rewards.
    """
    rewards: dict[str, RewardFunc] = {}
    for entry in entries:
        reward = _load(entry, kind)
        what, unnamed = f"The {kind} reward {reward.name!r:.80}", not isinstance(reward.name, str)
        refuse_first(
            (unnamed, f"The {kind} reward {type(reward).__name__} has the `name` {reward.name!r:.80}: give it text."),
            (not unnamed and reward.name in rewards, f"{what} is listed twice: give one another `name`."),
            *(
                (
                    not isinstance(value, Real) or not isfinite(value),
                    f"{what} has the `{number}` {value!r:.80}: set a finite number.",
                )
                for number, value in (("weight", reward.weight), ("maximum", reward.maximum))
            ),
            error=RewardListError,
        )
        rewards[reward.name] = reward
    return list(rewards.values())


def _load(entry: Any, kind: str) -> RewardFunc:
    value, options = parse_reward(entry)
    label = value if isinstance(value, str) else getattr(value, "name", getattr(value, "__name__", str(value)))
    if isinstance(value, str):
        if is_bare(value) and value not in REWARDS:
            raise RewardListError(unknown_reward(value, kind, REWARDS))
        value = REWARDS[value] if is_bare(value) else import_object(value, what=f"{kind} reward")
    parameters = inspect.signature(value).parameters.values() if options and isinstance(value, type) else []
    known = [item.name for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters)
    if not takes_any and (unknown := next((option for option in options if option not in known), None)) is not None:
        raise RewardListError(unknown_option(f"The {kind} reward {label!r}", unknown, known))
    reward_class = value if isinstance(value, type) else type(value)
    if issubclass(reward_class, _KINDS[kind]):
        return _instantiate(value, options, label, kind) if isinstance(value, type) else value
    subclass = f"subclass {_KINDS[kind].__name__}"
    refuse_first(
        *(
            (issubclass(reward_class, cls), f"{label!r} is a reward for {other}s: list it in `{_OPTIONS[other]}`.")
            for other, cls in _KINDS.items()
        ),
        (
            isinstance(value, type | RewardFunc) or not callable(value),
            f"The {kind} reward {label!r} is not a reward: {subclass}.",
        ),
        (
            kind != "outcome",
            f"The {kind} reward {label!r} is a plain function, which judges whole completions: {subclass}, or list it "
            "in `outcome_reward_funcs`.",
        ),
        error=RewardListError,
    )
    return ScoreFunction(value) if ScoreFunction.fits(value) else FunctionReward(value)


def _instantiate(reward_class: type[RewardFunc], options: dict[str, Any], label: str, kind: str) -> RewardFunc:
    if inspect.isabstract(reward_class):
        methods = sorted(reward_class.__abstractmethods__)
        own = [name for name in vars(reward_class) if inspect.isfunction(getattr(reward_class, name))]
        raise RewardListError(
            f"The {kind} reward {label!r} has no method `{methods[0]}`{did_you_mean(methods[0], own)}: define it in "
            "its class."
        )
    how = f"with the options {options!r}" if options else "without arguments"
    mend = "" if options else f": give them with its name, as `{{name: {label}, ...}}`, or list an instance"
    with users_code(f"The {kind} reward {label!r} cannot be made {how}", RewardListError, mend):
        return reward_class(**options)
