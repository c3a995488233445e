"""What a rule does to the proportions of rewards: the outcome at early turns, and turn rewards beside the outcome."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.registered import keep_estimators
from support.reward_batches import NONE, draw_batch

from mt_grpo.credit import RewardBatch, advantage_estimator
from mt_grpo.credit.audit import outcome_at_first_turn, pull_apart, scale_ratio


def conversations(turns: int = 12, shaping: float = 0.1, members: int = 8) -> RewardBatch:
    """One group: a chance of a turn reward at each turn, an outcome for every second member."""
    draw = torch.Generator().manual_seed(1)
    rewards = shaping * (torch.rand(members, turns, generator=draw) < 0.5).double()
    exists = torch.ones(members, turns, dtype=torch.bool)
    return RewardBatch(rewards, (torch.arange(members) % 2).double(), exists, exists, members)


@pytest.mark.parametrize(
    ("rule", "turns", "share"),
    [
        ({"name": "gtpo", "gamma": 0.5}, 12, 0.5**11),
        ({"name": "gtpo", "gamma": 0.9}, 12, 0.9**11),
        ({"name": "gtpo", "gamma": 0.5}, 4, 0.125),
        ({"name": "turn_gae", "lam": 0.95}, 12, 0.95**11),
        ("lambda_to_go", 12, 1.0),
        ("mt_grpo", 12, 1.0),
        ("grpo_or", 12, 1.0),
        ({"name": "gtpo", "gamma": 0.5}, 3, None),
    ],
)
def test_a_discount_takes_the_outcome_from_the_first_turn(rule, turns, share):
    found = outcome_at_first_turn(rule, conversations(turns))
    assert found == (None if share is None else pytest.approx(share, rel=1e-3))


def test_a_rule_without_a_scale_is_asked_as_it_is(monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("last_alone")
    def last_alone(batch):
        return torch.nn.functional.pad(batch.of_outcomes().nan_to_num()[:, None], (batch.turn_mask.shape[1] - 1, 0))

    assert outcome_at_first_turn("last_alone", conversations()) == 0
    equal = replace(conversations(), outcome_rewards=torch.zeros(8))
    assert outcome_at_first_turn("last_alone", equal) is None


def test_outcomes_by_name_are_left_out_too():
    batch = draw_batch(3, num_turns=6)
    assert outcome_at_first_turn("gdpo", batch) == pytest.approx(1.0)


@pytest.mark.parametrize("rule", ["lambda_to_go", "reward_to_go", "mt_grpo"])
def test_a_scale_each_makes_small_turn_rewards_count_as_much(rule):
    small, large = (scale_ratio(rule, conversations(shaping=shaping)) for shaping in (0.01, 0.1))
    assert small > 20 and small == pytest.approx(10 * large, rel=0.1)
    assert scale_ratio({"name": rule, "scales": "one"}, conversations()) == 1


def test_what_has_no_two_scales_has_no_ratio():
    assert scale_ratio("gtpo", conversations()) == 1
    assert scale_ratio("grpo_or", conversations()) is None
    assert scale_ratio("mt_grpo_discounted", conversations()) is None
    equal = replace(conversations(), outcome_rewards=torch.full((8,), NONE))
    assert scale_ratio("lambda_to_go", equal) is None


def test_means_that_go_apart_are_told_from_noise():
    draw = random.Random(0)
    noise = [[draw.gauss(0, 0.02) for _ in range(10)] for _ in range(2)]
    rising = [0.05 * step + each for step, each in enumerate(noise[0])]
    falling = [-0.01 * step for step in range(10)]
    assert pull_apart(rising, falling) and pull_apart(falling, rising)
    assert not pull_apart(rising, rising)
    assert not pull_apart(*noise) and not pull_apart([1.0], [2.0])
    by_chance = sum(pull_apart(*[[draw.gauss(0, 1) for _ in range(10)] for _ in range(2)]) for _ in range(2000))
    assert by_chance <= 3
