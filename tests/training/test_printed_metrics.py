"""What a script prints of a step."""

from __future__ import annotations

import io
import re
import sys
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback

from mt_grpo import silence
from mt_grpo.app.train import run_training
from mt_grpo.rewards import OutcomeReward
from mt_grpo.training.step_log.display import FewerPrinter, FewerProgress, print_fewer, printed


@pytest.mark.parametrize("name", ["loss", "reward", "rewards/mine/mean", "eval_reward", "eval_hard_reward", "epoch"])
def test_what_people_read_is_printed(name):
    assert printed({name: 1.0}) == {name: 1.0}


@pytest.mark.parametrize("name", ["sampling/ratio/max", "rewards/mine/std", "stops/length", "eval_stops/length"])
def test_the_rest_is_not_printed(name):
    assert not printed({name: 1.0})


def test_what_is_not_printed_stays_in_the_logs(capsys):
    logs = {"reward": 0.5, "stops/length": 0.25, "train_runtime": 3.0}
    FewerPrinter().on_log(None, SimpleNamespace(is_local_process_zero=True), None, logs)
    assert capsys.readouterr().out == "{'reward': '0.5', 'train_runtime': '3'}\n"
    assert len(logs) == 3


def test_printers_of_others_are_left_as_they_are():
    class Own(PrinterCallback):
        pass

    callbacks = [ProgressCallback(), PrinterCallback(), Own()]
    print_fewer(callbacks)
    assert list(map(type, callbacks)) == [FewerProgress, FewerPrinter, Own]


@pytest.mark.parametrize("way", ["train", "evaluate", "command", "rollout"])
def test_a_slow_step_says_once_how_far_it_is(build, monkeypatch, way):
    """The reward waits until somebody has said that it is waited for."""
    said, watching = threading.Event(), set()
    monkeypatch.setattr(silence, "SECONDS", 0.01)

    class Log(io.StringIO):
        def write(self, text):
            if re.search(r"(step 1/1: |evaluation: |^)waiting for rewards", text):
                said.set()
            return super().write(text)

    class Slow(OutcomeReward):
        def score(self, trajectory, **row):
            watching.add(sum(thread.name == "silence" for thread in threading.enumerate()))
            assert said.wait(30)
            return 1.0

    log = Log()
    trainer = build(rewards=((), (Slow(),)), max_steps=1)
    monkeypatch.setattr(sys, "stderr" if way == "rollout" else "stdout", log)
    if way == "command":
        trainer.eval_dataset = None
        run_training(trainer, {}, Console(file=log))
    else:
        getattr(trainer, way)(*([2] if way == "rollout" else []))
    assert said.is_set() and watching == {1}
    assert not [thread for thread in threading.enumerate() if thread.name == "silence"]
