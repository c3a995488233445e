"""Credit: from the rewards of a batch to an advantage per turn."""

from mt_grpo.credit.audit import Audit, RewardAudit, audit_rewards, without_signal
from mt_grpo.credit.batch import RewardBatch
from mt_grpo.credit.explain import by_reward, estimate_parts, explain
from mt_grpo.credit.rule import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    Credit,
    CreditError,
    Rule,
    advantage_estimator,
    bind_rule,
    call_rule,
    estimate,
    get_estimator,
    in_parts,
    rule_label,
    rule_says,
    splits_turns,
    sums_turns,
    whole_rule,
)
from mt_grpo.credit.rules.paper import bias_of_turn_coef, grpo_mr, grpo_or, mt_grpo
from mt_grpo.credit.rules.returns import (
    gdpo,
    gtpo,
    lambda_to_go,
    leave_one_out,
    mt_grpo_discounted,
    reward_to_go,
    state_baseline,
    turn_gae,
)
from mt_grpo.credit.rules.shared_states import branch_to_go, gigpo
from mt_grpo.credit.uncredited import Uncredited, uncredited_turn_rewards
from mt_grpo.options.values import parse_rule, rule_name

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "Audit",
    "Credit",
    "CreditError",
    "RewardAudit",
    "RewardBatch",
    "Rule",
    "Uncredited",
    "advantage_estimator",
    "audit_rewards",
    "bias_of_turn_coef",
    "bind_rule",
    "branch_to_go",
    "by_reward",
    "call_rule",
    "estimate",
    "estimate_parts",
    "explain",
    "gdpo",
    "get_estimator",
    "gigpo",
    "grpo_mr",
    "grpo_or",
    "gtpo",
    "in_parts",
    "lambda_to_go",
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
    "uncredited_turn_rewards",
    "rule_says",
    "whole_rule",
    "without_signal",
]
