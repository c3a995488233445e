"""
Credit rules: pure tensor functions from rewards to one advantage per turn, in one registry.

`mt_grpo` is the rule of MT-GRPO (Zeng et al. 2025, arXiv 2505.11821), in the form of its public code, where the
coefficient weighs the turn term. `grpo_or` and `grpo_mr` are the baselines of that paper.

Axes: B trajectory, G group member, K turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_grpo.credit.normalisation import Scale, normalize, to_go
from mt_grpo.errors import ConfigError
from mt_grpo.imports import Registry, check_name, did_you_mean


@dataclass(frozen=True)
class RewardBatch:
    """
    The rewards of a batch of groups.

    Args:
        turn_rewards (`Tensor`): Shape (B, K); NaN if the turn does not exist, or no turn reward applies to it.
        outcome_rewards (`Tensor`): Shape (B,); NaN if no outcome reward applies.
        turn_mask (`Tensor`): Shape (B, K), bool: whether the turn exists.
        result_mask (`Tensor`): Shape (B, K), bool: whether a tool result follows the turn.
        group_size (`int`): Rows i*G .. i*G+G-1 answer the same prompt.
        state_ids (`Tensor`, *optional*): Shape (B, K), int64: equal in the turns of a group that begin in the same
            state.
        state_scores (`Tensor`, *optional*): Shape (B, K): the `StateScore` of the state after each turn; NaN if there
            is none.
        turn_streams (`Tensor`, *optional*): Shape (S, B, K): each turn reward by itself, not weighted.
        outcome_streams (`Tensor`, *optional*): Shape (R, B): each outcome reward by itself, not weighted.
        stream_weights (`Tensor`, *optional*): Shape (S + R,): the weights of both.
        num_branches (`int`, *optional*, defaults to `1`): So many rows in a row continue the same trunk.
        branch_at (`int`, *optional*, defaults to `0`): Turns that these rows share.

    There are two kinds of NaN. An *absent* reward is one that does not apply to a trajectory which ran: the policy
    decided that. Rules that are unbiased count it as 0. A *failed* trajectory, which the engine or the environment
    ended, has no turns and no rewards: `failed` names it, and every rule leaves it out of its means.
    """

    turn_rewards: Tensor
    outcome_rewards: Tensor
    turn_mask: Tensor
    result_mask: Tensor
    group_size: int
    state_ids: Tensor | None = None
    state_scores: Tensor | None = None
    turn_streams: Tensor | None = None
    outcome_streams: Tensor | None = None
    stream_weights: Tensor | None = None
    num_branches: int = 1
    branch_at: int = 0

    @property
    def failed(self) -> Tensor:
        """The trajectories that the engine or the environment ended, shape (B,), bool."""
        return ~self.turn_mask.any(dim=1)

    def of_outcomes(self, rewards: Tensor | None = None) -> Tensor:
        """Outcome rewards, shape (B,), float64: 0 for an absent one, NaN for a failed trajectory."""
        rewards = self.outcome_rewards if rewards is None else rewards
        return rewards.double().nan_to_num(nan=0.0).masked_fill(self.failed, torch.nan)

    def of_turns(self, rewards: Tensor | None = None) -> Tensor:
        """Turn rewards, shape (B, K), float64: 0 for an absent one or no turn, NaN for a failed trajectory."""
        rewards = self.turn_rewards if rewards is None else rewards
        return rewards.double().nan_to_num(nan=0.0).masked_fill(self.failed[:, None], torch.nan)

    def at_turns(self, advantages: Tensor) -> Tensor:
        """Advantages, shape (B, K) or (B, 1), in the dtype of the rewards, rounded once; 0 where there is no turn."""
        return (advantages * self.turn_mask).to(self.turn_rewards.dtype)

    def needed(self, rule: str, field: str) -> Tensor:
        """
        A field that one rule cannot do without.

        Raises:
            ConfigError: If the batch lacks it.
        """
        value: Tensor | None = getattr(self, field)
        if value is None:
            raise ConfigError(
                f"The advantage estimator {rule!r} needs the `{field}` of a `RewardBatch`: fill them in."
            )
        return value


AdvantageEstimator = Callable[..., Tensor]
"""
`(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor` of shape (B, K). A rule may
have further options of its own. It may leave out `turn_coef` or `scale_rewards` if it does not use them.
"""

ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator", "mt_grpo.credit")
"""The estimators that a recipe can name in `advantage_estimator`."""


WHOLE: set[str] = set()
"""The estimators that give all turns of a trajectory the same advantage."""

SUMMING: set[str] = set()
"""The estimators that use no turn reward but in the sum over a trajectory's turns."""


def advantage_estimator(
    name: str, *, splits_turns: bool = True, sums_turns: bool = False
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """
    Registers an estimator under a name.

    Args:
        name (`str`): Its name in recipes.
        splits_turns (`bool`, *optional*, defaults to `True`): Whether turns of one trajectory can get different
            advantages. Such a rule is refused with a loss that weighs whole sequences.
        sums_turns (`bool`, *optional*, defaults to `False`): Whether turn rewards matter only in their sum over the
            trajectory, so that a turn reward may depend on later turns.

    Raises:
        RegistrationError: If the name is no word, or another file has registered it.
    """
    check_name(name, "advantage estimator")

    def register(function: AdvantageEstimator) -> AdvantageEstimator:
        ADVANTAGE_ESTIMATORS.add(name, function, function.__module__)
        (WHOLE.discard if splits_turns else WHOLE.add)(name)
        (SUMMING.add if sums_turns else SUMMING.discard)(name)
        return function

    return register


def splits_turns(name: str) -> bool:
    """Whether the estimator of that name can give turns of one trajectory different advantages."""
    return name not in WHOLE


def sums_turns(name: str) -> bool:
    """Whether the estimator of that name uses turn rewards only in their sum over a trajectory."""
    return name in SUMMING


def get_estimator(name: str) -> AdvantageEstimator:
    """
    Looks an estimator up.

    Raises:
        ConfigError: If there is none of that name. The message lists the known ones and the nearest.
    """
    if name not in ADVANTAGE_ESTIMATORS:
        known = ", ".join(ADVANTAGE_ESTIMATORS)
        raise ConfigError(
            f"The advantage estimator {name!r} is not one of {known}{did_you_mean(name, ADVANTAGE_ESTIMATORS)}."
        )
    return ADVANTAGE_ESTIMATORS[name]


@advantage_estimator("mt_grpo", sums_turns=True)
def mt_grpo(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """
    The position-aware rule of MT-GRPO: the turn advantage goes to the turns up to the first tool result.

    A^O is the normalised outcome reward. A^T is the normalised sum of the trajectory's turn rewards. The turns up to
    and including the first one that a tool result follows get A^O + turn_coef × A^T. Later turns get A^O. In a
    trajectory without a tool result every turn gets the normalised sum of both rewards.

    Bias: none (× G / (G − 1)) with one tool boundary, `turn_coef` 1 and `scale_rewards: none`. With several boundaries
    the turns after the first tool result get nothing for the turn rewards that they earn. With another `turn_coef`
    trajectories without a tool result weigh turn rewards by 1 all the same. `biases_of_mt_grpo` finds both in a batch;
    `reward_to_go` has neither.

    Args:
        batch (`RewardBatch`): The rewards.
        turn_coef (`float`, *optional*, defaults to `1.0`): Weight of the turn advantage.
        scale_rewards (`str`, *optional*, defaults to `"group"`): What the centred rewards are divided by: the standard
            deviation of the `"group"`, of the whole `"batch"`, or nothing (`"none"`).

    Returns:
        `Tensor`: Advantages, shape (B, K), float32; 0 where a turn does not exist. An outcome that does not apply is
        0, and is left out of the group's mean and standard deviation. A trajectory to which no turn reward applies has
        the turn reward 0.
    """
    outcome = normalize(batch.outcome_rewards.double(), batch.group_size, scale_rewards)
    turn = normalize(_turn_sums(batch), batch.group_size, scale_rewards)
    merged = normalize(_merged(batch), batch.group_size, scale_rewards)
    earlier_results = batch.result_mask.cumsum(dim=1) - batch.result_mask.long()
    split = outcome[:, None] + turn_coef * turn[:, None] * (earlier_results == 0)
    has_result = batch.result_mask.any(dim=1, keepdim=True)
    return (torch.where(has_result, split, merged[:, None]) * batch.turn_mask).float()


@advantage_estimator("grpo_or", splits_turns=False, sums_turns=True)
def grpo_or(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """GRPO on the outcome reward alone: its advantage on every turn, shape (B, K). `turn_coef` has no effect."""
    outcome = normalize(batch.outcome_rewards.double(), batch.group_size, scale_rewards)
    return (outcome[:, None] * batch.turn_mask).float()


@advantage_estimator("grpo_mr", splits_turns=False, sums_turns=True)
def grpo_mr(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """GRPO on the sum of turn and outcome rewards: its advantage on every turn, (B, K). `turn_coef` has no effect."""
    return (normalize(_merged(batch), batch.group_size, scale_rewards)[:, None] * batch.turn_mask).float()


def _turn_sums(batch: RewardBatch) -> Tensor:
    """
    Sum of each trajectory's turn rewards, shape (B,); NaN for a trajectory without any turn.

    A trajectory to which no turn reward applies counts as 0: the policy decides whether it calls tools, so leaving it
    out of the group's mean would bias the gradient.
    """
    return to_go(batch.of_turns())[:, 0]


def _merged(batch: RewardBatch) -> Tensor:
    """Sum of turn and outcome rewards, shape (B,); NaN where neither applies."""
    rewards = torch.cat([batch.turn_rewards, batch.outcome_rewards[:, None]], dim=1)
    return to_go(rewards.nan_to_num(nan=0.0))[:, 0].masked_fill(rewards.isnan().all(dim=1), torch.nan)


def biases_of_mt_grpo(batch: RewardBatch, turn_coef: float) -> list[str]:
    """
    The ways in which `mt_grpo` is biased on a batch, each as half a sentence; turns without turn rewards have none.

    Args:
        batch (`RewardBatch`): The rewards.
        turn_coef (`float`): The weight of the turn advantage.
    """
    results = batch.result_mask.sum(dim=1)
    if not batch.turn_rewards.nan_to_num(nan=0.0).any():
        return []
    several = (results > 1).sum().item()
    without = ((results == 0) & ~batch.failed).sum().item()
    biases = []
    if several:
        biases.append(
            f"in {several} of {len(results)} trajectories a tool result follows more than one turn, and turns after "
            "the first result get no credit for the turn rewards they earn"
        )
    if without and turn_coef != 1:
        biases.append(
            f"{without} of {len(results)} trajectories have no tool result, and weigh turn rewards by 1 instead of "
            f"`turn_coef` {turn_coef}"
        )
    return biases
