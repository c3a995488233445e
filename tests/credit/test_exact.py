"""What is said of the bias and the noise of each rule holds, with every group enumerated."""

from __future__ import annotations

import math

import pytest
import torch
from support.decision_processes import PROCESSES, late, logit, nearly_noise, one_search, paid_searches, stopper
from support.exact_gradients import Measurement, Paths, measure, sample
from support.registered import keep_estimators

from mt_grpo.credit import ADVANTAGE_ESTIMATORS, advantage_estimator, bind_rule, without_signal

UNBIASED = [
    ("reward_to_go", {}, True),
    ("gdpo", {}, True),
    ("gtpo", {"gamma": 1.0}, True),
    ("mt_grpo_discounted", {"gamma": 1.0}, True),
    ("leave_one_out", {}, False),
    ("turn_gae", {"lam": 1.0}, False),
    ("lambda_to_go", {"lam": 1.0}, False),
]
"""Rules that are unbiased without scaling: their options, and whether their means include the member itself."""


def measured(name, rule, group_size=4, own=True, **options):
    process, parameters = PROCESSES[name]
    factor = group_size / (group_size - 1) if own else 1.0
    return measure(rule, process, group_size=group_size, parameters=parameters, factor=factor, **options)


# The process whose figures are known


@pytest.mark.parametrize(("group_size", "to_go", "whole"), [(4, 0.119753, 0.167836), (8, 0.075853, 0.109689)])
def test_the_stopper_has_the_known_gradient_and_noise(group_size, to_go, whole):
    for rule, own, std in (("reward_to_go", True, to_go), ("leave_one_out", False, whole)):
        result = measured("stopper", rule, group_size, own)
        assert result.truth.item() == pytest.approx(0.20625, abs=1e-12)
        assert result.mean.item() == pytest.approx(0.20625, abs=1e-12)
        assert result.std == pytest.approx(std, abs=5e-7)


def test_mt_grpo_and_means_over_fewer_members_are_biased(monkeypatch):
    keep_estimators(monkeypatch)

    def over(batch, counted):
        """Immediate rewards minus their mean over the members that count at their turn, added up from each turn on."""
        rewards = batch.turn_rewards.nan_to_num(0.0)
        shape = (-1, batch.group_size, rewards.shape[1])
        means = (rewards * counted).view(shape).sum(dim=1) / counted.view(shape).sum(dim=1).clamp(min=1)
        centred = (rewards - means.repeat_interleave(batch.group_size, dim=0)) * counted
        return centred.flip(1).cumsum(dim=1).flip(1) * batch.turn_mask

    advantage_estimator("over_having")(
        lambda batch, turn_coef, scale_rewards: over(batch, ~batch.turn_rewards.isnan())
    )
    advantage_estimator("over_reaching")(lambda batch, turn_coef, scale_rewards: over(batch, batch.turn_mask))
    for rule, expected in (("mt_grpo", 0.098437), ("over_having", 0.0), ("over_reaching", 0.082104)):
        assert measured("stopper", rule, own=False).mean.item() == pytest.approx(expected, abs=1e-6)


def test_mt_grpo_teaches_later_turns_nothing():
    """With a parameter for each decision the second and the third have a gradient of exactly 0."""

    def process(play):
        for step in range(3):
            if not play.decide(step):
                play.turn()
                return 0.0
            play.turn(0.25, result=True)
        return 0.0

    options = {"group_size": 4, "parameters": (0.0, 0.0, 0.0), "factor": 4 / 3}
    first, second, third = measure("mt_grpo", process, **options).mean.tolist()
    assert first > 0.1 and (second, third) == pytest.approx((0.0, 0.0), abs=1e-8)
    assert measure("reward_to_go", process, **options).bias.abs().max() < 1e-12


# Bias


@pytest.mark.parametrize(
    ("name", "group_size"), [("stopper", 5), ("late", 4), *((name, size) for name in PROCESSES for size in (2, 3))]
)
@pytest.mark.parametrize(("rule", "options", "own"), UNBIASED, ids=[rule for rule, _, _ in UNBIASED])
def test_unbiased_rules_are_so_on_every_process(rule, options, own, name, group_size):
    for coef in (1.0, 0.25):
        result = measured(name, {"name": rule, **options}, group_size, own, turn_coef=coef)
        assert result.bias.abs().max() < 1e-12 < result.truth.norm()


def test_lambda_leaves_out_what_a_turn_changes_later():
    """Tasks do not change what later ones earn, and all decide the outcome; in `late` the first pays at the third."""
    rule = {"name": "lambda_to_go", "lam": 0.5}
    for name in ("tasks", "mastered"):
        result, to_go = measured(name, rule, own=False), measured(name, "reward_to_go")
        assert result.bias.abs().max() < 1e-12
        assert result.signal_to_noise > 1.05 * to_go.signal_to_noise
        assert measured(name, {"name": "turn_gae", "lam": 0.5}, own=False).bias.norm() > 0.1 * result.truth.norm()
    assert measured("late", rule, own=False).cosine < 0.9


# One scale for outcome and turn rewards, or one each


def in_paid_searches(scales, scale_rewards, searches=0.7):
    """`reward_to_go` where searches are paid and the outcome wants none, with groups of 4."""
    rule, factor, parameters = {"name": "reward_to_go", "scales": scales}, 4 / 3, (logit(searches),) * 4
    options = {"group_size": 4, "factor": factor, "parameters": parameters, "scale_rewards": scale_rewards}
    return (
        sample(rule, paid_searches(4), groups=20_000, **options)
        if scale_rewards == "batch"
        else measure(rule, paid_searches(4), **options)
    )


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize(("rule", "own"), [("reward_to_go", True), ("gdpo", True), ("lambda_to_go", False)])
def test_one_scale_is_unbiased_without_scaling(rule, own, name):
    options = {"scales": "one"} | ({"lam": 1.0} if rule == "lambda_to_go" else {})
    result = measured(name, {"name": rule, **options}, 3, own, turn_coef=0.5)
    assert result.bias.abs().max() < 1e-12 < result.truth.norm()


@pytest.mark.parametrize("scale_rewards", ["group", "batch"])
def test_separate_scales_point_away_where_calls_cost_the_outcome(scale_rewards):
    for searches in (0.7, 0.3):
        assert in_paid_searches("each", scale_rewards, searches).cosine < -0.95


def test_one_scale_of_the_batch_keeps_the_direction():
    for searches in (0.7, 0.3, 0.1):
        assert in_paid_searches("one", "batch", searches).cosine > 0.99


def test_one_scale_of_groups_of_equal_outcomes_points_away():
    """Then only turn rewards differ in most groups, and their small deviation divides."""
    assert in_paid_searches("one", "group").cosine > 0.99
    assert in_paid_searches("one", "group", searches=0.3).cosine < -0.5


def test_separate_scales_have_less_noise_of_a_noisy_outcome():
    options = {"group_size": 4, "factor": 4 / 3, "parameters": (logit(0.28),) * 3, "scale_rewards": "group"}
    each, one = (
        measure({"name": "reward_to_go", "scales": scales}, nearly_noise(3), **options) for scales in ("each", "one")
    )
    assert min(each.cosine, one.cosine) > 0.99
    assert each.signal_to_noise > 3 * one.signal_to_noise


@pytest.mark.parametrize("fit", ["line", "table"])
@pytest.mark.parametrize("process", [stopper, late])
def test_a_state_score_is_an_unbiased_baseline(process, fit):
    parameters = (0.3, -0.4)
    result = measure({"name": "state_baseline", "fit": fit}, process, group_size=2, groups=2, parameters=parameters)
    assert result.bias.abs().max() < 1e-12


def test_any_state_score_is_unbiased_that_of_noise_too():
    def noisy(play):
        total = 0.0
        for step in range(2):
            if not play.decide(step):
                play.turn()
                return total
            play.turn(0.5, result=True, score=float(play.chance(0.5)))
            total += 0.25
        return total

    result = measure("state_baseline", noisy, group_size=2, groups=2, parameters=(0.1, -0.3))
    assert result.bias.abs().max() < 1e-12
    biased = measure({"name": "state_baseline", "lam": 0.5}, noisy, group_size=2, groups=2, parameters=(0.1, -0.3))
    assert biased.bias.abs().max() > 1e-3


@pytest.mark.parametrize("fit", ["line", "table"])
def test_the_policys_own_log_prob_of_the_answer_is_unbiased(fit):
    parameters = (0.4, -0.9, 0.7)

    def answers(play):
        found = play.decide(0) and play.chance(0.6)
        after = 1 + found
        score = math.log(1 / (1 + math.exp(-parameters[after])))  # of the right answer, which is to say yes
        play.turn(0.3 * found, result=True, score=score)
        right = play.decide(after)
        play.turn()
        return float(right)

    rule = {"name": "state_baseline", "fit": fit}
    result = measure(rule, answers, group_size=2, groups=2, parameters=parameters)
    assert result.bias.abs().max() < 1e-12 < result.truth.norm()


@pytest.mark.parametrize(
    ("rule", "name", "cosine"),
    [
        ({"name": "gtpo"}, "searcher", 0.99),
        ({"name": "mt_grpo_discounted", "gamma": 0.9}, "searcher", 0.99),
        ({"name": "turn_gae"}, "two_hops", 0.99),
        ({"name": "gigpo"}, "two_hops", 0.95),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_rules_that_are_called_slightly_biased_are(rule, name, cosine):
    result = measured(name, rule, own=rule["name"] != "turn_gae")
    assert result.bias.abs().max() > 1e-4 and cosine < result.cosine < 1.0 + 1e-12


def test_mt_grpo_is_unbiased_on_its_home_ground():
    """One boundary, an outcome for all. A coefficient that is not 1 takes that away."""

    def process(play):
        found = False
        if play.decide(0):
            found = play.chance(0.5)
            play.turn(0.5 if found else 0.0, result=True)
        right = play.decide(1)
        play.turn()
        return float(right and play.chance(0.75 if found else 0.25))

    options = {"group_size": 4, "parameters": (0.3, -0.2), "factor": 4 / 3}
    assert measure("mt_grpo", process, **options).bias.abs().max() < 1e-7  # in float32
    result = measure("mt_grpo", process, turn_coef=2.0, **options)
    assert 0.05 < (result.bias.norm() / result.truth.norm()).item() < 0.5
    assert measure("reward_to_go", process, turn_coef=2.0, **options).bias.abs().max() < 1e-12


def test_leaving_out_an_outcome_that_the_policy_avoids_is_biased():
    result = measured("one_search", "grpo_mr")
    assert result.length < 0.5
    assert measured("one_search", "reward_to_go").length == pytest.approx(1.0)


def test_a_reward_that_later_turns_change_is_biased():
    """Calls that are good or not; the share of the good ones is the reward, divided among the turns in two ways."""

    def process(play, telescoped):
        goods = []
        while len(goods) < 3 and play.decide(1):
            goods.append(play.decide(0))
            before = sum(goods[:-1]) / (len(goods) - 1) if len(goods) > 1 else 0.0
            play.turn(sum(goods) / len(goods) - before if telescoped else float(goods[-1]), result=True)
        play.turn(0.0)
        if not telescoped:
            play.turns = [(gradient, reward / max(1, len(goods)), *rest) for gradient, reward, *rest in play.turns]
        return 0.0

    for telescoped in (True, False):
        options = {"group_size": 3, "parameters": (0.2, 0.1), "factor": 1.5}
        result = measure("reward_to_go", lambda play, way=telescoped: process(play, way), **options)
        bias = (result.bias.norm() / result.truth.norm()).item()
        assert bias < 1e-12 if telescoped else bias > 0.03


def test_scaling_bends_the_direction_less_in_larger_groups():
    cosines = [measured("searcher", "grpo_mr", size, scale_rewards="group").cosine for size in (2, 3, 4)]
    assert cosines == sorted(cosines) and cosines[0] < 0.9999


# The measure itself


@pytest.mark.parametrize("rule", ["reward_to_go", "mt_grpo", "leave_one_out", "gigpo"])
@pytest.mark.parametrize("name", ["stopper", "one_search", "searcher"])
def test_sampling_again_keeps_the_direction_of_a_prompt(rule, name):
    """The group that is trained in the end is the first with signal of R + 1; without one it adds nothing."""
    paths = Paths.of(*PROCESSES[name])
    rows, weights = paths.groups(3)
    function, options = bind_rule(rule, turn_coef=None, scale_rewards="group")
    advantages = function(paths.batch(rows), **options)
    estimates, silent = paths.estimates(advantages, rows), without_signal(advantages, 3)
    assert 0.01 < (chance := 1 - weights[silent].sum()) < 0.99
    rounds = 2
    trained = torch.zeros_like(estimates[0])
    for before in range(rounds + 1):  # so many groups without signal, then one with
        trained += weights[silent].sum() ** before * weights[~silent] @ estimates[~silent]
    factor = (1 - (1 - chance) ** (rounds + 1)) / chance
    torch.testing.assert_close(trained, factor * (weights @ estimates), rtol=0, atol=1e-12)
    assert 1 < factor < rounds + 1


def test_every_rule_can_be_measured():
    process, parameters = PROCESSES["late"]
    for rule in ADVANTAGE_ESTIMATORS:
        if ADVANTAGE_ESTIMATORS[rule].__module__.startswith("mt_grpo."):
            result = sample(rule, process, group_size=4, groups=50, parameters=parameters)
            assert math.isfinite(result.std)


def test_paths_are_all_ways_and_their_probabilities_sum_to_one():
    paths = Paths.of(one_search, (0.3, -0.2))
    assert len(paths.probability) == 9 and paths.probability.sum().item() == pytest.approx(1.0)
    _, weights = paths.groups(3)
    assert weights.sum().item() == pytest.approx(1.0)


def test_one_group_at_a_time_is_the_same_as_all_at_once():
    single, double = (measure("reward_to_go", stopper, group_size=2, groups=number) for number in (1, 2))
    torch.testing.assert_close(double.mean, single.mean)
    assert double.std == pytest.approx(single.std / math.sqrt(2))


def test_drawn_groups_agree_with_all_groups():
    drawn = sample("reward_to_go", stopper, group_size=4, groups=20_000, factor=4 / 3)
    assert drawn.std == pytest.approx(0.119753, rel=0.03)
    assert drawn.bias.item() == pytest.approx(0.0, abs=4 * 0.119753 / math.sqrt(20_000))


def test_an_estimate_of_nothing_has_no_direction():
    result = Measurement.of(torch.ones(1), torch.zeros(2, 1), torch.tensor([0.5, 0.5]))
    assert (result.cosine, result.length, result.signal_to_noise) == (0.0, 0.0, 0.0)


def test_a_decision_after_the_last_turn_is_refused():
    def process(play):
        play.turn()
        return float(play.decide(0))

    with pytest.raises(ValueError, match="belongs to no turn"):
        measure("reward_to_go", process, group_size=2)
