"""How much of the turn rewards does not reach the turn that earned it, measured for any rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mt_grpo.credit.batch import RewardBatch
from mt_grpo.credit.normalisation import Scale
from mt_grpo.credit.rule import Rule, estimate

MOST_TURNS = 16
"""Turns of the longest trajectory whose rewards are examined; of more, as many that are spread evenly."""


@dataclass(frozen=True)
class Uncredited:
    """
    Shares of the turn rewards of a batch, by absolute weighted value. `None` where no turn earned anything.

    Args:
        at_turn (`float`, *optional*): Share that does not reach the turn that earned it.
        up_to_turn (`float`, *optional*): Share that reaches neither this turn nor one before it.
    """

    at_turn: float | None
    up_to_turn: float | None


def uncredited_turn_rewards(
    rule: Rule,
    batch: RewardBatch,
    *,
    turn_coef: float | None = None,
    scale_rewards: Scale = "group",
    most_turns: int = MOST_TURNS,
) -> Uncredited:
    """
    Measures how much of the turn rewards of a batch does not reach the turn that earned it.

    For each turn k the rewards that trajectories earned at k are made smaller, each by another factor, and the rule is
    asked again. The reward of a trajectory at k reaches a turn if the advantage of that turn changes. A reward of 0
    has no share. Neither has one in a group where all other members failed, or of a turn that branches share where all
    other trunks failed: it is compared with nothing.

    With a tool result after each of 12 turns that earn the same, `mt_grpo` leaves 11 / 12 away from their turns, which
    all reach the first turn. `grpo_or` leaves everything away, `reward_to_go` nothing.

    The rule is called once, and once more for each turn at which something was earned. If these are more than
    `most_turns`, so many of them, evenly spread, stand for all. What changes the deviation by which an advantage is
    divided counts as reaching it.

    Args:
        rule, batch, turn_coef, scale_rewards: As in `estimate`.
        most_turns (`int`, *optional*, defaults to `MOST_TURNS`): See above.

    Raises:
        ConfigError, CreditError: As `estimate`.
    """
    earned = batch.of_turns().nan_to_num(nan=0.0).abs() * batch.turn_mask
    earned = earned.masked_fill(~_is_compared(batch), 0.0)
    turns = earned.any(dim=0).nonzero()[:, 0].tolist()
    if not turns:
        return Uncredited(None, None)
    if len(turns) > most_turns:
        turns = [turns[index * len(turns) // most_turns] for index in range(most_turns)]

    def advantages(rewards: RewardBatch) -> Tensor:
        # a rule that draws draws the same each time, and so does the run
        with torch.random.fork_rng(devices=[earned.device] if earned.is_cuda else []):
            return estimate(rule, rewards, turn_coef=turn_coef, scale_rewards=scale_rewards)

    before = advantages(batch)
    # members that earn the same differ then, and rewards stay between what they were and 0
    draws = torch.Generator().manual_seed(0)
    factors = torch.rand(len(earned), generator=draws, dtype=torch.double).to(earned.device) / 2
    total = missed = lost = 0.0
    for turn in turns:
        of_turn = earned[:, turn]
        changed = advantages(_with_less(batch, turn, factors)) != before
        total += of_turn.sum().item()
        missed += of_turn[~changed[:, turn]].sum().item()
        lost += of_turn[~changed[:, : turn + 1].any(dim=1)].sum().item()
    return Uncredited(missed / total, lost / total)


def _is_compared(batch: RewardBatch) -> Tensor:
    """The turns that have others of their group to be compared with, shape (B, K), bool."""
    lives = (~batch.failed).view(-1, batch.group_size // batch.num_branches, batch.num_branches)
    has_members, has_trunks = lives.sum(dim=(1, 2)) > 1, lives.any(dim=2).sum(dim=1) > 1
    shared = torch.arange(batch.turn_mask.shape[1], device=lives.device) < batch.branch_at
    return torch.where(shared, has_trunks[:, None], has_members[:, None]).repeat_interleave(batch.group_size, dim=0)


def _with_less(batch: RewardBatch, turn: int, factors: Tensor) -> RewardBatch:
    """The batch with the rewards of a turn times factors, (B,). A rule is given the dtypes that the run gives it."""
    rewards = batch.turn_rewards.clone()
    rewards[:, turn] *= factors
    if batch.turn_streams is None:
        return replace(batch, turn_rewards=rewards)
    streams = batch.turn_streams.clone()
    streams[:, :, turn] *= factors
    return replace(batch, turn_rewards=rewards, turn_streams=streams)
