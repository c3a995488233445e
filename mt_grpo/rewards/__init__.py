"""Rewards: classes to subclass, built-in rewards, and the functions that run them."""

from typing import Any

from mt_grpo.rewards import builtin
from mt_grpo.rewards.base import (
    REWARDS,
    FunctionReward,
    OutcomeReward,
    RewardFunc,
    RewardListError,
    StateScore,
    TurnReward,
    completion_ids,
    load_rewards,
    reward,
)
from mt_grpo.rewards.builtin import (
    AnswerLogprob,
    EnvReward,
    InformationGain,
    RightAnswer,
    TeacherAgreement,
    TeacherLogRatio,
)
from mt_grpo.rewards.scoring import RewardError, Scores, cut_after, score_cut, score_trajectories, spread

__all__ = [
    "AnswerLogprob",
    "EnvReward",
    "FunctionReward",
    "InformationGain",
    "OutcomeReward",
    "REWARDS",
    "RewardError",
    "RewardFunc",
    "RewardListError",
    "RightAnswer",
    "Scores",
    "StateScore",
    "TeacherAgreement",
    "TeacherLogRatio",
    "TurnReward",
    "completion_ids",
    "cut_after",
    "load_rewards",
    "reward",
    "score_cut",
    "score_trajectories",
    "spread",
]
__all__ += [name for name, made in vars(builtin).items() if isinstance(made, RewardFunc)]  # as `import *` had them


def __getattr__(name: str) -> Any:
    """A built-in reward by the name that recipes give it."""
    if not isinstance(vars(builtin).get(name), RewardFunc):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(builtin)[name]
