"""The examples of the pages on environments that people bring train in recipes as they are written."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from mt_grpo.cli import main
from mt_grpo.runlog import read_trajectories

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SHORT = ["--max_steps", "1", "--per_device_train_batch_size", "8", "--max_turn_length", "12", "--do_eval", "false"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "module", "rows", "rewards"),
    [
        (
            "trl_environments.md",
            "counting",
            [{"prompt": "Use the tool.", "target": number} for number in range(4)],
            [],
        ),
        ("games.md", "guessing", [{"prompt": "Play.", "seed": number} for number in range(4)], ["env_reward"]),
    ],
)
def test_the_example_of_the_page_trains(page, module, rows, rewards, tmp_path, monkeypatch):
    text = (DOCS / page).read_text()
    (code,) = re.findall(rf"`{module}\.py`:\n\n```python\n(.*?)```", text, re.DOTALL)
    (recipe,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    options = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    for name in (
        "tools",
        "system_prompt",
        "call_protocol",
        "turn_reward_funcs",
        "outcome_reward_funcs",
        "column_mapping",
        "max_env_steps",
    ):
        options.pop(name, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    Path(f"{module}.py").write_text(code)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("recipe.yaml").write_text(yaml.safe_dump(options | yaml.safe_load(recipe) | {"dataset_name": "rows.jsonl"}))
    assert main(["train", "recipe.yaml", *SHORT, "--output_dir", "run"]) == 0
    [*_, last] = read_trajectories("run")
    assert last["stop_reason"] != "env_error", last["error"]
    assert rewards == [] or last["rewards"]["outcome"].keys() == set(rewards)
    assert rewards or last["rewards"]["outcome"].keys() == {"Counter"}
    sys.modules.pop(module)


def test_the_recipe_of_the_page_on_branching_is_in_place(tmp_path, monkeypatch, capsys):
    (recipe,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "branching.md").read_text(), re.DOTALL)
    options = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text()) | yaml.safe_load(recipe)
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(yaml.safe_dump(options))
    assert main(["train", "recipe.yaml", "--dry_run", "--output_dir", "run"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert (resolved["branch_at"], resolved["num_branches"]) == (2, 4)


def test_a_factory_needs_no_dataset(tmp_path, monkeypatch, capsys):
    text = (DOCS / "trl_environments.md").read_text()
    (code,) = re.findall(r"`counting\.py`:\n\n```python\n(.*?)```", text, re.DOTALL)
    options = {"model_name_or_path": "embedded", "environment_factory": "counting.py:Counter", "use_cpu": True}
    monkeypatch.chdir(tmp_path)
    Path("counting.py").write_text(code)
    Path("recipe.yaml").write_text(yaml.safe_dump(options | {"bf16": False, "output_dir": "run"}))
    assert main(["train", "recipe.yaml", "--dry_run"]) == 1
    assert "There is no dataset, so `reset` of the environment gives the prompts" in capsys.readouterr().err
    assert main(["train", "recipe.yaml", "--do_eval", "--max_steps", "1", "--dry_run"]) == 1
    assert "`do_eval: true` needs a dataset" in capsys.readouterr().err
