"""What is said of the bias and the noise of each rule holds, with every group enumerated."""

import math

import pytest
import torch
from support.decision_processes import (
    PROCESSES,
    late,
    logit,
    nearly_noise,
    one_search,
    paid_searches,
    settled,
    stopper,
)
from support.exact_gradients import Paths, measure, measure_branching, sample, sampled_turns
from support.registered import keep_estimators

from mt_grpo.credit import advantage_estimator, bind_rule, branch_to_go, without_signal

UNBIASED = [
    ("reward_to_go", {}, True),
    ("gdpo", {}, True),
    ("gtpo", {"gamma": 1.0}, True),
    ("mt_grpo_discounted", {"gamma": 1.0}, True),
    ("leave_one_out", {}, False),
    ("turn_gae", {"lam": 1.0}, False),
    ("lambda_to_go", {"lam": 1.0}, False),
    ("reward_to_go", {"scales": "one"}, True),
    ("gdpo", {"scales": "one"}, True),
    ("lambda_to_go", {"scales": "one", "lam": 1.0}, False),
]
"""Rules that are unbiased without scaling: their options, and whether their means include the member itself."""
ZERO = 1e-12


def measured(name, rule, group_size=4, own=True, **options):
    """A rule on a process of `PROCESSES`, or on one and its parameters."""
    process, parameters = PROCESSES[name] if isinstance(name, str) else name
    factor = group_size / (group_size - 1) if own else 1.0
    return measure(rule, process, group_size=group_size, parameters=parameters, factor=factor, **options)


def biased(result):
    """The bias as a share of the gradient."""
    return (result.bias.norm() / result.truth.norm()).item()


def is_exact(result):
    return result.bias.abs().max() < ZERO < result.truth.norm()


@pytest.mark.parametrize(("group_size", "to_go", "whole"), [(4, 0.119753, 0.167836), (8, 0.075853, 0.109689)])
def test_the_stopper_has_the_known_gradient_and_noise(group_size, to_go, whole):
    for rule, own, std in (("reward_to_go", True, to_go), ("leave_one_out", False, whole)):
        result = measured("stopper", rule, group_size, own)
        assert (result.truth.item(), result.mean.item()) == pytest.approx((0.20625, 0.20625), abs=ZERO)
        assert result.std == pytest.approx(std, abs=5e-7)


@pytest.mark.parametrize(
    ("name", "group_size"), [("stopper", 5), ("late", 4), *((name, size) for name in PROCESSES for size in (2, 3))]
)
@pytest.mark.parametrize(("rule", "options", "own"), UNBIASED, ids=str)
def test_unbiased_rules_are_so_on_every_process(rule, options, own, name, group_size):
    for coef in (1.0, 0.25):
        assert is_exact(measured(name, {"name": rule, **options}, group_size, own, turn_coef=coef))


# Where rules are biased


def test_mt_grpo_and_means_over_fewer_members_are_biased(monkeypatch):
    keep_estimators(monkeypatch)

    def over(batch, counted):
        """Immediate rewards minus their mean over the members that count at their turn, added up from each turn on."""
        rewards = batch.turn_rewards.nan_to_num(0.0)
        shape = (-1, batch.group_size, rewards.shape[1])
        means = (rewards * counted).view(shape).sum(dim=1) / counted.view(shape).sum(dim=1).clamp(min=1)
        centred = (rewards - means.repeat_interleave(batch.group_size, dim=0)) * counted
        return centred.flip(1).cumsum(dim=1).flip(1) * batch.turn_mask

    advantage_estimator("over_having")(lambda batch, **options: over(batch, ~batch.turn_rewards.isnan()))
    advantage_estimator("over_reaching")(lambda batch, **options: over(batch, batch.turn_mask))
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

    apart = (process, (0.0, 0.0, 0.0))
    first, second, third = measured(apart, "mt_grpo").mean.tolist()
    assert first > 0.1 and (second, third) == pytest.approx((0.0, 0.0), abs=1e-8)
    assert is_exact(measured(apart, "reward_to_go"))


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

    home = (process, (0.3, -0.2))
    assert measured(home, "mt_grpo").bias.abs().max() < 1e-7  # in float32
    assert 0.05 < biased(measured(home, "mt_grpo", turn_coef=2.0)) < 0.5
    assert is_exact(measured(home, "reward_to_go", turn_coef=2.0))


@pytest.mark.parametrize(
    ("rule", "name", "cosine"),
    [
        ({"name": "gtpo"}, "searcher", 0.99),
        ({"name": "mt_grpo_discounted", "gamma": 0.9}, "searcher", 0.99),
        ({"name": "turn_gae"}, "two_hops", 0.99),
        ({"name": "gigpo"}, "two_hops", 0.95),
    ],
    ids=str,
)
def test_rules_that_are_called_slightly_biased_are(rule, name, cosine):
    result = measured(name, rule, own=rule["name"] != "turn_gae")
    assert result.bias.abs().max() > 1e-4 and cosine < result.cosine < 1.0 + ZERO


def test_lambda_leaves_out_what_a_turn_changes_later():
    """Tasks do not change what later ones earn, and all decide the outcome; in `late` the first pays at the third."""
    rule = {"name": "lambda_to_go", "lam": 0.5}
    for name in ("tasks", "mastered"):
        result, to_go = measured(name, rule, own=False), measured(name, "reward_to_go")
        assert is_exact(result) and result.signal_to_noise > 1.05 * to_go.signal_to_noise
        assert biased(measured(name, {"name": "turn_gae", "lam": 0.5}, own=False)) > 0.1
    assert measured("late", rule, own=False).cosine < 0.9


def test_leaving_out_an_outcome_that_the_policy_avoids_is_biased():
    assert measured("one_search", "grpo_mr").length < 0.5
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
        ways = (lambda play, way=telescoped: process(play, way), (0.2, 0.1))
        bias = biased(measured(ways, "reward_to_go", 3))
        assert bias < ZERO if telescoped else bias > 0.03


# Scaling, and one scale for outcome and turn rewards or one each


def test_scaling_bends_the_direction_less_in_larger_groups():
    cosines = [measured("searcher", "grpo_mr", size, scale_rewards="group").cosine for size in (2, 3, 4)]
    assert cosines == sorted(cosines) and cosines[0] < 0.9999


@pytest.mark.parametrize(
    ("scales", "scale_rewards", "least", "greatest"),
    [
        ("each", "group", {}, {0.7: -0.95, 0.3: -0.95}),
        ("each", "batch", {}, {0.7: -0.95, 0.3: -0.95}),
        ("one", "batch", {0.7: 0.99, 0.3: 0.99, 0.1: 0.99}, {}),
        # in most groups only turn rewards differ, and their small deviation divides
        ("one", "group", {0.7: 0.99}, {0.3: -0.5}),
    ],
)
def test_scales_where_calls_are_paid_and_cost_the_outcome(scales, scale_rewards, least, greatest):
    """The direction of the gradient, by how likely searches are."""
    rule, factor = {"name": "reward_to_go", "scales": scales}, 4 / 3
    for searches in least | greatest:
        options = {"parameters": (logit(searches),) * 4, "factor": factor, "scale_rewards": scale_rewards}
        whole = {"groups": 20_000} if scale_rewards == "batch" else {}
        way = sample if whole else measure
        cosine = way(rule, paid_searches(4), group_size=4, **options, **whole).cosine
        assert least.get(searches, -1.1) < cosine < greatest.get(searches, 1.1)


def test_separate_scales_have_less_noise_of_a_noisy_outcome():
    noise = (nearly_noise(3), (logit(0.28),) * 3)
    each, one = (
        measured(noise, {"name": "reward_to_go", "scales": scales}, scale_rewards="group")
        for scales in ("each", "one")
    )
    assert min(each.cosine, one.cosine) > 0.99 and each.signal_to_noise > 3 * one.signal_to_noise


# A score of the state as a baseline


def noisy(play):
    total = 0.0
    for step in range(2):
        if not play.decide(step):
            play.turn()
            return total
        play.turn(0.5, result=True, score=float(play.chance(0.5)))
        total += 0.25
    return total


ANSWERS = (0.4, -0.9, 0.7)


def answers(play):
    found = play.decide(0) and play.chance(0.6)
    after = 1 + found
    score = math.log(1 / (1 + math.exp(-ANSWERS[after])))  # the policy's own, of the right answer: to say yes
    play.turn(0.3 * found, result=True, score=score)
    right = play.decide(after)
    play.turn()
    return float(right)


@pytest.mark.parametrize("fit", ["line", "table"])
@pytest.mark.parametrize(
    ("process", "parameters"),
    [(stopper, (0.3, -0.4)), (late, (0.3, -0.4)), (noisy, (0.1, -0.3)), (answers, ANSWERS)],
    ids=["stopper", "late", "noisy", "answers"],
)
def test_any_state_score_is_an_unbiased_baseline(process, parameters, fit):
    options = {"group_size": 2, "groups": 2, "parameters": parameters}
    assert is_exact(measure({"name": "state_baseline", "fit": fit}, process, **options))
    if process is noisy:
        assert measure({"name": "state_baseline", "lam": 0.5}, process, **options).bias.abs().max() > 1e-3


# Conversations that branch


def measured_branches(rule, name, branch_at, num_branches, **options):
    process, parameters = PROCESSES[name]
    options = {"branch_at": branch_at, "num_branches": num_branches, "parameters": parameters, **options}
    return measure_branching(rule, process, **options)


@pytest.mark.parametrize(
    ("name", "branch_at", "branches", "trunks"),
    [
        *((name, at, 2, 2) for name in PROCESSES for at in (1, 2)),
        *((name, at, 4, 3) for name, at in (("stopper", 1), ("stopper", 2), ("one_search", 1), ("late", 2))),
    ],
)
def test_branches_are_credited_without_bias(name, branch_at, branches, trunks):
    for turn_coef in (1.0, 0.3):
        options = {"num_trunks": trunks, "turn_coef": turn_coef}
        assert is_exact(measured_branches("branch_to_go", name, branch_at, branches, **options))


@pytest.mark.parametrize("name", ["stopper", "searcher", "two_hops"])
def test_a_mean_over_siblings_is_biased(name):
    """Rules that do not know of branches shorten the gradient of shared turns more than that of others."""
    for rule in ("reward_to_go", "leave_one_out"):
        result = measured_branches(rule, name, 1, 2)
        scaled = result.mean * (result.truth.norm() / result.mean.norm())
        assert result.length < 0.95 and (len(scaled) == 1 or (scaled - result.truth).norm() > 1e-3)


def test_other_weights_than_one_by_branches_are_biased(monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("equal_tokens")
    def equal_tokens(batch, **options):
        """Each distinct token weighs the same: those of a trunk are in the group once."""
        weights = torch.where(torch.arange(batch.turn_mask.shape[1]) < batch.branch_at, 1 / batch.num_branches, 1.0)
        return branch_to_go(batch, **options) * weights

    @advantage_estimator("ended_once")
    def ended_once(batch, **options):
        """A trunk that ended before it branched is in the group once."""
        ended = batch.turn_mask.sum(dim=1) <= batch.branch_at
        first = torch.arange(len(ended)) % batch.num_branches == 0
        return branch_to_go(batch, **options) * torch.where(ended & ~first, 0.0, 1.0)[:, None]

    for rule in ("equal_tokens", "ended_once"):
        for name in ("one_search", "searcher"):
            result = measured_branches(rule, name, 1, 2)
            assert result.cosine < 1 - 1e-4 and biased(result) > 0.05, (rule, name)


def test_a_late_open_decision_is_where_branches_pay():
    parameters = (3.0, 0.0)
    plain = measured((settled, parameters), "reward_to_go")
    options = {"branch_at": 3, "num_branches": 4, "parameters": parameters}
    branched = measure_branching("branch_to_go", settled, num_trunks=2, **options)
    more = 2 * sampled_turns(settled, 3, 4, parameters) / (4 * sampled_turns(settled, 3, 1, parameters))
    assert is_exact(branched) and more == pytest.approx(14 / 16)
    assert branched.signal_to_noise / math.sqrt(more) > 1.3 * plain.signal_to_noise


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
    torch.testing.assert_close(trained, factor * (weights @ estimates), rtol=0, atol=ZERO)
    assert 1 < factor < rounds + 1


def test_paths_are_all_ways_and_their_probabilities_sum_to_one():
    paths = Paths.of(one_search, (0.3, -0.2))
    assert len(paths.probability) == 9
    assert [paths.probability.sum().item(), paths.groups(3)[1].sum().item()] == pytest.approx([1.0, 1.0])


def test_turns_of_a_trunk_are_sampled_once():
    # it stops at the first, second or third decision, or goes on three times
    turns = [sampled_turns(stopper, branch_at, branches, (0.0,)) for branch_at, branches in ((1, 1), (1, 4), (2, 4))]
    assert turns == pytest.approx([1.75, 1 + 4 * 0.75, 1 + 0.5 + 4 * 0.25])


def test_one_group_at_a_time_is_the_same_as_all_at_once():
    single, double = (measure("reward_to_go", stopper, group_size=2, groups=number) for number in (1, 2))
    torch.testing.assert_close(double.mean, single.mean)
    assert double.std == pytest.approx(single.std / math.sqrt(2))


def test_drawn_groups_agree_with_all_groups():
    drawn = sample("reward_to_go", stopper, group_size=4, groups=20_000, factor=4 / 3)
    assert drawn.std == pytest.approx(0.119753, rel=0.03)
    assert drawn.bias.item() == pytest.approx(0.0, abs=4 * 0.119753 / math.sqrt(20_000))
