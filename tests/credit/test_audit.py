"""An audit of rewards equals one that is written down member by member."""

from __future__ import annotations

import inspect
import math
import statistics

import pytest
import torch
from support.reward_batches import draw_batch

from mt_grpo.credit import ADVANTAGE_ESTIMATORS, RewardBatch, audit_rewards, estimate, reward_to_go, without_signal

NONE = math.nan


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
    agree = compared = 0
    for group in groups:
        middle = mean([outcomes[row] for row in group])
        for turn in range(batch.turn_mask.shape[1]):
            later = {row: sum(given(rewards[row][turn:].tolist())) for row in group}
            average = mean(list(later.values()))
            for row in group:
                a, b = outcomes[row] - middle, later[row] - average
                if batch.turn_mask[row, turn] and abs(a) > 1e-9 and abs(b) > 1e-9:
                    compared, agree = compared + 1, agree + (a * b > 0)
    return agree / compared if compared else None


def slow_audit(batch, advantages):
    size, total = batch.group_size, len(batch.turn_mask)
    ran = [row for row in range(total) if batch.turn_mask[row].any()]
    groups = [[row for row in ran if row // size == group] for group in range(total // size)]
    outcomes = {row: sum(given([batch.outcome_rewards[row].item()])) for row in ran}
    silent = [not any(advantages[row].any() for row in range(g * size, g * size + size)) for g in range(len(groups))]
    found = []
    streams = [*batch.turn_streams, *batch.outcome_streams[:, :, None]]
    for number, stream in enumerate(streams):
        present = [sum(given(stream[row].tolist())) for row in ran if given(stream[row].tolist())]
        earned = {row: sum(given(stream[row].tolist())) for row in ran}
        several = [group for group in groups if len(group) > 1]
        centred = {
            row: (
                earned[row] - mean([earned[each] for each in group]),
                outcomes[row] - mean([outcomes[each] for each in group]),
            )
            for group in groups
            for row in group
        }
        overall = [
            [values[row] - mean([values[each] for each in ran]) for row in ran] for values in (earned, outcomes)
        ]
        turn = number < len(batch.turn_streams)
        weighed = stream * batch.stream_weights[number]
        found.append(
            {
                "applies": len(present) / len(ran) if ran else None,
                "mean": mean(present),
                "std": (statistics.stdev(present) if len(present) > 1 else 0.0) if present else None,
                "group_variance": mean([statistics.variance([earned[row] for row in group]) for group in several]),
                "equal_groups": mean([float(len({earned[row] for row in group}) == 1) for group in several]),
                "correlation": correlation(*overall),
                "group_correlation": correlation([x for x, _ in centred.values()], [y for _, y in centred.values()]),
                "sign_agreement": slow_agreement(batch, weighed, outcomes, groups) if turn else None,
            }
        )
    return mean([float(each) for each in silent]), slow_agreement(batch, batch.turn_rewards, outcomes, groups), found


@pytest.mark.parametrize("seed", range(30))
def test_an_audit_equals_a_slow_one(seed):
    batch = draw_batch(seed, failing=0.3, integers=seed % 2 == 0, absent=0.8 if seed % 3 == 0 else 0.2)
    advantages = reward_to_go(batch)
    audit = audit_rewards(batch, advantages)
    silent, agreement, rewards = slow_audit(batch, advantages)
    assert audit.groups == 3
    assert audit.groups_without_signal == pytest.approx(silent)
    assert audit.sign_agreement == pytest.approx(agreement)
    for fast, slow in zip(audit.rewards, rewards, strict=True):
        assert vars(fast) == {name: pytest.approx(value) for name, value in slow.items()}


def batch_of(turns, outcomes, group_size, failed=(), weights=(1.0, 1.0)):
    turns, outcomes = torch.tensor(turns), torch.tensor(outcomes)
    exists = torch.ones_like(turns, dtype=torch.bool)
    exists[list(failed)] = False
    turns, outcomes = turns.masked_fill(~exists, NONE), outcomes.masked_fill(~exists.any(dim=1), NONE)
    return RewardBatch(
        turns * weights[0],
        outcomes * weights[1],
        exists,
        exists,
        group_size,
        turn_streams=turns[None],
        outcome_streams=outcomes[None],
        stream_weights=torch.tensor(weights),
    )


def test_groups_of_one_member_have_no_variance_to_speak_of():
    audit = audit_rewards(batch_of([[1.0], [2.0]], [0.0, 1.0], 1), torch.zeros(2, 1))
    turn, outcome = audit.rewards
    assert turn.group_variance is None and turn.equal_groups is None and turn.group_correlation is None
    assert turn.correlation == outcome.correlation == pytest.approx(1.0)
    assert audit.groups_without_signal == 1.0 and audit.sign_agreement is None


def test_rewards_that_never_apply_have_no_numbers():
    audit = audit_rewards(batch_of([[NONE], [NONE]], [NONE, NONE], 2), torch.zeros(2, 1))
    for each in audit.rewards:
        assert (each.applies, each.mean, each.std, each.correlation) == (0.0, None, None, None)
        assert (each.group_variance, each.equal_groups) == (0.0, 1.0)


def test_a_batch_of_failures_is_audited_without_an_error():
    audit = audit_rewards(batch_of([[1.0], [2.0]], [0.0, 1.0], 2, failed=(0, 1)), torch.zeros(2, 1))
    assert audit.groups_without_signal == 1.0
    assert {value for each in audit.rewards for value in vars(each).values()} == {None}


def test_a_penalty_agrees_when_the_worse_member_earns_it():
    punished = [[1.0], [0.0]]
    for weight, agreement in ((1.0, 0.0), (-1.0, 1.0)):
        audit = audit_rewards(batch_of(punished, [0.0, 1.0], 2, weights=(weight, 1.0)), torch.ones(2, 1))
        assert audit.sign_agreement == audit.rewards[0].sign_agreement == agreement
        assert audit.rewards[0].group_correlation == pytest.approx(-1.0)


def test_without_outcome_rewards_nothing_is_compared_with_them():
    batch = draw_batch(3)
    batch = RewardBatch(**{**vars(batch), "outcome_streams": batch.outcome_streams[:0]})
    batch = RewardBatch(**{**vars(batch), "outcome_rewards": torch.full_like(batch.outcome_rewards, NONE)})
    audit = audit_rewards(batch, torch.zeros_like(batch.turn_rewards))
    assert len(audit.rewards) == 2 and audit.sign_agreement is None
    assert all(each.correlation is each.group_correlation is each.sign_agreement is None for each in audit.rewards)


def test_sums_that_differ_by_rounding_are_the_same():
    third = 1 / 3
    audit = audit_rewards(batch_of([[third] * 3, [1.0, 0.0, 0.0]], [0.0, 1.0], 2), torch.ones(2, 3))
    turn = audit.rewards[0]
    assert (turn.group_variance, turn.equal_groups, turn.group_correlation) == (0.0, 1.0, None)
    assert turn.sign_agreement == 0.0  # the later turns of the first member earn more


def test_one_turn_of_one_member_is_a_signal():
    advantages = torch.zeros(6, 3)
    advantages[4, 2] = 1e-30
    assert without_signal(advantages, 2).tolist() == [True, True, False]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rule", sorted(set(ADVANTAGE_ESTIMATORS) - {"gigpo"}))
def test_a_group_of_equals_has_no_signal_whatever_the_rule(rule, scale):
    """Not even a rounding error, which dividing by a small number would make large."""
    takes_scale = "scale_rewards" in inspect.signature(ADVANTAGE_ESTIMATORS[rule]).parameters
    options = {"scale_rewards": scale} if takes_scale else {}
    draw = torch.Generator().manual_seed(1)
    for size in (2, 3, 5, 7):
        turns = torch.rand(2, 3, generator=draw).repeat_interleave(size, dim=0)
        outcomes = torch.rand(2, generator=draw).repeat_interleave(size)
        batch = batch_of(turns.tolist(), outcomes.tolist(), size)
        scores = torch.zeros_like(turns)
        batch = RewardBatch(**{**vars(batch), "state_ids": scores.long(), "state_scores": scores})
        assert without_signal(estimate(rule, batch, **options), size).all()


def test_an_audit_needs_each_reward_by_itself():
    batch = RewardBatch(torch.zeros(2, 1), torch.zeros(2), torch.ones(2, 1).bool(), torch.ones(2, 1).bool(), 2)
    with pytest.raises(ValueError, match="each reward by itself"):
        audit_rewards(batch, torch.zeros(2, 1))
