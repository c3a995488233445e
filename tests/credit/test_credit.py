import math
import statistics
from typing import Literal

import pytest
import torch
from support.registered import keep_estimators

from mt_grpo.credit import (
    ADVANTAGE_ESTIMATORS,
    RewardBatch,
    advantage_estimator,
    bind_rule,
    estimate,
    get_estimator,
    parse_rule,
    rule_label,
    rule_name,
)
from mt_grpo.credit import grpo_mr as estimate_grpo_mr
from mt_grpo.credit import grpo_or as estimate_grpo_or
from mt_grpo.credit import mt_grpo as estimate_mt_grpo
from mt_grpo.errors import ConfigError

NONE = math.nan
ALL = [estimate_mt_grpo, estimate_grpo_or, estimate_grpo_mr]


def make_batch(turn_rewards, outcome_rewards, results, group_size, lengths=None):
    """`results`: for each trajectory the turns that a tool result follows; `lengths`: its number of turns."""
    turn_rewards = torch.tensor(turn_rewards)
    turns = torch.arange(turn_rewards.shape[1])
    lengths = torch.tensor(lengths or [turn_rewards.shape[1]] * len(turn_rewards))
    result_mask = torch.zeros_like(turn_rewards, dtype=torch.bool)
    for row, columns in enumerate(results):
        result_mask[row, list(columns)] = True
    outcome_rewards = torch.tensor(outcome_rewards)
    return RewardBatch(turn_rewards, outcome_rewards, turns < lengths[:, None], result_mask, group_size)


def z(spread):
    """Advantage of the upper of two rewards that differ by `spread`."""
    return spread / 2 / (spread / math.sqrt(2) + 1e-4)


def check(advantages, expected):
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_the_turn_advantage_ends_with_the_first_result():
    batch = make_batch(
        turn_rewards=[[0.2, 0.5, NONE], [0.1, NONE, NONE]],  # sums 0.7 and 0.1
        outcome_rewards=[1.0, 0.0],
        results=[(0, 1), (0,)],
        lengths=[3, 2],
        group_size=2,
    )
    outcome, turn = z(1.0), z(0.6)  # 0.70701 and 0.70694
    check(
        estimate_mt_grpo(batch, turn_coef=0.5),
        [[outcome + 0.5 * turn, outcome, outcome], [-outcome - 0.5 * turn, -outcome, 0.0]],
    )


def test_turns_before_the_first_result_share_the_turn_advantage():
    batch = make_batch(
        turn_rewards=[[0.0, 0.2, NONE], [0.0, 0.0, NONE]],  # the first turn of both could not be parsed
        outcome_rewards=[0.0, 1.0],
        results=[(1,), (1,)],
        group_size=2,
    )
    outcome, turn = z(1.0), z(0.2)
    check(
        estimate_mt_grpo(batch),
        [[turn - outcome, turn - outcome, -outcome], [outcome - turn, outcome - turn, outcome]],
    )


def test_without_a_result_every_turn_gets_the_merged_advantage():
    batch = make_batch(
        turn_rewards=[[0.5, NONE], [0.0, 0.0], [NONE, NONE]],  # sums 0.5, 0, none
        outcome_rewards=[1.0, 0.0, 0.5],
        results=[(0,), (), ()],
        lengths=[2, 2, 1],
        group_size=3,
    )
    # outcome: mean 0.5, std 0.5. turn: 0.5, 0, 0: mean 1/6, variance 1/12
    # merged: 1.5, 0, 0.5: mean 2/3, squares 25/36 + 16/36 + 1/36 = 42/36
    merged = math.sqrt(42 / 36 / 2) + 1e-4
    check(
        estimate_mt_grpo(batch, turn_coef=2.0),
        [
            [0.5 / 0.5001 + 2.0 / 3 / (math.sqrt(1 / 12) + 1e-4), 0.5 / 0.5001],
            [-2 / 3 / merged, -2 / 3 / merged],
            [-1 / 6 / merged, 0.0],
        ],
    )


def test_one_turn_answers_without_tools_get_grpo_on_the_outcome():
    batch = make_batch([[NONE], [NONE], [NONE]], [1.0, 0.0, 0.5], [(), (), ()], group_size=3)
    expected = [[0.5 / 0.5001], [-0.5 / 0.5001], [0.0]]
    for estimator in ALL:
        check(estimator(batch), expected)


def test_the_baselines_ignore_where_the_results_are():
    batch = make_batch(
        turn_rewards=[[0.2, 0.5], [0.1, NONE]],
        outcome_rewards=[1.0, 0.0],
        results=[(0,), ()],
        lengths=[2, 1],
        group_size=2,
    )
    check(estimate_grpo_or(batch, turn_coef=9.0), [[z(1.0), z(1.0)], [-z(1.0), 0.0]])
    check(estimate_grpo_mr(batch, turn_coef=9.0), [[z(1.6), z(1.6)], [-z(1.6), 0.0]])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("estimator", ALL)
def test_equal_rewards_give_exactly_no_advantage(estimator, scale):
    batch = make_batch([[0.1, 0.6]] * 7, [0.7] * 7, [(0,)] * 4 + [()] * 3, group_size=7)
    assert not estimator(batch, scale_rewards=scale).any()


def test_a_group_of_equal_outcomes_learns_from_its_turns():
    batch = make_batch([[0.2, NONE], [0.0, NONE]], [1.0, 1.0], [(0,), (0,)], group_size=2)
    check(estimate_mt_grpo(batch), [[z(0.2), 0.0], [-z(0.2), 0.0]])


def test_an_outcome_of_none_is_left_out_a_turn_of_none_is_zero():
    batch = make_batch(
        turn_rewards=[[0.5, 0.5], [0.0, 0.0], [NONE, NONE]],
        outcome_rewards=[NONE, 0.0, 1.0],
        results=[(0,), (0,), (0,)],
        group_size=3,
    )
    # turn: 1, 0, 0: mean 1/3, variance 1/3
    outcome, turn = z(1.0), 1 / 3 / (math.sqrt(1 / 3) + 1e-4)
    check(estimate_mt_grpo(batch), [[2 * turn, 0.0], [-outcome - turn, -outcome], [outcome - turn, outcome]])
    check(estimate_grpo_or(batch), [[0.0, 0.0], [-outcome, -outcome], [outcome, outcome]])
    # merged: 1, 0, 1: mean 2/3, variance (1/9 + 4/9 + 1/9) / 2
    deviation = math.sqrt(1 / 3) + 1e-4
    check(estimate_grpo_mr(batch), [[1 / 3 / deviation] * 2, [-2 / 3 / deviation] * 2, [1 / 3 / deviation] * 2])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("estimator", ALL)
def test_a_reward_for_one_member_or_none_gives_no_advantage(estimator, scale):
    batch = make_batch(
        turn_rewards=[[NONE, NONE], [NONE, NONE], [NONE, NONE], [NONE, NONE]],
        outcome_rewards=[0.5, NONE, NONE, NONE],
        results=[(0,), (0,), (0,), ()],
        group_size=2,
    )
    check(estimator(batch, scale_rewards=scale), [[0.0, 0.0]] * 4)


def test_a_trajectory_without_tools_is_in_the_turn_baseline():
    batch = make_batch([[0.2, NONE], [NONE, NONE]], [0.0, 0.0], [(0,), ()], group_size=2)
    check(estimate_mt_grpo(batch), [[z(0.2), 0.0], [-z(0.2), -z(0.2)]])


def test_a_trajectory_without_turns_is_not_in_the_turn_baseline():
    batch = make_batch([[0.2], [0.0], [NONE]], [0.0, 0.0, NONE], [(0,), (0,), ()], group_size=3, lengths=[1, 1, 0])
    check(estimate_mt_grpo(batch), [[z(0.2)], [-z(0.2)], [0.0]])


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("estimator", ALL)
def test_a_group_of_one_gives_no_advantage(estimator, scale):
    batch = make_batch([[0.5, 0.1], [NONE, NONE]], [1.0, 0.0], [(0,), ()], group_size=1)
    check(estimator(batch, scale_rewards=scale), [[0.0, 0.0]] * 2)


@pytest.mark.parametrize("estimator", ALL)
def test_groups_are_normalised_apart(estimator):
    first = make_batch([[0.2, 0.5], [0.1, NONE]], [1.0, 0.0], [(0,), ()], group_size=2)
    second = make_batch([[9.0, 0.0], [0.0, 0.0]], [3.0, 7.0], [(1,), (0,)], group_size=2)
    both = RewardBatch(
        torch.cat([first.turn_rewards, second.turn_rewards]),
        torch.cat([first.outcome_rewards, second.outcome_rewards]),
        torch.cat([first.turn_mask, second.turn_mask]),
        torch.cat([first.result_mask, second.result_mask]),
        group_size=2,
    )
    check(estimator(both), torch.cat([estimator(first), estimator(second)]).tolist())


def test_batch_scaling_divides_each_term_by_its_own_deviation():
    batch = make_batch(
        turn_rewards=[[0.4, NONE], [0.0, NONE], [0.2, NONE], [0.2, NONE]],
        outcome_rewards=[1.0, 0.0, 1.0, 1.0],
        results=[(0,)] * 4,
        group_size=2,
    )
    outcome = 0.5 / (statistics.stdev([1.0, 0.0, 1.0, 1.0]) + 1e-4)
    turn = 0.2 / (statistics.stdev([0.4, 0.0, 0.2, 0.2]) + 1e-4)
    check(
        estimate_mt_grpo(batch, scale_rewards="batch"),
        [[outcome + turn, outcome], [-outcome - turn, -outcome], [0.0, 0.0], [0.0, 0.0]],
    )


def test_without_scaling_rewards_are_only_centred():
    batch = make_batch([[0.4, NONE], [0.0, NONE]], [1.0, 0.0], [(0,), ()], group_size=2)
    check(estimate_mt_grpo(batch, scale_rewards="none"), [[0.7, 0.5], [-0.7, -0.7]])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_outcome_advantage_is_that_of_trl(scale):
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(0))
    rewards[[3, 8, 9, 10]] = NONE
    group_size = 4
    expected = []
    for start in range(0, len(rewards), group_size):  # the formula of TRL, one reward at a time
        group = rewards[start : start + group_size].tolist()
        valid = [value for value in group if not math.isnan(value)]
        everyone = [value for value in rewards.tolist() if not math.isnan(value)]
        deviations = {
            "group": (statistics.stdev(valid) if len(valid) > 1 else 0.0) + 1e-4,
            "batch": statistics.stdev(everyone) + 1e-4,
            "none": 1.0,
        }
        mean = statistics.mean(valid)
        expected += [[0.0 if math.isnan(value) else (value - mean) / deviations[scale]] for value in group]
    batch = make_batch([[NONE]] * 12, rewards.tolist(), [()] * 12, group_size)
    for estimator in ALL:
        check(estimator(batch, scale_rewards=scale), expected)


def test_a_constant_added_to_the_outcome_changes_no_advantage():
    turn_rewards, results = [[0.2, 0.5], [0.1, NONE]], [(0,), (0,)]
    low = make_batch(turn_rewards, [1.0, 0.0], results, group_size=2)
    high = make_batch(turn_rewards, [6.0, 5.0], results, group_size=2)
    check(estimate_mt_grpo(high), estimate_mt_grpo(low).tolist())


@pytest.mark.parametrize("estimator", ALL)
def test_advantages_are_float32_whatever_the_rewards_are(estimator):
    batch = make_batch([[0.2], [0.0]], [1.0, 0.0], [(0,), ()], group_size=2)
    double = RewardBatch(
        batch.turn_rewards.double(), batch.outcome_rewards.double(), batch.turn_mask, batch.result_mask, 2
    )
    assert estimator(double).dtype is torch.float32
    check(estimator(double), estimator(batch).tolist())


def test_estimators_are_found_by_name():
    assert get_estimator("mt_grpo") is estimate_mt_grpo
    assert get_estimator("grpo_or") is estimate_grpo_or
    assert get_estimator("grpo_mr") is estimate_grpo_mr


def test_an_unknown_estimator_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="'mtgrpo' is not one of branch_to_go, .*, turn_gae; .* 'mt_grpo'"):
        get_estimator("mtgrpo")


def test_one_more_estimator_is_one_more_function(monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("zero")
    def zero(batch, *, turn_coef=1.0, scale_rewards="group"):
        return torch.zeros_like(batch.turn_rewards)

    assert get_estimator("zero") is zero
    monkeypatch.undo()
    assert "zero" not in ADVANTAGE_ESTIMATORS


# Rules with options of their own


@pytest.fixture
def decayed(monkeypatch):
    """Registers a rule that says what it was called with."""
    keep_estimators(monkeypatch)
    calls = []

    @advantage_estimator("decayed")
    def decayed(
        batch,
        *,
        scale_rewards="group",
        gamma: float = 0.9,
        mode: Literal["sum", "mean"] = "sum",
        steps: int | None = None,
        weights: list[float] = (),
        whole: bool = False,
        untyped="x",
    ):
        calls.append({"gamma": gamma, "mode": mode, "steps": steps, "scale_rewards": scale_rewards})
        return torch.zeros_like(batch.turn_rewards)

    return calls


SMALL = make_batch([[0.2], [0.0]], [1.0, 0.0], [(0,), ()], group_size=2)


def test_options_reach_the_rule_and_the_rest_keeps_its_default(decayed):
    estimate("decayed", SMALL, scale_rewards="none")
    estimate({"name": "decayed", "gamma": 1, "mode": "mean"}, SMALL)
    assert decayed == [
        {"gamma": 0.9, "mode": "sum", "steps": None, "scale_rewards": "none"},
        {"gamma": 1, "mode": "mean", "steps": None, "scale_rewards": "group"},
    ]


def test_the_coefficient_of_the_run_and_that_of_the_rule_are_one():
    expected = estimate_mt_grpo(SMALL, turn_coef=0.5)
    assert torch.equal(estimate("mt_grpo", SMALL, turn_coef=0.5), expected)
    assert torch.equal(estimate({"name": "mt_grpo", "turn_coef": 0.5}, SMALL), expected)
    assert torch.equal(estimate("mt_grpo", SMALL), estimate_mt_grpo(SMALL))


def test_a_rule_with_open_options_gets_all_of_them(monkeypatch):
    keep_estimators(monkeypatch)
    seen = []

    @advantage_estimator("open")
    def takes_any(batch, **options):
        seen.append(options)
        return torch.zeros_like(batch.turn_rewards)

    estimate({"name": "open", "depth": 3}, SMALL, turn_coef=2.0, scale_rewards="none")
    assert seen == [{"depth": 3, "turn_coef": 2.0, "scale_rewards": "none"}]


@pytest.mark.parametrize(
    "value",
    [
        {"gamma": 1},
        {"steps": None},
        {"steps": 3},
        {"weights": [1, 0.5]},
        {"whole": True},
        {"untyped": [{}]},
        {"mode": "mean"},
    ],
)
def test_values_that_fit_their_types_are_taken(decayed, value):
    bind_rule({"name": "decayed", **value}, turn_coef=None, scale_rewards="group")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gama": 0.5}, "has no option 'gama'; the nearest is 'gamma': its options are gamma, mode, steps, "),
        ({3: 0.5}, "has no option 3: its options are"),
        ({"turn_coef": 0.5}, "has no option 'turn_coef'"),
        ({"gamma": "high"}, "'gamma' of the advantage estimator 'decayed' is 'high': its type is float."),
        ({"gamma": True}, "'gamma' .* is True"),
        ({"gamma": None}, "'gamma' .* is None"),
        ({"steps": 0.5}, r"'steps' .* is 0.5: its type is int \| None"),
        ({"weights": [1, "a"]}, r"'weights' .*: its type is list\[float\]"),
        ({"whole": 1}, "'whole' .* is 1: its type is bool"),
        ({"mode": "meen"}, "'mode' .* is 'meen'; the nearest is 'mean': its type is Literal"),
        ({"scale_rewards": "none"}, "`scale_rewards` is an option of the run"),
    ],
)
def test_options_the_rule_does_not_take_are_refused(decayed, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        estimate({"name": "decayed", **options}, SMALL)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"name": "gtpo", "gamma": 1.5},
            "'gamma' of the advantage estimator 'gtpo' is 1.5: give a number from 0 to",
        ),
        ({"name": "gigpo", "gamma": -0.1}, "'gamma' .* is -0.1: give a number from 0 to 1."),
        ({"name": "turn_gae", "lam": 95}, "'lam' .* is 95: give a number from 0 to 1."),
        ({"name": "gtpo", "gamma": float("nan")}, "'gamma' .* is nan: give a number."),
        ({"name": "gtpo", "gamma": "high"}, "'gamma' .* is 'high': its type is float."),
    ],
)
def test_a_discount_is_from_0_to_1(rule, message):
    with pytest.raises(ConfigError, match=message):
        bind_rule(rule, turn_coef=None, scale_rewards="group")
    for gamma in (0, 0.5, 1):
        bind_rule({"name": "gtpo", "gamma": gamma}, turn_coef=None, scale_rewards="group")


def test_what_is_said_twice_or_in_vain_is_refused(decayed):
    with pytest.raises(ConfigError, match="`turn_coef: 0.5` of .* and `turn_advantage_coef: 1.0` contradict"):
        estimate({"name": "mt_grpo", "turn_coef": 0.5}, SMALL, turn_coef=1.0)
    with pytest.raises(ConfigError, match="`turn_advantage_coef` is 1.0, and .* 'decayed' takes no `turn_coef`"):
        estimate("decayed", SMALL, turn_coef=1.0)


def test_rules_without_options_and_with_needed_ones_say_so(monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("bare")
    def bare(batch):
        return torch.zeros_like(batch.turn_rewards)

    @advantage_estimator("strict")
    def strict(batch, *, gamma: float):
        return torch.full_like(batch.turn_rewards, gamma)

    assert not estimate("bare", SMALL).any()
    with pytest.raises(ConfigError, match="'bare' has no option 'gamma': it has none"):
        estimate({"name": "bare", "gamma": 1.0}, SMALL)
    with pytest.raises(ConfigError, match="`scale_rewards` is 'none', and .* 'bare' takes no `scale_rewards`"):
        estimate("bare", SMALL, scale_rewards="none")
    with pytest.raises(ConfigError, match="'strict' needs its option 'gamma': write .*name: strict, gamma: ..."):
        estimate("strict", SMALL)
    assert estimate({"name": "strict", "gamma": 0.5}, SMALL).unique().item() == 0.5


def test_annotations_that_cannot_be_read_are_named(monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("unread")
    def unread(batch, *, gamma: "Missing" = 1):  # noqa: F821
        return torch.zeros_like(batch.turn_rewards)

    with pytest.raises(ConfigError, match="'unread' cannot be checked.*'Missing'.*import it"):
        estimate({"name": "unread", "gamma": 1}, SMALL)


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("decayed", "decayed"),
        ('{"name": "decayed", "gamma": 0.9}', {"name": "decayed", "gamma": 0.9}),
        ({"name": "decayed"}, {"name": "decayed"}),
    ],
)
def test_a_rule_is_a_name_a_mapping_or_json(given, parsed):
    assert parse_rule(given) == parsed
    assert rule_name(parsed) == "decayed"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{name: decayed}", "not valid JSON"),
        ({"gamma": 0.9}, "a mapping of its `name`"),
        ('{"name": 3}', "a mapping of its `name`"),
        (None, "is None: give the name"),
        (["decayed"], "give the name of a rule"),
    ],
)
def test_what_names_no_rule_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        parse_rule(given)


def test_a_heading_shows_the_options_of_a_rule():
    assert rule_label("decayed") == rule_label({"name": "decayed"}) == "decayed"
    assert rule_label({"name": "decayed", "gamma": 0.9, "steps": 2}) == "decayed (gamma 0.9, steps 2)"
