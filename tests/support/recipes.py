"""The recipes of this repository."""

from __future__ import annotations

from pathlib import Path

import yaml

from mt_grpo.app.recipe import parse_recipe

ROOT = Path(__file__).parents[2] / "recipes"
RECIPES = sorted([*ROOT.glob("*.yaml"), *ROOT.glob("Qwen/*.yaml")])


def parse_for(processes: int, path: Path):
    """Parses a recipe as one process that has the batch of all of them."""
    options = yaml.safe_load(path.read_text())
    arguments = ["--config", str(path), "--use_cpu", "true", "--bf16", "false"]
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        arguments += [f"--{name}", str(options[name] * processes)]
    return parse_recipe(arguments)
