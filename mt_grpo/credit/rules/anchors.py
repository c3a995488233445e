"""Credit by comparing what followed from the same state."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_grpo.credit.normalisation import EPSILON, Scale, Share, deviation, normalize, to_go, without_rounding
from mt_grpo.credit.rule import RewardBatch, advantage_estimator
from mt_grpo.credit.rules.returns import with_outcome


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
    whole = normalize(to_go(rewards)[:, 0], batch.group_size, scale_rewards)
    groups = torch.arange(len(states), device=states.device) // batch.group_size
    keys = torch.stack([groups[:, None].expand_as(states), states], dim=-1)[batch.turn_mask]
    returns = to_go(rewards, gamma)[batch.turn_mask]
    centred, spread = _among_equals(returns, keys.unique(dim=0, return_inverse=True)[1])
    if scale_rewards == "group":
        centred = centred / (spread + EPSILON)
    elif scale_rewards == "batch":
        centred = centred / (deviation(returns, dim=0) + EPSILON)
    anchored = torch.zeros_like(rewards).masked_scatter(batch.turn_mask, centred)
    return batch.at_turns(whole[:, None] + turn_coef * anchored)


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
