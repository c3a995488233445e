"""
The credit rules, each a pure function from a `RewardBatch` to one advantage per turn, (B, K): those of the paper in
the form of its public code, then those for any number of turns, then those that compare what followed from one state.

r_ik is the turn reward of member i at turn k, O_i its outcome reward. An absent reward is 0, also beyond the end of a
trajectory; a failed member is in no mean (see `RewardBatch`). "Unbiased" means: without scaling the expected gradient
is that of E[c Σ r + O], times (G − 1) / G where a mean includes the member itself. Any scaling by a deviation of the
group bends it. `tests/support/exact_gradients.py` measures this without sampling.

A rule takes the options that are in its signature:

- `turn_coef`: the weight of turn rewards.
- `scales`: whether outcome and turn rewards are divided by a deviation `"each"`, by `"one"` for both, or by `"batch"`:
  one for both, that of the whole batch where `scale_rewards` is `"group"`.
- `scale_rewards`: whose standard deviation divides the centred rewards: that of the `"group"`, of the whole `"batch"`,
  or none (`"none"`).
- `gamma`: the discount of later rewards; `lam`: the λ of an average of returns.

It returns advantages in the dtype of the rewards, 0 where a turn does not exist. It raises `MissingField` if the batch
lacks a field that it needs.

Axes: B trajectory, G group member, K turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from mt_grpo.credit.rule import (
    EPSILON,
    RewardBatch,
    Scale,
    Scales,
    Share,
    advantage_estimator,
    centre,
    deviation,
    divisor,
    largest_deviation,
    minus_group_min,
    to_go,
    without_rounding,
)


@advantage_estimator("mt_grpo", sums_turns=True)
def mt_grpo(
    batch: RewardBatch, *, turn_coef: float = 1.0, scales: Scales = "each", scale_rewards: Scale = "group"
) -> Tensor:
    """
    The position-aware rule of MT-GRPO: the turn advantage goes to the turns up to the first tool result.

    A^O is the normalised outcome reward. A^T is the normalised sum of the trajectory's turn rewards. The turns up to
    and including the first one that a tool result follows get A^O + turn_coef × A^T. Later turns get A^O. In a
    trajectory without a tool result every turn gets the normalised sum of both rewards. The paper normalises outcome
    and turn rewards each by its own deviation; with `scales: one` all are divided by that of `reward_to_go`.

    Bias: none (× G / (G − 1)) with one tool boundary, `turn_coef` 1 and `scale_rewards: none`. With several boundaries
    the turns after the first tool result get nothing for the turn rewards that they earn, see
    `uncredited_turn_rewards`. With another `turn_coef` trajectories without a tool result weigh turn rewards by 1 all
    the same, see `bias_of_turn_coef`. `reward_to_go` has neither bias.

    The advantages are float32. An outcome that does not apply is 0, and is left out of the group's mean and standard
    deviation. A trajectory to which no turn reward applies has the turn reward 0.
    """
    earlier_results = batch.result_mask.cumsum(dim=1) - batch.result_mask.long()
    has_result = batch.result_mask.any(dim=1, keepdim=True)
    outcome, turns = batch.outcome_rewards.double()[:, None], _sum(batch.of_turns())
    totals = outcome + turn_coef * to_go(batch.of_turns())
    scale = divisor(totals, batch.group_size, scales, scale_rewards)
    of_outcome = batch.against_group(outcome, "outcome baseline", scale_rewards, scale)
    of_turns = turn_coef * batch.against_group(turns, "turn baseline", scale_rewards, scale)
    of_both = batch.against_group(_both(batch), "baseline", scale_rewards, scale)
    of_turns = torch.where(has_result & (earlier_results == 0), of_turns, 0.0)
    total = torch.where(has_result, of_outcome, 0.0) + of_turns + torch.where(has_result, 0.0, of_both)
    return batch.advantages(total, torch.float32)


@advantage_estimator("grpo_or", splits_turns=False, sums_turns=True)
def grpo_or(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """GRPO on the outcome reward alone: its advantage on every turn, shape (B, K). `turn_coef` has no effect."""
    outcome = batch.outcome_rewards.double()[:, None]
    return batch.advantages(batch.against_group(outcome, "outcome baseline", scale_rewards), torch.float32)


@advantage_estimator("grpo_mr", splits_turns=False, sums_turns=True)
def grpo_mr(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """GRPO on the sum of turn and outcome rewards: its advantage on every turn, (B, K). `turn_coef` has no effect."""
    return batch.advantages(batch.against_group(_both(batch), "baseline", scale_rewards), torch.float32)


def _sum(rewards: Tensor) -> Tensor:
    """Sum of each trajectory's rewards, shape (B, 1)."""
    return to_go(rewards)[:, :1]


def _both(batch: RewardBatch) -> Tensor:
    """Sum of each trajectory's turn and outcome rewards, shape (B, 1); NaN where none applies."""
    rewards = torch.cat([batch.turn_rewards, batch.outcome_rewards[:, None]], dim=1)
    return _sum(rewards.nan_to_num(nan=0.0)).masked_fill(rewards.isnan().all(dim=1, keepdim=True), torch.nan)


def bias_of_turn_coef(batch: RewardBatch, turn_coef: float) -> str | None:
    """
    How `mt_grpo` is biased on a batch by its coefficient, as half a sentence; `None` where it is not.
    """
    without = (~batch.result_mask.any(dim=1) & ~batch.failed).sum().item()
    if turn_coef == 1 or not without or not batch.turn_rewards.nan_to_num(nan=0.0).any():
        return None
    return (
        f"{without} of {len(batch.result_mask)} trajectories have no tool result, and weigh turn rewards by 1 instead "
        f"of `turn_coef` {turn_coef}"
    )


@advantage_estimator("reward_to_go")
def reward_to_go(
    batch: RewardBatch, *, turn_coef: float = 1.0, scales: Scales = "each", scale_rewards: Scale = "group"
) -> Tensor:
    """
    Each turn gets the outcome advantage and what its trajectory earns from that turn on.

        T_ik = Σ_{l ≥ k} r_il
        A_ik = A^O_i + turn_coef × (T_ik − mean_j T_jk) / σ

    σ is the largest deviation over turns, max_k std_j T_jk, and that of A^O the deviation of the outcome. So turn
    rewards weigh as much as the outcome, however small they are. With `scales: one` both are divided by the deviation
    of what they sum to, and keep the proportion that the rewards give them:

        σ = max_k std_j (O_j + turn_coef × T_jk)

    With one tool boundary, `turn_coef` 1 and no scaling it equals `mt_grpo`.

    Bias: none (× G / (G − 1)), for any number of turns and any `turn_coef`, if no turn reward depends on later turns.
    Source: policy gradients with rewards to go (Sutton et al. 2000), a mean over the group as the baseline.
    """
    outcome, returns = batch.of_outcomes()[:, None], to_go(batch.of_turns())
    scale = divisor(outcome + turn_coef * returns, batch.group_size, scales, scale_rewards)
    of_outcome = batch.against_group(outcome, "outcome baseline", scale_rewards, scale)
    of_turns = batch.against_group(returns, "turn baseline", scale_rewards, scale)
    return batch.advantages(of_outcome + turn_coef * of_turns)


@advantage_estimator("gdpo")
def gdpo(
    batch: RewardBatch, *, turn_coef: float = 1.0, scales: Scales = "each", scale_rewards: Scale = "group"
) -> Tensor:
    """
    `reward_to_go` with a scale for each reward: every turn reward and every outcome reward is centred and divided by
    its own deviation, and then weighed by its weight. A reward of a small range counts as much as one of a large one.
    With `scales: one` it is `reward_to_go` with that option.

    Bias: that of the scaling. Without it the rule is `reward_to_go`.
    Source: GDPO (Liu et al. 2026, arXiv 2601.05242) on rewards to go; its last step, normalising the batch, is left
    out, since it would centre turns of different prompts together.
    """
    turns, outcomes = (batch.needed("gdpo", name) for name in ("turn_streams", "outcome_streams"))
    given = batch.needed("gdpo", "stream_weights")
    earned = [batch.of_outcomes(rewards)[:, None] for rewards in outcomes]
    earned += [to_go(batch.of_turns(rewards)) for rewards in turns]
    weights = [*given[len(turns) :], *(turn_coef * given[: len(turns)])]  # outcomes first, as above
    names = [*batch.part_names("outcome")[: len(outcomes)], *batch.part_names("turn")]
    weighted = [weight * values for weight, values in zip(weights, earned, strict=True)]
    totals = sum(weighted, torch.zeros_like(batch.of_turns()))
    scale = divisor(totals, batch.group_size, scales, scale_rewards)
    total = torch.zeros_like(batch.of_turns())
    for name, values, weight in zip(names, earned, weights, strict=True):
        total = total + weight * batch.against_group(values, f"{name} baseline", scale_rewards, scale)
    return batch.advantages(total)


@advantage_estimator("leave_one_out", splits_turns=False, sums_turns=True)
def leave_one_out(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """
    Every turn gets what its trajectory earns in all, minus the mean of the other members.

        R_i = turn_coef × Σ_k r_ik + O_i;    A_ik = (R_i − mean_{j ≠ i} R_j) / std_j R_j

    Bias: none, for any number of turns, also if turn rewards depend on later turns. It has more noise than
    `reward_to_go`, since a turn is credited with what was earned before it. A member without others gets 0.
    Source: RLOO (Ahmadian et al. 2024, arXiv 2402.14740).
    """
    sums = turn_coef * to_go(batch.of_turns())[:, :1] + batch.of_outcomes()[:, None]
    return batch.advantages(batch.against_others(sums, "baseline", scale_rewards))


@advantage_estimator("gtpo")
def gtpo(batch: RewardBatch, *, turn_coef: float = 1.0, gamma: Share = 0.9, scale_rewards: Scale = "group") -> Tensor:
    """
    Each turn gets its discounted return; the outcome is a reward of the last turn.

        D_ik = Σ_{l ≥ k} γ^(l−k) × (turn_coef × r_il + [l is the last turn] O_i)
        A_ik = (D_ik − mean_j D_jk) / max_k std_j D_jk

    Bias: none at `gamma` 1 (× G / (G − 1)). Below 1 later rewards count less for earlier turns: a bias, mostly in the
    length of the gradient, for less noise.
    Source: the returns of GTPO (Ding et al. 2025, arXiv 2511.14846), without its shaping of rewards; absent turns
    count as 0 here.
    """
    returns = to_go(_with_outcome(batch, turn_coef), gamma)
    return batch.advantages(batch.against_group(returns, "baseline", scale_rewards))


@advantage_estimator("mt_grpo_discounted")
def mt_grpo_discounted(
    batch: RewardBatch, *, turn_coef: float = 1.0, gamma: Share = 1.0, scale_rewards: Scale = "group"
) -> Tensor:
    """
    Each turn gets the outcome advantage and the discounted sum of the turn advantages from it on.

        A_ik = A^O_i + turn_coef × Σ_{l ≥ k} γ^(l−k) × (r_il − mean_j r_jl) / std_j r_jl

    The sum runs over all turns of the group, also over those that member i does not reach, where r_il is 0.

    Bias: none at `gamma` 1 without scaling (× G / (G − 1)), where it equals `reward_to_go`. A mean over only the
    members that reach a turn, or a sum that ends with the member's own last turn, would be biased.
    Source: Eq. 12 of Zeng et al. 2025 (arXiv 2505.11821), which assumes that all members have as many turns.
    """
    of_outcome = batch.against_group(batch.of_outcomes()[:, None], "outcome baseline", scale_rewards)
    rewards, size = batch.of_turns(), batch.group_size
    columns = rewards.split(1, dim=1)
    scales = torch.cat([largest_deviation(column, size, scale_rewards) for column in columns], dim=1)
    centred = torch.cat([centre(column, size) for column in columns], dim=1)
    # each turn's reward has a scale of its own, so their sum has none
    of_turns = batch.term(centred / scales, rewards, scales, "turn baseline", scale_told=False)
    return batch.advantages(of_outcome + turn_coef * to_go(of_turns, gamma))


@advantage_estimator("turn_gae")
def turn_gae(
    batch: RewardBatch,
    *,
    turn_coef: float = 1.0,
    gamma: Share = 1.0,
    lam: Share = 0.95,
    scale_rewards: Scale = "group",
) -> Tensor:
    """
    Generalised advantage estimation over turns, with the group as the critic.

    The value of turn k for member i is the mean return from k on of the *other* members that reach turn k; where none
    does, that of the last turn which another member reached. The outcome is a reward of the last turn.

        δ_ik = r_ik + γ V_i,k+1 − V_ik;    A_ik = Σ_{l ≥ k} (γ lam)^(l−k) δ_il

    Bias: none at `gamma` 1 and `lam` 1. Below 1 it is biased, since one value stands for all states of a turn, and
    often less noisy. A member without others gets 0.
    Source: GAE (Schulman et al. 2016, arXiv 1506.02438) with a group's mean in place of a critic.
    """
    rewards = _with_outcome(batch, turn_coef)
    returns = to_go(rewards, gamma)
    values = _group_values(batch, returns)
    scale = largest_deviation(returns, batch.group_size, scale_rewards)
    return batch.advantages(_gae_over(batch, rewards, values, returns, scale, gamma, lam))


@advantage_estimator("lambda_to_go")
def lambda_to_go(
    batch: RewardBatch,
    *,
    turn_coef: float = 1.0,
    lam: Share = 0.9,
    scales: Scales = "each",
    scale_rewards: Scale = "group",
) -> Tensor:
    """
    The outcome advantage on every turn, and turn rewards near the turns that earn them: `turn_gae` over turn rewards
    alone.

        T_ik = Σ_{l ≥ k} r_il;    V_ik = mean of T_jk over the other members that reach turn k
        δ_ik = r_ik + V_i,k+1 − V_ik
        A_ik = A^O_i + turn_coef × Σ_{l ≥ k} lam^(l−k) δ_il / σ

    A^O_i is the outcome minus the mean of the other members, divided by its deviation. σ is the largest deviation of
    T over turns. With `scales: one` both are divided by max_k std_j (O_j + turn_coef × T_jk), as in `reward_to_go`.

    Bias: none at `lam` 1, for any `turn_coef`, if no turn reward depends on later turns. Below 1 the outcome is still
    unbiased, and a turn gets only lam^n of what it changes in the turn rewards n turns later. In a long conversation
    these are mostly the noise of what other turns do, so that it learns faster than with `reward_to_go`. Choose a
    `lam` near 1 if turns are paid for long after they are taken.
    Source: GAE (Schulman et al. 2016, arXiv 1506.02438) on turn rewards, beside the outcome advantage of MT-GRPO.
    """
    outcome, rewards = batch.of_outcomes()[:, None], batch.of_turns()
    returns = to_go(rewards)
    totals = outcome + turn_coef * returns
    scale = divisor(totals, batch.group_size, scales, scale_rewards)
    of_outcome = batch.against_others(outcome, "outcome baseline", scale_rewards, scale)
    own = largest_deviation(returns, batch.group_size, scale_rewards) if scale is None else scale
    values = _group_values(batch, returns)
    total = of_outcome + turn_coef * _gae_over(batch, rewards, values, returns, own, 1.0, lam, "turn baseline")
    if scale is not None:  # where totals are equal at every turn, a `lam` below 1 would be divided by `EPSILON`
        has_signal = (centre(totals, batch.group_size) != 0).view(-1, batch.group_size * totals.shape[1]).any(dim=1)
        total = torch.where(has_signal.repeat_interleave(batch.group_size)[:, None], total, 0.0)
    return batch.advantages(total)


def _with_outcome(batch: RewardBatch, turn_coef: float) -> Tensor:
    """Weighed turn rewards with the outcome added to the last turn, shape (B, K); NaN for a failed trajectory."""
    last = batch.turn_mask & ~torch.nn.functional.pad(batch.turn_mask, (0, 1))[:, 1:]
    return turn_coef * batch.of_turns() + torch.where(last, batch.of_outcomes()[:, None], 0.0)


def _group_values(batch: RewardBatch, returns: Tensor) -> Tensor:
    """The mean return of the other members that reach a turn, shape (B, K); see `turn_gae`."""
    shape = (-1, batch.group_size, returns.shape[1])
    reached = batch.turn_mask.view(shape)
    # shifted by the least first, so that equal returns have exactly their value
    least = returns.view(shape).masked_fill(~reached, torch.inf).amin(dim=1, keepdim=True)
    earned = (returns.view(shape) - least).masked_fill(~reached, 0.0)
    others = reached.sum(dim=1, keepdim=True) - reached.long()
    values = (earned.sum(dim=1, keepdim=True) - earned) / others + least
    values = torch.where(others > 0, values, torch.nan).view(returns.shape)
    for turn in range(1, values.shape[1]):
        values[:, turn] = torch.where(values[:, turn].isnan(), values[:, turn - 1], values[:, turn])
    return values


def _gae(rewards: Tensor, values: Tensor, turn_mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantages of turns that exist, shape (B, K); NaN where there is no value."""
    after, advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for turn in range(values.shape[1] - 1, -1, -1):
        exists = turn_mask[:, turn]
        step = rewards[:, turn] + gamma * after - values[:, turn] + gamma * lam * advantage
        advantage = torch.where(exists, step, 0.0)
        after = torch.where(exists, values[:, turn], 0.0)
        advantages[:, turn] = advantage
    return advantages


def _gae_over(
    batch: RewardBatch,
    rewards: Tensor,
    values: Tensor,
    returns: Tensor,
    scale: Tensor,
    gamma: float,
    lam: float,
    baseline: str = "baseline",
    others: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The term of `_gae` / `scale`, (B, K), 0 without a value; with `lam` < 1 it has the part `later values`."""
    parts = dict(others or {})
    if lam != 1:
        known = values.masked_fill(~batch.turn_mask, 0.0)
        parts["later values"] = _gae(torch.zeros_like(known), known, batch.turn_mask, gamma, lam) + known
    value = _in_units_of(scale, batch, _gae(rewards, values, batch.turn_mask, gamma, lam), returns)
    return batch.term(value, to_go(rewards, gamma * lam), scale, baseline, parts)


def _in_units_of(scale: Tensor, batch: RewardBatch, advantages: Tensor, returns: Tensor) -> Tensor:
    """Advantages / scale, (B, K); 0 for what rounding of the returns explains, and where an advantage is NaN."""
    largest = returns.nan_to_num(nan=0.0).abs().view(-1, batch.group_size * returns.shape[1]).amax(dim=1)
    advantages = without_rounding(advantages, largest.repeat_interleave(batch.group_size)[:, None])
    return (advantages / scale).nan_to_num(nan=0.0)


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
    """
    scores = batch.needed("state_baseline", "state_scores").double()
    before = torch.nn.functional.pad(scores, (1, 0), value=torch.nan)[:, :-1]
    rewards = _with_outcome(batch, turn_coef)
    returns = to_go(rewards)
    values = _group_values(batch, returns)
    known = batch.turn_mask & ~before.isnan() & ~values.isnan()
    groups = torch.arange(len(scores), device=scores.device) // batch.group_size
    groups = groups[:, None].expand_as(scores)[known]
    # in units of what divides, so that a group whose members all earn nearly the same is not moved out of proportion
    scale = largest_deviation(returns, batch.group_size, scale_rewards)
    fitted = {"line": _line, "table": _table}[fit](before[known], ((returns - values) / scale)[known], groups)
    more = scale * torch.zeros_like(values).masked_scatter(known, fitted)
    others = {"state baseline": -more}
    return batch.advantages(_gae_over(batch, rewards, values + more, returns, scale, 1.0, lam, others=others))


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
    """
    states = batch.needed("gigpo", "state_ids")
    rewards = _with_outcome(batch, 1.0)
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


# `branch_to_go` is for conversations that branch. A group of G trajectories holds G / m trunks. Each trunk is
# continued m times from its turn `branch_at` on (the first is 0), so that m trajectories in a row share the turns
# before. A trunk that ended sooner is in the group m times.
#
# Why its estimate is unbiased: each of the m trajectories, taken alone, is drawn from the policy. So the mean over the
# group of Σ_k A_k ∇ log π(turn k) estimates the gradient, if the baseline in A_k does not depend on what is sampled in
# turn k, given the state in which turn k begins:
#
# - Turns from `branch_at` on. Given the trunk, the branches are independent of each other. The baseline is the mean
#   return of the *other* branches of the same trunk. They began in the same state, so little is left to chance.
# - Turns before it. They are the same in all branches, and what *any* of the branches earns depends on them. The
#   baseline is the mean return of the other trunks; a mean over siblings would take away a part of the gradient. The
#   advantage is that of the mean over the branches.
#
# So a branch weighs 1 / m of a trunk: each of the m copies of a trunk's turn weighs 1 / G, and together they weigh as
# much as a trunk. If each *distinct* turn weighed the same, the turns of branches would count m times as much as those
# of the trunk. If a trunk that ended sooner were in the group once, long conversations would count m times as much as
# short ones. Both are biased where the policy decides how long a conversation is.


@advantage_estimator("branch_to_go")
def branch_to_go(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """
    Rewards to go for conversations that branch; the rule of `branch_at`.

        T_ik = turn_coef × Σ_{l ≥ k} r_il + O_i
        A_ik = T_ik − mean of T_k over the other branches of i's trunk              from turn `branch_at` on
        A_ik = mean of T_k over i's trunk − mean of T_k over the other trunks       before

    Both are divided by σ, the largest deviation over turns. Without branches the second line holds for all turns.

    Bias: none, for any number of turns, if no turn reward depends on later turns; see above.
    Source: rewards to go (Sutton et al. 2000) with leave-one-out means (Ahmadian et al. 2024, arXiv 2402.14740) over
    siblings, and over trunks where siblings share the turn. A failed trajectory is in no mean. A branch whose siblings
    have all failed is compared with the other trunks.
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
    value = _in_units_of(scale, batch, advantages.reshape(returns.shape), returns)
    return batch.advantages(batch.term(value, earned, scale, "baseline"))
