"""Whether a rule keeps what the rewards say: the outcome for early turns, and the weight of turn rewards beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from mt_grpo.credit.batch import RewardBatch
from mt_grpo.credit.explain import estimate_parts
from mt_grpo.credit.normalisation import EPSILON, Scale
from mt_grpo.credit.rule import Rule, bind_rule, estimate

FEWEST_TURNS = 4
"""Turns of a conversation in which it is asked what of the outcome reaches the first one."""
SURE = 3.0
"""A slope is shown if it is so many of its standard errors: of ten points, one in a hundred by chance."""


def outcome_at_first_turn(rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None) -> float | None:
    """
    How much of the outcome's advantage reaches the first turn, in what reaches the turn that gets most of it: the mean
    over conversations of `FEWEST_TURNS` turns or more. The outcome's advantage is what changes where outcomes are 0.

    With a discount γ and K turns it is about γ^(K − 1): .0005 for `gtpo` with γ .5 and 12 turns. `lambda_to_go` gives
    all turns the same, 1.
    """
    _, options = bind_rule(rule, turn_coef=turn_coef, scale_rewards="group")
    scale: Scale = (
        "none" if "scale_rewards" in options else "group"
    )  # without one, what an outcome adds is told by itself

    def advantages(rewards: RewardBatch) -> Tensor:
        with torch.random.fork_rng(devices=[rewards.turn_mask.device] if rewards.turn_mask.is_cuda else []):
            return estimate(rule, rewards, turn_coef=turn_coef, scale_rewards=scale).double()

    streams = batch.outcome_streams
    without = replace(
        batch,
        outcome_rewards=0 * batch.outcome_rewards,
        outcome_streams=None if streams is None else 0 * streams,
    )
    reached = (advantages(batch) - advantages(without)).abs()[batch.turn_mask.sum(dim=1) >= FEWEST_TURNS]
    most = reached.amax(dim=1).sum().item() if len(reached) else 0.0
    return reached[:, 0].sum().item() / most if most > 0 else None


def scale_ratio(
    rule: Rule, batch: RewardBatch, *, turn_coef: float | None = None, scale_rewards: Scale = "group"
) -> float | None:
    """
    What the rule divides outcomes by / what it divides turn rewards by, the median over turns: with 10, a turn reward
    counts ten times as much beside the outcome as its weight says.
    """
    scales = estimate_parts(rule, batch, turn_coef=turn_coef, scale_rewards=scale_rewards).scales
    outcome, turn = (
        [scale for name, scale in scales.items() if name.startswith(kind) and not name.endswith("baseline")]
        for kind in ("outcome", "turn reward")
    )
    if not outcome or not turn:
        return None
    of_outcome, of_turns = torch.stack(outcome).amax(dim=0), torch.stack(turn).amax(dim=0)
    differ = batch.turn_mask & (of_outcome > 2 * EPSILON) & (of_turns > 2 * EPSILON)
    ratios = (of_outcome / of_turns)[differ]
    return ratios.median().item() if len(ratios) else None


def pull_apart(outcomes: Sequence[float], turns: Sequence[float]) -> bool:
    """Whether of two means over steps, in their order, one is shown to rise while the other falls."""
    slopes = [_slope(outcomes), _slope(turns)]
    return min(slopes) < -SURE and max(slopes) > SURE


def _slope(values: Sequence[float]) -> float:
    """The slope of a line through values, in its standard errors; 0 for fewer than three."""
    count = len(values)
    if count < 3:
        return 0.0
    middle, mean = (count - 1) / 2, fmean(values)
    spread = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * value for place, value in enumerate(values)) / spread
    rest = sum((value - mean - slope * (place - middle)) ** 2 for place, value in enumerate(values))
    error = math.sqrt(rest / (count - 2) / spread)
    return slope / max(error, 1e-12)
