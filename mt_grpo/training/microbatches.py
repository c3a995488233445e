"""Which process trains which rows in which micro-batch, so that none waits long for another."""

from __future__ import annotations

import heapq
import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOTrainer

from mt_grpo.forward.packing import unique_tokens
from mt_grpo.forward.routes import NO_ROUTE
from mt_grpo.forward.sequence_parallel import SequenceGroup
from mt_grpo.training.rollout_batch import IMAGES, Columns, batch_trees


def rebalance(batches: Sequence[Columns], group_size: int) -> list[Columns]:
    """
    Distributes the rows of all ranks over micro-batches again: a group's in one, where they share their prompt, with
    about as many unique tokens in each. Every rank keeps its number of rows and micro-batches. Columns move only if
    micro-batches hold whole groups, or a group whole micro-batches.
    """
    state = PartialState()
    size = len(batches[0]["group_ids"])
    rows: Columns = {
        key: torch.cat([batch[key] for batch in batches])
        for key, value in batches[0].items()
        if isinstance(value, Tensor) and value.dim()
    }
    images = [row for batch in batches for row in batch.get(IMAGES) or [{}] * size]
    if any(images):
        rows[IMAGES] = images
    order = rows["group_ids"].argsort(stable=True)
    if size % group_size and group_size % size:
        mine = [_take(rows, order)]
    else:
        pieces = [_take(rows, part) for part in order.split(min(size, group_size))]
        tokens = [unique_tokens(batch_trees(piece)) for piece in pieces]
        weights = gather(torch.tensor(tokens, device=order.device)).tolist()
        plan = _assign(weights, state.num_processes, len(batches))
        first = state.process_index * len(pieces)
        parcels: list[dict[int, Columns]] = [
            {piece: pieces[piece - first] for step in plan for piece in step[rank] if 0 <= piece - first < len(pieces)}
            for rank in range(state.num_processes)
        ]
        received = {piece: part for parcel in _exchange(parcels, order.device) for piece, part in parcel.items()}
        mine = [received[piece] for step in plan for piece in step[state.process_index]]
    dealt = _join(mine)
    rest = {key: value for key, value in batches[0].items() if key not in (*rows, IMAGES)}
    return [
        {**rest, **{key: value[step * size : (step + 1) * size] for key, value in dealt.items()}}
        for step in range(len(batches))
    ]


def _assign(weights: Sequence[float], ranks: int, steps: int) -> list[list[list[int]]]:
    """Assigns pieces of work to micro-steps, and within each to ranks."""

    def cost(bin: list[int]) -> float:
        return sum(weights[piece] for piece in bin)

    bins = sorted(_balance(weights, ranks * steps), key=cost, reverse=True)
    loads, plan = [0.0] * ranks, []
    for start in range(0, len(bins), ranks):
        step: list[list[int]] = [[]] * ranks
        idlest = sorted(range(ranks), key=loads.__getitem__)
        for rank, bin in zip(idlest, bins[start:], strict=False):
            step[rank] = bin
            loads[rank] += cost(bin)
        plan.append(step)
    # in the order of the prompts: long conversations must not all come in the first optimiser step
    return sorted(plan, key=lambda step: min(map(min, step)))


def _exchange(parcels: list[Any], device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Sends `parcels[rank]` to each rank of a group; returns those for this rank, with tensors on `device`."""
    if len(parcels) == 1:
        return parcels
    blobs = []
    for parcel in parcels:
        buffer = io.BytesIO()
        torch.save(parcel, buffer)
        blobs.append(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))
    sizes = torch.tensor([len(blob) for blob in blobs], device=device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    arrived = torch.empty(int(coming.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(arrived, torch.cat(blobs).to(device), coming.tolist(), sizes.tolist(), group)
    return [
        torch.load(io.BytesIO(part.numpy().tobytes()), map_location=device, weights_only=True)
        for part in arrived.cpu().split(coming.tolist())
    ]


def _take(rows: Columns, index: Tensor) -> Columns:
    """Takes some rows, without padding that none of them needs."""
    prompt = int(rows["prompt_mask"][index].sum(dim=1).max())
    completion = int(rows["completion_mask"][index].sum(dim=1).max())
    taken: Columns = {}
    for key, value in rows.items():
        if key == IMAGES:
            taken[key] = [value[row] for row in index.tolist()]
            continue
        part = value[index]
        if key.startswith("prompt_"):
            part = part[:, part.size(1) - prompt :].clone()
        elif value.shape[:2] == rows["completion_ids"].shape:
            part = part[:, :completion].clone()
        taken[key] = part
    return taken


def _join(pieces: list[Columns]) -> Columns:
    images = [row for piece in pieces for row in piece.pop(IMAGES, [{}] * len(piece["group_ids"]))]
    if any("parent" in piece for piece in pieces):  # a rank on which no history was rewritten sent none
        for piece in pieces:
            chain = torch.arange(piece["completion_ids"].size(1), device=piece["completion_ids"].device) - 1
            piece.setdefault("parent", chain.expand_as(piece["completion_ids"]))
    for name, ids in (("prompt_routes", "prompt_ids"), ("routes", "completion_ids")):
        sent = [piece[name] for piece in pieces if name in piece]
        for piece in pieces if sent else []:  # a rank whose conversations all failed sent none
            piece.setdefault(name, sent[0].new_full((*piece[ids].shape, sent[0].size(2)), NO_ROUTE))
    # TRL pads ratios with 1, and its VESPO multiplies those of the padding too
    fills = {"importance_sampling_ratio": 1.0, "prompt_routes": NO_ROUTE, "routes": NO_ROUTE}
    joined: Columns = {
        key: _stack([piece[key] for piece in pieces], key.startswith("prompt_"), fills.get(key, 0.0))
        for key in pieces[0]
    }
    return {**joined, IMAGES: images} if any(images) else joined


def _stack(parts: list[Tensor], left: bool, fill: float) -> Tensor:
    """Stacks rows. Narrower ones are padded with `fill`, prompts on the left."""
    if parts[0].dim() == 1:
        return torch.cat(parts)
    width = max(part.size(1) for part in parts)

    def widened(part: Tensor) -> Tensor:
        more = width - part.size(1)
        return torch.nn.functional.pad(part, (*(0, 0) * (part.dim() - 2), more * left, more * (not left)), value=fill)

    return torch.cat([widened(part) for part in parts])


def _balance(weights: Sequence[float], num_bins: int) -> list[list[int]]:
    """Distributes items over bins of equal count, the largest to the lightest (Graham's rule with a cap)."""
    room = -(-len(weights) // num_bins)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, bin) for bin in range(num_bins)]
    full = len(weights) - num_bins * (room - 1)  # how many bins may hold `room` items, the rest one fewer
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        load, bin = heapq.heappop(heap)
        while len(bins[bin]) == room - 1 and full == 0:
            load, bin = heapq.heappop(heap)
        full -= len(bins[bin]) == room - 1
        bins[bin].append(item)
        if len(bins[bin]) < room:
            heapq.heappush(heap, (load + weights[item], bin))
    return bins


def loss_of_group(
    trainer: GRPOTrainer, model: nn.Module, inputs: Columns, loss_of: Callable[[dict[str, Any]], Tensor]
) -> Tensor:
    """
    The loss of this process's micro-batch, after the backward of all but the last one of its group. The processes
    compute their micro-batches one after the other, each a share of its tokens; summed over processes, gradients are
    those of all.
    """
    group: SequenceGroup = trainer.forwards.plan.group
    parts = _exchange([inputs] * group.size, inputs["completion_ids"].device, group.group)
    for part in parts:
        part.pop("row_ids", None)  # the process that has a row takes note of it
    parts[group.rank] = inputs
    losses = []
    for number, part in enumerate(parts, start=1):
        # DDP sums gradients once, FSDP2 after each backward, so that whole gradients are not kept
        with model.no_sync() if number < group.size and isinstance(model, DistributedDataParallel) else nullcontext():
            loss = loss_of(part)
            losses.append(loss.detach())
            if number < group.size:
                trainer.accelerator.backward(loss)  # TRL's loss is divided by the steps of accumulation already
    return loss + (losses[group.rank] - loss.detach())
