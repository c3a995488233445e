"""`report_to` with real trackers that work offline: the conversations of a whole run reach them."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.slow


def needs(tracker: str) -> pytest.MarkDecorator:
    beside = (
        f"{tracker} is not installed; to run this test make a virtual environment, put the path of this one's "
        "site-packages into a `.pth` file of its, `pip install` the tracker there, and run pytest with its python"
    )
    return pytest.mark.skipif(find_spec(tracker) is None, reason=beside)


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


def python(*arguments: str, **environment: str) -> list[str]:
    """Lines that a program prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    run = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@needs("trackio")
def test_trackio_gets_a_table_of_each_log_step(recipe, tmp_path):
    place = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    python("-m", "mt_grpo", "train", *recipe(report_to="trackio", project="ours"), **place)
    lines = python("-c", TRACKIO, **place)
    tables = [line.split()[:3] for line in lines if "conversations" in line]
    modes = [("eval", "0"), ("train", "1"), ("train", "2"), ("eval", "2")]  # before, two steps, after
    assert tables == [[f"{mode}/conversations", step, "4"] for mode, step in modes]
    first = next(line for line in lines if line.startswith("train/conv"))
    for column in ("'conversation': '--- turn 1 ---", "'exact_match_reward_func': 0.0", "'advantages': '"):
        assert column in first
    assert "'stop_reason':" in first
    assert [line for line in lines if line.startswith("eval/reward")] == ["eval/reward 0", "eval/reward 2"]


@needs("wandb")
def test_wandb_gets_a_table_of_each_log_step(recipe, tmp_path):
    folder = tmp_path / "wandb"
    folder.mkdir()
    arguments = recipe(report_to="wandb", project="ours")
    python("-m", "mt_grpo", "train", *arguments, WANDB_MODE="offline", WANDB_DIR=str(folder))
    tables = [path.parent.name for path in folder.rglob("*.table.json")]
    assert sorted(tables) == ["eval", "eval", "train", "train"]
