"""Rewards of a few trajectories, waited for."""

from mt_grpo.concurrency import run
from mt_grpo.rewards import Scores, score_trajectories


def score(turn_funcs, outcome_funcs, trajectories, extra=None) -> Scores:
    return run(score_trajectories(turn_funcs, outcome_funcs, trajectories, extra))
