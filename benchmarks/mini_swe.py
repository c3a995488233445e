"""
mini-swe-agent, unmodified and in its text mode, trained over HTTP on the tasks of `recipes/terminal/quickstart.yaml`:
the share of held-out tasks that it solves before and after.

    make .venv-interop/agents/.installed && .venv-interop/agents/bin/python benchmarks/mini_swe.py [--steps 1]

A model of 0.19 million parameters is taught its form, and to write commands badly; that takes a minute or three.
Commands run in sandboxes of bubblewrap's. Writes `benchmarks/results/mini_swe.json`, unless steps are said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from common import write
from rich.console import Console
from rich.table import Table

from mt_grpo import cli
from mt_grpo.data.terminal import write_tasks

ROOT = Path(__file__).parent.parent
SHELL = ("env", "system_prompt", "call_protocol", "max_env_steps")
"""Keys of the recipe that the agent has of its own."""
TASKS = {"train": (96, 0), "test": (48, 1)}
"""Number and seed of each split."""
MEASURED = ("before", "after", "history", "seconds", "steps", "seed")


def write_dataset(folder: Path) -> Path:
    """Writes tasks to find and count, those of the recipe, and a dataset of them with two splits."""
    for split, (number, seed) in TASKS.items():
        tasks = write_tasks(folder / "tasks" / split, number, seed, kinds=("find", "count"))
        asked = [(task / "instruction.md").read_text().strip() for task in tasks]
        rows = [
            {"prompt": text, "instruction": text, "task": str(task)} for task, text in zip(tasks, asked, strict=True)
        ]
        file = folder / "data" / f"{split}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of training, in place of the recipe's; writes no results")
    parser.add_argument("--model", type=Path, help="a model that was taught before, in place of a model of its own")
    asked = parser.parse_args()
    recipe = yaml.safe_load((ROOT / "recipes" / "terminal" / "quickstart.yaml").read_text())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = asked.model or folder / "model"
        if not asked.model:
            teach = [sys.executable, str(ROOT / "scripts" / "warm_start_terminal.py"), "--mini-swe-agent", str(model)]
            subprocess.run(teach, check=True, stdout=sys.stderr)
        recipe = {key: value for key, value in recipe.items() if key not in SHELL} | {
            "model_name_or_path": str(model),
            "agent": f"{ROOT / 'benchmarks' / 'agents' / 'mini_swe.py'}:solve",
            "dataset_name": str(write_dataset(folder)),
            "dataset_test_split": "test",
            "tool_timeout": 300,  # a busy machine is not the agent's fault
            "output_dir": str(folder / "run"),
        }
        if asked.steps:
            recipe["max_steps"] = asked.steps
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        with contextlib.redirect_stdout(sys.stderr):
            if status := cli.main(["train", "--config", str(folder / "recipe.yaml")]):
                raise SystemExit(status)
        summary = json.loads((folder / "run" / "summary.json").read_text())
    table = Table("solved before", "after", "steps", "seconds")
    table.add_row(
        *(f"{summary[name]['env']:.3f}" for name in ("before", "after")),
        str(summary["steps"]),
        f"{summary['seconds']:.0f}",
    )
    Console().print(table)
    if not asked.steps:
        kept = {name: summary[name] for name in MEASURED if name in summary}
        write("mini_swe", {"recipe": "recipes/terminal/quickstart.yaml"}, kept)


if __name__ == "__main__":
    main()
