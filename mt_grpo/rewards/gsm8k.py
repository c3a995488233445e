"""
Rewards for grade-school maths with a number as the answer.

The `answer` column is a number, a string that holds it, or GSM8K's worked solution, which ends in `#### 1,234`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from mt_grpo.rewards.base import OutcomeReward, ReadsAnswer
from mt_grpo.rewards.registry import reward
from mt_grpo.trajectory import Trajectory

NUMBER = re.compile(r"(?<!\w)-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}\b)")


@reward("gsm8k_correct_reward_func")
class Gsm8kCorrectReward(ReadsAnswer, OutcomeReward):
    """1.0 if the number in the final answer equals the number in the `answer` column, else 0.0."""

    def score(self, trajectory: Trajectory, *, answer: str | int | float, **row: Any) -> float:
        gold = self.right_answer(answer)
        return float(trajectory.answer is not None and find_number(trajectory.answer) == gold)

    def right_answer(self, value: Any) -> Decimal:
        gold = find_number(str(value))
        if gold is None:
            raise ValueError(f"the answer column holds no number: {value!r}")
        return gold


@reward("gsm8k_number_reward_func")
class Gsm8kNumberReward(OutcomeReward):
    """0.2 if the final answer is a number and nothing else, else 0.0; `$`, `%` and a full stop are allowed."""

    maximum = 0.2

    def score(self, trajectory: Trajectory, **row: Any) -> float:
        bare = _plain(trajectory.answer or "").strip().removesuffix(".")
        return 0.2 * (NUMBER.fullmatch(bare) is not None)


def find_number(text: str) -> Decimal | None:
    """The last number after the last `####`, or in the whole text without one; `None` where there is no number."""
    numbers = NUMBER.findall(_plain(text.rpartition("####")[2]))
    return Decimal(numbers[-1]) if numbers else None


def _plain(text: str) -> str:
    return THOUSANDS.sub("", text.replace("−", "-").replace("$", "").replace("%", ""))


gsm8k_correct_reward_func = Gsm8kCorrectReward()
gsm8k_number_reward_func = Gsm8kNumberReward()
