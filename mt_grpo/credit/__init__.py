"""Rewards in, advantages out."""

from mt_grpo.credit.estimators import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    RewardBatch,
    advantage_estimator,
    get_estimator,
    grpo_mr,
    grpo_or,
    mt_grpo,
)

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "RewardBatch",
    "advantage_estimator",
    "get_estimator",
    "grpo_mr",
    "grpo_or",
    "mt_grpo",
]
