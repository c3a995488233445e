"""The judge of reasoning-gym's tasks; `tests/interop` asks the real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mt_grpo.rewards import reasoning_gym_reward
from mt_grpo.trajectory import Trajectory


class Task(list):
    """A dataset of reasoning-gym, as far as it is asked."""

    def __init__(self, name, size, seed):
        super().__init__({"answer": f"{name} {seed + index}"} for index in range(size))

    def score_answer(self, answer, entry):
        return 1 if answer.strip() == entry["answer"] else 0.01


@pytest.mark.parametrize(("answer", "value"), [("legs 4 ", 1.0), ("legs 3", 0.01), (None, 0.0)])
def test_the_task_judges_the_answer(monkeypatch, answer, value):
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Task))
    row = {"task": "legs", "task_options": '{"size": 2, "seed": 3}', "index": 1}
    assert reasoning_gym_reward.score(Trajectory([], answer=answer), **row) == value
