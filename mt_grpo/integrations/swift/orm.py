"""ms-swift's reward classes as outcome rewards: one value for a trajectory, whatever its records."""

from __future__ import annotations

import inspect
import re
from functools import partialmethod
from typing import Any

from mt_grpo.integrations.swift.env import SchedulerEnv
from mt_grpo.rewards import REWARDS, FunctionReward
from mt_grpo.rewards.gsm8k import find_number
from mt_grpo.rewards.triviaqa import normalize_answer
from mt_grpo.trajectory import Message, Trajectory


class ORM(FunctionReward):
    """
    An outcome reward as ms-swift's: subclass it with `__call__(self, completions, **kwargs) -> list[float]`, which may
    be `async`. It is called once for a batch.

    - `completions`: the words of each trajectory's last record, as text.
    - columns of the rows, each a list; and `prompts`, `completion_ids` as TRL gives them.
    - `messages`: the messages of each last record; `rollout_infos`: what its scheduler told.
    - `request_id`: an identifier of each trajectory; `trajectory_inputs[request_id]`: its records in order, each a
      dictionary of the row's columns, `messages`, `rollout_infos` and `request_id`.
    """

    brings = ("messages", "rollout_infos", "request_id", "trajectory_inputs")
    takes_environments = False

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    @property
    def function(self) -> Any:
        """What `FunctionReward` calls."""
        return self.__call__

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        """The rewards of a batch."""
        raise NotImplementedError(f"{type(self).__name__} defines no `__call__`.")

    def arguments(self, trajectories: list[Trajectory], rows: list[dict[str, Any]]) -> dict[str, Any]:
        """What `__call__` is given."""
        inputs = {trajectory.session: _records(trajectory) for trajectory in trajectories}
        last = [inputs[trajectory.session][-1] for trajectory in trajectories]
        return {
            **super().arguments(trajectories, rows),
            "completions": [_words(record["messages"]) for record in last],
            "messages": [record["messages"] for record in last],
            "rollout_infos": [record["rollout_infos"] for record in last],
            "request_id": [trajectory.session for trajectory in trajectories],
            "trajectory_inputs": inputs,
        }


class AsyncORM(ORM):
    """An `ORM` whose `__call__` is `async`. All rewards of a batch are asked at once."""

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        """The rewards of a batch."""
        raise NotImplementedError(f"{type(self).__name__} defines no `__call__`.")


def _records(trajectory: Trajectory) -> list[dict[str, Any]]:
    environment = trajectory.environment
    whole = [(trajectory.messages, trajectory.info)]
    records = environment.records if isinstance(environment, SchedulerEnv) and environment.records else whole
    columns = {**trajectory.row, "request_id": trajectory.session}
    return [{**columns, "messages": messages, "rollout_infos": infos} for messages, infos in records]


def _words(messages: list[Message]) -> str:
    """What the assistant said last."""
    said = [message.get("content") or "" for message in messages if message["role"] == "assistant"]
    return said[-1] if said else ""


def register_orm(name: str, orm: type[ORM]) -> None:
    """Lets recipes name a reward class of a plugin in `outcome_reward_funcs`."""
    if orm is not Accuracy:  # whose name plugins have for rewards of their own
        given = inspect.signature(orm).parameters.get("args")
        if given is not None and given.default is given.empty:  # ms-swift's own trainer gives it
            orm.__init__ = partialmethod(orm.__init__, None)
        orm.name = name
        REWARDS.add(name, orm, orm.__module__)


_MARKED = re.compile(r"<answer>(.*?)</answer>|\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", re.DOTALL)


class Accuracy(ORM):
    r"""
    1.0 where the last answer equals the column `solution`, else 0.0. The answer stands in `<answer>` or `\boxed{}`,
    or is the last number. Two numbers are equal as numbers, other answers as text without case and punctuation; no
    algebra is done.
    """

    def __call__(self, completions: list[str], solution: list[Any], **kwargs: Any) -> list[float]:
        """The rewards of a batch."""
        return [float(is_right(said, str(right))) for said, right in zip(completions, solution, strict=True)]


def is_right(said: str, right: str) -> bool:
    """Whether some words give the answer of a solution; see `Accuracy`."""
    given, wanted = _final(said), _final(right)
    if given is None or wanted is None:
        return False
    numbers = find_number(given), find_number(wanted)
    if None not in numbers and not re.search(r"[^\W\d_]", given + wanted):
        return numbers[0] == numbers[1]
    return normalize_answer(given) == normalize_answer(wanted)


def _final(text: str) -> str | None:
    marked = _MARKED.findall(text)
    if marked:
        return "".join(marked[-1]).strip() or None  # one of the two is empty
    number = find_number(text)
    if number is not None:
        return str(number)
    return text if len(text.split()) <= 5 else None
