"""
Log-probabilities of the sampled tokens, as a real vLLM server reported them and as the trainer computes them.

The quickstart's agent (`recipes/quickstart_vllm.yaml`) answers questions with its search tool, sampled from a server
on this machine's CPU in float32, before and after optimiser steps with a weight sync before each round of rollouts;
with tied and untied embeddings, at two temperatures. The trainer's side is its own forward, every token once (`tree`),
and beside it one plain forward per turn (`turn_by_turn`).

    python benchmarks/parity.py [--quick]

Needs `.venv-vllm` (`make server-cpu`). Prints a table and writes `benchmarks/results/parity.json`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from common import build_tokenizer, write
from rich.console import Console
from rich.table import Table
from server import read, serve
from transformers import AutoModelForCausalLM, PreTrainedModel, PrinterCallback, ProgressCallback

from mt_grpo.app.build import Recipe, build_trainer
from mt_grpo.data import embedded
from mt_grpo.servers.http import Server
from mt_grpo.token_tree import TokenTree
from mt_grpo.training import token_logps
from mt_grpo.training.trainer import MTGRPOEnvTrainer

TARGET = 1e-4
FORWARDS = ("tree", "turn_by_turn")
BATCH = 20  # trajectories a forward


def untie(folder: str) -> str:
    """Saves the embedded model with output embeddings of their own, close to the ones it had."""
    model = AutoModelForCausalLM.from_pretrained(Path(embedded.__file__).parent / "model", tie_word_embeddings=False)
    torch.manual_seed(0)
    inputs, outputs = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    outputs.copy_(inputs + 0.01 * torch.randn_like(inputs))
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def score(model: PreTrainedModel, trees: list[TokenTree], forward: str, temperature: float) -> torch.Tensor:
    """Log-probabilities of all action tokens, one after another."""
    pieces = []
    for begin in range(0, len(trees), BATCH):
        batch = trees[begin : begin + BATCH]
        for turns in token_logps(model, batch, forward=forward, temperature=temperature):
            pieces += turns
    return torch.cat(pieces)


def sampled(tree: TokenTree) -> list[float]:
    """The server's log-probabilities of a trajectory's action tokens, turn by turn."""
    (sequence,) = tree.sequences()
    return [value for value, mask in zip(sequence.logprobs, sequence.mask, strict=True) if mask]


def compare(trainer: MTGRPOEnvTrainer, count: int, earlier: PreTrainedModel) -> dict[str, Any]:
    """
    Fresh trajectories, scored by both sides.

    Args:
        trainer (`MTGRPOEnvTrainer`): Its server is synced first.
        count (`int`): Trajectories.
        earlier (`PreTrainedModel`): Earlier weights; how far they are off shows what a lost sync would look like.
    """
    trajectories = trainer.rollout(count)
    trees = [trajectory.tree for trajectory in trajectories]
    served = torch.tensor([value for tree in trees for value in sampled(tree)])
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    (version,) = {turn.weight_version for turn in turns}
    row: dict[str, Any] = {
        "weight_version": version,
        "trajectories": len(trajectories),
        "turns": len(turns) / len(trajectories),
        "longest_context": max(turn.context_length for turn in turns),
        "action_tokens": len(served),
    }
    for name, model in (("trainer", trainer.model), ("earlier", earlier)):
        for forward in FORWARDS if name == "trainer" else FORWARDS[:1]:
            difference = (score(model, trees, forward, trainer.temperature) - served).abs()
            label = forward if name == "trainer" else "earlier weights"
            row[label] = {"largest": difference.max().item(), "mean": difference.mean().item()}
    return row


def run(recipe: Recipe, count: int) -> list[dict[str, Any]]:
    """Before and after training."""
    trainer = build_trainer(recipe)
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    initial = AutoModelForCausalLM.from_pretrained(trainer.model.config.name_or_path, dtype=torch.float32).eval()
    before = compare(trainer, count, initial)
    trainer.train()
    after = compare(trainer, count, initial)
    trainer.weight_sync.close()
    return [before, after]


def show(rows: list[dict[str, Any]]) -> None:
    """Differences in nats."""
    table = Table(title="Server and trainer, log-probabilities of the same action tokens, float32")
    table.add_column("embeddings, temperature")
    for column in ("steps", "trajectories", "turns each", "action tokens", *FORWARDS, "target", "earlier weights"):
        table.add_column(f"{column}: largest (mean)" if column in FORWARDS else column, justify="right")
    for row in rows:
        cells = [f"{row['embeddings']}, {row['temperature']}", row["weight_version"], row["trajectories"]]
        cells += [f"{row['turns']:.2f}", row["action_tokens"]]
        cells += [f"{row[forward]['largest']:.1e} ({row[forward]['mean']:.1e})" for forward in FORWARDS]
        earlier = row["earlier weights"]
        cells += [f"<= {TARGET:.0e}", f"{earlier['largest']:.1e} ({earlier['mean']:.1e})"]
        table.add_row(*map(str, cells))
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few trajectories and one server; nothing is written")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore", FutureWarning)
    count, steps, temperatures = (2, 1, (1.0,)) if quick else (200, 5, (1.0, 0.7))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = {"untied": untie(f"{folder}/untied")} if quick else {"tied": "embedded", "untied": untie(folder)}
        options = ["--max_steps", str(steps), "--learning_rate", "1e-3", "--lr_scheduler_type", "constant"]
        options += ["--warmup_steps", "0", "--output_dir", f"{folder}/run"]
        options += ["--num_generations", "2", "--per_device_train_batch_size", "2"] if quick else []
        for embeddings, model in models.items():
            recipe = read(model, *options)
            port = str(recipe.training.vllm_server_port)
            with serve(recipe) as url:
                version = Server(url).get("/version")["version"]
                for temperature in temperatures:
                    recipe = read(model, *options, "--temperature", str(temperature), "--vllm_server_port", port)
                    settings = {"embeddings": embeddings, "temperature": temperature}
                    rows += [settings | row for row in run(recipe, count)]
                    show(rows)
    if not quick:
        write("parity", {"steps": steps, "learning_rate": 1e-3, "seed": 42, "target": TARGET, "vllm": version}, rows)
    largest = max(row[forward]["largest"] for row in rows for forward in FORWARDS)
    if not largest <= TARGET:
        raise SystemExit(f"Server and trainer differ by {largest:.1e} nats; target: {TARGET:.0e}.")


if __name__ == "__main__":
    main()
