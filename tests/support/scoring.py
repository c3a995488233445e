"""Rewards of a few trajectories, waited for."""

from __future__ import annotations

from mt_grpo.rewards import Scores, score_trajectories
from mt_grpo.rollout.background import run


def score(turn_funcs, outcome_funcs, trajectories, extra=None) -> Scores:
    return run(score_trajectories(turn_funcs, outcome_funcs, trajectories, extra))
