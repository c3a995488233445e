"""Checkpoints that are damaged, of another model, or cannot be written: one sentence, or the one before."""

from __future__ import annotations

import errno
import io
import logging
import os
from pathlib import Path

import pytest
import torch
from support.forked import Forked
from support.models import build_model
from support.trainers import Letters

from mt_grpo.errors import ConfigError
from mt_grpo.training.checkpoint import (
    CheckpointError,
    find_checkpoint,
    is_whole,
    latest_checkpoint,
    save_rollouts,
)

SAVE = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "max_turn_length": 8}


@pytest.fixture
def folder(build, tmp_path) -> Path:
    """Of a run with two checkpoints."""
    build(None, rewards=((), (Letters(),)), output_dir=str(tmp_path / "run"), **SAVE).train()
    return tmp_path / "run"


def spoil(path: Path, how: str) -> None:
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "text":
        path.write_text("hello")
    else:
        torch.save([1, 2], path)


@pytest.mark.slow
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, caplog):
    last, before = folder / "checkpoint-2", folder / "checkpoint-1"
    states = ("rollouts-rank0.pt", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
    for name in (*states, "trainer_state.json", "config.json", "made_with.json"):
        sound = (last / name).read_bytes()
        for how in ("empty", "cut", "text"):
            spoil(last / name, how)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert find_checkpoint("true", str(folder)) == str(before)
            (said,) = caplog.messages
            assert (
                f"{last} is damaged, its {name} cannot be read" in said
                and f"goes on from the checkpoint before, {before}" in said
            )
        (last / name).write_bytes(sound)
    assert latest_checkpoint(str(folder)) == last
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (last / name).rename(last / "away")
        assert latest_checkpoint(str(folder)) == before
        with pytest.raises(ConfigError, match=f"checkpoint-2 is damaged, its {name} is gone: resume from another one"):
            find_checkpoint(str(last), str(folder))
        (last / "away").rename(last / name)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (last / name).rename(folder / name)
    assert latest_checkpoint(str(folder)) == last  # as `save_only_model` leaves it
    sound = (last / "trainer_state.json").read_bytes()
    (last / "trainer_state.json").write_text("{}")
    assert latest_checkpoint(str(folder)) == before
    (last / "trainer_state.json").write_bytes(sound)
    spoil(last / "rollouts-rank0.pt", "other")
    assert latest_checkpoint(str(folder)) == before


@pytest.mark.slow
def test_a_named_checkpoint_that_is_damaged_is_refused(folder, build):
    spoil(folder / "checkpoint-2" / "rollouts-rank0.pt", "cut")
    trainer = build(None, rewards=((), (Letters(),)), output_dir=str(folder), **SAVE)
    with pytest.raises(ConfigError, match=r"is damaged, its rollouts-rank0.pt .* another one \(.*checkpoint-1\)\.$"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))


@pytest.mark.slow
def test_the_latest_sound_checkpoint_is_resumed_from_python(folder, build):
    spoil(folder / "checkpoint-2" / "rollouts-rank0.pt", "cut")
    trainer = build(None, rewards=((), (Letters(),)), output_dir=str(folder), **SAVE)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2 and latest_checkpoint(str(folder)) == folder / "checkpoint-2"


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(folder, build, tokenizer):
    trainer = build(None, build_model(tokenizer, hidden_size=16), ((), (Letters(),)), output_dir=str(folder), **SAVE)
    with pytest.raises(ConfigError, match="checkpoint-2 is of another model .*has the shape") as refused:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert "\n" not in str(refused.value)


def test_the_folder_of_a_run_is_no_checkpoint(tmp_path):
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(ConfigError, match="is no checkpoint: name one, of which this folder has none"):
        find_checkpoint(str(tmp_path), "elsewhere")
    for step in (2, 10, 1):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(ConfigError, match=r"checkpoint-1, .*checkpoint-2, .*checkpoint-10\.$"):
        find_checkpoint(str(tmp_path), "elsewhere")


def test_the_one_before_stays_until_the_next_is_whole(build, tmp_path, monkeypatch):
    """Such as on a disk that is full once the model is written."""
    written = []

    def save(folder, *args):
        written.append(folder)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_rollouts(folder, *args)

    monkeypatch.setattr("mt_grpo.training.resuming.save_rollouts", save)
    trainer = build(None, rewards=((), (Letters(),)), output_dir=str(tmp_path), save_total_limit=1, **SAVE)
    with pytest.raises(CheckpointError, match="checkpoint-2 cannot be written"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert is_whole(tmp_path / "checkpoint-1") and trainer.args.save_total_limit == 1
    trainer.train(resume_from_checkpoint=True)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


class Executing:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_checkpoint_of_pickled_code_is_not_executed(tmp_path):
    folder, executed = tmp_path / "run" / "checkpoint-1", tmp_path / "executed"
    folder.mkdir(parents=True)
    buffer = io.BytesIO()
    torch.save({"processes": 1, "step": 0, "options": Executing(executed)}, buffer)
    (folder / "rollouts-rank0.pt").write_bytes(buffer.getvalue())
    (folder / "trainer_state.json").write_text("{}")
    assert latest_checkpoint(str(tmp_path / "run")) is None
    assert not executed.exists()


LIMITED = """
import resource, sys
from mt_grpo.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(main())
"""


@pytest.mark.slow
def test_a_disk_that_is_full_while_saving_is_one_sentence(tmp_path):
    """A process may write no file as large as the model, as on a disk that is full."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED.format(limit=2_000_000))
    command = [
        *(str(script), "train", "--model_name_or_path", "embedded", "--dataset_name", "embedded"),
        *("--tools", "calculator", "--outcome_reward_funcs", "exact_match_reward_func", "--use_cpu", "true"),
        *("--max_steps", "2", "--save_strategy", "steps", "--save_steps", "1", "--max_completion_length", "64"),
        *("--num_generations", "2", "--per_device_train_batch_size", "2", "--output_dir", str(tmp_path / "run")),
        *("--gradient_accumulation_steps", "1", "--report_to", "none"),
    ]
    status, log = Forked(command, tmp_path / "log").wait(300), (tmp_path / "log").read_text()
    said = log.strip().splitlines()
    assert status == 1 and "Traceback" not in log, log[-3000:]
    assert "checkpoint-1 cannot be written" in said[-1] and "GB are free there" in said[-1]
    assert "no whole checkpoint" in said[-1] and not list((tmp_path / "run").glob("checkpoint-*"))
