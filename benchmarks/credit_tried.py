"""
Rules that were tried and are not in the package, in their shortest form: what `credit.py --tried` measures. See
"Rules that were tried" in reports/credit.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch
from credit import PROCESSES, RULES, entry
from credit_toy import LESSONS, steps_to_learn
from support.decision_processes import tasks
from support.exact_gradients import Measurement, Process, sample
from torch import Tensor

from mt_grpo.credit import RewardBatch, Rule, advantage_estimator, rule_label, rule_name
from mt_grpo.credit.rule import EPSILON, Scale, centre, largest_deviation, to_go
from mt_grpo.credit.rules import _gae, _group_values, _with_outcome


def divided(batch: RewardBatch, advantages: Tensor, returns: Tensor, scale: Scale) -> Tensor:
    """Advantages over the largest deviation of returns, 0 where there is no turn; (B, K)."""
    return (advantages / largest_deviation(returns, batch.group_size, scale)).nan_to_num(0.0) * batch.turn_mask


def by_group(values: Tensor, batch: RewardBatch) -> Tensor:
    """(B, K) as (N, G, K), 0 where there is no turn."""
    return (values.nan_to_num(0.0) * batch.turn_mask).view(-1, batch.group_size, values.shape[1])


@advantage_estimator("optimal_baseline")
def optimal_baseline(
    batch: RewardBatch, *, turn_coef: float = 1.0, own: bool = False, scale_rewards: Scale = "group"
) -> Tensor:
    """
    The optimal token baseline (arXiv 2602.07078) for turns: a mean of returns, each weighed by the squared gradients
    of its turns so far, which `state_scores` hold. As published the mean includes the member itself (`own`).
    """
    returns = to_go(_with_outcome(batch, turn_coef))
    weights = by_group(batch.needed("optimal_baseline", "state_scores").double().nan_to_num(0.0).cumsum(dim=1), batch)
    weighed = weights * by_group(returns, batch)
    count, total = weights.sum(dim=1, keepdim=True), weighed.sum(dim=1, keepdim=True)
    if not own:
        count, total = count - weights, total - weighed
    baseline = torch.where(count > 1e-12, total / count, by_group(returns, batch)).view(returns.shape)
    return divided(batch, returns - baseline, returns, scale_rewards)


@advantage_estimator("state_gae")
def state_gae(
    batch: RewardBatch, *, turn_coef: float = 1.0, lam: float = 0.95, own: bool = False, scale_rewards: Scale = "group"
) -> Tensor:
    """
    GAGPO (arXiv 2605.13217): GAE whose value is the mean return over the group's visits of a state. As published the
    mean includes the trajectory itself (`own`). A state that no other trajectory visits has the value of its turn.
    """
    rewards = _with_outcome(batch, turn_coef)
    returns = to_go(rewards)
    states = by_group(batch.needed("state_gae", "state_ids").double(), batch)
    exists = batch.turn_mask.view(states.shape)
    same = (states[:, :, :, None, None] == states[:, None, None]) & exists[:, :, :, None, None] & exists[:, None, None]
    if not own:
        same &= ~torch.eye(batch.group_size, dtype=torch.bool)[:, None, :, None]
    visits = same.sum(dim=(3, 4))
    values = (same * by_group(returns, batch)[:, None, None]).sum(dim=(3, 4)) / visits
    values = torch.where(visits > 0, values, _group_values(batch, returns).view(states.shape)).view(returns.shape)
    return divided(batch, _gae(rewards, values, batch.turn_mask, 1.0, lam), returns, scale_rewards)


@advantage_estimator("hgpo")
def hgpo(batch: RewardBatch, *, turn_coef: float = 1.0, gamma: float = 0.95, scale_rewards: Scale = "group") -> Tensor:
    """
    HGPO (arXiv 2602.22817): the discounted return among turns of the same state, of the same last two and of the same
    last three states; the advantages are averaged with the weights 1, 2 and 3 where there are others.
    """
    returns = to_go(_with_outcome(batch, turn_coef), gamma)
    states, exists = by_group(batch.needed("hgpo", "state_ids").double(), batch), by_group(batch.turn_mask, batch) > 0
    same = exists[:, :, :, None, None] & exists[:, None, None]
    earned = by_group(returns, batch)
    total, weight = torch.zeros_like(earned), torch.zeros_like(earned)
    for back in range(3):
        past = torch.nn.functional.pad(states, (back, 0), value=-1.0)[:, :, : states.shape[2]]
        same = same & (past[:, :, :, None, None] == past[:, None, None])
        count = same.sum(dim=(3, 4))
        mean = (same * earned[:, None, None]).sum(dim=(3, 4)) / count
        among = earned - mean
        if scale_rewards != "none":
            squares = (same * (earned[:, None, None] - mean[..., None, None]).square()).sum(dim=(3, 4))
            among = among / ((squares / (count - 1)).sqrt() + EPSILON)
        total += torch.where(count > 1, (back + 1) * among, 0.0)
        weight += torch.where(count > 1, back + 1.0, 0.0)
    return (total / weight.clamp(min=1)).view(returns.shape).nan_to_num(0.0) * batch.turn_mask


@advantage_estimator("earned_gae")
def earned_gae(
    batch: RewardBatch, *, turn_coef: float = 1.0, lam: float = 1.0, scale_rewards: Scale = "group"
) -> Tensor:
    """
    `turn_gae` whose values know what the trajectory has earned before the turn: one slope for the batch, fitted on all
    members but the one that it is used for.
    """
    rewards = _with_outcome(batch, turn_coef)
    returns = to_go(rewards)
    scale = largest_deviation(returns, batch.group_size, scale_rewards)
    before = torch.nn.functional.pad(turn_coef * batch.of_turns().cumsum(dim=1), (1, 0))[:, :-1]
    x, y = by_group(before / scale, batch), by_group(returns / scale, batch)
    reached = batch.turn_mask.view(x.shape).double()
    count = reached.sum(dim=1, keepdim=True)
    others = (count - reached).clamp(min=1)

    def scatter(a: Tensor, b: Tensor) -> Tensor:
        products, sum_a, sum_b = (values.sum(dim=1, keepdim=True) for values in (a * b, a, b))
        own_group = products - a * b - (sum_a - a) * (sum_b - b) / others
        groups = (products - sum_a * sum_b / count.clamp(min=1)).sum(dim=(1, 2))
        return (own_group.sum(dim=2) + (groups.sum() - groups)[:, None])[:, :, None]

    ahead = torch.where(count > 1, x - (x.sum(dim=1, keepdim=True) - x) / others, 0.0) * reached
    more = scatter(x, y) / (scatter(x, x) + ahead.square() + 1e-12) * ahead
    values = _group_values(batch, returns) + scale * more.view(returns.shape)
    return divided(batch, _gae(rewards, values, batch.turn_mask, 1.0, lam), returns, scale_rewards)


@advantage_estimator("explained_discount")
def explained_discount(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """
    What comes after turn k is discounted by 1 − R²_k, the share of the outcome's variance in the *other* groups that
    is left when the rewards up to turn k are known.
    """
    earned = by_group(turn_coef * batch.of_turns().cumsum(dim=1), batch)
    outcome = by_group(batch.of_outcomes()[:, None].expand(-1, earned.shape[2]), batch)
    x, y = (values - values.mean(dim=1, keepdim=True) for values in (earned, outcome))
    xy, xx, yy = (values.sum(dim=1) for values in (x * y, x * x, y * y))
    xy, xx, yy = (values.sum(dim=0) - values for values in (xy, xx, yy))
    discount = (1 - xy.square() / (xx * yy).clamp(min=1e-12)).repeat_interleave(batch.group_size, dim=0)
    returns = _with_outcome(batch, turn_coef)
    for turn in range(returns.shape[1] - 2, -1, -1):
        returns[:, turn] += discount[:, turn] * returns[:, turn + 1]
    return divided(batch, centre(returns, batch.group_size), returns, scale_rewards)


@advantage_estimator("shrunk_baseline")
def shrunk_baseline(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """The mean of the other members, drawn to that of the other groups by how much groups differ (James and Stein)."""
    returns = to_go(_with_outcome(batch, turn_coef))
    earned, reached = by_group(returns, batch), by_group(batch.turn_mask.double(), batch)
    count, total = reached.sum(dim=1), earned.sum(dim=1)
    mean = total / count.clamp(min=1)
    inside = ((earned - mean[:, None]) * reached).square().sum(dim=1)

    def others(values: Tensor) -> Tensor:
        return values.sum(dim=0) - values

    groups = others((count > 0).double())
    within = others(inside) / others((count - 1).clamp(min=0)).clamp(min=1)
    average = others(total) / others(count).clamp(min=1)
    spread = others(mean.square()) / groups.clamp(min=1) - (others(mean) / groups.clamp(min=1)).square()
    between = (spread - within * groups / others(count).clamp(min=1)).clamp(min=0)[:, None]
    own = count[:, None] - reached
    share = torch.where(own > 0, within[:, None] / (between * own + within[:, None] + 1e-12), 1.0)
    baseline = (1 - share) * (total[:, None] - earned) / own.clamp(min=1) + share * average[:, None]
    return divided(batch, returns - baseline.view(returns.shape), returns, scale_rewards)


TRIED: list[tuple[Rule, bool]] = [
    ("reward_to_go", True),
    ("lambda_to_go", False),
    ("turn_gae", False),
    ({"name": "turn_gae", "lam": 0.8}, False),
    ({"name": "gtpo", "gamma": 0.5}, True),
    ({"name": "optimal_baseline", "own": True}, True),
    ("optimal_baseline", False),
    ({"name": "state_gae", "own": True}, True),
    ("state_gae", False),
    ("hgpo", True),
    ("earned_gae", False),
    ({"name": "earned_gae", "lam": 0.8}, False),
    ("explained_discount", True),
    ("shrunk_baseline", False),
]
"""Rules that were tried, and those to hold them against; each as in `RULES`."""

LONG: dict[str, tuple[Process, tuple[float, ...]]] = {
    **{name: PROCESSES[name] for name in ("two_hops", "late", "mastered")},
    "12 mastered": (tasks(12, 2), (1.4, 1.4)),
}


@cache
def reference(process: str) -> Measurement:
    return tried(*RULES[0], process)


def tried(rule: Rule, own: bool, process: str) -> Measurement:
    """On batches of 6 groups of 8 that are drawn, so the bias is known up to .04."""
    play, parameters = LONG[process]
    factor = 8 / 7 if own else 1.0
    energies = rule_name(rule) == "optimal_baseline"
    return sample(
        rule, play, group_size=8, groups=6, batches=100, parameters=parameters, factor=factor, energies=energies
    )


def tried_table(work: Callable[..., Iterable[list[str]]] = map) -> Iterator[str]:
    """Bias and noise, and the steps to learn, of rules that were tried: lines in Markdown, as they are measured."""
    columns = [*(f"`{process}`" for process in LONG), *LESSONS]
    yield f"| rule | {' | '.join(columns)} |"
    yield "| --- " * (len(columns) + 1) + "|"
    for (rule, _), cells in zip(TRIED, work(tried_cells, TRIED), strict=True):
        yield f"| {rule_label(rule)} | {' | '.join(cells)} |"


def tried_cells(entry_of: tuple[Rule, bool]) -> list[str]:
    torch.set_num_threads(1)
    rule, own = entry_of
    found = [entry(tried(rule, own, process), reference(process)) for process in LONG]
    return [*found, *(steps_to_learn(rule, lesson) for lesson in LESSONS.values())]
