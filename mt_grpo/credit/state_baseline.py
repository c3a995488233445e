"""A score of the state as a baseline, not as a reward."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mt_grpo.credit.estimators import RewardBatch, advantage_estimator
from mt_grpo.credit.normalisation import Scale, Share, to_go
from mt_grpo.credit.returns import gae, group_values, scaled, with_outcome


@advantage_estimator("state_baseline")
def state_baseline(
    batch: RewardBatch,
    *,
    turn_coef: float = 1.0,
    lam: Share = 1.0,
    fit: Literal["line", "table"] = "line",
    scale_rewards: Scale = "group",
) -> Tensor:
    """
    `turn_gae` whose values know the score of the state in which a turn begins.

        V_ik = mean return of the other members from turn k on + f(score after turn k − 1)

    f says how much more than the others a turn earns that begins in a state of this score. It is fitted on the turns
    of the *other* groups of the batch: a `"line"` (least squares) or a `"table"` (the mean for each score; 0 for a
    score that no other group has). The first turn, a turn without a score and a batch of one group have f = 0.

    Bias: none at `lam` 1, whatever the score is: neither the other groups nor the state before a turn depend on what
    is sampled in it. A good score takes noise away, if there are many groups to fit it on; a fit on two or three adds
    noise. Below 1 the values also stand in for later rewards, which takes more noise away and is biased by the error
    of the fit. The same score as a *reward* would be biased.

    Args:
        batch (`RewardBatch`): The rewards, with `state_scores`.
        turn_coef (`float`, *optional*, defaults to `1.0`): Weight of turn rewards.
        lam (`float`, *optional*, defaults to `1.0`): λ of GAE.
        fit (`str`, *optional*, defaults to `"line"`): `"line"`, or `"table"` for scores of few values.
        scale_rewards (`str`, *optional*, defaults to `"group"`): As in `reward_to_go`.

    Returns:
        `Tensor`: Advantages, shape (B, K), in the dtype of the rewards; 0 where a turn does not exist.

    Raises:
        ConfigError: If the batch has no `state_scores`.
    """
    scores = batch.needed("state_baseline", "state_scores").double()
    before = torch.nn.functional.pad(scores, (1, 0), value=torch.nan)[:, :-1]
    rewards = with_outcome(batch, turn_coef)
    returns = to_go(rewards)
    values = group_values(batch, returns)
    known = batch.turn_mask & ~before.isnan() & ~values.isnan()
    groups = torch.arange(len(scores), device=scores.device) // batch.group_size
    groups = groups[:, None].expand_as(scores)[known]
    fitted = {"line": _line, "table": _table}[fit](before[known], (returns - values)[known], groups)
    values = values + torch.zeros_like(values).masked_scatter(known, fitted)
    return scaled(batch, gae(rewards, values, batch.turn_mask, 1.0, lam), returns, scale_rewards)


def _line(x: Tensor, y: Tensor, groups: Tensor) -> Tensor:
    """For each point, the line through the points of the other groups, at its x; (N,)."""
    number = int(groups.max()) + 1 if len(groups) else 0
    x = x - x.mean()
    sums = x.new_zeros(number, 5).index_add(0, groups, torch.stack([torch.ones_like(x), x, y, x * x, x * y], dim=1))
    count, *moments = (sums.sum(dim=0) - sums).T
    mean_x, mean_y, mean_xx, mean_xy = (moment / count.clamp(min=1) for moment in moments)
    variance = mean_xx - mean_x.square()
    # scores that are all the same have a variance that is 0 but for rounding
    differ = variance > 1e-6 * mean_xx
    slope = torch.where(differ, (mean_xy - mean_x * mean_y) / variance, 0.0)
    line: Tensor = (mean_y - slope * mean_x)[groups] + slope[groups] * x
    return line


def _table(x: Tensor, y: Tensor, groups: Tensor) -> Tensor:
    """For each point, the mean of the points of the other groups with the same x; 0 where there is none; (N,)."""
    labels = x.unique(return_inverse=True)[1]
    own = torch.stack([groups, labels], dim=1).unique(dim=0, return_inverse=True)[1]
    points = torch.stack([torch.ones_like(y), y], dim=1)
    count, total = (_sums(points, labels) - _sums(points, own)).T
    return torch.where(count > 0, total / count.clamp(min=1), 0.0)


def _sums(points: Tensor, labels: Tensor) -> Tensor:
    """For each point the sum of those with the same label; points are (N, 2)."""
    return points.new_zeros(len(points), 2).index_add(0, labels, points)[labels]
