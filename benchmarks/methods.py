"""
Ways to compute the log-probs of a multi-turn rollout whose past thinking is stripped, against one forward for each
turn: how far they are from it, and what they cost in time and memory over turns, lengths and batch sizes.

    python benchmarks/methods.py [--quick]

Prints three tables, writes `benchmarks/results/methods.json` and `docs/images/methods.png`. The measures are those of
"Efficient Forward Pass for Agent RL" (part 1), whose `compare_logits` takes the same tolerances.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import matplotlib
import torch
from common import write
from measure import interleave, peak_memory
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear
from transformers import Qwen3ForCausalLM
from ways import METHODS, VOCABULARY, Batch, build_batch, build_model, labels_of, run

from mt_grpo.forward import attention as kernels

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

CHUNK = 512
"""Positions whose whole distributions are compared at once."""

RELATIVE, ABSOLUTE = 1e-1, 1e-2
"""Logits further from the reference than `ABSOLUTE + RELATIVE * |reference|` are mismatched."""


SCALED = ("turn by turn", "padded right", "KV cache", "tree, segment", "tree, dense")
"""Methods of the scaling table: without those that are wrong, or that a CPU only emulates."""

RIGHT = tuple(name for name in METHODS if name not in ("KV cache", "naive packing"))
"""Methods between which rounding is compared: those that compute the same, with gradients."""


# Accuracy


def _logits(hidden: Tensor, weight: Tensor) -> Iterator[Tensor]:
    for part in hidden.split(CHUNK):
        yield linear(part, weight).double()


def rmse(ours: Tensor, reference: Tensor) -> float:
    return float((ours.double() - reference.double()).square().mean().sqrt())


def compare(ours: Tensor, reference: Tensor, weight: Tensor) -> dict[str, float]:
    """Distances between the distributions that two sets of hidden states give."""
    sums = dict.fromkeys(("squares", "forward", "reverse", "top-1", "top-8", "mismatched"), 0.0)
    for a, b in zip(_logits(ours, weight), _logits(reference, weight), strict=True):
        gap = (a - b).abs()
        sums["squares"] += float(gap.square().sum())
        sums["mismatched"] += float((gap > ABSOLUTE + RELATIVE * b.abs()).sum())
        tops = [x.float().topk(8, dim=-1).indices for x in (a, b)]
        sums["top-1"] += float((tops[0][:, 0] == tops[1][:, 0]).sum())
        sums["top-8"] += float((tops[0][:, :, None] == tops[1][:, None, :]).any(dim=-1).sum())
        p, q = b.log_softmax(dim=-1), a.log_softmax(dim=-1)  # p is the reference
        sums["forward"] += float((p.exp() * (p - q)).sum())
        sums["reverse"] += float((q.exp() * (q - p)).sum())
    size, elements = len(ours), len(ours) * len(weight)
    return {
        "RMSE logits": (sums["squares"] / elements) ** 0.5,
        "KL(ref‖it)": sums["forward"] / size,
        "KL(it‖ref)": sums["reverse"] / size,
        "summed KL(ref‖it)": sums["forward"],
        "summed KL(it‖ref)": sums["reverse"],
        "top-1": sums["top-1"] / size,
        "top-8": sums["top-8"] / size / 8,
        "mismatched": sums["mismatched"] / elements,
    }


def accuracy(
    exact: Qwen3ForCausalLM, batches: list[Batch]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """
    Each method against turn by turn in the same precision, and against it in float32; and the distance between the
    log-probs of every two methods in bfloat16.
    """
    rows, rounding = [], {}
    truth = torch.cat([run(exact, "turn by turn", batch)[1] for batch in batches])
    for dtype in (torch.bfloat16, torch.float32):
        model = copy.deepcopy(exact).to(dtype)
        pieces: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in METHODS}
        seconds = dict.fromkeys(METHODS, 0.0)
        for batch in batches:  # in turns, so that what disturbs one method disturbs all
            for name in METHODS:
                start = time.process_time()
                pieces[name].append(run(model, name, batch))
                seconds[name] += time.process_time() - start
        found = {name: tuple(map(torch.cat, zip(*parts, strict=True))) for name, parts in pieces.items()}
        reference = found["turn by turn"]
        if dtype == torch.bfloat16:
            rounding = {one: {other: rmse(found[one][1], found[other][1]) for other in RIGHT} for one in RIGHT}
        for name, (hidden, logps) in found.items():
            rows.append(
                {
                    "method": name,
                    "precision": str(dtype).removeprefix("torch."),
                    "RMSE": rmse(logps, reference[1]),
                    "RMSE to float32": rmse(logps, truth),
                    **compare(hidden, reference[0], model.lm_head.weight),
                    "CPU seconds": seconds[name],
                }
            )
    return rows, rounding


def scale(model: Qwen3ForCausalLM, quick: bool, repeats: int) -> list[dict[str, Any]]:
    """The third table: over turns, then over batch sizes and lengths."""
    sizes = [{"turns": turns, "batch": 1, "thinking": 32} for turns in ((2, 4) if quick else (2, 4, 8, 16, 32, 64))]
    if not quick:
        sizes += [{"turns": 8, "batch": b, "thinking": t} for b in (1, 4) for t in (32, 128) if (b, t) != (1, 32)]
    rows = []
    for size in sizes:
        batch = build_batch(size["batch"], size["turns"], 1, thinking=size["thinking"])
        functions = {name: lambda batch=batch, name=name: run(model, name, batch)[1] for name in SCALED}
        logps = {name: function() for name, function in functions.items()}
        memory = {name: peak_memory(function, "cpu") for name, function in functions.items()}
        seconds = interleave(functions, repeats, time.process_time)
        for name in SCALED:
            error = rmse(logps[name], logps["turn by turn"])
            rows.append(size | {"method": name, "RMSE": error, "peak MiB": memory[name], "CPU seconds": seconds[name]})
    return rows


# Output


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """One rich table; of repeated seconds the median."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("method", "precision") else "right")
    for row in rows:
        table.add_row(*(_cell(column, value) for column, value in row.items()))
    Console(width=200).print(table)


def _cell(column: str, value: Any) -> str:
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, list):
        return f"{statistics.median(value):.3f}"
    if column == "CPU seconds":
        return f"{value:.2f}"
    return f"{value:.2%}" if column in ("top-1", "top-8", "mismatched") else f"{value:.2e}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time and memory over turns, one conversation."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for name in SCALED:
        points = [r for r in rows if r["method"] == name and (r["batch"], r["thinking"]) == (1, 32)]
        turns = [row["turns"] for row in points]
        panels[0].plot(turns, [statistics.median(row["CPU seconds"]) for row in points], marker="o", label=name)
        panels[1].plot(turns, [max(1, row["peak MiB"]) for row in points], marker="o", label=name)
    for panel, label in zip(panels, ("CPU seconds", "peak memory, MiB"), strict=True):
        panel.set(xlabel="turns", ylabel=label, xscale="log", yscale="log")
        panel.set_xticks(turns, turns)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, to see that it runs; nothing is written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # FlexAttention warns that it is not compiled
    kernels._compiled_flex = lambda device: kernels._uncompiled_flex  # compiled on GPUs only
    model, repeats = build_model(), 1 if quick else 3
    batches = [build_batch(1, 2 if quick else 8, seed, 96, 84, 24, 24) for seed in range(1 if quick else 13)]
    positions = sum(len(labels_of(batch)) for batch in batches)
    with torch.no_grad():
        table, rounding = accuracy(model, batches)
        show(f"Against turn by turn, {positions} action positions", table)
        between = [{"method": name} | distances for name, distances in rounding.items()]
        show("RMSE between the log-probs of two methods, bfloat16", between)
        scaling = scale(model, quick, repeats)
        show("Time, memory and accuracy, float32, no gradient", scaling)
    if not quick:
        settings = {"positions": positions, "conversations": len(batches), "turns": 8, "vocabulary": VOCABULARY}
        settings |= {"layers": 4, "hidden": 128, "seed": 0, "repeats": repeats, "threads": 1}
        write("methods", settings, table, rounding=rounding, scaling=scaling)
        plot(scaling, Path(__file__).parents[1] / "docs" / "images" / "methods.png")


if __name__ == "__main__":
    main()
