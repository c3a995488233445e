"""Credit: from the rewards of a batch to an advantage per turn."""

from mt_grpo.credit.anchors import gigpo
from mt_grpo.credit.audit import Audit, RewardAudit, audit_rewards, without_signal
from mt_grpo.credit.branching import branch_to_go
from mt_grpo.credit.check import CreditError, estimate
from mt_grpo.credit.estimators import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    RewardBatch,
    advantage_estimator,
    biases_of_mt_grpo,
    get_estimator,
    grpo_mr,
    grpo_or,
    mt_grpo,
    splits_turns,
    sums_turns,
)
from mt_grpo.credit.returns import gdpo, gtpo, leave_one_out, mt_grpo_discounted, reward_to_go, turn_gae
from mt_grpo.credit.rule import Rule, bind_rule, rule_label
from mt_grpo.credit.state_baseline import state_baseline
from mt_grpo.credit_options import parse_rule, rule_name

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "Audit",
    "CreditError",
    "RewardAudit",
    "RewardBatch",
    "Rule",
    "advantage_estimator",
    "audit_rewards",
    "biases_of_mt_grpo",
    "bind_rule",
    "branch_to_go",
    "estimate",
    "gdpo",
    "get_estimator",
    "gigpo",
    "grpo_mr",
    "grpo_or",
    "gtpo",
    "leave_one_out",
    "mt_grpo",
    "mt_grpo_discounted",
    "parse_rule",
    "reward_to_go",
    "rule_label",
    "rule_name",
    "splits_turns",
    "state_baseline",
    "sums_turns",
    "turn_gae",
    "without_signal",
]
