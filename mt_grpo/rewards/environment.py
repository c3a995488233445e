"""What the environment itself thinks of a conversation, as a reward."""

from __future__ import annotations

from typing import Any

from mt_grpo.rewards.base import OutcomeReward
from mt_grpo.rewards.registry import reward
from mt_grpo.trajectory import Trajectory


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
