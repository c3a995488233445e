"""
Bytes that `weight_sync: delta` sends, against those of all weights, on the updates of a real run.

    python benchmarks/weight_delta.py [--quick]

Trains the embedded agent by `recipes/quickstart.yaml`, with its learning rate, and keeps the weights of each step. The
change of a step is made of the weights in bfloat16, which is what servers of larger models hold, and put into the old
ones: the result must equal the new ones. Beside it stands what places and values of the changed words would take.
Prints a table and writes `benchmarks/results/weight_delta.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import write
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from mt_grpo import cli
from mt_grpo.vllm_plugin.fetch import apply, difference

TARGET = 0.1
FEW = ["--num_generations", "2", "--per_device_train_batch_size", "2"]
RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"


def trained(steps: int, folder: str, *further: str) -> list[torch.Tensor]:
    """The bytes of the weights after each step of a run, in bfloat16."""
    options = ["--max_steps", str(steps), "--save_strategy", "steps", "--save_steps", "1", "--do_eval", "false"]
    options += ["--save_only_model", "true", "--output_dir", folder]
    with contextlib.redirect_stdout(sys.stderr):
        if status := cli.main(["train", str(RECIPE), *options, *further]):
            raise SystemExit(status)
    found = []
    for step in range(1, steps + 1):
        tensors = load_file(f"{folder}/checkpoint-{step}/model.safetensors")
        words = torch.cat([tensors[name].to(torch.bfloat16).flatten() for name in sorted(tensors)])
        found.append(words.view(torch.uint8))
    return found


def measure(step: int, old: torch.Tensor, new: torch.Tensor) -> dict[str, Any]:
    change = difference(old, new)
    assert change is not None
    made = old.clone()
    apply(change, made)
    assert torch.equal(made, new)
    changed = (old.view(torch.int16) != new.view(torch.int16)).float().mean().item()
    return {
        "step": step,
        "changed words": changed,
        "places and values / all": 2 * changed,
        "delta / all": change.numel() / new.numel(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps of few conversations; nothing is written")
    steps = 2 if (quick := parser.parse_args().quick) else 50
    with tempfile.TemporaryDirectory() as folder:
        weights = trained(steps, folder, *(FEW if quick else []))
    rows = [measure(step, *weights[step - 2 : step]) for step in range(2, steps + 1)]
    shares = [row["delta / all"] for row in rows]
    table = Table(title="Weights in bfloat16, quickstart")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows if quick else rows[::7]:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=100).print(table)
    print(f"delta / all: {statistics.mean(shares):.3f} in the mean, {max(shares):.3f} at most; target <= {TARGET}")
    if not quick:
        total = {"part": "delta / all, mean", "values": [statistics.mean(shares)], "target": f"<= {TARGET}"}
        write("weight_delta", {"recipe": RECIPE.name, "steps": steps}, [total, *rows])


if __name__ == "__main__":
    main()
