"""Turns are distilled where a teacher's word foretells outcomes in groups that its line has not seen, or by choice."""

import random

import numpy as np
import pytest
import torch
from support.models import build_model
from support.trainers import SEARCH, logged, member, thinking, trained_tokens, two_groups

from mt_grpo.errors import ConfigError
from mt_grpo.rewards import RewardError
from mt_grpo.training.distillation import LOGPS, _explained

FOUR_GROUPS = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "distillation_coef": 1.0}
GATE = "mt_gates.py:{}"
WRONG = {
    "short": r"gave \[True\] for a conversation of 3 turns: return a bool for each turn",
    "whole": "gave True for a conversation of 3 turns",
    "breaks": "failed with ZeroDivisionError: division by zero .on trajectory 'train-.*mt_gates.py, line",
}


@pytest.fixture
def teach(build, tokenizer, tmp_path):
    def make(gate, script=thinking, **options):
        build_model(tokenizer, seed=7).save_pretrained(folder := tmp_path / "teacher")
        tokenizer.save_pretrained(folder)
        return build(script, teacher={"model": str(folder), "gate": gate}, **{**FOUR_GROUPS, **options})

    return make


def varied(session, turn):
    """Thoughts that have nothing to do with the answer."""
    draw = random.Random(f"{session} {turn}")
    thought = f"<think>{'well ' * draw.randint(1, 9)}</think>"
    return thought + (SEARCH if turn < member(session) % 3 else f"<answer>Lima{' of Peru' * (turn % 2)}</answer>")


def by_hand(ratios, outcomes, size, without=None):
    """What lines of the other groups leave of each turn's deviations, and all of them; a fit for every group."""
    groups = [group for group in range(len(outcomes) // size) if group != without]
    left, whole = np.zeros(ratios.shape[1]), np.zeros(ratios.shape[1])
    for turn in range(ratios.shape[1]):
        points = {}
        for group in groups:
            rows = [row for row in range(group * size, group * size + size)]
            rows = [row for row in rows if not np.isnan(ratios[row, turn] + outcomes[row])]
            x, y = ratios[rows, turn], outcomes[rows]
            points[group] = (x - x.mean(), y - y.mean()) if rows else (x, y)
        for group in groups:
            x, y = (np.concatenate([points[other][part] for other in groups if other != group]) for part in (0, 1))
            slope = np.linalg.lstsq(x[:, None], y, rcond=None)[0][0] if (x**2).sum() > 1e-12 else 0.0
            left[turn] += ((points[group][1] - slope * points[group][0]) ** 2).sum()
            whole[turn] += (points[group][1] ** 2).sum()
    return left, whole


def drawn(groups=6, size=4, turns=5, signal=0.0, seed=0):
    draw = np.random.default_rng(seed)
    ratios, outcomes = draw.normal(size=(groups * size, turns)), draw.integers(0, 2, groups * size).astype(float)
    ratios += signal * outcomes[:, None] + draw.normal(size=(groups, 1)).repeat(size, axis=0)
    ratios[draw.random(ratios.shape) < 0.2], outcomes[3] = np.nan, np.nan
    ratios[:, -1] = 0.1  # says nothing
    return ratios, outcomes


@pytest.mark.parametrize("groups", [3, 6])
def test_each_group_is_judged_by_the_lines_of_others(groups):
    ratios, outcomes = drawn(groups, signal=1.0)
    found = _explained(torch.tensor(ratios), torch.tensor(outcomes), 4)
    for row, without in enumerate([None, *range(groups)]):
        for ours, oracle in zip(found, by_hand(ratios, outcomes, 4, without), strict=True):
            np.testing.assert_allclose(ours[row].numpy(), oracle, rtol=1e-9, atol=1e-12)
    assert (found[0][:, -1] == found[1][:, -1]).all()


def test_a_groups_own_words_do_not_open_its_gate():
    ratios, outcomes = drawn(signal=1.0)
    before = _explained(torch.tensor(ratios), torch.tensor(outcomes), 4)
    ratios[8:12], outcomes[8:12] = 7.0, [0.0, 1.0, 5.0, 0.0]
    after = _explained(torch.tensor(ratios), torch.tensor(outcomes), 4)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one[3], other[3])
        assert not torch.allclose(one[0], other[0])


@pytest.mark.parametrize(("signal", "least", "most"), [(0.0, -0.5, 0.0), (2.0, 0.3, 0.6)])
def test_noise_explains_nothing_and_a_signal_does(signal, least, most):
    sums = [_explained(*map(torch.tensor, drawn(8, signal=signal, seed=seed)), 4) for seed in range(200)]
    left, whole = (sum(each[part][0, :-1].sum() for each in sums) for part in (0, 1))
    assert least < 1 - left / whole < most


def test_turns_that_explain_nothing_are_not_distilled(teach):
    trainer = teach("explained", varied, steps_per_generation=1, max_steps=1)
    kept, credit = [], trainer._credit
    trainer._credit = lambda step: [credit(step), kept.append({**step.output})]
    trainer.train()
    (inputs,), trajectories = kept, trainer.batch.trajectories
    outcomes = np.array([each.rewards["outcome"]["Answered"] for each in trajectories])
    ratios = np.full((16, 3), np.nan)
    for row, each in enumerate(trajectories):
        ratios[row, : len(each.turns)] = each.teacher_log_ratios
    closed = read = 0
    for row, each in enumerate(trajectories):
        left, whole = by_hand(ratios, outcomes, 4, row // 4)
        for turn in each.turns:
            there = (inputs["turn_ids"][row] == turn.index) & trained_tokens(inputs)[row]
            read, closed = read + 1, closed + (left[turn.index] >= whole[turn.index])
            assert inputs[LOGPS][row, there].isnan().all() == (left[turn.index] >= whole[turn.index])
    left, whole = by_hand(ratios, outcomes, 4)
    names = "teacher/gated", "teacher/explained", "turn_1/explained"
    assert 0 < closed < read
    expected = closed / read, 1 - left.sum() / whole.sum(), 1 - left[0] / whole[0]
    assert logged(trainer, *names) == [pytest.approx(expected, abs=1e-4)]


def test_a_function_chooses_turns(teach, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = "def first(trajectory):\n    return [turn.index == 0 for turn in trajectory.turns]\n"
    lines += "\n\ndef short(trajectory):\n    return [True]\n\n\nnumber = 3\n"
    lines += "\n\ndef breaks(trajectory):\n    return 1 / 0\n"
    (tmp_path / "mt_gates.py").write_text(f"{lines}\n\ndef whole(trajectory):\n    return True\n")
    options = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    trainer = teach(GATE.format("first"), **options)
    for inputs in two_groups(trainer):
        distilled = ~inputs[LOGPS].isnan() & trained_tokens(inputs)
        assert distilled.equal(trained_tokens(inputs) & (inputs["turn_ids"] == 0)) and distilled.any()
    ungated = {name: metric for name, metric in trainer.evaluate().items() if "gated" in name}
    assert not ungated and trainer._metrics["train"]["teacher/gated"] == [10 / 18]
    for name, said in WRONG.items():
        with pytest.raises(RewardError, match=f"The gate of `teacher` {said}"):
            two_groups(teach(GATE.format(name), **options))
    with pytest.raises(ConfigError, match="is no function of a trajectory: it is 3"):
        teach(GATE.format("number"), **options)


def test_gates_that_cannot_open_are_refused(teach):
    with pytest.raises(ConfigError, match="no outcome reward says which those are: name one in `outcome_reward_funcs"):
        teach("explained", rewards=((), ()))
    with pytest.raises(ConfigError, match="judges each group by two others or more, and a batch has 2 of 4"):
        teach("explained", per_device_train_batch_size=8)
