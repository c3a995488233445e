"""Laying rows out as one tree: TRL's `TreeRow` against `mt_grpo.training.packing.pack` on the same rows."""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import statistics
import time

import numpy as np
import torch
from measure import WORKLOADS, interleave, ratio, write
from trl.experimental.async_grpo.packing import TreeRow

from mt_grpo.training.packing import FlatTree, pack

CALLS = 20
"""Calls of ours in one measurement, which alone would be too short to time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    results = []
    print("| workload | tokens | unique | TreeRow, µs a token | ours, µs a token | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
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

        packed, reference = pack(trees), theirs()
        # TRL's tree has one more token at each fork; the scored ones must be the same
        assert len(packed.label) == len(reference["token_index"]), name
        seconds = interleave(
            {"trl": theirs, "ours": lambda trees=trees: [pack(trees) for _ in range(CALLS)]},
            args.repeats,
            time.process_time,
        )
        seconds["ours"] = [value / CALLS for value in seconds["ours"]]
        tokens = sum(len(tokens) for tokens, _ in rows)
        speed = ratio(seconds, "trl", "ours")
        theirs_us, ours_us = (statistics.median(seconds[key]) / tokens * 1e6 for key in ("trl", "ours"))
        print(
            f"| {name} | {tokens} | {len(packed.input_ids)} | {theirs_us:.3f} | {ours_us:.4f} "
            f"| {speed['median']:.0f} (min {speed['minimum']:.0f}) |",
            flush=True,
        )
        results.append(
            {
                "workload": name,
                "tokens": tokens,
                "unique_tokens": len(packed.input_ids),
                "trl_tokens": len(reference["input_ids"]),
                "seconds": seconds,
                "ratio": speed,
            }
        )
    write("packing", {"seed": 0, "repeats": args.repeats}, results)


if __name__ == "__main__":
    main()
