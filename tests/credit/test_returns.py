"""Rules for any number of turns equal slow ones that are written down member by member."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from support.registered import keep_estimators
from support.reward_batches import NONE, draw_batch

from mt_grpo.credit import (
    RewardBatch,
    advantage_estimator,
    bias_of_turn_coef,
    estimate,
    gdpo,
    gigpo,
    gtpo,
    lambda_to_go,
    leave_one_out,
    mt_grpo,
    mt_grpo_discounted,
    reward_to_go,
    splits_turns,
    state_baseline,
    sums_turns,
    turn_gae,
)
from mt_grpo.errors import ConfigError

EPSILON = 1e-4
SCALES = ["group", "batch", "none"]
ALL = [reward_to_go, gdpo, leave_one_out, gtpo, mt_grpo_discounted, turn_gae, lambda_to_go, gigpo, state_baseline]


# The same once more, in plain Python, without anything of `mt_grpo.credit`


def zero(value):
    return 0.0 if math.isnan(value) else value


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


class Members:
    """A batch as lists; members that failed are left out, and have no advantage."""

    def __init__(self, batch, coef=1.0, turn_rewards=None, outcomes=None):
        self.num_turns = batch.turn_mask.shape[1]
        self.group_size, self.size = batch.group_size, len(batch.turn_mask)
        turn_rewards = batch.turn_rewards if turn_rewards is None else turn_rewards
        outcomes = batch.outcome_rewards if outcomes is None else outcomes
        self.lengths = batch.turn_mask.sum(dim=1).tolist()
        self.rewards = [[coef * zero(value) for value in row] for row in turn_rewards.tolist()]
        self.outcomes = [zero(value) for value in outcomes.tolist()]

    def ran(self, i):
        """The members of the group of i that did not fail."""
        start = i // self.group_size * self.group_size
        return [j for j in range(start, start + self.group_size) if self.lengths[j]]

    def everyone(self):
        return [j for j in range(self.size) if self.lengths[j]]

    def advantages(self, of):
        result = torch.zeros(self.size, self.num_turns, dtype=torch.double)
        for i in self.everyone():
            for k in range(self.lengths[i]):
                result[i, k] = of(i, k)
        return result

    def normalized(self, scale):
        """(i, value of j at any turn) -> centred and divided by the largest deviation over turns."""

        def of(i, k, value, turns):
            members = self.ran(i)
            mean = statistics.fmean(value(j, k) for j in members)
            among = {"group": members, "batch": self.everyone()}.get(scale)
            divisor = max(spread([value(j, t) for j in among]) for t in turns) + EPSILON if among else 1.0
            return (value(i, k) - mean) / divisor

        return of

    def scale(self, i, scale, gamma=1.0):
        """What the returns of member i are divided by."""
        among = {"group": self.ran(i), "batch": self.everyone()}.get(scale)
        if not among:
            return 1.0
        return max(spread([self.returns(j, t, gamma) for j in among]) for t in range(self.num_turns)) + EPSILON

    def to_go(self, j, k, gamma=1.0):
        return sum(gamma ** (t - k) * self.rewards[j][t] for t in range(k, self.num_turns))

    def returns(self, j, k, gamma=1.0):
        """With the outcome at the last turn."""
        last = self.lengths[j] - 1
        return self.to_go(j, k, gamma) + (gamma ** (last - k) * self.outcomes[j] if k <= last else 0.0)

    def outcome(self, i, scale):
        return self.normalized(scale)(i, 0, lambda j, k: self.outcomes[j], [0])


def slow_reward_to_go(batch, turn_coef, scale):
    members = Members(batch)
    turns = range(members.num_turns)
    normal = members.normalized(scale)
    return members.advantages(lambda i, k: members.outcome(i, scale) + turn_coef * normal(i, k, members.to_go, turns))


def slow_gdpo(batch, turn_coef, scale):
    result = 0.0
    for stream, weight in zip(batch.turn_streams, batch.stream_weights, strict=False):
        members = Members(batch, turn_rewards=stream)
        normal, turns = members.normalized(scale), range(members.num_turns)
        result = result + turn_coef * weight * members.advantages(
            lambda i, k, members=members, normal=normal, turns=turns: normal(i, k, members.to_go, turns)
        )
    for stream, weight in zip(batch.outcome_streams, batch.stream_weights[2:], strict=True):
        members = Members(batch, outcomes=stream)
        result = result + weight * members.advantages(lambda i, k, members=members: members.outcome(i, scale))
    return result


def slow_leave_one_out(batch, turn_coef, scale):
    members = Members(batch, turn_coef)

    def of(i, k):
        others = [members.returns(j, 0) for j in members.ran(i) if j != i]
        if not others:
            return 0.0
        among = {"group": members.ran(i), "batch": members.everyone()}.get(scale)
        divisor = spread([members.returns(j, 0) for j in among]) + EPSILON if among else 1.0
        return (members.returns(i, 0) - statistics.fmean(others)) / divisor

    return members.advantages(of)


def slow_gtpo(batch, turn_coef, scale, gamma=0.9):
    members = Members(batch, turn_coef)
    normal, turns = members.normalized(scale), range(members.num_turns)
    return members.advantages(lambda i, k: normal(i, k, lambda j, t: members.returns(j, t, gamma), turns))


def slow_mt_grpo_discounted(batch, turn_coef, scale, gamma=1.0):
    members = Members(batch)
    normal = members.normalized(scale)

    def of(i, k):
        later = range(k, members.num_turns)
        terms = [gamma ** (t - k) * normal(i, t, lambda j, turn: members.rewards[j][turn], [t]) for t in later]
        return members.outcome(i, scale) + turn_coef * sum(terms)

    return members.advantages(of)


def slow_gae(batch, turn_coef, scale, gamma, lam, extra=lambda i, k: 0.0):
    members = Members(batch, turn_coef)

    def value(i, k):
        others = [j for j in members.ran(i) if j != i]
        reach = [t for t in range(k + 1) if any(members.lengths[j] > t for j in others)][-1]
        of = [members.returns(j, reach, gamma) for j in others if members.lengths[j] > reach]
        return statistics.fmean(of) + extra(i, k)

    def of(i, k):
        if len(members.ran(i)) < 2:
            return 0.0
        advantage, last = 0.0, members.lengths[i] - 1
        for t in range(k, last + 1):
            reward = members.rewards[i][t] + (members.outcomes[i] if t == last else 0.0)
            after = value(i, t + 1) if t < last else 0.0
            advantage += (gamma * lam) ** (t - k) * (reward + gamma * after - value(i, t))
        return advantage / members.scale(i, scale, gamma)

    return members.advantages(of)


def slow_turn_gae(batch, turn_coef, scale, gamma=1.0, lam=0.95):
    return slow_gae(batch, turn_coef, scale, gamma, lam)


def slow_lambda_to_go(batch, turn_coef, scale, lam=0.9):
    nothing = torch.zeros_like(batch.outcome_rewards)
    turn = slow_gae(fields(batch, outcome_rewards=nothing), 1.0, scale, 1.0, lam)
    outcome = slow_leave_one_out(fields(batch, turn_rewards=torch.zeros_like(batch.turn_rewards)), 1.0, scale)
    return outcome + turn_coef * turn


def of_total(members, i, scale):
    """What divides outcome and turn rewards alike."""
    among = {"group": members.ran(i), "batch": members.everyone()}.get(scale)
    if not among:
        return 1.0
    turns = range(members.num_turns)
    return max(spread([members.outcomes[j] + members.to_go(j, t) for j in among]) for t in turns) + EPSILON


def slow_reward_to_go_of_one_scale(batch, turn_coef, scale, scales):
    members = Members(batch, turn_coef)

    def of(i, k):
        mean = statistics.fmean(members.outcomes[j] + members.to_go(j, k) for j in members.ran(i))
        return (members.outcomes[i] + members.to_go(i, k) - mean) / of_total(members, i, scale)

    return members.advantages(of)


def slow_lambda_to_go_of_one_scale(batch, turn_coef, scale, lam, scales):
    """A_ik = [(O_i − mean_{j≠i} O_j) + c Σ_{l≥k} λ^(l−k) δ_il] / σ."""
    members = Members(batch, turn_coef)

    def value(i, k):
        others = [j for j in members.ran(i) if j != i]
        reach = [t for t in range(k + 1) if any(members.lengths[j] > t for j in others)][-1]
        return statistics.fmean(members.to_go(j, reach) for j in others if members.lengths[j] > reach)

    def of(i, k):
        others = [members.outcomes[j] for j in members.ran(i) if j != i]
        if not others:
            return 0.0
        last, total = members.lengths[i] - 1, members.outcomes[i] - statistics.fmean(others)
        for t in range(k, last + 1):
            after = value(i, t + 1) if t < last else 0.0
            total += lam ** (t - k) * (members.rewards[i][t] + after - value(i, t))
        return total / of_total(members, i, scale)

    return members.advantages(of)


def slow_gigpo(batch, turn_coef, scale, gamma=0.95):
    members = Members(batch)
    states = batch.state_ids.tolist()

    def whole(j, k=0):
        return members.returns(j, 0)

    def of(i, k):
        turns = [(j, t) for j in members.ran(i) for t in range(members.lengths[j]) if states[j][t] == states[i][k]]
        same = [members.returns(j, t, gamma) for j, t in turns]
        all_turns = [members.returns(j, t, gamma) for j in members.everyone() for t in range(members.lengths[j])]
        divisor = {"group": spread(same) + EPSILON, "batch": spread(all_turns) + EPSILON, "none": 1.0}[scale]
        anchored = (members.returns(i, k, gamma) - statistics.fmean(same)) / divisor
        return members.normalized(scale)(i, 0, whole, [0]) + turn_coef * anchored

    return members.advantages(of)


def slow_state_baseline(batch, turn_coef, scale, lam=1.0, fit="line"):
    members = Members(batch, turn_coef)
    scores = batch.state_scores.tolist()
    points = []  # (group, score before, how much more than the others)
    for i in members.everyone():
        others = [j for j in members.ran(i) if j != i]
        for k in range(1, members.lengths[i] if others else 0):
            reach = [t for t in range(k + 1) if any(members.lengths[j] > t for j in others)][-1]
            mean = statistics.fmean(members.returns(j, reach) for j in others if members.lengths[j] > reach)
            if not math.isnan(scores[i][k - 1]):
                more = (members.returns(i, k) - mean) / members.scale(i, scale)
                points.append((i // members.group_size, scores[i][k - 1], more))

    def extra(i, k):
        if k == 0 or math.isnan(scores[i][k - 1]):
            return 0.0
        x, others = scores[i][k - 1], [(x, y) for group, x, y in points if group != i // members.group_size]
        if not others:
            return 0.0
        if fit == "table":
            same = [y for score, y in others if score == x]
            return statistics.fmean(same) if same else 0.0
        if len({score for score, _ in others}) < 2:
            return statistics.fmean(y for _, y in others)
        slope, intercept = statistics.linear_regression(*zip(*others, strict=True))
        return intercept + slope * x

    return slow_gae(batch, turn_coef, scale, 1.0, lam, lambda i, k: members.scale(i, scale) * extra(i, k))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("rule", "slow", "options"),
    [
        (reward_to_go, slow_reward_to_go, {}),
        (gdpo, slow_gdpo, {}),
        (leave_one_out, slow_leave_one_out, {}),
        (gtpo, slow_gtpo, {}),
        (gtpo, slow_gtpo, {"gamma": 0.5}),
        (mt_grpo_discounted, slow_mt_grpo_discounted, {}),
        (mt_grpo_discounted, slow_mt_grpo_discounted, {"gamma": 0.5}),
        (turn_gae, slow_turn_gae, {}),
        (turn_gae, slow_turn_gae, {"gamma": 0.5, "lam": 0.3}),
        (lambda_to_go, slow_lambda_to_go, {}),
        (lambda_to_go, slow_lambda_to_go, {"lam": 1.0}),
        (reward_to_go, slow_reward_to_go_of_one_scale, {"scales": "one"}),
        (lambda_to_go, slow_lambda_to_go_of_one_scale, {"lam": 0.8, "scales": "one"}),
        (lambda_to_go, slow_lambda_to_go_of_one_scale, {"lam": 1.0, "scales": "one"}),
        (gigpo, slow_gigpo, {}),
        (gigpo, slow_gigpo, {"gamma": 0.5}),
        (state_baseline, slow_state_baseline, {}),
        (state_baseline, slow_state_baseline, {"lam": 0.5}),
        (state_baseline, slow_state_baseline, {"fit": "table"}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ",".join(f"{name}={of}" for name, of in value.items()),
)
def test_a_rule_equals_its_slow_form(rule, slow, options, scale):
    for seed in range(10):
        batch = draw_batch(seed)
        for coef in (1.0, 0.3):
            expected = slow(batch, coef, scale, **options)
            computed = rule(batch, turn_coef=coef, scale_rewards=scale, **options)
            torch.testing.assert_close(computed, expected, rtol=1e-6, atol=1e-6 if scale == "none" else 1e-5)


# What they have in common


def fields(batch, **changes):
    return RewardBatch(**{name: getattr(batch, name) for name in batch.__dataclass_fields__} | changes)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.__name__)
def test_failed_members_are_as_if_they_were_not_there(rule, scale):
    """In a group of four of which one failed the others get what a group of three gets."""
    three = draw_batch(1, group_size=3, num_groups=2, failing=0.0)
    rows = torch.tensor([0, 1, 2, 0, 3, 4, 5, 3])
    failed = torch.tensor([False] * 3 + [True] + [False] * 3 + [True])

    def more(values, fill):
        if values.shape[0] == 2:  # streams
            return torch.stack([more(stream, fill) for stream in values])
        values = values[rows].clone()
        values[failed] = fill
        return values

    four = RewardBatch(
        more(three.turn_rewards, NONE),
        more(three.outcome_rewards, NONE),
        more(three.turn_mask, False),
        more(three.result_mask, False),
        4,
        state_ids=more(three.state_ids, 0),
        state_scores=more(three.state_scores, NONE),
        turn_streams=more(three.turn_streams, NONE),
        outcome_streams=more(three.outcome_streams, NONE),
        stream_weights=three.stream_weights,
    )
    assert four.failed.equal(failed)
    result = rule(four, scale_rewards=scale)
    torch.testing.assert_close(result[~failed], rule(three, scale_rewards=scale))
    assert not result[failed].any()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.__name__)
def test_an_absent_reward_counts_as_zero(rule, scale):
    batch = draw_batch(4, group_size=4)

    def filled(values, exists):
        return torch.where(values.isnan() & exists, 0.0, values)

    ran = ~batch.failed
    zeros = fields(
        batch,
        turn_rewards=filled(batch.turn_rewards, batch.turn_mask),
        outcome_rewards=filled(batch.outcome_rewards, ran),
        turn_streams=filled(batch.turn_streams, batch.turn_mask),
        outcome_streams=filled(batch.outcome_streams, ran),
    )
    torch.testing.assert_close(rule(batch, scale_rewards=scale), rule(zeros, scale_rewards=scale))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.__name__)
def test_equal_members_and_a_group_of_one_get_nothing(rule, scale):
    one = draw_batch(0, group_size=1, num_groups=1, failing=0.0)
    alike = torch.zeros(4, dtype=torch.long)
    four = fields(
        one,
        group_size=4,
        **{
            name: getattr(one, name)[alike]
            for name in ("turn_rewards", "outcome_rewards", "turn_mask", "result_mask", "state_ids", "state_scores")
        },
        turn_streams=one.turn_streams[:, alike],
        outcome_streams=one.outcome_streams[:, alike],
    )
    # a state that occurs in several turns compares these
    four = fields(four, state_ids=torch.arange(5).expand(4, 5))
    torch.testing.assert_close(rule(four, scale_rewards=scale), torch.zeros(4, 5, dtype=torch.double))
    alone = fields(one, state_ids=torch.arange(5)[None])
    assert not rule(alone, scale_rewards=scale).any()


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.__name__)
def test_a_batch_that_failed_altogether_has_no_advantages(rule):
    batch = draw_batch(0, group_size=2, failing=1.1)
    assert not rule(batch).any()


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.__name__)
def test_float32_rewards_give_float32_advantages(rule):
    batch = draw_batch(3, group_size=4)
    changes = {
        name: getattr(batch, name).float()
        for name in ("turn_rewards", "outcome_rewards", "turn_streams", "outcome_streams", "state_scores")
    }
    single = fields(batch, **changes, stream_weights=batch.stream_weights.float())
    advantages = rule(single)
    assert advantages.dtype is torch.float32
    torch.testing.assert_close(advantages.double(), rule(batch), rtol=1e-3, atol=1e-3)


# Equalities


@pytest.mark.parametrize("seed", range(20))
def test_reward_to_go_is_mt_grpo_on_one_boundary(seed):
    """The first turn calls a tool or answers; after the call there is one more turn, which earns no turn reward."""
    batch = draw_batch(seed, group_size=4, num_turns=2)
    several = batch.turn_mask.sum(dim=1) > 1
    rewards = batch.turn_rewards.clone()
    rewards[:, 1] = NONE
    outcomes = torch.where(batch.failed, NONE, batch.outcome_rewards.nan_to_num())
    batch = fields(
        batch,
        turn_rewards=rewards,
        outcome_rewards=outcomes,
        result_mask=torch.stack([several, torch.zeros_like(several)], dim=1),
    )
    expected = reward_to_go(batch, turn_coef=1.0, scale_rewards="none").float()
    torch.testing.assert_close(mt_grpo(batch, turn_coef=1.0, scale_rewards="none"), expected)


@pytest.mark.parametrize("seed", range(5))
def test_rules_meet_where_their_options_say_so(seed):
    batch = draw_batch(seed, group_size=4, failing=0.0)
    expected = reward_to_go(batch, turn_coef=0.3, scale_rewards="none")
    same = {"turn_coef": 0.3, "scale_rewards": "none"}
    torch.testing.assert_close(mt_grpo_discounted(batch, gamma=1.0, **same), expected)
    torch.testing.assert_close(gdpo(batch, **same), expected)
    no_scores = fields(batch, state_scores=torch.full_like(batch.turn_rewards, NONE))
    expected = turn_gae(batch, gamma=1.0, lam=0.7, **same)
    torch.testing.assert_close(state_baseline(no_scores, lam=0.7, **same), expected)


@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("rule", [reward_to_go, gdpo, gtpo, turn_gae, lambda_to_go], ids=lambda rule: rule.__name__)
def test_equal_sums_in_different_turns_do_not_blow_up(rule, group_size):
    """The deviation of the sum is 0; divided by it the largest advantage would be thousands."""
    rewards = torch.zeros(group_size, 3, dtype=torch.double)
    rewards[torch.arange(group_size), torch.arange(group_size) % 3] = 1.0
    rewards[-1] = 1 / 3
    outcomes = torch.ones(group_size, dtype=torch.double)
    exists = torch.ones_like(rewards, dtype=torch.bool)
    batch = RewardBatch(
        rewards,
        outcomes,
        exists,
        exists,
        group_size,
        turn_streams=rewards[None],
        outcome_streams=outcomes[None],
        stream_weights=torch.ones(2, dtype=torch.double),
    )
    bound = (group_size - 1) / math.sqrt(group_size) * (1 if rule in (reward_to_go, gdpo) else 3)
    assert 0 < rule(batch).abs().max() <= bound


def test_a_fit_does_not_blow_up_a_group_that_all_solve():
    """One group is always solved, whatever its scores say; in the other the score says who solves it."""
    scores = torch.tensor([[0.0, NONE], [1.0, NONE]]).double().repeat(4, 1)
    outcomes = torch.tensor([1.0] * 4 + [0.0, 1.0] * 2).double()
    rewards = torch.full_like(scores, NONE)
    exists = torch.ones_like(scores, dtype=torch.bool)
    batch = RewardBatch(rewards, outcomes, exists, exists, 4, state_scores=scores)
    assert 0 < state_baseline(batch).abs().max() < 5


@pytest.mark.parametrize("seed", range(20))
def test_the_turn_advantage_is_bounded_by_the_group(seed):
    """A z-score is at most (G − 1) / √G; equal sums, and any other rewards, keep to it."""
    batch = draw_batch(seed, group_size=5, failing=0.0, absent=0.0, integers=True)
    rewards = batch.turn_rewards - batch.turn_rewards.nansum(dim=1, keepdim=True) * (torch.arange(5) == 0)
    batch = fields(batch, turn_rewards=rewards, outcome_rewards=torch.zeros_like(batch.outcome_rewards))
    assert reward_to_go(batch).abs().max() <= 4 / math.sqrt(5)


def test_each_stream_has_its_own_scale():
    small, large = torch.tensor([[0.0], [0.001]]), torch.tensor([[50.0], [0.0]])
    exists = torch.ones(2, 1, dtype=torch.bool)
    streams = torch.stack([small, large])
    batch = RewardBatch(
        streams.sum(dim=0),
        torch.zeros(2),
        exists,
        exists,
        2,
        turn_streams=streams,
        outcome_streams=torch.zeros(1, 2),
        stream_weights=torch.tensor([3.0, 1.0, 1.0]),
    )
    assert reward_to_go(batch)[0] > 0 > gdpo(batch)[0]  # the small one weighs more


@pytest.mark.parametrize("scale", SCALES)
def test_rules_of_one_scale_meet(scale):
    """`gdpo` is `reward_to_go` then, and so is `mt_grpo` with one boundary, after the first turn."""
    for seed in range(5):
        batch = draw_batch(seed, absent=0.0)
        turns, outcomes = batch.turn_streams.nan_to_num(nan=0.0), batch.outcome_streams
        rewards = torch.einsum("s,sbk->bk", batch.stream_weights[:2], turns)
        outcome = torch.einsum("r,rb->b", batch.stream_weights[2:], outcomes)
        batch = fields(batch, turn_rewards=rewards, outcome_rewards=outcome)
        options = {"scales": "one", "scale_rewards": scale, "turn_coef": 0.5}
        torch.testing.assert_close(gdpo(batch, **options), reward_to_go(batch, **options), rtol=1e-9, atol=1e-9)
        first = torch.zeros_like(batch.result_mask)
        first[:, 0] = True
        called = fields(batch, result_mask=first & batch.turn_mask, turn_rewards=rewards * first)
        torch.testing.assert_close(
            mt_grpo(called, **options), reward_to_go(called, **options).float(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("rule", [reward_to_go, gdpo, lambda_to_go, mt_grpo], ids=lambda rule: rule.__name__)
def test_one_scale_keeps_the_proportion_that_rewards_have(rule):
    """Small turn rewards against the outcome: with a scale each they weigh as much, with one a fiftieth."""
    rewards = torch.tensor([[0.02, 0.0], [0.0, 0.0]], dtype=torch.double)
    outcomes = torch.tensor([0.0, 1.0], dtype=torch.double)
    exists = torch.ones_like(rewards, dtype=torch.bool)
    streams = {"turn_streams": rewards[None], "outcome_streams": outcomes[None], "stream_weights": torch.ones(2)}
    batch = RewardBatch(rewards, outcomes, exists, exists, 2, **streams)
    each, one = rule(batch, scales="each"), rule(batch, scales="one")
    larger = torch.tensor([[0.98, 1.0], [-0.98, -1.0]], dtype=torch.double)
    torch.testing.assert_close(one.double() / one[1, 1].abs().double(), -larger, rtol=1e-4, atol=1e-4)
    assert each[:, 0].abs().max() < 0.01 * each[:, 1].abs().min()


def test_equal_totals_of_one_scale_do_not_blow_up():
    """What the outcome gives the last turn takes: they sum to the same, and the deviation of that is 0."""
    rewards = torch.tensor([[0.0, -1.0], [0.0, 0.0]], dtype=torch.double)
    outcomes = torch.tensor([1.0, 0.0], dtype=torch.double)
    exists = torch.ones_like(rewards, dtype=torch.bool)
    batch = RewardBatch(rewards, outcomes, exists, exists, 2)
    assert not reward_to_go(batch, scales="one").any()
    assert lambda_to_go(batch, scales="one", lam=0.5).abs().max() <= 1


# As rules of a recipe


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gigpo", "state_ids"),
        ("gdpo", "turn_streams"),
        ("gdpo", "stream_weights"),
        ("state_baseline", "state_scores"),
    ],
)
def test_a_rule_says_what_it_lacks(name, field):
    batch = fields(draw_batch(2), **{field: None})
    with pytest.raises(ConfigError, match=f"'{name}' needs the `{field}` of a `RewardBatch`"):
        estimate(name, batch)


def test_rules_take_their_options_from_a_recipe():
    batch = draw_batch(2)
    expected = gtpo(batch, gamma=0.5, turn_coef=0.1).float()
    assert torch.equal(estimate({"name": "gtpo", "gamma": 0.5}, batch, turn_coef=0.1), expected)
    with pytest.raises(ConfigError, match="'fit' .* is 'lines'; the nearest is 'line'"):
        estimate({"name": "state_baseline", "fit": "lines"}, batch)


def test_rules_say_whether_turn_rewards_may_be_summed(monkeypatch):
    summing = {name for name in ("mt_grpo", "grpo_or", "grpo_mr", "leave_one_out", "reward_to_go") if sums_turns(name)}
    assert summing == {"mt_grpo", "grpo_or", "grpo_mr", "leave_one_out"}
    assert not splits_turns("leave_one_out") and splits_turns("reward_to_go")
    keep_estimators(monkeypatch)
    advantage_estimator("reward_to_go", sums_turns=True)(reward_to_go)
    assert sums_turns("reward_to_go")
    monkeypatch.undo()
    assert not sums_turns("reward_to_go")


# Where `mt_grpo` is biased


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
    assert bias_of_turn_coef(batch, coef) == (said if biased else None)


# The same rewards in another order

WHOLE = ["mt_grpo", "grpo_mr", "leave_one_out"]


def shuffled(count, members, seed):
    """Members that earn the same rewards, each in an order of its own, and an outcome of .7."""
    draw = torch.Generator().manual_seed(seed)
    rewards = torch.rand(count, generator=draw) * 10 ** torch.randint(-3, 3, (count,), generator=draw)
    rewards *= torch.randint(0, 2, (count,), generator=draw) * 2 - 1
    rows = torch.stack([rewards[torch.randperm(count, generator=draw)] for _ in range(members)])
    exists = torch.ones_like(rows, dtype=torch.bool)
    last = torch.arange(count) == count - 1  # the first result follows the last turn
    return RewardBatch(rows, torch.full((members,), 0.7), exists, exists & last, members)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", WHOLE)
def test_the_order_of_rewards_makes_no_signal(name, scale):
    for count in (1, 2, 3, 10, 100, 1000):
        for seed in range(20 if count < 1000 else 3):
            assert not estimate(name, shuffled(count, 4, seed), scale_rewards=scale).any()


@pytest.mark.parametrize("name", WHOLE)
def test_the_order_of_10000_rewards_makes_no_signal(name):
    assert not estimate(name, shuffled(10_000, 8, 0)).any()


@pytest.mark.parametrize("name", ["reward_to_go", "turn_gae", "state_baseline", "branch_to_go"])
def test_the_first_turn_of_equal_sums_gets_nothing(name):
    """What is earned from it on is all that is earned; later turns differ."""
    batch = fields(shuffled(100, 4, 0), state_scores=torch.full((4, 100), NONE))
    options = {} if name in ("reward_to_go", "branch_to_go") else {"lam": 1.0}
    advantages = estimate({"name": name, **options}, batch)
    assert not advantages[:, 0].any() and advantages[:, 1:].any()


def test_decimals_that_add_up_to_the_same_are_equal():
    rewards = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.3, 0.0], [0.6, 0.0, 0.0]])
    exists = torch.ones_like(rewards, dtype=torch.bool)
    outcomes = torch.tensor([0.4, 0.4, 0.4])
    for name in WHOLE:
        assert not estimate(name, RewardBatch(rewards, outcomes, exists, exists & False, 3)).any()
    spread = torch.tensor([0.9, 0.8, 0.5])  # 1.0 in all, with a last reward of its own
    turns = torch.stack([1.0 - spread, torch.zeros(3), torch.zeros(3)], dim=1)
    assert not estimate("leave_one_out", RewardBatch(turns, spread, exists, exists & False, 3)).any()


def test_rewards_that_float32_can_tell_apart_are_a_signal():
    for value in (0.3, 1.0, 1e6):
        one = torch.tensor(value)
        rewards = torch.stack([one, torch.nextafter(one, torch.tensor(0.0))])[:, None]
        batch = RewardBatch(rewards, torch.zeros(2), rewards > 0, rewards < 0, 2)
        assert (estimate("leave_one_out", batch, scale_rewards="none") != 0).all()


def test_gigpo_prefers_the_visit_nearer_to_the_reward():
    """As its paper defines it, also where all members earn the same; without a discount visits are alike."""
    turns = torch.tensor([[0.0, 0.0, 1.0]] * 4)
    exists = torch.ones_like(turns, dtype=torch.bool)
    states = torch.tensor([[0, 5, 5]] * 4)
    batch = RewardBatch(turns, torch.zeros(4), exists, exists, 4, state_ids=states)
    torch.testing.assert_close(gigpo(batch)[0], torch.tensor([0.0, -0.93, 0.93]), atol=0.005, rtol=0.0)
    assert not gigpo(batch, gamma=1.0).any()


@pytest.mark.parametrize("name", ["mt_grpo", "reward_to_go", "lambda_to_go"])
@pytest.mark.parametrize(("scale", "same"), [("group", "batch"), ("batch", "batch"), ("none", "none")])
def test_one_scale_of_the_batch_does_without_the_runs_option(name, scale, same):
    draw = torch.Generator().manual_seed(0)
    exists = torch.ones(8, 3, dtype=torch.bool)
    rewards = torch.rand(8, 3, generator=draw).double() * torch.tensor([1.0, 5.0]).repeat_interleave(4)[:, None]
    batch = RewardBatch(rewards, torch.rand(8, generator=draw).double(), exists, exists, 4)
    found = estimate({"name": name, "scales": "batch"}, batch, scale_rewards=scale)
    assert torch.equal(found, estimate({"name": name, "scales": "one"}, batch, scale_rewards=same))
    assert not torch.equal(found, estimate({"name": name, "scales": "one"}, batch, scale_rewards="group"))
