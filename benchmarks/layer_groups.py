"""
What a forward keeps for its backward, the most that both take, and their time, with gradient checkpointing of layers
in groups that keep one input between them (`gradient_checkpointing_layers`). Gradients are compared first.

    python benchmarks/layer_groups.py
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from itertools import accumulate
from time import process_time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from common import write
from measure import extension_rows, interleave
from step import BOUND, difference
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from mt_grpo.doctor.step_time import recomputed
from mt_grpo.forward.model import _score_packed, enable_trees
from mt_grpo.forward.packing import FlatTree, Packed, pack
from mt_grpo.training.model import _layers_in_groups

SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2}
GROUPS = (1, 2, 4, 6, 9, 18, 36)
VOCABULARY = 256
"""Small, so that the logits of a chunk are not most of what is there."""


def build_model(layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPE, head_dim=32, num_hidden_layers=layers, vocab_size=VOCABULARY, tie_word_embeddings=True
    )
    model = Qwen3ForCausalLM(config).train()
    enable_trees(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of(model: Qwen3ForCausalLM, packed: Packed, size: int) -> torch.Tensor:
    with _layers_in_groups(model, size):
        found = _score_packed(model, packed)
    return -(found.logps * torch.linspace(-1, 1, len(found.logps))).mean()


def step(model: Qwen3ForCausalLM, packed: Packed, size: int) -> None:
    loss_of(model, packed, size).backward()


def gradients(model: Qwen3ForCausalLM, packed: Packed, size: int) -> list[torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # of no step's memory
    step(model, packed, size)
    return [parameter.grad.clone() for parameter in model.parameters()]


def allocated(function: Callable[[], Any]) -> tuple[float, float]:
    """MiB that torch has allocated more than before: after a call, while what it returns is there, and at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        held = function()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    del held
    return sum(sizes) / 2**20, max(accumulate(sizes)) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six layers, one repeat; writes no results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    layers, prompt, turns, repeats = (6, 64, 2, 1) if args.quick else (36, 512, 6, 3)
    model = build_model(layers)
    sequences = [row for trajectory in extension_rows(prompt, 1, turns, vocabulary=VOCABULARY) for row in trajectory]
    packed = pack([FlatTree(tokens, np.where(trained, 0, -1)) for tokens, trained in sequences])
    groups = [size for size in GROUPS if size <= layers]
    expected = gradients(model, packed, 1)
    gaps = {size: difference(gradients(model, packed, size), expected) for size in groups}
    worst = max(gaps.values())
    if worst > BOUND["cpu"]:
        raise SystemExit(f"The gradients differ by {worst:.1e}; a ratio would be void.")
    kept = {size: allocated(lambda size=size: loss_of(model, packed, size))[0] for size in groups}
    peaks = {size: allocated(lambda size=size: step(model, packed, size))[1] for size in groups}
    seconds = interleave(
        {str(size): lambda size=size: step(model, packed, size) for size in groups}, repeats, process_time
    )
    alone = statistics.median(seconds["1"])
    print(f"{layers} layers, {len(packed.input_ids)} tokens\n")
    print("| layers of a group | MiB kept | MiB at most | time | planned | gradient |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = []
    for size in groups:
        ratio, planned = statistics.median(seconds[str(size)]) / alone, recomputed(True, size) / recomputed(True, 1)
        rows.append(
            {
                "layers_of_a_group": size,
                "mib_kept": kept[size],
                "mib_at_most": peaks[size],
                "ratio_of_memory": peaks[size] / peaks[1],
                "ratio_of_time": ratio,
                "planned_ratio_of_time": planned,
                "gradient_difference": gaps[size],
            }
        )
        print(
            f"| {size} | {kept[size]:.1f} | {peaks[size]:.1f} | {ratio:.2f} | {planned:.2f} | {gaps[size]:.0e} |",
            flush=True,
        )
    if not args.quick:
        settings = {"shape": SHAPE, "layers": layers, "tokens": len(packed.input_ids), "seed": 0, "repeats": repeats}
        write("layer_groups", {**settings, "threads": 1, "clock": "process", "dtype": "float32"}, rows)


if __name__ == "__main__":
    main()
