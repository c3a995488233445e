"""The agents of the page on any agent hold their conversations as they are written."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from mt_grpo.cli import main
from mt_grpo.runlog import read_trajectories

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "any_agent.md").read_text()
ROWS = [{"question": f"How many live in city {number}?", "answer": "million"} for number in range(4)]


def prepare(recipe: str, folder: Path, monkeypatch) -> list[str]:
    """A folder with the page's files, and a recipe of the quickstart's with the page's options; short runs of it."""
    options = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    for name in ("tools", "system_prompt", "call_protocol", "max_env_steps", "turn_reward_funcs", "column_mapping"):
        options.pop(name, None)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)
    (code,) = re.findall(r"`my_agent\.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    (script,) = re.findall(r"`agent\.sh`:\n\n```sh\n(.*?)```", PAGE, re.DOTALL)
    Path("my_agent.py").write_text(code)
    Path("agent.sh").write_text(script)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"dataset_name": "rows.jsonl", "do_eval": False}
    Path("recipe.yaml").write_text(yaml.safe_dump(options | yaml.safe_load(recipe) | data))
    return ["recipe.yaml", "--max_turn_length", "12", "--output_dir", "run"]


RECIPES = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if block.startswith("agent:")]


@pytest.mark.slow
def test_the_loop_of_the_page_trains(tmp_path, monkeypatch):
    options = ["--max_steps", "1", "--per_device_train_batch_size", "8"]
    assert main(["train", *prepare(RECIPES[0], tmp_path, monkeypatch), *options]) == 0
    lines = list(read_trajectories("run"))
    assert len(lines) == 8 and {line["error"] for line in lines} == {None}
    assert all(line["env_rewards"].keys() == {"right"} for line in lines)
    assert all(line["prompt"] == [{"role": "user", "content": line["row"]["question"]}] for line in lines)
    sys.modules.pop("my_agent")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_program_of_the_page_is_rolled_out(tmp_path, monkeypatch, capsys):
    assert main(["rollout", *prepare(RECIPES[1], tmp_path, monkeypatch), "--num_prompts", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("outcome reward env_reward: 0") == 2 and "env_error" not in shown


def test_the_page_has_the_committed_figures():
    measured = json.loads((ROOT / "benchmarks" / "results" / "endpoint.json").read_text())
    assert f"HTTP adds {measured['added_ms']:.2f} ms" in PAGE
    assert f"takes {measured['rows']['in process']['cpu_ms']:.2f} ms without it" in PAGE
    assert measured["at_once"]["lost"] == 0 and measured["added_ms"] <= measured["settings"]["aim_ms"]
    forms = json.loads((ROOT / "benchmarks" / "results" / "bring_your_own.json").read_text())["rows"]
    for form in ("openai", "program"):
        before, after = (f"{forms[form][when]['exact_match']:.3f}" for when in ("before", "after"))
        said = f"goes from {before} exact match to {after} in {forms[form]['steps']} steps"
        assert said in " ".join(PAGE.split()), form
