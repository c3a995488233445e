"""`report_to` with real trackers that work offline: the conversations of a whole run reach them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BESIDE = (
    "is not installed; to run this test make a virtual environment, put the path of this one's site-packages into a "
    "`.pth` file of its, `pip install` the tracker there, and run pytest with its python"
)
TRACKIO = """
import sys
from trackio.sqlite_storage import SQLiteStorage
for name in SQLiteStorage.get_runs("ours"):
    for entry in SQLiteStorage.get_logs("ours", name):
        for key in ("train/conversations", "eval/conversations"):
            if key in entry:
                print(key, entry["train/global_step"], len(entry[key]["_value"]), entry[key]["_value"][0])
        if "eval/reward" in entry:
            print("eval/reward", entry["train/global_step"])
"""


def train(recipe, tracker: str, **environment: str) -> None:
    command = [sys.executable, "-m", "mt_grpo", "train", *recipe(report_to=tracker, project="ours")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason=f"trackio {BESIDE}")
def test_trackio_gets_a_table_of_each_log_step(recipe, tmp_path):
    train(recipe, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    reading = subprocess.run([sys.executable, "-c", TRACKIO], env=environment, capture_output=True, text=True)
    lines = reading.stdout.splitlines()
    tables = [line.split()[:3] for line in lines if "conversations" in line]
    assert tables == [  # before, two steps, after
        ["eval/conversations", "0", "4"],
        ["train/conversations", "1", "4"],
        ["train/conversations", "2", "4"],
        ["eval/conversations", "2", "4"],
    ], reading.stderr
    for column in (
        "'conversation': '--- turn 1 ---",
        "'exact_match_reward_func': 0.0",
        "'advantages': '",
        "'stop_reason':",
    ):
        assert column in next(line for line in lines if line.startswith("train/conv"))
    assert [line for line in lines if line.startswith("eval/reward")] == ["eval/reward 0", "eval/reward 2"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason=f"wandb {BESIDE}")
def test_wandb_gets_a_table_of_each_log_step(recipe, tmp_path):
    (tmp_path / "wandb").mkdir()
    train(recipe, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path / "wandb"))
    tables = [Path(path).parts[-2:] for path in map(str, (tmp_path / "wandb").rglob("*.table.json"))]
    assert sorted(folder for folder, _ in tables) == ["eval", "eval", "train", "train"]
