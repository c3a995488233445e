"""The judge of reasoning-gym's tasks, as a reward."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from mt_grpo.rewards.base import OutcomeReward
from mt_grpo.rewards.registry import reward
from mt_grpo.trajectory import Trajectory


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
