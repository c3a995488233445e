"""What a rule's advantage is the sum of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.registered import keep_estimators
from support.reward_batches import NONE, draw_batch

from mt_grpo.credit import (
    ADVANTAGE_ESTIMATORS,
    Credit,
    CreditError,
    RewardBatch,
    advantage_estimator,
    by_reward,
    estimate,
    estimate_parts,
    in_parts,
    reward_to_go,
    whole_rule,
)

RULES = [name for name, rule in ADVANTAGE_ESTIMATORS.items() if rule.__module__.startswith("mt_grpo.credit.rules")]
BRANCHES = {"num_branches": 2, "branch_at": 2}
NAMES = ("format", "hops", "answer", "judge")


@st.composite
def batches(draw):
    """Batches of two turn rewards and two outcome rewards, some of large numbers, some of float32."""
    batch = draw_batch(draw(st.integers(0, 10**6)), 4, num_turns=draw(st.integers(1, 6)), integers=draw(st.booleans()))
    size = draw(st.sampled_from([1.0, 300.0, 1e-3]))
    batch = replace(
        batch,
        turn_rewards=size * batch.turn_rewards,
        outcome_rewards=size * batch.outcome_rewards,
        turn_streams=size * batch.turn_streams,
        outcome_streams=size * batch.outcome_streams,
        names=draw(st.sampled_from([(), NAMES])),
    )
    if draw(st.booleans()):
        batch = replace(batch, turn_rewards=batch.turn_rewards.float(), outcome_rewards=batch.outcome_rewards.float())
    return batch


@pytest.mark.parametrize("rule", RULES)
@given(
    batches(),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from(["each", "one"]),
)
@settings(max_examples=25, deadline=None)
def test_parts_sum_to_the_advantage(rule, batch, scale, turn_coef, share, scales):
    known = whole_rule(rule, **OF_RUN)
    options = {"gamma": share, "lam": share, "scales": scales}
    options = {option: value for option, value in options.items() if option in known}
    if rule == "branch_to_go":
        batch = replace(batch, **BRANCHES)
    credit = estimate_parts({"name": rule, **options}, batch, turn_coef=turn_coef, scale_rewards=scale)
    total = sum(credit.parts.values())
    assert torch.allclose(total, credit.advantages.double(), rtol=1e-6, atol=1e-6)
    assert all(part.dtype == torch.double and part.isfinite().all() for part in credit.parts.values())
    assert all(not part[~batch.turn_mask].any() for part in credit.parts.values())
    for name, scale in credit.scales.items():
        assert not credit.parts[name][scale.isnan()].any()
        assert (scale[~scale.isnan()] > 0).all()


OF_RUN = {"turn_coef": None, "scale_rewards": "group"}


def at(tensor, row, turn):
    return round(tensor[row, turn].item(), 6)


def two(names=("hops", "exact_match"), **changes):
    """Two members: 0.4 and 0.2 for two turns and right; 0.2 for the first of two and wrong."""
    turns = torch.tensor([[0.4, 0.2], [0.2, 0.0]], dtype=torch.double)
    outcomes = torch.tensor([1.0, 0.0], dtype=torch.double)
    exists = torch.ones(2, 2, dtype=torch.bool)
    about = {
        "turn_streams": turns[None] / 2,
        "outcome_streams": outcomes[None],
        "stream_weights": torch.tensor([2.0, 1.0], dtype=torch.double),
        "names": names,
    }
    return RewardBatch(turns, outcomes, exists, exists, 2, **{**about, **changes})


def test_rewards_to_go_are_what_was_earned_less_a_mean():
    credit = estimate_parts("reward_to_go", two())
    assert list(credit.parts) == ["outcome", "turn reward hops", "outcome baseline", "turn baseline"]
    assert [at(credit.parts[name] * credit.scales[name], 0, 0) for name in credit.parts] == [1.0, 0.6, -0.5, -0.4]
    assert [at(credit.parts[name] * credit.scales[name], 1, 1) for name in credit.parts] == [0.0, 0.0, -0.5, -0.1]
    deviations = [at(credit.scales[name], 0, 0) for name in credit.parts]
    assert deviations == pytest.approx([0.5**0.5 + 1e-4, 0.08**0.5 + 1e-4] * 2, abs=1e-6)


def test_the_coefficient_is_in_the_turn_parts():
    credit = estimate_parts("reward_to_go", two(), turn_coef=0.5, scale_rewards="none")
    assert [at(part, 0, 0) for part in credit.parts.values()] == [1.0, 0.3, -0.5, -0.2]
    assert all((scale == 1).all() for scale in credit.scales.values())


def test_mt_grpo_has_one_baseline_where_no_tool_ran():
    first = torch.tensor([[True, True], [False, False]])
    credit = estimate_parts("mt_grpo", replace(two(), result_mask=first))
    raw = {name: part * credit.scales[name] for name, part in credit.parts.items()}
    assert [at(raw[name], 0, 0) for name in ("outcome", "outcome baseline")] == [1.0, -0.5]
    assert [at(raw[name], 0, 0) for name in ("turn reward hops", "turn baseline")] == [0.6, -0.4]
    assert at(credit.parts["turn reward hops"], 0, 1) == 0  # after the first result
    assert [at(raw[name], 1, 1) for name in ("outcome", "turn reward hops", "baseline")] == [0.0, 0.2, -0.9]
    assert credit.scales["baseline"][0].isnan().all() and credit.scales["turn baseline"][1].isnan().all()


def test_each_reward_has_its_part_and_in_gdpo_its_baseline():
    batch = replace(draw_batch(3, group_size=4), names=NAMES)
    own = ["turn reward format", "turn reward hops", "outcome answer", "outcome judge"]
    assert set(own) < set(estimate_parts("reward_to_go", batch).parts)
    assert set(estimate_parts("gdpo", batch).parts) == {*own, *(f"{name} baseline" for name in own)}
    unnamed = estimate_parts("gtpo", replace(batch, names=())).parts
    assert set(unnamed) == {"turn reward 1", "turn reward 2", "outcome 1", "outcome 2", "baseline"}


def test_turn_rewards_that_streams_do_not_tell_are_one_part():
    batch = draw_batch(3, group_size=4)
    moved = replace(batch, turn_rewards=batch.turn_rewards.flip(1).masked_fill(~batch.turn_mask, NONE), names=NAMES)
    assert "turn reward" in estimate_parts("reward_to_go", moved).parts
    assert list(estimate_parts("grpo_mr", two(turn_streams=None)).parts) == ["outcome", "turn reward", "baseline"]


def test_later_values_are_a_part_where_they_stand_for_rewards():
    whole, mixed = (estimate_parts({"name": "turn_gae", "lam": lam}, two(), scale_rewards="none") for lam in (1, 0.5))
    # the other member earns 0.2 from the first turn on, and nothing from the second
    assert {name: at(part, 0, 0) for name, part in whole.parts.items()} == {
        "outcome": 1.0,
        "turn reward hops": 0.6,
        "baseline": -0.2,
    }
    # the first member's value of the second turn is 0; the second member's is 1.2, of which half stands in
    assert {name: at(part, 1, 0) for name, part in mixed.parts.items()} == {
        "outcome": 0.0,
        "turn reward hops": 0.2,
        "later values": 0.6,
        "baseline": -1.6,
    }


def test_a_score_of_the_state_has_a_part():
    batch = draw_batch(4, group_size=4, num_groups=6)
    credit = estimate_parts("state_baseline", batch)
    assert credit.parts["state baseline"].any()
    assert not credit.parts["state baseline"][:, 0].any()  # before the first turn there is no score


def test_turns_before_a_branch_earn_the_mean_of_their_trunk():
    exists = torch.ones(4, 2, dtype=torch.bool)
    turns = torch.tensor([[0.1, 1.0], [0.1, 0.0], [0.3, 0.0], [0.3, 0.0]], dtype=torch.double)
    batch = RewardBatch(turns, torch.zeros(4), exists, exists, 4, num_branches=2, branch_at=1)
    parts = estimate_parts("branch_to_go", batch, scale_rewards="none").parts
    assert parts["turn reward"].flatten().tolist() == pytest.approx([0.6, 1.0, 0.6, 0.0, 0.3, 0.0, 0.3, 0.0])
    assert [at(parts["baseline"], 0, turn) for turn in (0, 1)] == [-0.3, 0.0]


def test_each_reward_alone_has_all_others_at_zero():
    alone = by_reward(two())
    assert list(alone) == ["outcome", "turn reward hops"]
    assert not alone["outcome"].turn_rewards.any() and not alone["turn reward hops"].outcome_rewards.any()
    assert torch.equal(alone["turn reward hops"].turn_rewards, two().turn_rewards)


def test_a_rule_that_is_called_returns_its_advantages():
    batch = two()
    assert torch.equal(reward_to_go(batch).float(), estimate("reward_to_go", batch))


def test_a_rule_of_ones_own_may_return_parts(monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("plain")
    def plain(batch):
        return 2 * reward_to_go(batch)

    @advantage_estimator("told")
    def told(batch):
        rewards = batch.turn_rewards.nan_to_num(nan=0.0)
        mean = rewards.mean()
        return Credit((rewards - mean) * batch.turn_mask, {"turn reward": rewards, "baseline": -mean})

    assert estimate_parts("plain", two()).parts == {}
    credit = estimate_parts("told", two())
    assert {name: at(part, 0, 0) for name, part in credit.parts.items()} == {"turn reward": 0.4, "baseline": -0.2}
    assert credit.scales == {}
    assert torch.equal(in_parts(told)(two()).float(), credit.advantages)
    advantage_estimator("wrapped")(in_parts(told))
    assert set(estimate_parts("wrapped", two()).parts) == {"turn reward", "baseline"}
    assert estimate_parts("plain", two()).advantages.any()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"reward": torch.zeros(2, 2)}, "gave 0.6 to turn 1 of trajectory 0, and parts whose sum is 0 \\(reward 0\\)"),
        ({"reward": torch.zeros(3, 2)}, "returned \\(3, 2\\) for the part 'reward': return a tensor of the shape"),
        ({1: torch.zeros(2, 2)}, "returned parts without names: return a tensor by name"),
        ([torch.zeros(2, 2)], "returned parts without names"),
        ({"reward": [0.6, 0.2]}, "returned list for the part 'reward'"),
        ({"reward": torch.full((2, 2), NONE)}, "parts whose sum is nan"),
    ],
)
def test_parts_that_do_not_add_up_are_refused(monkeypatch, parts, message):
    keep_estimators(monkeypatch)
    advantage_estimator("wrong")(lambda batch: Credit(torch.tensor([[0.6, 0.2], [0.2, 0.0]]), parts))
    with pytest.raises(CreditError, match=message):
        estimate_parts("wrong", two())


def test_a_rule_that_raises_is_named_with_its_line(monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("broken")
    def broken(batch):
        return batch.turn_rewards.view(7)

    line = broken.__code__.co_firstlineno + 2
    with pytest.raises(
        CreditError, match=rf"'broken' raised RuntimeError: .*, in {__file__}, line {line}, in broken\."
    ):
        estimate_parts("broken", two())


def test_a_bug_of_a_built_in_rule_keeps_its_traceback():
    with pytest.raises(RuntimeError) as caught:
        estimate_parts("grpo_or", replace(two(), outcome_rewards=torch.zeros(3)))
    assert not isinstance(caught.value, CreditError)


def test_a_rule_is_told_whole_with_its_defaults():
    assert whole_rule({"name": "gtpo", "gamma": 0.5}, turn_coef=2.0, scale_rewards="batch") == {
        "name": "gtpo",
        "turn_coef": 2.0,
        "gamma": 0.5,
        "scale_rewards": "batch",
    }
    assert whole_rule("grpo_or", turn_coef=None, scale_rewards="group")["turn_coef"] == 1.0
