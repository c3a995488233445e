"""
Laying rows out as one tree: TRL's `TreeRow` against `mt_grpo.forward.packing.pack` on the same rows. TRL's row also
lists the keys that its attention gathers, so ours is timed once more with the layout that its attention reads.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import statistics
import time

import numpy as np
import torch
from common import write
from measure import WORKLOADS, interleave, ratio
from trl.experimental.async_grpo.packing import TreeRow

from mt_grpo.forward.attention import TreeLayout
from mt_grpo.forward.packing import FlatTree, Packed, pack

CALLS = 20
"""Calls of ours in one measurement, which alone would be too short to time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    results = []
    torch.set_num_threads(1)
    print("| workload | tokens | forwarded: TRL / ours | TRL, µs a token | ours, µs a token | ratio | with layout |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, make in WORKLOADS.items():
        rows = [row for trajectory in make() for row in trajectory]
        samples = [
            {
                "input_ids": torch.from_numpy(tokens),
                "completion_mask": torch.from_numpy(trained.astype(np.int64)),
                "old_log_probs": torch.zeros(len(tokens)),
                "advantage": 1.0,
                "group_id": 0,
            }
            for tokens, trained in rows
        ]
        trees = [FlatTree(tokens, np.where(trained, 0, -1)) for tokens, trained in rows]

        def theirs(samples: list[dict[str, object]] = samples) -> dict[str, torch.Tensor]:
            row = TreeRow()
            for sample in samples:
                row.add(sample)
            return row.pack()

        def ours(trees: list[FlatTree] = trees) -> None:
            for _ in range(CALLS):
                pack(trees)

        def ours_with_layout(trees: list[FlatTree] = trees) -> None:
            for _ in range(CALLS):
                TreeLayout(pack(trees), "segment")

        packed, reference = pack(trees), theirs()
        _check(packed, reference, [tokens for tokens, _ in rows], name)
        functions = {"trl": theirs, "ours": ours, "ours with layout": ours_with_layout}
        seconds = interleave(functions, args.repeats, time.process_time)
        for key in ("ours", "ours with layout"):
            seconds[key] = [value / CALLS for value in seconds[key]]
        tokens = sum(len(tokens) for tokens, _ in rows)
        ratios = {key: ratio(seconds, "trl", key) for key in ("ours", "ours with layout")}
        theirs_us, ours_us = (statistics.median(seconds[key]) / tokens * 1e6 for key in ("trl", "ours"))
        speeds = [f"{speed['median']:.0f} ({speed['minimum']:.0f})" for speed in ratios.values()]
        print(
            f"| {name} | {tokens} | {len(reference['input_ids'])} / {len(packed.input_ids)} | {theirs_us:.3f} "
            f"| {ours_us:.4f} | {speeds[0]} | {speeds[1]} |",
            flush=True,
        )
        results.append(
            {
                "workload": name,
                "tokens": tokens,
                "unique_tokens": len(packed.input_ids),
                "trl_tokens": len(reference["input_ids"]),
                "seconds": seconds,
                "ratio": ratios["ours"],
                "ratio with layout": ratios["ours with layout"],
            }
        )
    write("packing", {"seed": 0, "repeats": args.repeats}, results)


def _check(packed: Packed, reference: dict[str, torch.Tensor], rows: list[np.ndarray], name: str) -> None:
    """
    Both score the same tokens, each with the same history before it. TRL's tree has one more token at each fork, so
    indices differ and depths do not.
    """
    order = np.lexsort((packed.column, packed.tree))
    depths = reference["position_ids"][reference["token_index"]].numpy()
    assert np.array_equal(packed.tree[order], reference["segment_id"].numpy()), name
    assert np.array_equal(packed.column[order] - 1, depths), name
    assert np.array_equal(packed.position_ids[packed.predictor[order]], depths), name
    for tree, place, depth in zip(packed.tree, packed.predictor, packed.column - 1, strict=True):
        while place >= 0:
            assert packed.input_ids[place] == rows[tree][depth], name
            place, depth = packed.parent[place], depth - 1


if __name__ == "__main__":
    main()
