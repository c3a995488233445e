"""Rewards in, advantages out."""

from mt_grpo.credit.check import CreditError, estimate
from mt_grpo.credit.estimators import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    RewardBatch,
    advantage_estimator,
    get_estimator,
    grpo_mr,
    grpo_or,
    mt_grpo,
    splits_turns,
)

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "CreditError",
    "RewardBatch",
    "advantage_estimator",
    "estimate",
    "get_estimator",
    "grpo_mr",
    "grpo_or",
    "mt_grpo",
    "splits_turns",
]
