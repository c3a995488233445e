"""The reward that came with the conversation: what an environment or a stateful tool gave for a turn."""

from __future__ import annotations

from typing import Any

from mt_grpo.rewards.base import TurnReward
from mt_grpo.rewards.registry import reward
from mt_grpo.trajectory import Trajectory, Turn


@reward("step_reward")
class StepReward(TurnReward):
    """`Turn.reward`; `None` for a turn that was given none."""

    def score(self, turn: Turn, trajectory: Trajectory, **row: Any) -> float | None:
        return turn.reward


step_reward = StepReward()
