"""
Agents in a terminal, trained on the tasks of `recipes/terminal/quickstart.yaml`: the share of held-out tasks that each
solves before and after, and of those it trained on at each step.

    python benchmarks/terminal.py                        # the recipe itself: our shell
    make .venv-interop/agents/.installed && .venv-interop/agents/bin/python benchmarks/terminal.py --mini-swe-agent

mini-swe-agent is unmodified, in its text mode, and asks over HTTP. A model of 0.19 million parameters is taught its
form, and to write commands badly; that takes a minute or three. Commands run in sandboxes of bubblewrap's. Writes
`benchmarks/results/terminal.json` or `mini_swe.json`, unless `--steps` are said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

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
MEASURED = ("before", "after", "seconds", "steps", "seed")
SOLVED = 0.8


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


def of_mini_swe_agent(recipe: dict, model: Path | None, folder: Path) -> dict:
    """The recipe with mini-swe-agent in place of the shell."""
    if model is None:
        model = folder / "model"
        teach = [sys.executable, str(ROOT / "scripts" / "warm_start_terminal.py"), "--mini-swe-agent", str(model)]
        subprocess.run(teach, check=True, stdout=sys.stderr)
    return {key: value for key, value in recipe.items() if key not in SHELL} | {
        "model_name_or_path": str(model),
        "agent": f"{ROOT / 'benchmarks' / 'agents' / 'mini_swe.py'}:solve",
        "dataset_name": str(write_dataset(folder)),
        "dataset_test_split": "test",
        "tool_timeout": 300,  # a busy machine is not the agent's fault
    }


def solved(folder: Path) -> list[float]:
    """The share that was solved of the tasks of each step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [round(row["reward"], 4) for row in rows if "reward" in row]


def first_solved(curve: list[float]) -> int | None:
    """The first step at which the mean of five is `SOLVED`."""
    return next((step for step in range(5, len(curve) + 1) if fmean(curve[step - 5 : step]) >= SOLVED), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mini-swe-agent", action="store_true", help="in place of our shell")
    parser.add_argument("--steps", type=int, help="of training, in place of the recipe's; writes no results")
    parser.add_argument("--model", type=Path, help="one that was taught mini-swe-agent's form before")
    asked = parser.parse_args()
    recipe = yaml.safe_load((ROOT / "recipes" / "terminal" / "quickstart.yaml").read_text())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if asked.mini_swe_agent:
            recipe = of_mini_swe_agent(recipe, asked.model, folder)
        recipe["output_dir"] = str(folder / "run")
        if asked.steps:
            recipe["max_steps"] = asked.steps
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        with contextlib.redirect_stdout(sys.stderr):
            if status := cli.main(["train", "--config", str(folder / "recipe.yaml")]):
                raise SystemExit(status)
        summary, curve = json.loads((folder / "run" / "summary.json").read_text()), solved(folder / "run")
    table = Table("solved before", "after", "steps", f"steps to {SOLVED} in training", "seconds")
    table.add_row(
        *(f"{summary[name]['env']:.3f}" for name in ("before", "after")),
        str(summary["steps"]),
        str(first_solved(curve)),
        f"{summary['seconds']:.0f}",
    )
    Console().print(table)
    if not asked.steps:
        kept = {name: summary[name] for name in MEASURED if name in summary} | {"curve": curve}
        name = "mini_swe" if asked.mini_swe_agent else "terminal"
        write(name, {"recipe": "recipes/terminal/quickstart.yaml"}, kept)


if __name__ == "__main__":
    main()
