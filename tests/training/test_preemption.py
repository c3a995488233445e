"""A run whose machines are wanted back ends after its step, with a checkpoint and a status of its own."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from support.trainers import Letters
from transformers import TrainerCallback

from mt_grpo import preemption
from mt_grpo.preemption import FOLDER, STATUS, PreemptedError, heard, leave, left, listening
from mt_grpo.runlog.heartbeat import read_state
from mt_grpo.training.checkpoint import is_whole

pytestmark = pytest.mark.own_process
OPTIONS = {"max_steps": 3, "learning_rate": 1e-2, "max_turn_length": 8, "eval_strategy": "steps", "eval_steps": 1}


def signals(number=signal.SIGUSR1, times=1):
    for _ in range(times):
        os.kill(os.getpid(), number)


class AtEvent(TrainerCallback):
    """Sends a signal at an event, once it comes with so many steps taken."""

    def __init__(self, event, step, **kwargs):
        self.event, self.step, self.kwargs = event, step, kwargs

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "event"):
            return self.look
        return super().__getattribute__(name)

    def look(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            signals(**self.kwargs)


class Asking(Letters):
    """Sends a signal while the second batch is scored."""

    name = "Letters"
    number = signal.SIGUSR1

    def score(self, trajectory, **row):
        if trajectory.session.startswith("train-000001"):
            signals(self.number)
        return super().score(trajectory, **row)


def preempted(build, folder, callback=None, reward=None, **options):
    trainer = build(None, rewards=((), (reward or Letters(),)), output_dir=str(folder), **OPTIONS | options)
    if callback is not None:
        trainer.add_callback(callback)
    with pytest.raises(PreemptedError) as ended:
        trainer.train()
    assert ended.value.code == STATUS == 75
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and heard() is None
    assert read_state(folder)["state"] == "stopped"
    return str(ended.value)


def trained(build, folder, resume=None):
    trainer = build(None, rewards=((), (Letters(),)), output_dir=str(folder), **OPTIONS)
    trainer.train(resume)
    return trainer


@pytest.fixture(scope="module")
def kept():
    return []


@pytest.fixture
def whole(kept, build, tmp_path):
    """The weights of a run that nothing happens to."""
    if not kept:
        kept.extend(weight.detach().clone() for weight in trained(build, tmp_path / "whole").model.parameters())
    return kept


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        ({"reward": Asking()}, 2),
        ({"callback": AtEvent("on_step_begin", 1, times=3)}, 2),
        ({"callback": AtEvent("on_pre_optimizer_step", 1)}, 2),
        ({"callback": AtEvent("on_prediction_step", 2)}, 2),
        ({"callback": AtEvent("on_save", 2), "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}, 2),
    ],
    ids=["rollouts", "thrice", "training", "evaluation", "saving"],
)
def test_the_step_is_finished_and_the_run_goes_on(build, whole, tmp_path, moment, step):
    said = preempted(build, tmp_path / "run", **moment)
    checkpoint = tmp_path / "run" / f"checkpoint-{step}"
    assert f"end by SIGUSR1: what was learnt up to step {step} is in {checkpoint}. Run the same command" in said
    assert is_whole(checkpoint)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [checkpoint.name]
    resumed = trained(build, tmp_path / "run", str(checkpoint))
    for one, other in zip(resumed.model.parameters(), whole, strict=True):
        assert torch.equal(one, other)


def test_before_the_first_step_nothing_is_saved(build, tmp_path):
    said = preempted(build, tmp_path / "run", AtEvent("on_train_begin", 0))
    assert "no step was taken" in said and not list((tmp_path / "run").glob("checkpoint-*"))


def test_sigterm_is_noted_where_it_is_asked_for(build, tmp_path):
    """transformers' own callback would end the run as if all its steps were taken."""
    asking = Asking()
    asking.number = signal.SIGTERM
    said = preempted(build, tmp_path / "run", reward=asking, enable_jit_checkpoint=True)
    assert "end by SIGTERM: what was learnt up to step 2" in said


def test_training_in_another_thread_hears_no_signal(build, tmp_path):
    ended = []

    def train():
        trainer = build(output_dir=str(tmp_path / "run"), enable_jit_checkpoint=True, max_steps=1)
        trainer.train()
        ended.append(trainer.state.global_step)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ended == [1] and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_second_sigterm_does_not_wait(monkeypatch):
    """One that comes at once is the same, by another way."""
    ends = []
    signal.signal(signal.SIGTERM, lambda number, frame: ends.append(number))
    with listening(signal.SIGTERM):
        signals(signal.SIGTERM, times=2)
        assert heard() == "SIGTERM" and not ends
        monkeypatch.setattr(preemption, "ECHO", -1.0)
        signals(signal.SIGTERM)
        assert ends == [signal.SIGTERM]
    assert heard() is None


def test_a_launcher_hands_on_what_it_hears(tmp_path, monkeypatch):
    with listening(signal.SIGUSR1):
        signals()  # before it is a launcher
        with listening(signal.SIGUSR1, on_first=(tmp_path / "SIGUSR1").touch):
            monkeypatch.setenv(FOLDER, str(tmp_path))
    assert heard() == "SIGUSR1" and not left(tmp_path)
    assert leave() == 0 and left(tmp_path)
    monkeypatch.delenv(FOLDER)
    assert leave() == STATUS


def test_other_signals_do_what_they_did():
    with listening(signal.SIGUSR1), pytest.raises(KeyboardInterrupt):
        signals(signal.SIGINT)
        time.sleep(60)
