"""Credit: from the rewards of a batch to an advantage per turn."""

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
from mt_grpo.credit.rule import bind_rule, rule_label
from mt_grpo.options import parse_rule, rule_name

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "CreditError",
    "RewardBatch",
    "advantage_estimator",
    "bind_rule",
    "estimate",
    "get_estimator",
    "grpo_mr",
    "grpo_or",
    "mt_grpo",
    "parse_rule",
    "rule_label",
    "rule_name",
    "splits_turns",
]
