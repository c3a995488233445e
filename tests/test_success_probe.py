"""The success probe of benchmarks/reports/success_probe.md: its task, its score, its rule and its table."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from support.registered import keep_estimators
from support.servers import ROOT

from mt_grpo.concurrency import run
from mt_grpo.credit import RewardBatch, estimate
from mt_grpo.errors import ConfigError
from mt_grpo.trajectory import ToolCall, Trajectory, Turn


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    keep_estimators(monkeypatch)
    for name in ("horizon_task", "success_task", "success_probe", "success_toy"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def converse(wrong: set[int]) -> tuple[dict, list]:
    """A row, and the steps of a conversation whose calls are right but for some turns."""
    from success_task import TURNS, Attempt, rows

    (row,) = rows(1, seed=1)
    env = Attempt()
    env.session, env.row = "one", row

    async def steps():
        await env.reset(row)
        made = []
        for turn in range(TURNS):
            words = ("tally" if turn in wrong else "search", row["right"][turn].split()[1])
            call = ToolCall(words[0], {"name": words[1]})
            made.append(await env.step(Turn(turn, {}, tool_calls=[call])))
        return made

    return row, run(steps())


def test_two_decisions_weigh_as_much_as_fifteen_others():
    from success_task import WEIGHTS, Chance

    assert sum(WEIGHTS) == pytest.approx(1) and sorted(WEIGHTS) == pytest.approx([0.04] * 10 + [0.3] * 2)
    heavy, light = (Chance().score(Trajectory([], info=converse(wrong)[1][-1].info)) for wrong in ({2}, {0, 1, 3}))
    assert heavy == pytest.approx(1 / (1 + 2.718281828 ** (-12 * 0.2))) and light > 0.98


def test_the_outcome_is_drawn_with_the_chance():
    from success_task import Chance, Succeeded

    infos = [{"right": [turn != 7 for turn in range(12)], "luck": luck / 1000} for luck in range(1000)]
    attempts = [Trajectory([], info=info) for info in infos]
    share = sum(Succeeded().score(each) for each in attempts) / len(attempts)
    assert share == pytest.approx(Chance().score(attempts[0]), abs=0.002)
    assert Succeeded().score(Trajectory([])) == Chance().score(Trajectory([])) == 0


def test_the_context_says_what_was_right_and_what_is_heavy():
    row, steps = converse({2})
    assert [text[-1] for text in row["questions"]] == ["!" if turn in (2, 7) else "?" for turn in range(12)]
    assert [step.replies.split()[0] for step in steps[:-1]] == ["r1"] * 2 + ["r0"] + ["r1"] * 8


def test_the_exact_value_is_the_mean_chance_of_what_may_follow():
    from success_task import WEIGHTS, chance, value

    begins, so_far, likely, later = 6, 0.38, 0.3, 0.6
    rates = [likely] + [later] * 5
    expected = sum(
        prod(rate if won else 1 - rate for rate, won in zip(rates, right, strict=True))
        * chance(so_far + sum(weight for weight, won in zip(WEIGHTS[begins:], right, strict=True) if won))
        for right in product((False, True), repeat=6)
    )
    assert value(so_far, begins, likely, later) == pytest.approx(expected)


def attempt(right: str) -> Trajectory:
    """Conversations of calls that were right (`r1`) or not."""
    turns = [
        Turn(index, {}, tool_calls=[ToolCall("search", {}, executed=True, result=f"r{each}")])
        for index, each in enumerate(right)
    ]
    return Trajectory([], turns)


def test_the_exact_value_of_a_state_knows_no_later_turn():
    from success_task import Value

    score, found = Value(), []
    for later in ("0000000", "1111111"):
        trajectory = attempt("11100" + later)
        trajectory.answer_logprobs["value"] = [-0.5] * 6 + [float(f"-{each}.1") for each in later[:6]]
        found.append([score.score(trajectory.turns[index], trajectory) for index in range(5)])
    assert found[0] == found[1] and found[0][2] > found[0][0]
    trajectory.answer_logprobs["value"] = [-0.5] * 12
    assert score.score(trajectory.turns[11], trajectory) is None


def test_the_probe_is_the_difference_of_both_answers():
    from success_task import SuccessProbe

    probe, trajectory = SuccessProbe(), attempt("111")
    trajectory.answer_logprobs = {"success_probe": [-1.0, -2.0, -3.0], "success_denial": [-4.0, -4.0, None]}
    assert [probe.score(turn, trajectory) for turn in trajectory.turns] == [2.0, None, None]
    assert [each.answer_at(0, {}) for each in probe.both] == ["no", "yes"]
    assert probe.denial.score(trajectory.turns[0], trajectory) is None


def test_answers_of_the_same_tokens_are_refused():
    from success_task import SuccessProbe, build_tokenizer

    SuccessProbe().check(build_tokenizer())
    with pytest.raises(ConfigError, match="'aye' and 'nay', which are the same tokens"):  # both are unknown words
        SuccessProbe(yes="aye", no="nay").check(build_tokenizer())


def draw(seed: int, noise: float, groups: int = 6) -> RewardBatch:
    """Outcomes that the third of five decisions makes likely, and scores of the state that know it, or do not."""
    generator = torch.Generator().manual_seed(seed)
    size, turns = groups * 8, 5
    won = torch.rand(size, generator=generator) < 0.5
    outcomes = (torch.rand(size, generator=generator) < torch.where(won, 0.9, 0.1)).float()
    known = torch.zeros(size, turns)
    known[:, 2:] = won[:, None].float()
    scores = (1 - noise) * known + noise * torch.randn(size, turns, generator=generator)
    exists = torch.ones(size, turns, dtype=torch.bool)
    return RewardBatch(
        torch.full((size, turns), torch.nan), outcomes, exists, torch.zeros_like(exists), 8, state_scores=scores
    )


def test_a_score_that_knows_is_used_and_explains():
    from success_task import explained, used

    batch = draw(1, noise=0.0)
    assert explained(batch) > 0.2 and used(batch).all()
    rule = estimate("state_baseline_where_it_explains", batch)
    assert torch.equal(rule, estimate("state_baseline", batch))


def test_a_score_of_noise_leaves_the_advantages_of_grpo_or():
    from success_task import explained, used

    seed = next(seed for seed in range(20) if not used(draw(seed, noise=1.0)).any())
    batch = draw(seed, noise=1.0)
    assert explained(batch) < 0.05
    rule, plain = (estimate(name, batch) for name in ("state_baseline_where_it_explains", "grpo_or"))
    torch.testing.assert_close(rule, plain * 8 / 7, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.7, 1.0])
def test_a_group_has_no_say_in_whether_its_scores_are_used(noise):
    from success_task import used

    batch, other = draw(1, noise), draw(2, noise)
    changed = batch.outcome_rewards.clone()
    changed[8:16] = other.outcome_rewards[8:16]
    scores = batch.state_scores.clone()
    scores[8:16] = 100 * other.state_scores[8:16]
    assert used(replace(batch, outcome_rewards=changed, state_scores=scores))[1] == used(batch)[1]


@pytest.mark.parametrize(("gain", "verdict"), [(0.05, "the probe stays"), (0.0, "the probe is left out")])
def test_the_table_decides_by_the_paired_interval(gain, verdict):
    from success_probe import text

    def row(arm, seed, over):
        watched = {"explained": [0.1] * 100, "used": [1.0] * 100}
        return {"arm": arm, "seed": seed, "start": 0.2, "end": 0.8, "over": over, **watched}

    rows = []
    for seed in range(6):
        rows.append(row("grpo_or", seed, 0.5 + seed / 100))
        rows.append(row("success probe", seed, 0.5 + seed / 100 + gain + (0.01 if seed % 2 else -0.01)))
    assert verdict in text(rows) and "0.10, 0.10, 0.10" in text(rows)
    assert "So far 10 of 18 runs: nothing is decided." in text(rows[:10])


def test_the_values_of_a_table_are_means_of_what_may_follow():
    from success_task import chance
    from success_toy import values

    likely = torch.rand(2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    found = values(likely)
    for seed in range(2):
        share = likely[seed, 10:].tolist()  # two light calls are left
        expected = sum(
            prod(rate if won else 1 - rate for rate, won in zip(share, right, strict=True))
            * chance(0.3 + 0.04 * (4 + sum(right)))
            for right in product((False, True), repeat=2)
        )
        assert found[seed, 10, 1, 4].item() == pytest.approx(expected)
    mixed = likely[:, 2] * found[:, 3, 1, 1] + (1 - likely[:, 2]) * found[:, 3, 0, 1]
    assert found[:, 2, 0, 1].tolist() == pytest.approx(mixed.tolist())  # the third call is heavy
