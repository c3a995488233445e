"""A run whose machines are wanted back ends after its step, with a checkpoint and a status of its own."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.trainers import LETTERS, Letters, at, same, trainer_builder, weights

from mt_grpo import preemption
from mt_grpo.preemption import FOLDER, STATUS, PreemptedError, heard, leave, left, listening
from mt_grpo.runlog.files import read_state
from mt_grpo.training.checkpoint import is_whole

pytestmark = pytest.mark.own_process
OPTIONS = {"script": None, "max_steps": 3, "max_turn_length": 8, "rewards": LETTERS}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1}


def signals(number=signal.SIGUSR1, times=1):
    for _ in range(times):
        os.kill(os.getpid(), number)


class Asking(Letters):
    """Sends a signal while the second batch is scored."""

    name = "Letters"

    def __init__(self, number=signal.SIGUSR1):
        self.number = number

    def score(self, trajectory, **row):
        if trajectory.session.startswith("train-000001"):
            signals(self.number)
        return super().score(trajectory, **row)


def asked_at(event, step, times=1):
    return {"callbacks": [at(event, lambda **_: signals(times=times), step)]}


def preempted(build, **options):
    trainer = build(**OPTIONS | options)
    with pytest.raises(PreemptedError) as ended:
        trainer.train()
    assert ended.value.code == STATUS == 75
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and heard() is None
    assert read_state(Path(trainer.args.output_dir))["state"] == "stopped"
    return str(ended.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokenizer, questions):
    (trainer := trainer_builder(tmp_path_factory.mktemp("whole"), tokenizer, questions)(**OPTIONS)).train()
    return weights(trainer)


@pytest.mark.parametrize(
    "moment",
    [
        {"rewards": ((), (Asking(),))},
        asked_at("on_step_begin", 1, times=3),
        asked_at("on_pre_optimizer_step", 1),
        asked_at("on_prediction_step", 2) | EVALUATES,
        asked_at("on_save", 2) | {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1},
    ],
    ids=["rollouts", "thrice", "training", "evaluation", "saving"],
)
def test_the_step_is_finished_and_the_run_goes_on(build, whole, tmp_path, moment):
    said, checkpoint = preempted(build, **moment), tmp_path / "checkpoint-2"
    assert f"end by SIGUSR1: what was learnt up to step 2 is in {checkpoint}. Run the same command" in said
    assert is_whole(checkpoint) and list(tmp_path.glob("checkpoint-*")) == [checkpoint]
    (resumed := build(**OPTIONS)).train(str(checkpoint))
    assert same(weights(resumed), whole)


def test_a_run_that_went_back_keeps_what_it_learnt_since(build, tmp_path):
    options = {**OPTIONS, "save_strategy": "steps", "save_steps": 1}
    build(**options).train()
    begun = {"learning_rate": 0.5, **asked_at("on_step_end", 2)}
    trainer = build(**options | begun | {"save_steps": 100})
    with pytest.raises(PreemptedError):
        trainer.train(str(tmp_path / "checkpoint-1"))
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert same([saved[name] for name, _ in trainer.model.named_parameters()], weights(trainer))


def test_before_the_first_step_nothing_is_saved(build, tmp_path):
    assert "no step was taken" in preempted(build, **asked_at("on_train_begin", 0))
    assert not list(tmp_path.glob("checkpoint-*"))


def test_sigterm_is_noted_where_it_is_asked_for(build):
    """transformers' own callback would end the run as if all its steps were taken."""
    said = preempted(build, rewards=((), (Asking(signal.SIGTERM),)), enable_jit_checkpoint=True)
    assert "end by SIGTERM: what was learnt up to step 2" in said


def test_training_in_another_thread_hears_no_signal(build):
    ended = []

    def train():
        (trainer := build(enable_jit_checkpoint=True, max_steps=1)).train()
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
