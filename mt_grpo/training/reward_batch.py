"""Gathers the scores of all processes into the rewards that credit rules take."""

from __future__ import annotations

import torch
from accelerate.utils import gather

from mt_grpo.credit import RewardBatch
from mt_grpo.rewards import Scores
from mt_grpo.trajectory import Trajectory


def gather_rewards(
    trajectories: list[Trajectory], scores: Scores, weights: torch.Tensor, group_size: int
) -> tuple[RewardBatch, torch.Tensor]:
    """
    Gathers the scores of all processes. This is a collective call: every process brings the same number of
    trajectories, with any number of turns.

    Args:
        trajectories (`list[Trajectory]`): Trajectories of this process.
        scores (`Scores`): Their scores.
        weights (`torch.Tensor` of shape `(num_rewards,)`): Weights of turn rewards, then outcome rewards; results are
            on their device.
        group_size (`int`): Trajectories of one prompt.

    Returns:
        The weighted rewards of all processes, and their scores with a column for each reward, `(B, num_rewards)`: turn
        rewards summed over turns, NaN where a reward does not apply. A trajectory that failed has no turns and no
        rewards, so that it is in no baseline.
    """
    device = weights.device
    num_turns = torch.tensor([len(trajectory.turns) for trajectory in trajectories], device=device)
    longest = max(1, int(gather(num_turns).max()))
    stays = torch.tensor([not trajectory.failed for trajectory in trajectories], device=device)
    exists = (torch.arange(longest, device=device) < num_turns.unsqueeze(1)) & stays.unsqueeze(1)
    results = torch.zeros_like(exists)
    for row, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            results[row, turn.index] = turn.has_result and not trajectory.failed
    split = len(scores.turn)
    # at least one column each: NCCL's way of gathering fails on a tensor without elements
    turns = torch.full((len(trajectories), longest, max(1, split)), torch.nan, device=device)
    outcomes = torch.full((len(trajectories), max(1, len(scores.outcome))), torch.nan, device=device)
    for column, rows in enumerate(scores.turn):
        for row, values in enumerate(rows):
            turns[row, : len(values), column] = _tensor(values, device)
    for column, values in enumerate(scores.outcome):
        outcomes[:, column] = _tensor(values, device)
    turns, outcomes, exists, results = (gather(tensor) for tensor in (turns, outcomes, exists, results))
    turns, outcomes = turns[:, :, :split], outcomes[:, : len(scores.outcome)]
    batch = RewardBatch(
        _sum_present(turns * weights[:split], dim=2),
        _sum_present(outcomes * weights[split:], dim=1),
        exists,
        results,
        group_size,
    )
    return batch, torch.cat([_sum_present(turns, dim=1), outcomes], dim=1)


def share_of_equal_groups(columns: torch.Tensor, weights: torch.Tensor, group_size: int) -> float:
    """
    TRL's `frac_reward_zero_std`, computed exactly. TRL compares a float32 deviation with zero, which rounding may
    change.

    Args:
        columns (`torch.Tensor` of shape `(B, num_rewards)`): Scores of all processes, NaN where one does not apply.
        weights (`torch.Tensor` of shape `(num_rewards,)`): Their weights.
        group_size (`int`): Trajectories of one prompt.

    Returns:
        The share of the groups whose members all earn the same, among the groups that earn anything; NaN for none.
    """
    earned = _sum_present(columns.double() * weights, dim=1).float().view(-1, group_size)
    highest = earned.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest = earned.nan_to_num(nan=torch.inf).amin(dim=1)
    return (highest == lowest)[highest >= lowest].float().mean().item()


def _tensor(values: list[float | None], device: torch.device) -> torch.Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values], device=device)


def _sum_present(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over the rewards that apply; NaN if none does."""
    total = values.nansum(dim=dim)
    return total.masked_fill(values.isnan().all(dim=dim), torch.nan)
