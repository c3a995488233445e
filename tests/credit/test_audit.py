"""An audit of rewards equals one that is written down member by member; which rewards reach which turns."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from support.registered import keep_estimators
from support.reward_batches import NONE, draw_batch

from mt_grpo.credit import (
    RewardBatch,
    Uncredited,
    advantage_estimator,
    audit_rewards,
    reward_to_go,
    uncredited_turn_rewards,
    without_signal,
)
from mt_grpo.credit.audit import RewardAudit, outcome_at_first_turn, pull_apart, scale_ratio


def given(values):
    return [value for value in values if not math.isnan(value)]


def mean(values):
    return statistics.fmean(values) if values else None


def correlation(xs, ys):
    """Of pairs that are centred already."""
    above = sum(x * y for x, y in zip(xs, ys, strict=True))
    below = math.sqrt(sum(x * x for x in xs)) * math.sqrt(sum(y * y for y in ys))
    return above / below if below > 1e-9 else None


def slow_agreement(batch, rewards, outcomes, groups):
    agree = []
    for group in groups:
        middle = mean([outcomes[row] for row in group])
        for turn in range(batch.turn_mask.shape[1]):
            later = {row: sum(given(rewards[row][turn:].tolist())) for row in group}
            average = mean(list(later.values()))
            for row in group:
                a, b = outcomes[row] - middle, later[row] - average
                if batch.turn_mask[row, turn] and abs(a) > 1e-9 and abs(b) > 1e-9:
                    agree.append(float(a * b > 0))
    return mean(agree)


def slow_audit(batch, advantages):
    size, total = batch.group_size, len(batch.turn_mask)
    ran = [row for row in range(total) if batch.turn_mask[row].any()]
    groups = [[row for row in ran if row // size == group] for group in range(total // size)]
    outcomes = {row: sum(given([batch.outcome_rewards[row].item()])) for row in ran}
    silent = [float(not each.any()) for each in advantages.view(len(groups), -1)]

    def centred(values, groups):
        return [values[row] - mean([values[each] for each in group]) for group in groups for row in group]

    found = []
    for number, stream in enumerate([*batch.turn_streams, *batch.outcome_streams[:, :, None]]):
        present = [sum(given(stream[row].tolist())) for row in ran if given(stream[row].tolist())]
        earned = {row: sum(given(stream[row].tolist())) for row in ran}
        several = [[earned[row] for row in group] for group in groups if len(group) > 1]
        weighed, turn = stream * batch.stream_weights[number], number < len(batch.turn_streams)
        found.append(
            {
                "applies": len(present) / len(ran) if ran else None,
                "mean": mean(present),
                "std": (statistics.stdev(present) if len(present) > 1 else 0.0) if present else None,
                "group_variance": mean([statistics.variance(group) for group in several]),
                "equal_groups": mean([float(len(set(group)) == 1) for group in several]),
                "correlation": correlation(centred(earned, [ran]), centred(outcomes, [ran])),
                "group_correlation": correlation(centred(earned, groups), centred(outcomes, groups)),
                "sign_agreement": slow_agreement(batch, weighed, outcomes, groups) if turn else None,
            }
        )
    return mean(silent), slow_agreement(batch, batch.turn_rewards, outcomes, groups), found


@pytest.mark.parametrize("seed", range(30))
def test_an_audit_equals_a_slow_one(seed):
    batch = draw_batch(seed, failing=0.3, integers=seed % 2 == 0, absent=0.8 if seed % 3 == 0 else 0.2)
    advantages = reward_to_go(batch)
    audit = audit_rewards(batch, advantages)
    silent, agreement, rewards = slow_audit(batch, advantages)
    assert audit.groups == 3
    assert (audit.groups_without_signal, audit.sign_agreement) == (pytest.approx(silent), pytest.approx(agreement))
    for fast, slow in zip(audit.rewards, rewards, strict=True):
        assert vars(fast) == {name: pytest.approx(value) for name, value in slow.items()}


def batch_of(turns, outcomes, group_size, failed=(), weights=(1.0, 1.0), **changes):
    turns, outcomes = torch.tensor(turns), torch.tensor(outcomes)
    exists = torch.ones_like(turns, dtype=torch.bool)
    exists[list(failed)] = False
    turns, outcomes = turns.masked_fill(~exists, NONE), outcomes.masked_fill(~exists.any(dim=1), NONE)
    streams = {"turn_streams": turns[None], "outcome_streams": outcomes[None], "stream_weights": torch.tensor(weights)}
    rewards = (turns * weights[0], outcomes * weights[1])
    return RewardBatch(*rewards, exists, exists, group_size, **{**streams, **changes})


def test_groups_of_one_member_have_no_variance_to_speak_of():
    audit = audit_rewards(batch_of([[1.0], [2.0]], [0.0, 1.0], 1), torch.zeros(2, 1))
    turn, outcome = audit.rewards
    assert (turn.group_variance, turn.equal_groups, turn.group_correlation) == (None, None, None)
    assert turn.correlation == outcome.correlation == pytest.approx(1.0)
    assert (audit.groups_without_signal, audit.sign_agreement) == (1.0, None)


def test_what_never_applies_or_failed_has_no_numbers():
    never = audit_rewards(batch_of([[NONE], [NONE]], [NONE, NONE], 2), torch.zeros(2, 1))
    assert set(never.rewards) == {RewardAudit(0.0, None, None, 0.0, 1.0, None, None, None)}
    failed = audit_rewards(batch_of([[1.0], [2.0]], [0.0, 1.0], 2, failed=(0, 1)), torch.zeros(2, 1))
    assert failed.groups_without_signal == 1.0 and set(failed.rewards) == {RewardAudit(*[None] * 8)}
    batch = draw_batch(3)
    batch = replace(batch, outcome_streams=batch.outcome_streams[:0], outcome_rewards=NONE * batch.outcome_rewards)
    audit = audit_rewards(batch, torch.zeros_like(batch.turn_rewards))
    assert len(audit.rewards) == 2 and audit.sign_agreement is None
    assert all(each.correlation is each.group_correlation is each.sign_agreement is None for each in audit.rewards)


def test_a_penalty_agrees_when_the_worse_member_earns_it():
    for weight, agreement in ((1.0, 0.0), (-1.0, 1.0)):
        audit = audit_rewards(batch_of([[1.0], [0.0]], [0.0, 1.0], 2, weights=(weight, 1.0)), torch.ones(2, 1))
        assert audit.sign_agreement == audit.rewards[0].sign_agreement == agreement
        assert audit.rewards[0].group_correlation == pytest.approx(-1.0)


def test_sums_that_differ_by_rounding_are_the_same():
    turn = audit_rewards(batch_of([[1 / 3] * 3, [1.0, 0.0, 0.0]], [0.0, 1.0], 2), torch.ones(2, 3)).rewards[0]
    assert (turn.group_variance, turn.equal_groups, turn.group_correlation) == (0.0, 1.0, None)
    assert turn.sign_agreement == 0.0  # the later turns of the first member earn more


def test_one_turn_of_one_member_is_a_signal():
    advantages = torch.zeros(6, 3)
    advantages[4, 2] = 1e-30
    assert without_signal(advantages, 2).tolist() == [True, True, False]


def test_an_audit_needs_each_reward_by_itself():
    for lacking in ("turn_streams", "outcome_streams", "stream_weights"):
        with pytest.raises(ValueError, match="each reward by itself"):
            audit_rewards(batch_of([[0.0]] * 2, [0.0] * 2, 2, **{lacking: None}), torch.zeros(2, 1))


# How much of the turn rewards reaches the turn that earned them


UNTOUCHED = Uncredited(None, None)


def equal_turns(turns=12, members=4, reward=0.5, **changes):
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
    reach = uncredited_turn_rewards(rule, equal_turns(), scale_rewards=scale)
    assert (reach.at_turn, reach.up_to_turn) == pytest.approx((at_turn, up_to_turn))


def test_a_share_is_of_what_was_earned():
    """The first two of three turns are up to the first result; penalties count as rewards do."""
    results = torch.tensor([[False, True, True]] * 2)
    rewards = torch.tensor([[0.2, NONE, -0.4], [0.3, 0.1, 0.0]])
    batch = RewardBatch(rewards, torch.zeros(2), torch.ones(2, 3).bool(), results, 2)
    assert uncredited_turn_rewards("mt_grpo", batch).at_turn == pytest.approx(0.4)


FALSE = torch.zeros(4, 12, dtype=torch.bool)
SECOND_TRUNK_FAILED = equal_turns(3, turn_mask=torch.tensor([[True] * 3] * 2 + [[False] * 3] * 2), num_branches=2)


@pytest.mark.parametrize(
    ("rule", "batch", "missed"),
    [
        ("mt_grpo", equal_turns(reward=0.0), UNTOUCHED),
        ("mt_grpo", equal_turns(reward=NONE), UNTOUCHED),
        ("mt_grpo", equal_turns(members=1), UNTOUCHED),
        ("mt_grpo", equal_turns(turn_mask=FALSE), UNTOUCHED),
        ("mt_grpo", equal_turns(turn_mask=torch.tensor([[True]] + [[False]] * 3).expand(4, 12)), UNTOUCHED),
        ("mt_grpo", equal_turns(result_mask=FALSE), Uncredited(0.0, 0.0)),
        ("mt_grpo", equal_turns(turns=1), Uncredited(0.0, 0.0)),
        # what the shared turn of the first trunk earns is compared with nothing, what a branch does is
        ("branch_to_go", replace(SECOND_TRUNK_FAILED, branch_at=1), Uncredited(0.0, 0.0)),
        ("branch_to_go", replace(SECOND_TRUNK_FAILED, branch_at=3), UNTOUCHED),
        ({"name": "reward_to_go", "turn_coef": 0.0}, equal_turns(), Uncredited(1.0, 1.0)),
        *((rule, draw_batch(7, 4), Uncredited(0.0, 0.0)) for rule in ("gdpo", "gigpo", "state_baseline")),
        ("mt_grpo_discounted", draw_batch(7, 4), Uncredited(0.0, 0.0)),
    ],
)
def test_nothing_is_missed_where_nothing_can_be_credited(rule, batch, missed):
    before = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert uncredited_turn_rewards(rule, batch) == missed
    assert all(torch.equal(getattr(batch, name).nan_to_num(9), value.nan_to_num(9)) for name, value in before.items())


OWN = {
    # the same draws each time
    "drawn": lambda batch: torch.randn(batch.turn_mask.shape),
    # the reward of the turn before
    "one_late": lambda batch: torch.nn.functional.pad(batch.turn_rewards.nan_to_num(nan=0.0), (1, 0))[:, :-1],
    # of the run's dtype, or not at all
    "summed": lambda batch: batch.turn_rewards @ torch.ones(12, 12).tril(),
}


@pytest.mark.parametrize(("name", "missed"), [("drawn", 1.0), ("one_late", 1.0), ("summed", 0.0)])
def test_a_rule_of_ones_own_is_measured_too(monkeypatch, name, missed):
    keep_estimators(monkeypatch)
    advantage_estimator(name)(OWN[name])
    batch, before = equal_turns(), torch.get_rng_state()
    assert uncredited_turn_rewards(name, batch) == Uncredited(missed, missed)
    assert torch.equal(torch.get_rng_state(), before)


def test_many_turns_are_measured_on_some(monkeypatch):
    keep_estimators(monkeypatch)
    calls = []

    @advantage_estimator("counted")
    def counted(batch):
        calls.append(batch)
        return torch.where(torch.arange(100) < 50, batch.turn_rewards, 0.0)

    reach = uncredited_turn_rewards("counted", equal_turns(turns=100), most_turns=10)
    assert reach.at_turn == pytest.approx(0.5) and len(calls) == 11


# What a rule does to the proportions of rewards: the outcome at early turns, and turn rewards beside the outcome


def shaped(turns: int = 12, shaping: float = 0.1, members: int = 8) -> RewardBatch:
    """One group: a chance of a turn reward at each turn, an outcome for every second member."""
    draw = torch.Generator().manual_seed(1)
    rewards = shaping * (torch.rand(members, turns, generator=draw) < 0.5).double()
    exists = torch.ones(members, turns, dtype=torch.bool)
    return RewardBatch(rewards, (torch.arange(members) % 2).double(), exists, exists, members)


def last_alone(batch):
    return torch.nn.functional.pad(batch.of_outcomes().nan_to_num()[:, None], (batch.turn_mask.shape[1] - 1, 0))


@pytest.mark.parametrize(
    ("rule", "batch", "share"),
    [
        ({"name": "gtpo", "gamma": 0.5}, shaped(), 0.5**11),
        ({"name": "gtpo", "gamma": 0.9}, shaped(), 0.9**11),
        ({"name": "gtpo", "gamma": 0.5}, shaped(4), 0.125),
        ({"name": "turn_gae", "lam": 0.95}, shaped(), 0.95**11),
        ("lambda_to_go", shaped(), 1.0),
        ("mt_grpo", shaped(), 1.0),
        ("grpo_or", shaped(), 1.0),
        ({"name": "gtpo", "gamma": 0.5}, shaped(3), None),
        ("gdpo", draw_batch(3, num_turns=6), 1.0),  # outcomes by name are left out too
        ("last_alone", shaped(), 0.0),  # it has no scale
        ("branch_to_go", replace(shaped(), num_branches=4, branch_at=1), 1.0),
        # whatever outcomes there are: none yet, all, or none that applies
        *[
            ({"name": "gtpo", "gamma": 0.5}, replace(shaped(), outcome_rewards=torch.full((8,), same)), 0.5**11)
            for same in (0.0, 1.0, NONE)
        ],
        (
            "lambda_to_go",
            replace(shaped(), turn_streams=shaped().turn_rewards[None], outcome_streams=torch.zeros(0, 8)),
            None,
        ),
    ],
)
def test_a_discount_takes_the_outcome_from_the_first_turn(monkeypatch, rule, batch, share):
    keep_estimators(monkeypatch)
    advantage_estimator("last_alone")(last_alone)
    found = outcome_at_first_turn(rule, batch)
    assert found == (None if share is None else pytest.approx(share, rel=1e-3))


@pytest.mark.parametrize("rule", [{"name": "gtpo", "gamma": 1.0}, {"name": "turn_gae", "lam": 1.0}, "gigpo"])
def test_few_long_conversations_are_no_lost_outcome(rule):
    """All but one succeed, and each is longer than the one before: the last turns of the longest have no others."""
    exists = torch.arange(16) < torch.arange(2, 17, 2)[:, None]
    rewards, outcomes = torch.where(exists, 0.0, NONE), (torch.arange(8) > 0).double()
    batch = RewardBatch(rewards, outcomes, exists, exists, 8, state_ids=exists.long())
    found = outcome_at_first_turn(rule, batch)
    assert found is not None and found > 0.5


def test_a_discount_loses_the_outcome_if_few_are_long():
    exists = torch.arange(12) < torch.tensor([1, 1, 1, 2, 5, 6, 7, 12])[:, None]
    batch = RewardBatch(torch.where(exists, 0.0, NONE), torch.zeros(8), exists, exists, 8)
    assert outcome_at_first_turn({"name": "gtpo", "gamma": 0.5}, batch) == pytest.approx(0.5**7)


@pytest.mark.parametrize("rule", ["lambda_to_go", "reward_to_go", "mt_grpo"])
def test_a_scale_each_makes_small_turn_rewards_count_as_much(rule):
    small, large = (scale_ratio(rule, shaped(shaping=shaping)) for shaping in (0.01, 0.1))
    assert small > 20 and small == pytest.approx(10 * large, rel=0.1)
    assert scale_ratio({"name": rule, "scales": "one"}, shaped()) == 1


def test_what_has_no_two_scales_has_no_ratio():
    assert [scale_ratio(rule, shaped()) for rule in ("gtpo", "grpo_or")] == [1, None]
    assert scale_ratio("mt_grpo_discounted", shaped()) == pytest.approx(10, rel=0.2)  # a scale for each turn
    assert scale_ratio("lambda_to_go", replace(shaped(), outcome_rewards=torch.full((8,), NONE))) is None


def test_means_that_go_apart_are_told_from_noise():
    draw = random.Random(0)
    noise = [[draw.gauss(0, 0.02) for _ in range(10)] for _ in range(2)]
    rising = [0.05 * step + each for step, each in enumerate(noise[0])]
    falling = [-0.01 * step for step in range(10)]
    assert pull_apart(falling, rising) and not pull_apart(rising, falling)  # more of the outcome is no harm
    assert not pull_apart(rising, rising) and not pull_apart(*noise) and not pull_apart([1.0], [2.0])
    # chance, also where what earns more of one earns less of the other
    chance = [[draw.gauss(0, 1) for _ in range(10)] for _ in range(2000)]
    assert sum(pull_apart(each, [-value for value in each]) for each in chance) <= 10
