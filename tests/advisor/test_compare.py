"""What a few groups tell of the direction of a rule agrees with the enumeration of all groups."""

import math

import pytest
import torch
from support.decision_processes import PROCESSES
from support.exact_gradients import Paths, measure

from mt_grpo.advisor.compare import ALL, _compare_rules, judge_rules
from mt_grpo.credit import bind_rule

RULES = ("leave_one_out", "reward_to_go", "gtpo", "mt_grpo", "grpo_mr", "grpo_or")
SIZE = 4


def skills(play):
    """Four turns with a skill of their own; only turn rewards: what most rules are told apart by."""
    for turn in range(4):
        play.turn(0.25 if play.decide(turn) else 0.0, result=True)
    return 0.0


NAMED = {**PROCESSES, "skills": (skills, (0.2, -0.3, 0.1, 0.4))}


def noise(seed, *shapes):
    """Normal numbers of each shape, one after another."""
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=draws) for shape in shapes]


def sampled(name, groups, seed=0, rules=RULES, groups_per_step=8, draws=500):
    paths = Paths.of(*NAMED[name])
    rows = paths.draw(groups, SIZE, seed)
    estimates = {}
    for rule in rules:
        function, options = bind_rule(rule, turn_coef=None, scale_rewards="none")
        estimates[rule] = paths.estimates(function(paths.batch(rows), **options), rows)
    return _compare_rules(estimates, estimates["leave_one_out"], groups_per_step, draws=draws)


def enumerated(name, rule):
    process, parameters = NAMED[name]
    return measure(rule, process, group_size=SIZE, parameters=parameters)


def step_of(measurement, groups_per_step):
    """The expected cosine of a step, from what is enumerated."""
    signal, noise = measurement.mean.norm().item(), measurement.std
    return measurement.cosine * signal / math.sqrt(signal**2 + noise**2 / groups_per_step) if signal > 1e-12 else 0.0


def holds(interval, value, slack=0.0):
    return interval.low - slack <= value <= (math.inf if interval.high is None else interval.high + slack)


@pytest.mark.parametrize("name", ["one_search", "searcher", "two_hops", "late", "skills"])
def test_cosine_noise_step_and_order_agree_with_enumeration(name):
    found = sampled(name, groups=400)
    reference = enumerated(name, "leave_one_out")
    assert found.known
    for rule in RULES:
        exact, direction = enumerated(name, rule), found.directions[rule]
        if direction is None:
            assert exact.mean.norm() < 1e-12
            continue
        # six rules of five processes: one in twenty intervals may miss by a little
        assert holds(direction.cosine, exact.cosine, 0.02)
        assert holds(direction.signal_to_noise, exact.signal_to_noise / reference.signal_to_noise, 0.05)
        assert holds(direction.step, step_of(exact, 8), 0.02)
        assert direction.cosine.value == pytest.approx(exact.cosine, abs=0.12)
    if name in ("searcher", "late"):
        return
    steps = {rule: step_of(enumerated(name, rule), 8) for rule in RULES}
    shown = [(one, other) for one in RULES for other in RULES if found.behind(one, other)]
    assert all(steps[one] < steps[other] + 0.01 for one, other in shown) and ("grpo_or", found.best) in shown
    assert steps[found.best] > max(steps.values()) - 0.02


def test_what_noise_tells_apart_is_not_shown_behind():
    """Each of two rules is the truth and noise of its own, and neither points better."""
    truth = torch.ones(40, 8)
    one, other = noise(0, (40, 8), (40, 8))
    found = _compare_rules({"one": truth + one, "other": truth + other}, truth, groups_per_step=8)
    assert not found.behind("one", "other") and not found.behind("other", "one")


def test_intervals_of_few_groups_hold_the_truth():
    """95 % intervals from 24 groups, over 60 batches of them; those of cosines near 1 end at 1."""
    exact, reference = enumerated("skills", "mt_grpo"), enumerated("skills", "leave_one_out")
    ratio = exact.signal_to_noise / reference.signal_to_noise
    found = [sampled("skills", 24, seed, ("leave_one_out", "mt_grpo"), draws=300).directions for seed in range(60)]
    for values in (
        [holds(each["mt_grpo"].cosine, exact.cosine) for each in found],
        [holds(each["mt_grpo"].signal_to_noise, ratio) for each in found],
        [holds(each["mt_grpo"].step, step_of(exact, 8)) for each in found],
        [holds(each["leave_one_out"].step, step_of(reference, 8)) for each in found],
    ):
        assert sum(values) >= 53


def test_noise_does_not_make_a_cosine_smaller():
    """Plain means of 16 noisy estimates of one direction have a cosine of about .7; pairs of groups have 1."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.zeros(64)
    truth[0] = 1.0
    cosines, plain = [], []
    for _ in range(40):
        one, other = (truth + 0.3 * torch.randn(16, 64, generator=generator) for _ in range(2))
        cosines.append(_compare_rules({"rule": one}, other, 4, draws=2).directions["rule"].cosine.value)
        plain.append(torch.cosine_similarity(one.mean(dim=0), other.mean(dim=0), dim=0).item())
    assert sum(plain) / 40 < 0.8
    assert sum(cosines) / 40 == pytest.approx(1.0, abs=0.05)


def test_nothing_is_known_where_groups_tell_no_gradient():
    (only,) = noise(1, (12, 32))
    found = _compare_rules({"rule": only}, only, 4)
    assert not found.known and not found.directions["rule"].step.told
    found = _compare_rules({"silent": torch.zeros(12, 32)}, torch.zeros(12, 32), 4, draws=20)
    assert found.directions == {"silent": None} and not found.known
    with pytest.raises(ValueError, match="one group"):
        _compare_rules({}, torch.ones(1, 4), 4)


def test_a_truth_of_unknown_length_names_no_rule():
    """Seven groups do not tell the length of the truth from 0, so that the interval of every cosine is [−1, 1]."""
    truth, (loud, low) = torch.eye(64)[0], noise(4, (7, 64), (7, 64))
    noisy = 0.5 * truth + 0.5 * loud
    found = _compare_rules({"quiet": truth + 0.05 * low, "noisy": noisy}, noisy, 4, draws=200)
    assert found.best == "quiet" and not found.directions["quiet"].step.told
    assert not found.known


def test_noise_is_rarely_known():
    """Two rules, one of them quiet, beside a truth of 0: known by chance in one batch of twenty."""
    drawn = noise(0, *[(24, 16)] * 200)
    pairs = [(loud, 0.1 + 0.1 * low) for loud, low in zip(drawn[::2], drawn[1::2], strict=True)]
    found = [_compare_rules({"quiet": quiet, "loud": loud}, loud, 6, draws=200) for loud, quiet in pairs]
    assert sum(each.known for each in found) <= 8


def test_a_rule_without_signal_has_no_direction():
    rule = 1.0 + 0.1 * noise(1, (12, 32))[0]
    found = _compare_rules({"silent": torch.zeros(12, 32), "rule": rule}, rule, 4)
    assert found.directions["silent"] is None and found.best == "rule"
    assert found.behind("silent", "rule") and not found.behind("rule", "silent")
    assert not found.behind("silent", "silent") and not found.behind("rule", "rule")


def drawn(directions, size=0.2):
    """By name, noisy estimates of a gradient whose first numbers are given; (60, 16) each."""
    each = zip(directions.items(), noise(len(directions), *[(60, 16)] * len(directions)), strict=True)
    return {name: torch.tensor([*first, *[0.0] * (16 - len(first))]) + size * loud for (name, first), loud in each}


def judged(rules, rewards, kept=None, noises=None):
    """Rules beside rewards by the first numbers of their gradients; `noises` of rewards that have another one."""
    truths = {name: drawn({name: first}, (noises or {}).get(name, 0.2))[name] for name, first in rewards.items()}
    return judge_rules(drawn(rules), {ALL: sum(truths.values()), **truths}, 8, kept or {}, draws=300)


def test_a_rule_is_judged_by_what_it_does_worst():
    """One rule loses the reward that decides little now, and the other one does a bit worse on all together."""
    rules = {"loses": [1.0, 0.0], "even": [0.6, 0.8]}
    found = judged(rules, {"easy": [1.0, 0.0], "outcome": [0.0, 0.5]})
    assert set(found.told) == {ALL, "easy", "outcome"} and found.known and not found.silent
    assert found.items[ALL].best in rules and found.worst("loses") == "outcome"
    assert found.best == "even" == found.farthest
    assert found.behind("loses", "even") and not found.behind("even", "loses")
    share = found.share("loses", "outcome")
    assert share.low < share.value < share.high < 0.3 and found.share("even", "outcome").value == 1.0


def test_a_clear_reward_is_judged_beside_the_noise_of_another():
    """All together are not told. The rule whose steps go along the clear one is best, not the one that is drowned."""
    outcome, clear = 3.0 * noise(8, (60, 16))[0], drawn({"clear": [0.3]}, 0.02)["clear"]
    rules = {"drowned": clear + outcome, "each": 10 * clear + outcome}
    found = judge_rules(rules, {ALL: clear + outcome, "clear": clear, "outcome": outcome}, 8, {}, draws=300)
    assert list(found.told) == ["clear"] and found.silent == [ALL, "outcome"]
    assert found.best == "each" and found.behind("drowned", "each") and not found.opposed


def test_a_reward_that_goes_against_the_others_has_no_part():
    rules = {"follows all": [1.0, 0.3], "follows the small one": [-0.9, 0.3]}
    found = judged(rules, {"outcome": [1.0, 0.1], "paid": [-0.4, 0.05]})
    assert set(found.told) == {ALL, "outcome"} and found.opposed == ["paid"] and found.best == "follows all"


def test_nothing_is_known_where_rewards_cancel():
    rules = {"one": [1.0], "other": [-1.0]}
    found = judged(rules, {"outcome": [1.0], "paid": [-1.0]})
    assert not found.told and not found.known
    assert found.silent == [ALL] and found.opposed == ["outcome", "paid"]


def test_nothing_is_known_where_each_rule_is_bad_for_something():
    """Two rewards that are not shown to pull apart, of which each rule follows one and goes against the other."""
    rules = drawn({"one": [1.0, -1.0], "other": [-1.0, 1.0]})
    truths = {**drawn({"a": [1.0]}), **drawn({"b": [0.0, 1.0]})}
    whole = truths["a"] + truths["b"] + 50 * noise(0, (60, 16))[0]
    found = judge_rules(rules, {ALL: whole, **truths}, 8, {}, draws=300)
    assert set(found.told) == {"a", "b"} and not found.known


def test_of_near_rules_the_one_that_keeps_outcomes_is_best():
    rules = {"short": [1.0, 0.0], "keeps": [0.9, 0.44], "slow": [0.4, 0.92]}
    kept = {"short": 0.01, "keeps": 0.9}  # "slow" keeps all
    found = judged(rules, {"turn": [1.0]}, kept)
    assert found.farthest == "short" and found.best == "keeps"
    assert judged(rules, {"turn": [1.0]}).best == "short"


def test_turn_rewards_count_by_their_weights():
    """By themselves they do only where all rewards together are not told."""
    rules = {"proportion": [1.0, 0.1], "each": [0.6, 0.8]}
    found = judged(rules, {"outcome": [1.0], "turn reward 1": [0.0, 0.15]}, noises={"turn reward 1": 0.05})
    assert set(found.told) == {ALL, "outcome"} and not found.silent and not found.opposed
    assert found.best == "proportion" and found.behind("each", "proportion")


def test_of_near_rules_the_default_is_best():
    """Also where it keeps an outcome but for rounding."""
    rules, truths = drawn({"first": [1.0], "default": [0.95, 0.3], "far": [0.3, 0.95]}), drawn({ALL: [1.0]})
    best = {
        names: judge_rules(rules, truths, 8, {"default": 0.9999999}, names, draws=300).best
        for names in (("default",), ("far",), ("far", "default", "first"))
    }
    assert list(best.values()) == ["default", "first", "default"]


def test_nothing_is_judged_where_nothing_is_told():
    assert not judged({"one": [1.0]}, {"turn": [1.0], "outcome": [1.0]}, noises={"turn": 50.0, "outcome": 50.0}).known
