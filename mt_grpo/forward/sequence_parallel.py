"""
One packed row over several processes, as DeepSpeed-Ulysses has it (Jacobs et al. 2023).

Each process computes embedding, norms and MLPs for its share of the row's tokens, and the output layer for its share
of the labels. For the core of attention it gets all tokens of a share of the heads, and gives their outputs back. So
attention sees the whole tree, by the same mask and the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd, prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh

from mt_grpo.errors import UnsupportedModelError


class SequenceGroup:
    """The processes that compute a row together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @classmethod
    def of_neighbours(cls, size: int, device: torch.device) -> SequenceGroup:
        """The group of `size` ranks in a row, as accelerate's `sp_size` makes it. This is a collective call."""
        mesh = init_device_mesh(device.type, (dist.get_world_size() // size, size), mesh_dim_names=("dp", "sp"))
        return cls(mesh.get_group("sp"))

    def gather(self, thing: object) -> list[Any]:
        """What each process of the group brings, by rank. This is a collective call of the group."""
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, self.group)
        return things


@dataclass(frozen=True, eq=False)
class Share:
    """A packed row's tokens that this process computes: those in a row, as many as other processes have."""

    group: SequenceGroup
    length: int

    @cached_property
    def sizes(self) -> list[int]:
        """How many tokens each process computes."""
        return _evenly(self.length, self.group.size)

    @property
    def tokens(self) -> slice:
        """Where in the row the tokens of this process are."""
        ends = list(accumulate(self.sizes))
        return slice(ends[self.group.rank] - self.sizes[self.group.rank], ends[self.group.rank])

    def labels(self, predictor: np.ndarray) -> Labels:
        """Which processes have and score labels that are predicted by given tokens, `(M,)`, of the row."""
        process = np.searchsorted(np.cumsum(self.sizes), predictor, side="right")
        had = np.bincount(process, minlength=self.group.size).tolist()
        return Labels(self.group, np.argsort(process, kind="stable"), had, _evenly(len(predictor), self.group.size))

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From all heads of this process's tokens to all tokens of its heads; too few key-value heads are repeated."""
        heads, size = query.size(1), self.group.size
        if heads % size:
            raise UnsupportedModelError(
                f"A layer has {heads} attention heads, which {size} processes cannot share equally: leave `sp_size` "
                "out."
            )
        copies = size // gcd(key.size(1), size)
        if copies > 1:
            key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
        query, key, value = self._move(True, query, key, value)
        return query, key, value

    def to_tokens(self, output: Tensor) -> Tensor:
        """`(1, heads of this process, N, head_dim)` of all tokens to `(1, heads, n, head_dim)` of this process's."""
        return self._move(False, output)[0]

    def _move(self, to_heads: bool, *tensors: Tensor) -> list[Tensor]:
        """By one exchange for several tensors, so that all processes make them in one order."""
        leaving: list[Sequence[Tensor]] = []  # per tensor and process
        arriving: list[list[tuple[int, int, int]]] = []
        for (rows,) in tensors:
            heads, _, width = rows.shape
            if to_heads:
                heads //= self.group.size
                leaving.append(rows.split(heads))
                arriving.append([(heads, size, width) for size in self.sizes])
            else:
                leaving.append(rows.split(self.sizes, dim=1))
                arriving.append([(heads, self.sizes[self.group.rank], width)] * self.group.size)
        sent = [torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*leaving, strict=True)]
        shapes = [shape for of_process in zip(*arriving, strict=True) for shape in of_process]
        sizes = [prod(shape) for shape in shapes]
        counts = [sum(sizes[start : start + len(tensors)]) for start in range(0, len(sizes), len(tensors))]
        pieces = _exchanged(self.group, list(map(len, sent)), counts, torch.cat(sent)).split(sizes)
        parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        dim = 1 if to_heads else 0
        return [torch.cat(parts[number :: len(tensors)], dim=dim)[None] for number in range(len(tensors))]

    def of_heads(self, values: Tensor) -> Tensor:
        """Of `(heads,)` those of this process's heads."""
        mine: Tensor = values.chunk(self.group.size)[self.group.rank]
        return mine


@dataclass(frozen=True, eq=False)
class Labels:
    """The `M` labels of a row: states are sent on, so that every process scores as many."""

    group: SequenceGroup
    order: np.ndarray
    had: list[int]
    scored: list[int]

    def of(self, counts: list[int]) -> np.ndarray:
        """Those of this process, by `had` or `scored`."""
        end = sum(counts[: self.group.rank + 1])
        return self.order[end - counts[self.group.rank] : end]

    def deal(self, states: Tensor) -> Tensor:
        """Redistributes hidden states, `(m, hidden)`, from the ranks that predict labels to those that score them."""
        rank = self.group.rank
        leaving, coming = _overlaps(self.had, self.scored)[rank], _overlaps(self.scored, self.had)[rank]
        return _exchanged(self.group, leaving, coming, states)

    def join(self, scores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All scores, `(M,)`, on every process; the gradient is that of a loss that each computes."""
        mine, stacked = self.of(self.scored), torch.stack(list(scores))
        joined: Tensor = _Join.apply(self.group, len(self.order), mine, stacked)  # type: ignore[no-untyped-call]
        return joined.unbind()


def _evenly(number: int, parts: int) -> list[int]:
    """Sizes of as equal parts as there can be."""
    least, more = divmod(number, parts)
    return [least + (part < more) for part in range(parts)]


def _overlaps(one: list[int], other: list[int]) -> list[list[int]]:
    """How much each part of one partition has of each part of another."""
    ends, others = list(accumulate(one)), list(accumulate(other))
    return [
        [max(0, min(end, stop) - max(end - size, stop - width)) for stop, width in zip(others, other, strict=True)]
        for end, size in zip(ends, one, strict=True)
    ]


def _exchanged(group: SequenceGroup, leaving: list[int], coming: list[int], rows: Tensor) -> Tensor:
    """The rows that other processes send, for those that this one sends to each; gradients go the way back."""
    exchanged: Tensor = _Exchange.apply(group, leaving, coming, rows)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, leaving: list[int], coming: list[int], rows: Tensor) -> Tensor:
        ctx.group, ctx.leaving, ctx.coming = group, leaving, coming
        arrived = rows.new_empty(sum(coming), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), coming, leaving, group.group)
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, None, _exchanged(ctx.group, ctx.coming, ctx.leaving, gradient)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, number: int, mine: np.ndarray, scores: Tensor) -> Tensor:
        ctx.mine = torch.from_numpy(mine).to(scores.device)
        joined = scores.new_zeros(len(scores), number)
        joined[:, ctx.mine] = scores
        dist.all_reduce(joined, group=group.group)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, None, gradient[:, ctx.mine]
