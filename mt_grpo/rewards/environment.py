"""Rewards that the environment or the task itself gives: for a turn, for the whole conversation, for the answer."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from mt_grpo.rewards.base import OutcomeReward, TurnReward
from mt_grpo.rewards.registry import reward
from mt_grpo.trajectory import Trajectory, Turn


@reward("env_reward")
class EnvReward(OutcomeReward):
    """
    The rewards that the environment gave for the whole conversation, summed.

    Args:
        key (`str`, *optional*): Name of one of them, to take that one alone.
    """

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        if key is not None:
            self.name = f"env_reward/{key}"

    def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        given = trajectory.env_rewards
        if self.key is not None:
            return given.get(self.key)
        return sum(given.values()) if given else None


env_reward = EnvReward()


@reward("step_reward")
class StepReward(TurnReward):
    """`Turn.reward`; `None` for a turn that was given none."""

    def score(self, turn: Turn, trajectory: Trajectory, **row: Any) -> float | None:
        return turn.reward


step_reward = StepReward()


@reward("reasoning_gym_reward")
class ReasoningGymReward(OutcomeReward):
    """What the row's task gives for the answer, from 0 to 1; for rows of `dataset_name: reasoning_gym:TASK`."""

    name = "reasoning_gym_reward"

    def score(self, trajectory: Trajectory, task: str, task_options: str, index: int, **row: Any) -> float:
        dataset = _dataset(task, task_options)
        try:
            return float(dataset.score_answer(trajectory.answer, dataset[index]))
        except Exception:  # an answer that the task cannot read
            return 0.0


@lru_cache
def _dataset(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(options))


reasoning_gym_reward = ReasoningGymReward()
