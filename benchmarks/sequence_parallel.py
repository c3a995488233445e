"""
What a forward keeps for its backward, on one process and on each of several that compute the same conversation
together (`sp_size`). Loss and gradient are compared first.

    python benchmarks/sequence_parallel.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.distributed as dist
from common import write
from measure import Row, extension_rows, stripped_rows
from step import SHAPES, build_model, difference
from transformers import Qwen3ForCausalLM

from mt_grpo.forward.model import ForwardPlan, _score_packed, enable_trees
from mt_grpo.forward.packing import FlatTree, Packed, SequenceGroup, pack

CONVERSATIONS: dict[str, Callable[[], list[list[Row]]]] = {
    "prompt 512, 12 turns, extension holds": lambda: extension_rows(512, 1, 12),
    "prompt 2048, 2 turns, extension holds": lambda: extension_rows(2048, 1, 2),
    "prompt 512, 6 turns, thinking stripped": lambda: stripped_rows(512, 1, 6),
}
BOUND = 1e-5
"""Relative difference of the gradients above which a ratio is void."""


class Kept:
    """
    What is kept for a backward, in bytes: tensors that autograd saves, each storage once, without the parameters', and
    the logits that our output layer keeps of its last chunk.
    """

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._storages: dict[int, int] = {}
        self._seen: set[Any] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._parameters:
                self._storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def bytes(self, loss: torch.Tensor) -> int:
        """After the forward, whose graph is looked through for logits."""
        left = [loss.grad_fn]
        while left:
            node = left.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            last = getattr(node, "last", None)  # only the output layer's node has one
            if last is not None:
                self._storages[last.untyped_storage().data_ptr()] = last.untyped_storage().nbytes()
            left += [following for following, _ in node.next_functions]
        return sum(self._storages.values())


def step(model: Qwen3ForCausalLM, packed: Packed, sequence: SequenceGroup | None) -> tuple[torch.Tensor, list, int]:
    """Loss, gradient summed over the processes, and bytes that were kept."""
    model.zero_grad()
    kept = Kept(model)
    with kept.watching():
        found = _score_packed(model, packed, ForwardPlan(group=sequence))
        loss = -(found.logps * torch.linspace(-1, 1, len(found.logps))).mean() + found.entropies.mean()
    size = kept.bytes(loss)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    if sequence is not None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=sequence.group)
    return loss.detach(), gradients, size


def work(rank: int, processes: int, folder: str, quick: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
    torch.set_num_threads(1)
    sequence = SequenceGroup.of_neighbours(processes, torch.device("cpu"))
    model = build_model("cpu", "cpu")
    enable_trees(model)
    model.train()
    results = []
    for name, make in list(CONVERSATIONS.items())[-1 if quick else 0 :]:
        sequences = [row for trajectory in make() for row in trajectory]
        packed = pack([FlatTree(tokens, np.where(trained, 0, -1)) for tokens, trained in sequences])
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()
            (loss, theirs, alone), (shared_loss, ours, here) = (
                step(model, packed, group) for group in (None, sequence)
            )
            gap = difference(ours, theirs)
            if gap > BOUND:
                raise SystemExit(f"{name}: the gradients differ by {gap:.1e}; a ratio would be void.")
            most = max(sequence.gather(here))
            results.append(
                {
                    "conversation": name,
                    "processes": processes,
                    "gradient_checkpointing": checkpointing,
                    "tokens": len(packed.input_ids),
                    "trained_tokens": len(packed.label),
                    "bytes_of_one": alone,
                    "bytes_of_each": sequence.gather(here),
                    "ratio": most / alone,
                    "loss_difference": float((shared_loss - loss).abs() / loss.abs()),
                    "gradient_difference": gap,
                }
            )
    if rank == 0:
        torch.save(results, f"{folder}/results")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two processes, one conversation; writes no results")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    print("| conversation | tokens | checkpointing | processes | MiB, one / each | ratio | gradient |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for processes in (2,) if args.quick else (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            # nothing has run here that a fork may not have behind it, and it need not import all of this again
            given = processes, folder, args.quick
            torch.multiprocessing.start_processes(work, given, nprocs=processes, start_method="fork")
            rows = torch.load(f"{folder}/results")
        for row in rows:
            mebibytes = [size / 2**20 for size in (row["bytes_of_one"], max(row["bytes_of_each"]))]
            print(
                f"| {row['conversation']} | {row['tokens']} | {'yes' if row['gradient_checkpointing'] else 'no'} "
                f"| {processes} | {mebibytes[0]:.1f} / {mebibytes[1]:.1f} | {row['ratio']:.2f} "
                f"| {row['gradient_difference']:.0e} |",
                flush=True,
            )
        results += rows
    if not args.quick:
        write("sequence_parallel", {"shape": SHAPES["cpu"], "seed": 0, "backend": "gloo", "dtype": "float32"}, results)


if __name__ == "__main__":
    main()
