"""Rules equal slow ones that are written down member by member, and make no signal of nothing."""

import inspect
import math
import statistics
from dataclasses import replace

import pytest
import torch
from support.registered import keep_estimators
from support.reward_batches import NONE, draw_batch

from mt_grpo import credit
from mt_grpo.credit import ADVANTAGE_ESTIMATORS, RewardBatch, estimate, without_signal
from mt_grpo.errors import ConfigError

EPSILON = 1e-4
SCALES = ["group", "batch", "none"]
RULES = sorted(name for name, rule in ADVANTAGE_ESTIMATORS.items() if rule.__module__.startswith("mt_grpo.credit."))


# The same once more, in plain Python, without anything of `mt_grpo.credit`


def zero(value):
    return 0.0 if math.isnan(value) else value


def mean(values):
    """Of those that are not NaN."""
    values = [value for value in values if not math.isnan(value)]
    return statistics.fmean(values) if values else math.nan


def spread(values):
    values = [value for value in values if not math.isnan(value)]
    return statistics.stdev(values) if len(values) > 1 else 0.0


class Slow:
    """A batch as lists; members that failed are in no group. What is measured of member j at turn k is `of(j, k)`."""

    def __init__(self, batch, scale, coef=1.0, turns=None, outcomes=None):
        self.size, self.scale = batch.group_size, scale
        self.lengths = batch.turn_mask.sum(dim=1).tolist()
        self.turns = range(batch.turn_mask.shape[1])
        turns = batch.turn_rewards if turns is None else turns
        self.rewards = [[coef * zero(value) for value in row] for row in turns.tolist()]
        self.given = (batch.outcome_rewards if outcomes is None else outcomes).tolist()
        self.everyone = [i for i, length in enumerate(self.lengths) if length]

    def group(self, i):
        return [j for j in self.everyone if j // self.size == i // self.size]

    def others(self, i):
        return [j for j in self.group(i) if j != i]

    def outcome(self, j, k=0):
        return zero(self.given[j])

    def to_go(self, j, k, gamma=1.0):
        return sum(gamma ** (t - k) * self.rewards[j][t] for t in self.turns[k:])

    def total(self, j, k):
        return self.outcome(j) + self.to_go(j, k)

    def whole(self, j, k=0):
        return self.total(j, 0)

    def returns(self, j, k, gamma=1.0):
        """With the outcome at the last turn."""
        last = self.lengths[j] - 1
        return self.to_go(j, k, gamma) + (gamma ** (last - k) * self.outcome(j) if k <= last else 0.0)

    def divisor(self, i, of, turns=None):
        """The largest deviation over turns."""
        if self.scale == "none":
            return 1.0
        among = self.group(i) if self.scale == "group" else self.everyone
        return max(spread([of(j, k) for j in among]) for k in turns or self.turns) + EPSILON

    def advantages(self, of, divided_by=None):
        result = torch.zeros(len(self.lengths), len(self.turns), dtype=torch.double)
        for i in self.everyone:
            divisor = self.divisor(i, divided_by) if divided_by else 1.0
            for k in range(self.lengths[i]):
                result[i, k] = zero(of(i, k)) / divisor
        return result

    def centred(self, i, k, of):
        return zero(of(i, k) - mean(of(j, k) for j in self.group(i)))

    def normal(self, of, divided_by=None):
        return self.advantages(lambda i, k: self.centred(i, k, of), divided_by or of)

    def left_out(self, of, divided_by=None):
        return self.advantages(lambda i, k: of(i, k) - mean(of(j, k) for j in self.others(i)), divided_by or of)

    def value(self, i, k, gamma=1.0):
        """What the other members get from turn k on, or from the last turn before it that any of them has."""
        others = self.others(i)
        reach = [t for t in range(k + 1) if any(self.lengths[j] > t for j in others)][-1]
        return mean(self.returns(j, reach, gamma) for j in others if self.lengths[j] > reach)

    def gae(self, gamma, lam, divided_by=None, more=lambda i, k: 0.0):
        def of(i, k):
            if not self.others(i):
                return 0.0
            advantage, last = 0.0, self.lengths[i] - 1
            for t in range(k, last + 1):
                reward = self.rewards[i][t] + (self.outcome(i) if t == last else 0.0)
                after = self.value(i, t + 1, gamma) + more(i, t + 1) if t < last else 0.0
                advantage += (gamma * lam) ** (t - k) * (reward + gamma * after - self.value(i, t, gamma) - more(i, t))
            return advantage

        return self.advantages(of, divided_by or (lambda j, k: self.returns(j, k, gamma)))


def one_scale(scales, scale):
    """What divides all, if `scales` is not "each"."""
    return "batch" if (scales, scale) == ("batch", "group") else scale


def grpo_or(batch, coef, scale):
    slow = Slow(batch, scale)
    return slow.normal(lambda j, k: slow.given[j])


def grpo_mr(batch, coef, scale, divided_by=None):
    slow = Slow(batch, scale)
    absent = (batch.turn_rewards.isnan().all(dim=1) & batch.outcome_rewards.isnan()).tolist()
    return slow.normal(lambda j, k: NONE if absent[j] else slow.whole(j), divided_by)


def mt_grpo(batch, coef, scale, scales="each"):
    scale = one_scale(scales, scale)
    slow, weighed = Slow(batch, scale), Slow(batch, scale, coef)
    first = [row.index(True) if any(row) else None for row in batch.result_mask.tolist()]
    by = None if scales == "each" else lambda j, k: weighed.given[j] + weighed.to_go(j, k)
    outcome, turn = slow.normal(lambda j, k: slow.given[j], by), slow.normal(lambda j, k: slow.to_go(j, 0), by)
    both = grpo_mr(batch, coef, scale, by)
    return slow.advantages(
        lambda i, k: both[i, k] if first[i] is None else outcome[i, k] + (coef * turn[i, k] if k <= first[i] else 0)
    )


def reward_to_go(batch, coef, scale, scales="each"):
    slow, weighed = Slow(batch, scale), Slow(batch, one_scale(scales, scale), coef)
    return (
        weighed.normal(weighed.total)
        if scales != "each"
        else slow.normal(slow.outcome) + coef * slow.normal(slow.to_go)
    )


def gdpo(batch, coef, scale, scales="each"):
    scale = one_scale(scales, scale)
    by = None if scales == "each" else Slow(batch, scale, coef).total
    turns = [Slow(batch, scale, turns=stream) for stream in batch.turn_streams]
    outcomes = [Slow(batch, scale, outcomes=stream) for stream in batch.outcome_streams]
    terms = [coef * slow.normal(slow.to_go, by) for slow in turns]
    terms += [slow.normal(slow.outcome, by) for slow in outcomes]
    return sum(weight * term for weight, term in zip(batch.stream_weights, terms, strict=True))


def leave_one_out(batch, coef, scale):
    slow = Slow(batch, scale, coef)
    return slow.left_out(slow.whole)


def gtpo(batch, coef, scale, gamma=0.9):
    slow = Slow(batch, scale, coef)
    return slow.normal(lambda j, k: slow.returns(j, k, gamma))


def mt_grpo_discounted(batch, coef, scale, gamma=1.0):
    slow = Slow(batch, scale)

    def at(i, t):
        def reward(j, k):
            return slow.rewards[j][k]

        return slow.centred(i, t, reward) / slow.divisor(i, reward, [t])

    turn = slow.advantages(lambda i, k: sum(gamma ** (t - k) * at(i, t) for t in slow.turns[k:]))
    return slow.normal(slow.outcome) + coef * turn


def turn_gae(batch, coef, scale, gamma=1.0, lam=0.95):
    return Slow(batch, scale, coef).gae(gamma, lam)


def lambda_to_go(batch, coef, scale, lam=0.9, scales="each"):
    """A_ik = (O_i − mean_{j≠i} O_j) / σ + c Σ_{l≥k} λ^(l−k) δ_il / σ."""
    scale, inside = one_scale(scales, scale), 1.0 if scales == "each" else coef
    weighed, turns = Slow(batch, scale, coef), Slow(batch, scale, inside, outcomes=0 * batch.outcome_rewards)
    by = None if scales == "each" else weighed.total
    return weighed.left_out(weighed.outcome, by) + coef / inside * turns.gae(1.0, lam, by)


def gigpo(batch, coef, scale, gamma=0.95):
    slow, states = Slow(batch, scale), batch.state_ids.tolist()
    turns = [(j, t) for j in slow.everyone for t in range(slow.lengths[j])]

    def of(i, k):
        same = [slow.returns(j, t, gamma) for j, t in turns if j in slow.group(i) and states[j][t] == states[i][k]]
        among = same if scale == "group" else [slow.returns(j, t, gamma) for j, t in turns]
        return (slow.returns(i, k, gamma) - mean(same)) / (1.0 if scale == "none" else spread(among) + EPSILON)

    return slow.normal(slow.whole) + coef * slow.advantages(of)


def state_baseline(batch, coef, scale, lam=1.0, fit="line"):
    slow, scores = Slow(batch, scale, coef), batch.state_scores.tolist()
    units = {i: slow.divisor(i, slow.returns) for i in slow.everyone}
    points = [  # group, score before, how much more than the others
        (i // slow.size, scores[i][k - 1], (slow.returns(i, k) - slow.value(i, k)) / units[i])
        for i in slow.everyone
        for k in range(1, slow.lengths[i] if slow.others(i) else 0)
        if not math.isnan(scores[i][k - 1])
    ]

    def more(i, k):
        score, others = scores[i][k - 1], [(x, y) for group, x, y in points if group != i // slow.size]
        if k == 0 or math.isnan(score) or not others:
            return 0.0
        if fit == "table":
            return units[i] * zero(mean(y for x, y in others if x == score))
        if len({x for x, _ in others}) < 2:
            return units[i] * mean(y for _, y in others)
        slope, intercept = statistics.linear_regression(*zip(*others, strict=True))
        return units[i] * (intercept + slope * score)

    return slow.gae(1.0, lam, more=more)


def branch_to_go(batch, coef, scale):
    slow, branches = Slow(batch, scale, coef), batch.num_branches

    def of(i, k):
        trunk = [j for j in slow.group(i) if j // branches == i // branches]
        others = mean(slow.total(j, k) for j in slow.group(i) if j not in trunk)
        if k < batch.branch_at:
            return mean(slow.total(j, k) for j in trunk) - others
        siblings = mean(slow.total(j, k) for j in trunk if j != i)
        return slow.total(i, k) - (others if math.isnan(siblings) else siblings)

    return slow.advantages(of, slow.total)


def drawn(rule, seed):
    """A batch for a rule; with some groups of one."""
    if rule != "branch_to_go":
        return draw_batch(seed)
    return replace(draw_batch(seed, 6, failing=0.3), num_branches=1 + seed % 3, branch_at=2 * (seed % 3 > 0))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *((rule, {}) for rule in RULES),
        *((rule, {"gamma": 0.5}) for rule in ("gtpo", "mt_grpo_discounted", "gigpo")),
        ("turn_gae", {"gamma": 0.5, "lam": 0.3}),
        ("state_baseline", {"lam": 0.5}),
        ("state_baseline", {"fit": "table"}),
        ("lambda_to_go", {"lam": 1.0}),
        *((rule, {"scales": "one"}) for rule in ("reward_to_go", "gdpo", "lambda_to_go", "mt_grpo")),
        *((rule, {"scales": "batch"}) for rule in ("reward_to_go", "gdpo", "lambda_to_go", "mt_grpo")),
    ],
    ids=str,
)
def test_a_rule_equals_its_slow_form(rule, options, scale):
    fast, slow = getattr(credit, rule), globals()[rule]
    for seed in range(10):
        batch = drawn(rule, seed)
        for coef in (1.0, 0.3):
            computed = fast(batch, turn_coef=coef, scale_rewards=scale, **options)
            close = {"rtol": 1e-6, "atol": 1e-6 if scale == "none" else 1e-5, "check_dtype": False}
            torch.testing.assert_close(computed, slow(batch, coef, scale, **options), **close)


def whole_batch(turns, outcomes, group_size, **changes):
    """Members that all have all turns, each reward with a stream of its own."""
    exists = torch.ones_like(turns, dtype=torch.bool)
    fields = {"turn_streams": turns[None], "outcome_streams": outcomes[None], "stream_weights": torch.ones(2)}
    return replace(RewardBatch(turns, outcomes, exists, exists, group_size, **fields), **changes)


def test_the_example_of_the_paper():
    """The turn advantage ends with the first result; a turn that does not exist has none."""
    turns = torch.tensor([[0.2, 0.5, NONE], [0.1, NONE, NONE]])  # sums 0.7 and 0.1
    batch = replace(
        whole_batch(turns, torch.tensor([1.0, 0.0]), 2),
        turn_mask=torch.tensor([[True, True, True], [True, True, False]]),
        result_mask=torch.tensor([[True, True, False], [True, False, False]]),
    )
    outcome, turn = 0.70701, 0.70694
    expected = [[outcome + turn / 2, outcome, outcome], [-outcome - turn / 2, -outcome, 0.0]]
    torch.testing.assert_close(credit.mt_grpo(batch, turn_coef=0.5), torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_advantages_have_the_dtype_of_rewards_or_float32(rule):
    batch = draw_batch(3, group_size=4)
    fields = {name: value.float() for name, value in vars(batch).items() if getattr(value, "dtype", 0) == torch.double}
    single, double = (ADVANTAGE_ESTIMATORS[rule](each) for each in (replace(batch, **fields), batch))
    of_paper = rule in ("mt_grpo", "grpo_or", "grpo_mr")
    assert (single.dtype, double.dtype) == (torch.float32, torch.float32 if of_paper else torch.double)
    torch.testing.assert_close(single.double(), double.double(), rtol=1e-3, atol=1e-3)


# What makes no signal, not even of a rounding error, which dividing by a small number would make large


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rule", ADVANTAGE_ESTIMATORS)
def test_equals_a_group_of_one_and_failures_get_nothing(rule, scale):
    takes_scale = "scale_rewards" in inspect.signature(ADVANTAGE_ESTIMATORS[rule]).parameters
    options = {"scale_rewards": scale} if takes_scale else {}
    draw = torch.Generator().manual_seed(1)
    for size in (1, 2, 3, 5, 7):
        turns = torch.rand(2, 3, generator=draw).repeat_interleave(size, dim=0)
        outcomes = torch.rand(2, generator=draw).repeat_interleave(size)
        states = {"state_ids": torch.arange(3).expand(2 * size, 3), "state_scores": torch.zeros_like(turns)}
        batch = whole_batch(turns, outcomes, size, **states)
        for each in (batch, replace(batch, result_mask=~batch.result_mask)):
            assert without_signal(estimate(rule, each, **options), size).all()
    assert not estimate(rule, draw_batch(0, group_size=2, failing=1.1), **options).any()


def shuffled(count, members, seed):
    """Members that earn the same rewards, each in an order of its own, and an outcome of .7."""
    draw = torch.Generator().manual_seed(seed)
    rewards = torch.rand(count, generator=draw) * 10 ** torch.randint(-3, 3, (count,), generator=draw)
    rewards *= torch.randint(0, 2, (count,), generator=draw) * 2 - 1
    rows = torch.stack([rewards[torch.randperm(count, generator=draw)] for _ in range(members)])
    last = (torch.arange(count) == count - 1).expand(members, count)  # the first result follows the last turn
    scores = torch.full((members, count), NONE)
    return whole_batch(rows, torch.full((members,), 0.7), members, result_mask=last, state_scores=scores)


WHOLE = ["mt_grpo", "grpo_mr", "leave_one_out"]


@pytest.mark.parametrize("name", WHOLE)
def test_the_order_of_rewards_makes_no_signal(name):
    assert not estimate(name, shuffled(10_000, 8, 0)).any()
    for count, seeds in ((1, 1), (2, 5), (3, 20), (10, 20), (100, 5), (1000, 1)):
        for seed in range(seeds):
            for scale in SCALES:
                assert not estimate(name, shuffled(count, 4, seed), scale_rewards=scale).any()


@pytest.mark.parametrize("name", ["reward_to_go", "turn_gae", "state_baseline", "branch_to_go"])
def test_the_first_turn_of_equal_sums_gets_nothing(name):
    """What is earned from it on is all that is earned; later turns differ."""
    rule = {"name": name} | ({} if name in ("reward_to_go", "branch_to_go") else {"lam": 1.0})
    advantages = estimate(rule, shuffled(100, 4, 0))
    assert not advantages[:, 0].any() and advantages[:, 1:].any()


def test_decimals_that_add_up_to_the_same_are_equal():
    rewards = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.3, 0.0], [0.6, 0.0, 0.0]])
    for name in WHOLE:
        batch = whole_batch(rewards, torch.full((3,), 0.4), 3)
        assert not estimate(name, replace(batch, result_mask=~batch.turn_mask)).any()
    outcomes = torch.tensor([0.9, 0.8, 0.5])  # 1.0 in all, with a last reward of its own
    turns = torch.stack([1.0 - outcomes, torch.zeros(3), torch.zeros(3)], dim=1)
    assert not estimate("leave_one_out", whole_batch(turns, outcomes, 3)).any()


def test_rewards_that_float32_can_tell_apart_are_a_signal():
    for value in (0.3, 1.0, 1e6):
        one = torch.tensor(value)
        rewards = torch.stack([one, torch.nextafter(one, torch.tensor(0.0))])[:, None]
        assert (estimate("leave_one_out", whole_batch(rewards, torch.zeros(2), 2), scale_rewards="none") != 0).all()


@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("rule", ["reward_to_go", "gdpo", "gtpo", "turn_gae", "lambda_to_go"])
def test_equal_sums_in_different_turns_do_not_blow_up(rule, group_size):
    """The deviation of the sum is 0; divided by it the largest advantage would be thousands."""
    rewards = torch.zeros(group_size, 3, dtype=torch.double)
    rewards[torch.arange(group_size), torch.arange(group_size) % 3] = 1.0
    rewards[-1] = 1 / 3
    # a z-score is at most (G − 1) / √G
    bound = (group_size - 1) / math.sqrt(group_size) * (1 if rule in ("reward_to_go", "gdpo") else 3)
    assert 0 < estimate(rule, whole_batch(rewards, torch.ones(group_size), group_size)).abs().max() <= bound


def test_equal_totals_of_one_scale_do_not_blow_up():
    """What the outcome gives the last turn takes: they sum to the same, and the deviation of that is 0."""
    rewards = torch.tensor([[0.0, -1.0], [0.0, 0.0]], dtype=torch.double)
    batch = whole_batch(rewards, torch.tensor([1.0, 0.0], dtype=torch.double), 2)
    assert not credit.reward_to_go(batch, scales="one").any()
    assert credit.lambda_to_go(batch, scales="one", lam=0.5).abs().max() <= 1


def test_a_fit_does_not_blow_up_a_group_that_all_solve():
    """One group is always solved, whatever its scores say; in the other the score says who solves it."""
    scores = torch.tensor([[0.0, NONE], [1.0, NONE]]).double().repeat(4, 1)
    outcomes = torch.tensor([1.0] * 4 + [0.0, 1.0] * 2).double()
    batch = whole_batch(torch.full_like(scores, NONE), outcomes, 4, state_scores=scores)
    assert 0 < credit.state_baseline(batch).abs().max() < 5


def test_gigpo_prefers_the_visit_nearer_to_the_reward():
    """As its paper defines it, also where all members earn the same; without a discount visits are alike."""
    turns, states = torch.tensor([[0.0, 0.0, 1.0]] * 4), torch.tensor([[0, 5, 5]] * 4)
    batch = whole_batch(turns, torch.zeros(4), 4, state_ids=states)
    torch.testing.assert_close(credit.gigpo(batch)[0], torch.tensor([0.0, -0.93, 0.93]), atol=0.005, rtol=0.0)
    assert not credit.gigpo(batch, gamma=1.0).any()


# What is known of them


@pytest.mark.parametrize(
    ("name", "field"),
    [("gigpo", "state_ids"), ("gdpo", "turn_streams"), ("gdpo", "stream_weights"), ("state_baseline", "state_scores")],
)
def test_a_rule_says_what_it_lacks(name, field):
    with pytest.raises(ConfigError, match=f"'{name}' needs the `{field}` of a `RewardBatch`"):
        estimate(name, replace(draw_batch(2), **{field: None}))


def test_rules_say_whether_turn_rewards_may_be_summed(monkeypatch):
    assert {name for name in RULES if credit.sums_turns(name)} == {"mt_grpo", "grpo_or", "grpo_mr", "leave_one_out"}
    assert {name for name in RULES if not credit.splits_turns(name)} == {"grpo_or", "grpo_mr", "leave_one_out"}
    keep_estimators(monkeypatch)
    credit.advantage_estimator("reward_to_go", sums_turns=True)(credit.reward_to_go)
    assert credit.sums_turns("reward_to_go")
    monkeypatch.undo()
    assert not credit.sums_turns("reward_to_go")


@pytest.mark.parametrize(
    ("results", "coef", "reward", "biased"),
    [
        ([[1, 0], [0, 0]], 1.0, 0.5, False),
        ([[1, 0], [0, 0]], 2.0, 0.5, True),
        ([[1, 0], [0, 0]], 2.0, 0.0, False),
        ([[1, 0], [0, 0]], 2.0, NONE, False),
        ([[1, 0], [0, 1]], 2.0, 0.5, False),
    ],
)
def test_the_coefficient_biases_mt_grpo_where_no_tool_ran(results, coef, reward, biased):
    rewards = torch.tensor([[reward, NONE]] * 2 + [[NONE, NONE]])
    exists = torch.tensor([[True, True]] * 2 + [[False, False]])  # the last one failed
    results = torch.tensor([*results, [0, 0]], dtype=torch.bool)
    batch = RewardBatch(rewards, torch.zeros(3), exists, results, 3)
    said = f"1 of 3 trajectories have no tool result, and weigh turn rewards by 1 instead of `turn_coef` {coef}"
    assert credit.bias_of_turn_coef(batch, coef) == (said if biased else None)
