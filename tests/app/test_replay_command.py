"""`mt-grpo train --replay`: a run's own recipe, and that the run stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mt_grpo.cli import main

SAVED = ("--save_strategy", "steps", "--save_steps", "1", "--do_eval", "false", "--learning_rate", "0.01")


@pytest.fixture
def run(recipe, tmp_path):
    assert main(["train", *recipe(), *SAVED]) == 0
    return tmp_path / "run"


def weights(folder: Path) -> list[torch.Tensor]:
    return list(load_file(folder / "model.safetensors").values())


def test_the_first_step_of_a_replay_is_that_of_its_run(run, tmp_path):
    """The run's own recipe, of a model that samples: nothing else is said, but where to."""
    (tmp_path / "train.jsonl").unlink()  # rows come with the conversations
    again = ["train", "--replay", str(run), "--output_dir", str(tmp_path / "again")]
    assert main([*again, "--max_steps", "1", "--lr_scheduler_type", "constant"]) == 0
    assert all(map(torch.equal, weights(run / "checkpoint-1"), weights(tmp_path / "again")))


def test_a_replay_does_not_write_over_its_run(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for options in ([], ["--overwrite_output_dir", "true"], ["--output_dir", f"{run}/../run"]):
        assert main(["train", "--replay", str(run), *options]) == 1
    refusals = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mt-grpo: ")]
    assert all("give another `--output_dir`" in line or "holds an earlier run" in line for line in refusals)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nowhere", "There is no folder"), ("empty", "has no `config.yaml`, which `mt-grpo train` writes")],
)
def test_a_folder_of_no_run_is_refused_in_a_sentence(tmp_path, capsys, folder, message):
    (tmp_path / "empty").mkdir()
    assert main(["train", "--replay", str(tmp_path / folder)]) == 1
    assert message in capsys.readouterr().err


def test_a_rollout_by_the_recipe_of_a_replay_samples(run, tmp_path, capsys):
    again = tmp_path / "again"
    assert main(["train", "--replay", str(run), "--output_dir", str(again)]) == 0
    assert main(["rollout", str(again / "config.yaml"), "--num_prompts", "1"]) == 0
    assert "conversation 1" in capsys.readouterr().out
    assert json.loads((again / "summary.json").read_text())["steps"] == 2
