"""The success probe of benchmarks/reports/success_probe.md: its task, its score, its rule and its table."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from support.benchmarks import steps_of

from mt_grpo.credit import RewardBatch, estimate
from mt_grpo.errors import ConfigError
from mt_grpo.trajectory import ToolCall, Trajectory, Turn


@pytest.fixture
def task(bench):
    return bench.success_task


def converse(task, wrong: set[int]) -> tuple[dict, list]:
    """A row, and the steps of a conversation whose calls are right but for some turns."""
    (row,) = task.rows(1, seed=1)
    env = task.Attempt()
    env.session, env.row = "one", row
    tools = ["tally" if turn in wrong else "search" for turn in range(task.TURNS)]
    calls = [ToolCall(tool, {"name": right.split()[1]}) for tool, right in zip(tools, row["right"], strict=True)]
    return row, steps_of(env, row, (Turn(turn, {}, tool_calls=[call]) for turn, call in enumerate(calls)))


def test_two_decisions_weigh_as_much_as_fifteen_others(task):
    assert sum(task.WEIGHTS) == pytest.approx(1) and sorted(task.WEIGHTS) == pytest.approx([0.04] * 10 + [0.3] * 2)
    ends = [Trajectory([], info=converse(task, wrong)[1][-1].info) for wrong in ({2}, {0, 1, 3})]
    heavy, light = map(task.Chance().score, ends)
    assert heavy == pytest.approx(1 / (1 + 2.718281828 ** (-12 * 0.2))) and light > 0.98


def test_the_outcome_is_drawn_with_the_chance(task):
    infos = [{"right": [turn != 7 for turn in range(12)], "luck": luck / 1000} for luck in range(1000)]
    attempts, succeeded, chance = [Trajectory([], info=info) for info in infos], task.Succeeded(), task.Chance()
    share = sum(succeeded.score(each) for each in attempts) / len(attempts)
    assert share == pytest.approx(chance.score(attempts[0]), abs=0.002)
    assert succeeded.score(Trajectory([])) == chance.score(Trajectory([])) == 0


def test_the_context_says_what_was_right_and_what_is_heavy(task):
    row, steps = converse(task, {2})
    assert [text[-1] for text in row["questions"]] == ["!" if turn in (2, 7) else "?" for turn in range(12)]
    assert [step.replies.split()[0] for step in steps[:-1]] == ["r1"] * 2 + ["r0"] + ["r1"] * 8


def expected_chance(task, so_far, weights, rates):
    """The mean over all that may follow: each call is right at its rate, and then adds its weight."""
    return sum(
        prod(rate if won else 1 - rate for rate, won in zip(rates, right, strict=True))
        * task.chance(so_far + sum(weight for weight, won in zip(weights, right, strict=True) if won))
        for right in product((False, True), repeat=len(rates))
    )


def test_the_exact_value_is_the_mean_chance_of_what_may_follow(task):
    expected = expected_chance(task, 0.38, task.WEIGHTS[6:], [0.3] + [0.6] * 5)
    assert task.value(0.38, 6, 0.3, 0.6) == pytest.approx(expected)


def test_the_values_of_a_table_are_means_of_what_may_follow(bench, task):
    likely = torch.rand(2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    found = bench.success_toy.values(likely)
    for seed in range(2):  # two light calls are left
        expected = expected_chance(task, 0.3 + 0.04 * 4, [0.04] * 2, likely[seed, 10:].tolist())
        assert found[seed, 10, 1, 4].item() == pytest.approx(expected)
    mixed = likely[:, 2] * found[:, 3, 1, 1] + (1 - likely[:, 2]) * found[:, 3, 0, 1]
    assert found[:, 2, 0, 1].tolist() == pytest.approx(mixed.tolist())  # the third call is heavy


def attempt(right: str) -> Trajectory:
    """Conversations of calls that were right (`r1`) or not."""
    calls = [ToolCall("search", {}, executed=True, result=f"r{each}") for each in right]
    return Trajectory([], [Turn(index, {}, tool_calls=[call]) for index, call in enumerate(calls)])


def test_the_exact_value_of_a_state_knows_no_later_turn(task):
    score, found = task.Value(), []
    for later in ("0000000", "1111111"):
        trajectory = attempt("11100" + later)
        trajectory.answer_logprobs["value"] = [-0.5] * 6 + [float(f"-{each}.1") for each in later[:6]]
        found.append([score.score(trajectory.turns[index], trajectory) for index in range(5)])
    assert found[0] == found[1] and found[0][2] > found[0][0]
    trajectory.answer_logprobs["value"] = [-0.5] * 12
    assert score.score(trajectory.turns[11], trajectory) is None


def test_the_probe_is_the_difference_of_both_answers(task):
    probe, trajectory = task.SuccessProbe(), attempt("111")
    trajectory.answer_logprobs = {"success_probe": [-1.0, -2.0, -3.0], "success_denial": [-4.0, -4.0, None]}
    assert [probe.score(turn, trajectory) for turn in trajectory.turns] == [2.0, None, None]
    assert [each.answer_at(0, {}) for each in probe.both] == ["no", "yes"]
    assert probe.denial.score(trajectory.turns[0], trajectory) is None


def test_answers_of_the_same_tokens_are_refused(task):
    task.SuccessProbe().check(task.build_tokenizer())
    with pytest.raises(ConfigError, match="'aye' and 'nay', which are the same tokens"):  # both are unknown words
        task.SuccessProbe(yes="aye", no="nay").check(task.build_tokenizer())


def draw(seed: int, noise: float) -> RewardBatch:
    """Outcomes that the third of five decisions makes likely, and scores of the state that know it, or do not."""
    generator = torch.Generator().manual_seed(seed)
    size, turns = 48, 5
    won = torch.rand(size, generator=generator) < 0.5
    outcomes = (torch.rand(size, generator=generator) < torch.where(won, 0.9, 0.1)).float()
    known = torch.zeros(size, turns)
    known[:, 2:] = won[:, None].float()
    scores = (1 - noise) * known + noise * torch.randn(size, turns, generator=generator)
    exists, silent = torch.ones(size, turns, dtype=torch.bool), torch.full((size, turns), torch.nan)
    return RewardBatch(silent, outcomes, exists, ~exists, 8, state_scores=scores)


def test_a_score_that_knows_is_used_and_explains(task):
    batch = draw(1, noise=0.0)
    assert task.explained(batch) > 0.2 and task.used(batch).all()
    assert torch.equal(estimate("state_baseline_where_it_explains", batch), estimate("state_baseline", batch))


def test_a_score_of_noise_leaves_the_advantages_of_grpo_or(task):
    batch = next(batch for seed in range(20) if not task.used(batch := draw(seed, noise=1.0)).any())
    assert task.explained(batch) < 0.05
    rule, plain = (estimate(name, batch) for name in ("state_baseline_where_it_explains", "grpo_or"))
    torch.testing.assert_close(rule, plain * 8 / 7, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.7, 1.0])
def test_a_group_has_no_say_in_whether_its_scores_are_used(task, noise):
    batch, other = draw(1, noise), draw(2, noise)
    changed, scores = batch.outcome_rewards.clone(), batch.state_scores.clone()
    changed[8:16], scores[8:16] = other.outcome_rewards[8:16], 100 * other.state_scores[8:16]
    assert task.used(replace(batch, outcome_rewards=changed, state_scores=scores))[1] == task.used(batch)[1]


@pytest.mark.parametrize(("gain", "verdict"), [(0.05, "the probe stays"), (0.0, "the probe is left out")])
def test_the_table_decides_by_the_paired_interval(bench, gain, verdict):
    def row(arm, seed, over):
        watched = {"explained": [0.1] * 100, "used": [1.0] * 100}
        return {"arm": arm, "seed": seed, "start": 0.2, "end": 0.8, "over": 0.5 + seed / 100 + over, **watched}

    rows, text = [], bench.success_probe.text
    for seed in range(6):
        rows += [row("grpo_or", seed, 0), row("success probe", seed, gain + (0.01 if seed % 2 else -0.01))]
    assert verdict in text(rows) and "0.10, 0.10, 0.10" in text(rows)
    assert "So far 10 of 18 runs: nothing is decided." in text(rows[:10])
