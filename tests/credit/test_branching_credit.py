"""Credit of conversations that branch: no bias with every group enumerated, and what would be biased."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.decision_processes import PROCESSES, settled, stopper
from support.exact_gradients import measure, measure_branching, sampled_turns
from support.registered import keep_estimators

from mt_grpo.credit import RewardBatch, advantage_estimator, branch_to_go, reward_to_go


def measured(rule, name, branch_at, num_branches, **options):
    process, parameters = PROCESSES[name]
    options = {"branch_at": branch_at, "num_branches": num_branches, "parameters": parameters, **options}
    return measure_branching(rule, process, **options)


def random_batch(groups=3, trunks=3, branches=4, turns=4, branch_at=2):
    """Rewards of branched trunks, some of which end early, with failed members and rewards that do not apply."""
    size = groups * trunks * branches
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, turns + 1, (groups * trunks, branches), generator=draws)
    lengths = torch.where(lengths[:, :1] <= branch_at, lengths[:, :1], lengths.clamp(min=branch_at)).flatten()
    exists = torch.arange(turns) < lengths[:, None]
    exists[torch.rand(size, generator=draws) < 0.2] = False
    exists[:branches] = False  # a whole trunk
    exists[branches + 1 : 2 * branches] = False  # all branches but one
    rewards, outcomes = (torch.randn(shape, generator=draws).double() for shape in ((size, turns), (size,)))
    rewards[~exists | (torch.rand(size, turns, generator=draws) < 0.2)] = torch.nan
    outcomes[~exists.any(dim=1) | (torch.rand(size, generator=draws) < 0.2)] = torch.nan
    return RewardBatch(
        rewards, outcomes, exists, exists, trunks * branches, num_branches=branches, branch_at=branch_at
    )


def slow(batch, turn_coef):
    """The formulas of `branch_to_go`, one number after another."""
    mean = lambda values: sum(values) / len(values) if values else math.nan  # noqa: E731
    size, turns = batch.turn_rewards.shape
    zero = lambda value: 0.0 if math.isnan(value) else value  # noqa: E731
    stays = batch.turn_mask.any(dim=1).tolist()
    advantages = torch.zeros(size, turns, dtype=torch.double)
    for row in range(size):
        for turn in range(turns):
            if not batch.turn_mask[row, turn]:
                continue
            returns = {
                each: turn_coef * sum(map(zero, batch.turn_rewards[each, turn:].tolist()))
                + zero(batch.outcome_rewards[each].item())
                for each in range(size)
                if each // batch.group_size == row // batch.group_size and stays[each]
            }
            trunk = [each for each in returns if each // batch.num_branches == row // batch.num_branches]
            others = mean([value for each, value in returns.items() if each not in trunk])
            siblings = mean([returns[each] for each in trunk if each != row])
            if turn < batch.branch_at:
                advantage = mean([returns[each] for each in trunk]) - others
            else:
                advantage = returns[row] - (others if math.isnan(siblings) else siblings)
            advantages[row, turn] = zero(advantage)
    return advantages


@pytest.mark.parametrize("branch_at", [1, 2])
@pytest.mark.parametrize("name", list(PROCESSES))
def test_branches_are_credited_without_bias(name, branch_at):
    for turn_coef in (1.0, 0.3):
        result = measured("branch_to_go", name, branch_at, 2, turn_coef=turn_coef)
        assert result.bias.abs().max() < 1e-12


@pytest.mark.parametrize(("name", "branch_at"), [("stopper", 1), ("stopper", 2), ("one_search", 1), ("late", 2)])
def test_four_branches_of_three_trunks_have_no_bias(name, branch_at):
    assert measured("branch_to_go", name, branch_at, 4, num_trunks=3).bias.abs().max() < 1e-12


@pytest.mark.parametrize("name", ["stopper", "searcher", "two_hops"])
def test_a_mean_over_siblings_is_biased(name):
    """Rules that do not know of branches shorten the gradient of shared turns more than that of others."""
    for rule in ("reward_to_go", "leave_one_out"):
        result = measured(rule, name, 1, 2)
        scaled = result.mean * (result.truth.norm() / result.mean.norm())
        assert result.length < 0.95 and (len(scaled) == 1 or (scaled - result.truth).norm() > 1e-3)


def test_other_weights_than_one_by_branches_are_biased(monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("equal_tokens")
    def equal_tokens(batch, *, turn_coef=1.0, scale_rewards="none"):
        """Each distinct token weighs the same: those of a trunk are in the group once."""
        weights = torch.where(torch.arange(batch.turn_mask.shape[1]) < batch.branch_at, 1 / batch.num_branches, 1.0)
        return branch_to_go(batch, turn_coef=turn_coef, scale_rewards=scale_rewards) * weights

    @advantage_estimator("ended_once")
    def ended_once(batch, *, turn_coef=1.0, scale_rewards="none"):
        """A trunk that ended before it branched is in the group once."""
        advantages = branch_to_go(batch, turn_coef=turn_coef, scale_rewards=scale_rewards)
        ended = batch.turn_mask.sum(dim=1) <= batch.branch_at
        first = torch.arange(len(ended)) % batch.num_branches == 0
        return advantages * torch.where(ended & ~first, 0.0, 1.0)[:, None]

    for rule in ("equal_tokens", "ended_once"):
        for name in ("one_search", "searcher"):
            result = measured(rule, name, 1, 2)
            assert result.cosine < 1 - 1e-4 and result.bias.norm() > 0.05 * result.truth.norm(), (rule, name)


def test_without_branches_it_is_rewards_to_go_left_out():
    batch = replace(random_batch(), num_branches=1, branch_at=0)
    batch.turn_mask[:] = True
    batch.turn_rewards.nan_to_num_(nan=0.5)
    expected = reward_to_go(batch, scale_rewards="none") * batch.group_size / (batch.group_size - 1)
    torch.testing.assert_close(branch_to_go(batch, scale_rewards="none"), expected)


@pytest.mark.parametrize("branches", [1, 2, 4])
def test_branches_equal_their_formulas_on_random_rewards(branches):
    batch = replace(random_batch(), num_branches=branches)
    advantages = branch_to_go(batch, turn_coef=0.7, scale_rewards="none")
    assert advantages.isfinite().all()
    torch.testing.assert_close(advantages, slow(batch, 0.7))


def test_branches_that_earn_the_same_get_no_advantage():
    batch = random_batch()
    same = replace(batch, turn_rewards=torch.full_like(batch.turn_rewards, 0.1), outcome_rewards=torch.ones(36))
    for scale in ("group", "batch", "none"):
        assert (branch_to_go(same, scale_rewards=scale) == 0).all()


def test_a_late_open_decision_is_where_branches_pay():
    parameters = (3.0, 0.0)
    plain = measure("reward_to_go", settled, group_size=4, factor=4 / 3, parameters=parameters)
    options = {"branch_at": 3, "num_branches": 4, "parameters": parameters}
    branched = measure_branching("branch_to_go", settled, num_trunks=2, **options)
    assert branched.bias.abs().max() < 1e-12
    more = 2 * sampled_turns(settled, 3, 4, parameters) / (4 * sampled_turns(settled, 3, 1, parameters))
    assert more == pytest.approx(14 / 16)
    assert branched.signal_to_noise / math.sqrt(more) > 1.3 * plain.signal_to_noise


def test_turns_of_a_trunk_are_sampled_once():
    # it stops at the first, second or third decision, or goes on three times
    assert sampled_turns(stopper, 1, 1, (0.0,)) == pytest.approx(1.75)
    assert sampled_turns(stopper, 1, 4, (0.0,)) == pytest.approx(1 + 4 * 0.75)
    assert sampled_turns(stopper, 2, 4, (0.0,)) == pytest.approx(1 + 0.5 + 4 * 0.25)
