"""
Routes of a mixture, replayed in training: what they take away of the difference between sampler and trainer, whose
routers round differently, and what they cost.

    python benchmarks/router_replay.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write
from measure import interleave

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.mixtures import Flips, build_mixture

from mt_grpo.forward import token_logps
from mt_grpo.forward.routes import Recorder, route_shape
from mt_grpo.token_tree import Routes, TokenTree

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_experts": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
}
FLIPS = 0.003
"""Rounding of a router's scores, in units of probability: a few in a hundred choices differ."""


def conversations(model: Any, turns: int, context: int, action: int, group: int) -> list[TokenTree]:
    """Conversations of a group, as if the model had sampled them, with routers that flip."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(2000, size=context).tolist()
    trees = []
    for _ in range(group):
        history, spans = list(prompt), []
        for turn in range(turns):
            spans.append((len(history), len(history) + action))
            history += draw.integers(2000, size=action + context * (turn < turns - 1)).tolist()
        with torch.no_grad(), Flips(route_shape(model.config).experts, FLIPS), Recorder(model) as recorder:
            logits = model(torch.tensor([history])).logits[0, :-1]
        logps = logits.log_softmax(-1).gather(1, torch.tensor(history[1:])[:, None])[:, 0].tolist()
        routes, tree = recorder.routes(1)[0][:-1], TokenTree()
        for begin, end in spans:
            given = Routes(tree.routed, routes.shape[1], routes[tree.routed : end - 1].tobytes())
            sampled = history[begin:end], logps[begin - 1 : end - 1], given
            if begin == spans[0][0]:
                tree.add_turn(history[:begin], *sampled)
            else:
                tree.extend(history[begin - context : begin], *sampled)
        trees.append(tree)
    return trees


def without(trees: list[TokenTree]) -> list[TokenTree]:
    """The same trees without routes."""
    copies = [tree.fork() for tree in trees]
    for tree in copies:
        for node in tree.nodes:
            node.routes = b""
    return copies


def difference(model: Any, trees: list[TokenTree]) -> list[float]:
    """Of each sampled token, |log-prob of the engine - log-prob of the trainer|, in nats."""
    found = []
    for tree, turns in zip(trees, token_logps(model, trees), strict=True):
        for turn, logps in enumerate(turns):
            sampled = [value for node in tree.nodes if node.turn == turn for value in node.logprobs]
            found += (logps - torch.tensor(sampled)).abs().tolist()
    return found


def measure(name: str, repeats: int) -> dict[str, Any]:
    model = build_mixture(name, 2048, **SIZES)
    routed = conversations(model, turns=4, context=96, action=48, group=4)
    plain = without(routed)

    def step(trees: list[TokenTree]) -> None:
        model.zero_grad()
        sum(logps.sum() for turns in token_logps(model, trees) for logps in turns).backward()

    with torch.no_grad():
        apart = {key: difference(model, trees) for key, trees in (("replay", routed), ("none", plain))}
        counts = model._replayer.take_counts()
    steps = {"none": lambda: step(plain), "replay": lambda: step(routed)}
    times = interleave(steps, repeats, time.process_time)
    row = {
        "model": name,
        "bytes per token": route_shape(model.config).width,
        "choices that differ": round(float(counts.differing / counts.routed), 4),
        **{
            f"{key}: {what} difference": float(f"{function(values):.2g}")
            for key, values in apart.items()
            for what, function in (("mean", statistics.mean), ("largest", max))
        },
        "step, replay / none": round(
            statistics.median(one / other for one, other in zip(times["replay"], times["none"], strict=True)), 3
        ),
    }
    print(row, flush=True)
    return row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    torch.set_num_threads(1)
    parser.add_argument("--quick", action="store_true", help="one model, one repeat; writes no results")
    options = parser.parse_args(argv)
    models, repeats = (("mixtral",), 1) if options.quick else (("qwen3_moe", "mixtral"), 25)
    rows = [measure(name, repeats) for name in models]
    if not options.quick:
        write("router_replay", {"device": "cpu", "dtype": "float32", "rounding of scores": FLIPS}, rows)


if __name__ == "__main__":
    main()
