"""What a rule's advantage is the sum of."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reward_batches import NONE, draw_batch

from mt_grpo.credit import ADVANTAGE_ESTIMATORS, RewardBatch, by_reward, estimate_parts, whole_rule

RULES = [name for name, rule in ADVANTAGE_ESTIMATORS.items() if rule.__module__.startswith("mt_grpo.credit.rules")]
NAMES = ("format", "hops", "answer", "judge")


@st.composite
def batches(draw):
    """Batches of two turn rewards and two outcome rewards, some of large numbers, some of float32."""
    batch = draw_batch(draw(st.integers(0, 10**6)), 4, num_turns=draw(st.integers(1, 6)), integers=draw(st.booleans()))
    size = draw(st.sampled_from([1.0, 300.0, 1e-3]))
    rewards = ("turn_rewards", "outcome_rewards", "turn_streams", "outcome_streams")
    scaled = {name: size * getattr(batch, name) for name in rewards}
    if draw(st.booleans()):
        scaled |= {name: scaled[name].float() for name in rewards[:2]}
    return replace(batch, **scaled, names=draw(st.sampled_from([(), NAMES])))


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
    known = whole_rule(rule, turn_coef=None, scale_rewards="group")
    options = {"gamma": share, "lam": share, "scales": scales}
    options = {option: value for option, value in options.items() if option in known}
    if rule == "branch_to_go":
        batch = replace(batch, num_branches=2, branch_at=2)
    credit = estimate_parts({"name": rule, **options}, batch, turn_coef=turn_coef, scale_rewards=scale)
    assert torch.allclose(sum(credit.parts.values()), credit.advantages.double(), rtol=1e-6, atol=1e-6)
    for part in credit.parts.values():
        assert part.dtype == torch.double and part.isfinite().all() and not part[~batch.turn_mask].any()
    for name, scale in credit.scales.items():
        assert not credit.parts[name][scale.isnan()].any() and (scale[~scale.isnan()] > 0).all()


def two(**changes):
    """Two members: 0.4 and 0.2 for two turns and right; 0.2 for the first of two and wrong."""
    turns = torch.tensor([[0.4, 0.2], [0.2, 0.0]], dtype=torch.double)
    outcomes = torch.tensor([1.0, 0.0], dtype=torch.double)
    exists = torch.ones(2, 2, dtype=torch.bool)
    about = {
        "turn_streams": turns[None] / 2,
        "outcome_streams": outcomes[None],
        "stream_weights": torch.tensor([2.0, 1.0], dtype=torch.double),
        "names": ("hops", "exact_match"),
    }
    return RewardBatch(turns, outcomes, exists, exists, 2, **{**about, **changes})


def told(rule, batch, row, turn, undivided=False, **options):
    """The parts of a turn's advantage, those that it has; undivided: what they are before the scale."""
    credit = estimate_parts(rule, batch, **options)
    parts = {name: part * (credit.scales[name] if undivided else 1) for name, part in credit.parts.items()}
    return {name: round(part[row, turn].item(), 6) for name, part in parts.items() if not part[row, turn].isnan()}


def test_rewards_to_go_are_what_was_earned_less_a_mean():
    first, last = (told("reward_to_go", two(), turn, turn, undivided=True) for turn in (0, 1))
    assert list(first.items()) == [
        ("outcome", 1.0),
        ("turn reward hops", 0.6),
        ("outcome baseline", -0.5),
        ("turn baseline", -0.4),
    ]
    assert list(last.values()) == [0.0, 0.0, -0.5, -0.1]
    scales = [scale[0, 0].item() for scale in estimate_parts("reward_to_go", two()).scales.values()]
    assert scales == pytest.approx([0.5**0.5 + 1e-4, 0.08**0.5 + 1e-4] * 2, abs=1e-6)
    halved = told("reward_to_go", two(), 0, 0, turn_coef=0.5, scale_rewards="none")
    assert list(halved.values()) == [1.0, 0.3, -0.5, -0.2]
    unscaled = estimate_parts("reward_to_go", two(), turn_coef=0.5, scale_rewards="none").scales
    assert len(unscaled) == 4 and all((scale == 1).all() for scale in unscaled.values())


def test_mt_grpo_has_one_baseline_where_no_tool_ran():
    batch = replace(two(), result_mask=torch.tensor([[True, True], [False, False]]))
    outcome, turn = {"outcome": 1.0, "outcome baseline": -0.5}, {"turn reward hops": 0.6, "turn baseline": -0.4}
    assert told("mt_grpo", batch, 0, 0, undivided=True) == outcome | turn
    assert told("mt_grpo", batch, 0, 1, undivided=True) == outcome  # after the first result
    without = {"outcome": 0.0, "turn reward hops": 0.2, "baseline": -0.9}
    assert told("mt_grpo", batch, 1, 1, undivided=True) == without


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
    whole, mixed = ({"name": "turn_gae", "lam": lam} for lam in (1, 0.5))
    # the other member earns 0.2 from the first turn on, and nothing from the second
    parts = {"outcome": 1.0, "turn reward hops": 0.6, "baseline": -0.2}
    assert told(whole, two(), 0, 0, scale_rewards="none") == parts
    # the first member's value of the second turn is 0; the second member's is 1.2, of which half stands in
    parts = {"outcome": 0.0, "turn reward hops": 0.2, "later values": 0.6, "baseline": -1.6}
    assert told(mixed, two(), 1, 0, scale_rewards="none") == parts


def test_a_score_of_the_state_has_a_part():
    part = estimate_parts("state_baseline", draw_batch(4, group_size=4, num_groups=6)).parts["state baseline"]
    assert part.any() and not part[:, 0].any()  # before the first turn there is no score


def test_turns_before_a_branch_earn_the_mean_of_their_trunk():
    exists = torch.ones(4, 2, dtype=torch.bool)
    turns = torch.tensor([[0.1, 1.0], [0.1, 0.0], [0.3, 0.0], [0.3, 0.0]], dtype=torch.double)
    batch = RewardBatch(turns, torch.zeros(4), exists, exists, 4, num_branches=2, branch_at=1)
    parts = estimate_parts("branch_to_go", batch, scale_rewards="none").parts
    assert parts["turn reward"].flatten().tolist() == pytest.approx([0.6, 1.0, 0.6, 0.0, 0.3, 0.0, 0.3, 0.0])
    assert parts["baseline"][0].tolist() == pytest.approx([-0.3, 0.0])


def test_each_reward_alone_has_all_others_at_zero():
    alone = by_reward(two())
    assert list(alone) == ["outcome", "turn reward hops"]
    assert not alone["outcome"].turn_rewards.any() and not alone["turn reward hops"].outcome_rewards.any()
    assert torch.equal(alone["turn reward hops"].turn_rewards, two().turn_rewards)
