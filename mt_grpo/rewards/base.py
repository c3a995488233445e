"""The classes of rewards to subclass, and the wrapper around plain TRL reward functions."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from mt_grpo.media import part_text
from mt_grpo.trajectory import Trajectory, Turn

PlainFunction = Callable[..., "list[float | None] | Awaitable[list[float | None]]"]
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
        Judges a turn; may be `async def`.

        Args:
            turn (`Turn`): The turn to judge.
            trajectory (`Trajectory`): The finished trajectory that it is part of.
            **row: The columns of the dataset row.

        Returns:
            `float` or `None`: The reward; `None` where it does not apply to this turn.
        """


class StateScore(RewardFunc):
    """
    Says how good the state is that a turn leads to, by the trajectory up to it: a baseline, never a reward. Any scale
    will do, since what a score is worth is fitted on other groups (see the credit rule `state_baseline`).
    """

    @abstractmethod
    def score(self, turn: Turn, trajectory: Trajectory, *args: Any, **row: Any) -> Score:
        """
        Scores the state after a turn; may be `async def`.

        Args:
            turn (`Turn`): The turn that leads to the state.
            trajectory (`Trajectory`): The finished trajectory that it is part of. Later turns must not change the
                score: a baseline must not know what comes.
            **row: The columns of the dataset row.

        Returns:
            `float` or `None`: The score; `None` where there is none.
        """


class OutcomeReward(RewardFunc):
    """Judges a whole trajectory."""

    collective: bool = False
    """Whether the processes of a run score together: each is called as often as the others, before other rewards."""

    @abstractmethod
    def score(self, trajectory: Trajectory, *args: Any, **row: Any) -> Score:
        """
        Judges a trajectory; may be `async def`.

        Args:
            trajectory (`Trajectory`): The finished trajectory.
            **row: The columns of the dataset row.

        Returns:
            `float` or `None`: The reward; `None` where it does not apply to this trajectory.
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

    def __init__(self, function: PlainFunction) -> None:
        self.function = function
        self.takes_environments = _takes(function, "environments")
        self.name = getattr(function, "__name__", type(function).__name__)  # a partial or an object has none

    async def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        """Scores a batch of one."""
        return (await self.score_batch([trajectory], [row]))[0]

    def score_batch(
        self,
        trajectories: list[Trajectory],
        rows: list[dict[str, Any]],
        extra: dict[str, Any] | None = None,
    ) -> Awaitable[list[float | None]]:
        """
        Calls the function once, for the whole batch.

        Args:
            trajectories (`list[Trajectory]`): The batch.
            rows (`list[dict]`): The dataset row of each; every column of the first row is passed as a list.
            extra (`dict`, *optional*): Further keyword arguments (`trainer_state`, `log_extra`, `log_metric`).

        Returns:
            An awaitable of `list[float | None]`: one reward per trajectory.

        Raises:
            ValueError: When awaited, if the function does not return one reward per trajectory.
        """
        rewards = self.function(**{**self.arguments(trajectories, rows), **(extra or {})})
        return _counted(rewards, len(trajectories))

    def score_nothing(self) -> None:
        """Called in place of `score_batch` where this process has no conversation to score."""

    def arguments(self, trajectories: list[Trajectory], rows: list[dict[str, Any]]) -> dict[str, Any]:
        """What the function is called with, as `score_batch` is."""
        columns = {key: [row[key] for row in rows] for key in rows[0] if key not in NOT_COLUMNS}
        environments = [_own(trajectory.environment) for trajectory in trajectories]
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
    def right_answer(self, value: Any) -> Any:
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
        try:
            parameters = inspect.signature(function, follow_wrapped=False).parameters
        except (TypeError, ValueError):  # no function, or one written in C
            return False
        return "ground_truth" in parameters and any(name in parameters for name in cls.SOLUTION)

    @staticmethod
    def truth(row: Mapping[str, Any]) -> Any:
        """The right answer of a row; `KeyError` where it has none."""
        return row["ground_truth"] if "ground_truth" in row else row["reward_model"]["ground_truth"]


def _own(environment: Any) -> Any:
    """The user's own environment, where ours only stands for it."""
    return environment.user_environment if isinstance(environment, Adapter) else environment


def _takes(function: PlainFunction, name: str) -> bool:
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except ValueError:  # a function written in C may not say what it takes
        return False
    return name in parameters or any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())


async def _counted(rewards: Any, number: int) -> list[float | None]:
    if inspect.isawaitable(rewards):
        rewards = await rewards
    if isinstance(rewards, (str, bytes, Mapping)) or not isinstance(rewards, Iterable):
        raise TypeError(f"it returned {rewards!r:.80}: return a list of numbers, one for each of {number} completions")
    listed = list(rewards)
    if len(listed) != number:
        raise ValueError(f"it returned {len(listed)} rewards for {number} completions")
    return listed


def completion_ids(trajectory: Trajectory) -> list[int]:
    """
    Token ids after the first context, in the trajectory's first token sequence; tool results are included, without
    their images.
    """
    for sequence in trajectory.tree.sequences()[:1]:
        start = next((t for t, turn in enumerate(sequence.turns) if turn >= 0), len(sequence.turns))
        return [token for token in sequence.tokens[start:] if token >= 0]
    return []
