"""
Credit by comparing what followed from the same state: `gigpo` finds such states, `branch_to_go` is given them.

`branch_to_go` is for conversations that branch. A group of G trajectories holds G / m trunks. Each trunk is continued
m times from its turn `branch_at` on (the first is 0), so that m trajectories in a row share the turns before. A trunk
that ended sooner is in the group m times.

Why the estimate of `branch_to_go` is unbiased: each of the m trajectories, taken alone, is drawn from the policy. So
the mean over the group of Σ_k A_k ∇ log π(turn k) estimates the gradient, if the baseline in A_k does not depend on
what is sampled in turn k, given the state in which turn k begins:

- Turns from `branch_at` on. Given the trunk, the branches are independent of each other. The baseline is the mean
  return of the *other* branches of the same trunk. They began in the same state, so little is left to chance.
- Turns before it. They are the same in all branches, and what *any* of the branches earns depends on them. The
  baseline is the mean return of the other trunks; a mean over siblings would take away a part of the gradient. The
  advantage is that of the mean over the branches.

So a branch weighs 1 / m of a trunk: each of the m copies of a trunk's turn weighs 1 / G, and together they weigh as
much as a trunk. If each *distinct* turn weighed the same, the turns of branches would count m times as much as those
of the trunk. If a trunk that ended sooner were in the group once, long conversations would count m times as much as
short ones. Both are biased where the policy decides how long a conversation is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mt_grpo.credit.batch import RewardBatch
from mt_grpo.credit.normalisation import (
    EPSILON,
    Scale,
    Share,
    deviation,
    largest_deviation,
    minus_group_min,
    to_go,
    without_rounding,
)
from mt_grpo.credit.rule import advantage_estimator
from mt_grpo.credit.rules.returns import in_units_of, with_outcome


@advantage_estimator("gigpo")
def gigpo(
    batch: RewardBatch, *, turn_coef: float = 1.0, gamma: Share = 0.95, scale_rewards: Scale = "group"
) -> Tensor:
    """
    The advantage of the whole trajectory, plus that of the turn among all turns of the group that begin in its state.

        A_ik = (R_i − mean_j R_j) / std_j R_j + turn_coef × (D_ik − mean_s D) / std_s D

    R_i is the sum of all rewards, D_ik the discounted return from turn k on, with the outcome at the last turn. The
    means and deviations of the second term are over the turns whose `state_ids` are those of turn k (with
    `scale_rewards: batch` the deviation is that of all turns of the batch). A state that occurs once adds 0. A
    state to which a trajectory comes back counts at each visit. With `gamma` below 1 the visit nearer to the reward
    has the larger return, so that a group whose members all earn the same can have a signal, as the paper defines it.

    Bias: slight in direction. Each term alone would do, so the gradient is about 1 + `turn_coef` times as long. The
    second is discounted, and its mean includes the turn itself, in states that occur a random number of times.
    Source: GiGPO (Feng et al. 2025, arXiv 2505.10978); `turn_coef` is its ω.

    Args:
        batch (`RewardBatch`): The rewards, with `state_ids`.
        turn_coef (`float`, *optional*, defaults to `1.0`): Weight of the second term.
        gamma (`float`, *optional*, defaults to `0.95`): Discount of the returns.
        scale_rewards (`str`, *optional*, defaults to `"group"`): As in `reward_to_go`.

    Returns:
        `Tensor`: Advantages, shape (B, K), in the dtype of the rewards; 0 where a turn does not exist.

    Raises:
        ConfigError: If the batch has no `state_ids`.
    """
    states = batch.needed("gigpo", "state_ids")
    rewards = with_outcome(batch, 1.0)
    of_trajectory = batch.against_group(to_go(rewards)[:, :1], "baseline", scale_rewards)
    groups = torch.arange(len(states), device=states.device) // batch.group_size
    keys = torch.stack([groups[:, None].expand_as(states), states], dim=-1)[batch.turn_mask]
    returns = to_go(rewards, gamma)
    centred, spread = _among_equals(returns[batch.turn_mask], keys.unique(dim=0, return_inverse=True)[1])
    scale = {
        "group": spread + EPSILON,
        "batch": (deviation(returns[batch.turn_mask], dim=0) + EPSILON).expand_as(spread),
        "none": torch.ones_like(spread),
    }[scale_rewards]
    anchored = torch.zeros_like(rewards).masked_scatter(batch.turn_mask, centred / scale)
    scales = torch.ones_like(rewards).masked_scatter(batch.turn_mask, scale)
    of_state = batch.term(anchored, returns, scales, "baseline (same state)")
    return batch.advantages(of_trajectory + turn_coef * of_state)


def _among_equals(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Values minus the mean of those with the same label, and the standard deviation (ddof 1) of these; (N,) each."""
    number = int(labels.max()) + 1 if len(labels) else 0
    sums, least = values.new_zeros(number), values.new_zeros(number)
    count = sums.index_add(0, labels, torch.ones_like(values))
    # shifted by the least first, so that equal values come out as exactly 0
    least = least.scatter_reduce(0, labels, values, "amin", include_self=False)[labels]
    shifted = without_rounding(values - least, torch.maximum(values.abs(), least.abs()))
    centred = shifted - (sums.index_add(0, labels, shifted) / count)[labels]
    variance = sums.index_add(0, labels, centred.square()) / (count - 1).clamp(min=1)
    return centred, variance.sqrt()[labels]


@advantage_estimator("branch_to_go")
def branch_to_go(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """
    Rewards to go for conversations that branch; the rule of `branch_at`.

        T_ik = turn_coef × Σ_{l ≥ k} r_il + O_i
        A_ik = T_ik − mean of T_k over the other branches of i's trunk              from turn `branch_at` on
        A_ik = mean of T_k over i's trunk − mean of T_k over the other trunks       before

    Both are divided by σ, the largest deviation over turns. Without branches the second line holds for all turns.

    Bias: none, for any number of turns, if no turn reward depends on later turns; see the module.
    Source: rewards to go (Sutton et al. 2000) with leave-one-out means (Ahmadian et al. 2024, arXiv 2402.14740) over
    siblings, and over trunks where siblings share the turn.

    Args:
        batch (`RewardBatch`): The rewards, with `branch_at` and `num_branches`.
        turn_coef (`float`, *optional*, defaults to `1.0`): Weight of turn rewards.
        scale_rewards (`str`, *optional*, defaults to `"group"`): As in `reward_to_go`.

    Returns:
        `Tensor`: Advantages, shape (B, K), in the dtype of the rewards; 0 where a turn does not exist. A failed
        trajectory is in no mean. A branch whose siblings have all failed is compared with the other trunks.
    """
    returns = turn_coef * to_go(batch.of_turns()) + batch.of_outcomes()[:, None]
    # group, trunk, branch, turn; shifted by the group's least, so that equal returns come out as exactly 0
    grouped = minus_group_min(returns.view(-1, batch.group_size, returns.shape[1]))
    branches = grouped.view(len(grouped), -1, batch.num_branches, returns.shape[1])
    stays = ~branches.isnan()
    trunk_sum, trunk_count = branches.nansum(dim=2, keepdim=True), stays.sum(dim=2, keepdim=True)
    others = (trunk_sum.sum(dim=1, keepdim=True) - trunk_sum) / (trunk_count.sum(dim=1, keepdim=True) - trunk_count)
    siblings = (trunk_sum - branches.nan_to_num(nan=0.0)) / (trunk_count - stays.long())
    of_branch = branches - torch.where(siblings.isnan(), others, siblings)
    shared = torch.arange(returns.shape[1], device=returns.device) < batch.branch_at
    advantages = torch.where(shared, trunk_sum / trunk_count - others, of_branch)
    # what a branch earns; before it, the mean of its trunk
    of_trunk = returns.view(branches.shape).masked_fill(~stays, torch.nan).nanmean(dim=2, keepdim=True)
    earned = torch.where(shared, of_trunk, returns.view(branches.shape)).reshape(returns.shape)
    scale = largest_deviation(returns, batch.group_size, scale_rewards)
    value = in_units_of(scale, batch, advantages.reshape(returns.shape), returns)
    return batch.advantages(batch.term(value, earned, scale, "baseline"))
