"""Rewards of a few trajectories, and batches of rewards at random, as credit rules are given them."""

import math

import torch

from mt_grpo.concurrency import run
from mt_grpo.credit import RewardBatch
from mt_grpo.rewards import Scores, score_trajectories

NONE = math.nan


def score(turn_funcs, outcome_funcs, trajectories, extra=None) -> Scores:
    return run(score_trajectories(turn_funcs, outcome_funcs, trajectories, extra))


def draw_batch(seed, group_size=None, num_groups=3, num_turns=5, absent=0.3, failing=0.15, integers=False):
    """Unequal numbers of turns, rewards that do not apply, failed members; in double precision."""
    draw = torch.Generator().manual_seed(seed)
    group_size = group_size or 1 + seed % 5
    size = num_groups * group_size

    def numbers(*shape):
        return (
            torch.randint(0, 3, shape, generator=draw).double()
            if integers
            else torch.randn(*shape, generator=draw, dtype=torch.double)
        )

    lengths = torch.randint(1, num_turns + 1, (size,), generator=draw)
    lengths[torch.rand(size, generator=draw) < failing] = 0
    exists = torch.arange(num_turns) < lengths[:, None]
    streams = numbers(2, size, num_turns)
    streams[(torch.rand(streams.shape, generator=draw) < absent) | ~exists] = NONE
    outcomes = numbers(2, size)
    outcomes[(torch.rand(outcomes.shape, generator=draw) < absent) | (lengths == 0)] = NONE
    weights = torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=torch.double)
    turn_rewards = total(streams * weights[:2, None, None])
    results = exists & (torch.rand(exists.shape, generator=draw) < 0.5)
    scores = torch.randint(0, 3, exists.shape, generator=draw).double()
    scores[~exists | (torch.rand(exists.shape, generator=draw) < 0.2)] = NONE
    return RewardBatch(
        turn_rewards,
        total(outcomes * weights[2:, None]),
        exists,
        results,
        group_size,
        state_ids=torch.randint(0, 3, exists.shape, generator=draw),
        state_scores=scores,
        turn_streams=streams,
        outcome_streams=outcomes,
        stream_weights=weights,
    )


def total(values):
    return values.nansum(dim=0).masked_fill(values.isnan().all(dim=0), NONE)
