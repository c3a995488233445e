"""Measures each reward of a batch: how much it varies within groups, and how it correlates with the outcome."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mt_grpo.credit.batch import RewardBatch
from mt_grpo.credit.normalisation import centre, deviation, to_go


@dataclass(frozen=True)
class RewardAudit:
    """
    One reward over a batch. A number is `None` if there is nothing to compute it from.

    A trajectory earns the sum of a turn reward over its turns. From `group_variance` on, a reward that does not apply
    counts as 0, as in `reward_to_go`. Failed trajectories are left out.

    Args:
        applies (`float`, *optional*): Share of the trajectories to which it applies.
        mean, std (`float`, *optional*): Of what these trajectories earn.
        group_variance (`float`, *optional*): Variance within a group, its mean over groups of two or more.
        equal_groups (`float`, *optional*): Share of these groups whose members all earn the same.
        correlation (`float`, *optional*): With the weighted sum of outcome rewards, over all trajectories.
        group_correlation (`float`, *optional*): The same within groups: both minus the means of their groups.
        sign_agreement (`float`, *optional*): Of a turn reward: among the turns at which both the outcome and the
            weighted reward from the turn on differ from their means in the group, the share where both are above or
            both below.
    """

    applies: float | None
    mean: float | None
    std: float | None
    group_variance: float | None
    equal_groups: float | None
    correlation: float | None
    group_correlation: float | None
    sign_agreement: float | None


@dataclass(frozen=True)
class Audit:
    """
    A batch and its rewards.

    Args:
        groups (`int`): Groups.
        groups_without_signal (`float`): Share of the groups whose advantages are 0 at every turn.
        sign_agreement (`float`, *optional*): As in `RewardAudit`, of the weighted sum of all turn rewards.
        rewards (`tuple[RewardAudit, ...]`): Turn rewards, then outcome rewards.
    """

    groups: int
    groups_without_signal: float
    sign_agreement: float | None
    rewards: tuple[RewardAudit, ...]


def without_signal(advantages: Tensor, group_size: int) -> Tensor:
    """The groups whose advantages, of shape (B, K), are 0 at every turn; shape (B / G,), bool."""
    return ~advantages.view(-1, group_size * advantages.shape[1]).any(dim=1)


def audit_rewards(batch: RewardBatch, advantages: Tensor) -> Audit:
    """
    Audits the rewards of a batch.

    Args:
        batch (`RewardBatch`): The rewards, with their streams.
        advantages (`Tensor`): What a credit rule made of them, shape (B, K).

    Raises:
        ValueError: If the batch has no streams, or no weights of them.
    """
    if batch.turn_streams is None or batch.outcome_streams is None or batch.stream_weights is None:
        raise ValueError("An audit needs a `RewardBatch` with each reward by itself and with the weights of all.")
    size, exists, ran = batch.group_size, batch.turn_mask.cpu(), ~batch.failed.cpu()
    turns, outcomes = batch.turn_streams.cpu().double(), batch.outcome_streams.cpu().double()
    # one column per reward, (B, N): NaN where it does not apply; then 0 there, and NaN for a failed trajectory
    sums = turns.new_empty(turns.shape[:2])
    for reward, values in enumerate(turns):
        sums[reward] = to_go(values.nan_to_num(nan=0.0))[:, 0].masked_fill(values.isnan().all(dim=1), torch.nan)
    scores = torch.cat([sums, outcomes]).T
    earned = scores.nan_to_num(nan=0.0).masked_fill(~ran[:, None], torch.nan)
    outcome = batch.of_outcomes().cpu().double()[:, None]
    within, outcome_within = centre(earned, size), centre(outcome, size)

    several = ran.view(-1, size).sum(dim=1)
    comparable = several > 1
    grouped = within.view(-1, size, within.shape[1])[comparable]
    variances = grouped.square().sum(dim=1) / (several[comparable, None] - 1)
    equal = (grouped == 0).all(dim=1).double()

    weights = batch.stream_weights.cpu().double()[: len(turns)]
    weighed = turns * weights[:, None, None]
    agreements = [_agreement(batch, rewards, outcome_within, exists) for rewards in weighed]
    whole = _correlations(centre(earned, len(earned)), centre(outcome, len(earned)))
    in_groups = _correlations(within, outcome_within)
    audits = []
    for index, column in enumerate(scores.T):
        present = column[~column.isnan()]
        audits.append(
            RewardAudit(
                applies=_number(len(present) / ran.sum()),
                mean=_number(present.mean()),
                std=_number(deviation(present, dim=0).squeeze()) if len(present) else None,
                group_variance=_number(variances[:, index].mean()),
                equal_groups=_number(equal[:, index].mean()),
                correlation=whole[index],
                group_correlation=in_groups[index],
                sign_agreement=agreements[index] if index < len(turns) else None,
            )
        )
    return Audit(
        groups=len(several),
        groups_without_signal=without_signal(advantages, size).double().mean().item(),
        sign_agreement=_agreement(batch, batch.turn_rewards.cpu().double(), outcome_within, exists),
        rewards=tuple(audits),
    )


def _agreement(batch: RewardBatch, rewards: Tensor, outcome: Tensor, exists: Tensor) -> float | None:
    """The share of turns at which the signs of a turn reward, (B, K), and of the outcome, (B, 1), agree."""
    failed = batch.failed.cpu()[:, None]
    turn = centre(to_go(rewards.nan_to_num(nan=0.0).masked_fill(failed, torch.nan)), batch.group_size)
    both = (turn.sign() * outcome.sign())[exists]
    return _number((both[both != 0] > 0).double().mean())


def _correlations(columns: Tensor, other: Tensor) -> list[float | None]:
    """The correlation of each centred column, (B, N), with a centred one, (B, 1)."""
    spread = (columns.square().sum(dim=0) * other.square().sum()).sqrt()
    return [_number(value) for value in (columns * other).sum(dim=0).div(spread).clamp(-1.0, 1.0)]


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else value.item()
