"""Calls a credit rule, and checks what it returns before anything is trained with it."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_grpo.credit.estimators import RewardBatch
from mt_grpo.credit.normalisation import Scale
from mt_grpo.credit.rule import Rule, bind_rule
from mt_grpo.credit_options import rule_name
from mt_grpo.errors import UserError


class CreditError(UserError, ValueError):
    """A credit rule returned something unusable. The message is one sentence that names the rule."""


def estimate(
    rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None, scale_rewards: Scale = "group"
) -> Tensor:
    """
    Calls a rule.

    Args:
        rule (`str` or `Mapping`): Its name, or a mapping of its `name` and its own options.
        batch (`RewardBatch`): The rewards.
        turn_coef (`float`, *optional*): Weight of the turn advantage; by default the rule's own.
        scale_rewards (`str`, *optional*, defaults to `"group"`): What rewards are divided by, see `mt_grpo`.

    Returns:
        `Tensor`: Its advantages, shape (B, K), float32; 0 where a turn does not exist.

    Raises:
        ConfigError: If there is no such rule, or it does not take its options.
        CreditError: If it returns no tensor, a tensor of another shape, or a number that is not finite at a turn that
            exists.
    """
    name = rule_name(rule)
    function, options = bind_rule(rule, turn_coef=turn_coef, scale_rewards=scale_rewards)
    advantages = function(batch, **options)
    wanted = tuple(batch.turn_mask.shape)
    if not isinstance(advantages, Tensor):
        raise CreditError(
            f"The advantage estimator {name!r} returned a {type(advantages).__name__}: return a tensor with an "
            f"advantage for each trajectory and turn, of the shape {wanted} of `turn_mask`."
        )
    if advantages.shape != batch.turn_mask.shape:
        raise CreditError(
            f"The advantage estimator {name!r} returned a tensor of shape {tuple(advantages.shape)}: return an "
            f"advantage for each trajectory and turn, of the shape {wanted} of `turn_mask`."
        )
    advantages = advantages.to(batch.turn_mask.device, torch.float32)
    wrong = ~advantages.isfinite() & batch.turn_mask
    if wrong.any():
        row, turn = wrong.nonzero()[0].tolist()
        raise CreditError(
            f"The advantage estimator {name!r} gave {advantages[row, turn]} to turn {turn + 1} of trajectory {row}, "
            f"whose turn reward is {batch.turn_rewards[row, turn]} and whose outcome reward is "
            f"{batch.outcome_rewards[row]}, in groups of {batch.group_size}: return a finite number for every turn "
            "that exists, also where a reward is NaN because it does not apply or a group has no deviation."
        )
    return advantages.masked_fill(~batch.turn_mask, 0.0)
