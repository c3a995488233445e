"""How much of the turn rewards reaches the turn that earned them, for any rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.registered import keep_estimators
from support.reward_batches import NONE, draw_batch

from mt_grpo.credit import RewardBatch, Uncredited, advantage_estimator, uncredited_turn_rewards

UNTOUCHED = Uncredited(None, None)


def conversations(turns=12, members=4, reward=0.5, **changes):
    """Each turn earns the same, and a tool result follows each."""
    exists = torch.ones(members, turns, dtype=torch.bool)
    rewards = torch.full((members, turns), reward)
    return replace(RewardBatch(rewards, torch.rand(members), exists, exists, members), **changes)


@pytest.mark.parametrize(
    ("rule", "at_turn", "up_to_turn"),
    [
        ("mt_grpo", 11 / 12, 0.0),
        ("grpo_or", 1.0, 1.0),
        ("grpo_mr", 0.0, 0.0),
        ("leave_one_out", 0.0, 0.0),
        ("reward_to_go", 0.0, 0.0),
        ({"name": "gtpo", "gamma": 0.0}, 0.0, 0.0),
        ("turn_gae", 0.0, 0.0),
        ("branch_to_go", 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_twelve_equal_turns_with_results(rule, at_turn, up_to_turn, scale):
    reach = uncredited_turn_rewards(rule, conversations(), scale_rewards=scale)
    assert (reach.at_turn, reach.up_to_turn) == pytest.approx((at_turn, up_to_turn))


def test_a_share_is_of_what_was_earned():
    """The first two of three turns are up to the first result; penalties count as rewards do."""
    results = torch.tensor([[False, True, True]] * 2)
    rewards = torch.tensor([[0.2, NONE, -0.4], [0.3, 0.1, 0.0]])
    batch = RewardBatch(rewards, torch.zeros(2), torch.ones(2, 3).bool(), results, 2)
    assert uncredited_turn_rewards("mt_grpo", batch).at_turn == pytest.approx(0.4)


def test_a_conversation_without_results_reaches_all_of_its_turns():
    batch = conversations(result_mask=torch.zeros(4, 12, dtype=torch.bool))
    assert uncredited_turn_rewards("mt_grpo", batch) == Uncredited(0.0, 0.0)


@pytest.mark.parametrize(
    "batch",
    [
        conversations(reward=0.0),
        conversations(reward=NONE),
        conversations(members=1),
        conversations(turn_mask=torch.zeros(4, 12, dtype=torch.bool)),
        conversations(turn_mask=torch.tensor([[True]] + [[False]] * 3).expand(4, 12)),
    ],
    ids=["rewards of 0", "no rewards", "a group of one", "all failed", "all but one failed"],
)
def test_where_nothing_can_be_credited_nothing_is_missed(batch):
    assert uncredited_turn_rewards("mt_grpo", batch) == UNTOUCHED


def test_shared_turns_are_compared_with_other_trunks_alone():
    """The second trunk failed: what the shared turn of the first earns is compared with nothing, a branch's is."""
    exists = torch.tensor([[True] * 3, [True] * 3, [False] * 3, [False] * 3])
    batch = conversations(turns=3, turn_mask=exists, branch_at=1, num_branches=2)
    assert uncredited_turn_rewards("branch_to_go", batch) == Uncredited(0.0, 0.0)
    assert uncredited_turn_rewards("branch_to_go", replace(batch, branch_at=3)) == UNTOUCHED


def test_a_single_turn_gets_what_it_earns():
    assert uncredited_turn_rewards("mt_grpo", conversations(turns=1)) == Uncredited(0.0, 0.0)


def test_a_coefficient_of_0_credits_no_turn():
    assert uncredited_turn_rewards("reward_to_go", conversations(), turn_coef=0.0) == Uncredited(1.0, 1.0)


@pytest.mark.parametrize("rule", ["gdpo", "gigpo", "state_baseline", "mt_grpo_discounted"])
def test_rules_of_streams_and_states_reach_their_turns(rule):
    assert uncredited_turn_rewards(rule, draw_batch(7, group_size=4)) == Uncredited(0.0, 0.0)


def test_measuring_changes_nothing_in_the_batch():
    batch = draw_batch(7, group_size=4)
    before = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    uncredited_turn_rewards("gdpo", batch)
    assert all(torch.equal(getattr(batch, name).nan_to_num(9), value.nan_to_num(9)) for name, value in before.items())


def test_a_rule_that_draws_is_measured_by_the_same_draws(monkeypatch):
    keep_estimators(monkeypatch)
    advantage_estimator("drawn")(lambda batch: torch.randn(batch.turn_mask.shape))
    batch = conversations()
    before = torch.get_rng_state()
    assert uncredited_turn_rewards("drawn", batch) == Uncredited(1.0, 1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rule_of_ones_own_is_measured_too(monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("one_late")
    def one_late(batch):
        """Each turn gets the reward of the turn before it."""
        return torch.nn.functional.pad(batch.turn_rewards.nan_to_num(nan=0.0), (1, 0))[:, :-1]

    assert uncredited_turn_rewards("one_late", conversations()) == Uncredited(1.0, 1.0)


def test_a_rule_is_measured_on_rewards_of_the_runs_dtype(monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("summed")
    def summed(batch):
        return batch.turn_rewards @ torch.ones(12, 12).tril()  # of one dtype, or not at all

    assert uncredited_turn_rewards("summed", conversations()) == Uncredited(0.0, 0.0)


def test_many_turns_are_measured_on_some(monkeypatch):
    keep_estimators(monkeypatch)
    calls = []

    @advantage_estimator("counted")
    def counted(batch):
        calls.append(batch)
        return torch.where(torch.arange(100) < 50, batch.turn_rewards, 0.0)

    reach = uncredited_turn_rewards("counted", conversations(turns=100), most_turns=10)
    assert reach.at_turn == pytest.approx(0.5) and len(calls) == 11
