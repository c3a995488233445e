"""What a run shows while it works."""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console
from support.conversations import Talk, user
from support.waiting import until_true

from mt_grpo.app.train import run_training
from mt_grpo.cli import main
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.training.step_log import Activity

STEP = r"step 1/3  reward \d\.\d{3}  loss -?\d\.\d{4}  turns \d\.\d\d  \d+\.\d s  0:0\d:\d\d left"


def test_without_a_terminal_each_step_is_a_line(recipe, capsys):
    assert main(["train", *recipe(max_steps=3, eval_strategy="steps", eval_steps=2)]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 3 and re.fullmatch(STEP, steps[0]) and steps[2].startswith("step 3/3  ")
    assert "left" not in steps[2]
    measured = [line for line in lines if line.startswith("evaluation at step ")]
    assert [line.split()[3] for line in measured] == [
        "0/3",
        "2/3",
        "3/3",
    ]  # the last step once
    assert re.fullmatch(r"evaluation at step 2/3  reward \d\.\d{3}  turns \d\.\d\d  \d+\.\d s", measured[1])


def test_steps_that_are_not_logged_have_a_line(recipe, capsys):
    assert main(["train", *recipe(max_steps=3, do_eval=False, logging_steps=2)]) == 0
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [bool(re.search("reward", line)) for line in steps] == [False, True, False, True]
    assert re.fullmatch(r"step 1/3  \d+\.\d s  0:0\d:\d\d left", steps[0])


@pytest.mark.slow
def test_a_line_is_there_before_the_next_step_begins(recipe):
    """Whoever reads a pipe sees each line when it is written."""
    command = [sys.executable, "-m", "mt_grpo", "train", *recipe(max_steps=2, do_eval=False)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, bufsize=1) as run:
        for line in run.stdout:
            if line.startswith("step 1/2"):
                assert run.poll() is None
                break
        else:
            raise AssertionError("no line for the first step")
        run.stdout.read()
    assert run.returncode == 0


def test_a_terminal_shows_what_a_step_waits_for(build):
    trainer = build()
    trainer.eval_dataset = None
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    run_training(trainer, {}, console)
    shown = console.file.getvalue()
    assert "training, 0:0" in shown and "reward 2.475" in shown and "turns 2.25" in shown
    assert "waiting for" in shown and "0/?" not in shown
    assert "\x1b[?25h" in shown  # the cursor is back


def test_an_activity_counts_conversations_turns_and_waits(tokenizer):
    """One conversation has ended, one waits for its tool, one for the engine."""
    described, activity = [], Activity()
    held = asyncio.Event()

    class Held(Talk):
        async def step(self, turn):
            if self.session == "1" and turn.index == 1:
                await held.wait()
            return await super().step(turn)

    class Slow(ScriptedEngine):
        async def generate(self, context, sampling, session):
            if session == "2":
                await held.wait()
            return await super().generate(context, sampling, session)

    batch = RolloutBatch("train", [{}] * 4, [False, False, False, True])
    runner = RolloutRunner(Held([user("more"), user("more")]), Slow(tokenizer, lambda session, turn: "a<|im_end|>"))
    requests = [RolloutRequest("q", str(number)) for number in range(3)]

    async def run() -> None:
        work = asyncio.ensure_future(runner.run(requests, SamplingParams(), batch.trajectories.append))
        await until_true(lambda: batch.trajectories and len(runner.under_way["1"].turns) >= 2)
        described.append(activity.describe())
        held.set()
        await work
        described.append(activity.describe())

    with activity.sampling(batch, runner.under_way):
        asyncio.run(run())
    assert described == [
        "1 of 3 conversations, 5 turns; waiting for sampling (1) and tools (1)",
        "3 of 3 conversations, 9 turns; waiting for sampling (0) and tools (0)",
    ]
    assert activity.describe() == "waiting for forward and backward"
    with activity.of("rewards"):
        with activity.of("weight sync"):
            assert activity.describe() == "waiting for weight sync"
        assert activity.describe() == "waiting for rewards"
