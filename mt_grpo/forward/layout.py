"""Which token sees which in a packed row, the masks for it, and the order in which recurrences run over it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mt_grpo.forward.packing import Packed
from mt_grpo.forward.sequence_parallel import SequenceGroup, Share


@dataclass(frozen=True)
class Chunk:
    """Chunked attention: a token sees its own chunk only (Llama 4)."""

    size: int


Window = int | Chunk | None
"""What a layer sees of a token's ancestors: the last `int` tokens, itself included, those of its chunk, or all."""


def oldest(depth: np.ndarray, window: Window) -> np.ndarray:
    """The smallest depth that tokens at given depths see. It never falls where depth rises."""
    if window is None:
        return np.zeros_like(depth)
    if isinstance(window, Chunk):
        begins: np.ndarray = depth // window.size * window.size
        return begins
    first: np.ndarray = np.maximum(0, depth - window + 1)
    return first


BLOCK = 128
"""Side of a block of FlexAttention's mask, in tokens."""

MASK_ELEMENTS = 2**24
"""Entries of the mask that a row's chains share: 64 MiB in float32, however long the row is."""

FEWEST_QUERIES = 16
"""Queries that attend at once at least: rows of more than a million tokens take larger masks."""


class _Piece(NamedTuple):
    """Queries that attend at once, by their depth."""

    begin: int
    end: int
    first: int
    causal: bool


class TreeLayout:
    """
    Which token sees which in a packed row of `N` tokens.

    Masks are made on the device of the queries, which may differ between layers, and are kept.
    """

    def __init__(self, packed: Packed, attention: str = "auto", sequence: SequenceGroup | None = None) -> None:
        self.subtree_end, self.depth = packed.subtree_end, packed.position_ids
        self.size = len(packed.subtree_end)
        self.share = None if sequence is None else Share(sequence, self.size)
        """The tokens that this process computes, where several compute the row."""
        self.layers: set[int | None] = set()
        """Layers whose attention was called with this layout."""
        self.choose: Callable[[int, Tensor], Tensor] | None = None
        """What routers choose by: a layer and the experts that its router would choose, `(N, k)`, to experts."""
        indices = np.arange(self.size)
        # a chain continues while the next token is the only child
        begins = packed.parent != indices - 1
        begins[1:] |= self.subtree_end[1:] != self.subtree_end[:-1]
        begins[:1] = True
        self.starts = begins.nonzero()[0]
        self.sizes = np.diff(np.array([*self.starts, self.size]))
        self._parent = packed.parent
        parents = np.searchsorted(self.starts, packed.parent[self.starts], side="right") - 1  # -1 for a root
        self._parents: list[int] = parents.tolist()
        self.paths: list[list[int]] = []
        """Per chain, the chains from the root to it, including itself."""
        for chain, parent in enumerate(self._parents):
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), chain])
        self._attention = attention
        self._dense: dict[tuple[torch.device, Window], Tensor] = {}
        self._triangles: dict[tuple[torch.device, torch.dtype, Window], tuple[int, Tensor]] = {}
        self._blocks: dict[tuple[torch.device, Window], BlockMask] = {}

    @cached_property
    def schedule(self) -> Schedule:
        """In which order a recurrence runs over the chains."""
        return Schedule(self.starts, self.sizes, self._parents, self._parent)

    def attention(self, device: torch.device, dropout: float = 0.0) -> str:
        """The kernel for queries on `device`; FlexAttention drops no weights."""
        if self._attention != "auto":
            return self._attention
        return "flex" if device.type == "cuda" and not dropout else "segment"

    def dense_mask(self, device: torch.device, window: Window) -> Tensor:
        """`(N, N)` bool, queries by keys."""
        key = (device, window)
        if key not in self._dense:
            arrays = (np.arange(self.size), self.subtree_end, self.depth, oldest(self.depth, window))
            index, last, depth, first = (torch.from_numpy(array).to(device) for array in arrays)
            mask = (index[:, None] >= index) & (index[:, None] <= last)
            if window is not None:
                mask &= depth >= first[:, None]
            self._dense[key] = mask
        return self._dense[key]

    def pieces(self, chain: int, window: Window, most: int, masked: bool) -> Iterator[_Piece]:
        """A chain's queries, in parts that attend at once; each begins where a chunk does, so none is in two."""
        begin = int(self.depth[self.starts[chain]])
        end = begin + int(self.sizes[chain])
        while begin < end:
            first = int(oldest(np.array([begin]), window)[0])
            stop = min(end, first + window.size) if isinstance(window, Chunk) else end
            causal = first == begin and (not isinstance(window, int) or stop - begin <= window) and not masked
            stop = stop if causal else min(stop, begin + most)
            yield _Piece(begin, stop, first, causal)
            begin = stop

    def most_queries(self, window: Window, heads: int = 1) -> int:
        """How many queries attend at once, so that scores of `heads` heads have about `MASK_ELEMENTS` entries."""
        longest = int(self.depth.max()) + 1
        keys = longest if window is None else min(longest, window.size if isinstance(window, Chunk) else window)
        return max(FEWEST_QUERIES, min(isqrt(MASK_ELEMENTS // heads), MASK_ELEMENTS // heads // keys))

    def piece_mask(self, device: torch.device, dtype: torch.dtype, window: Window, piece: _Piece) -> Tensor:
        """
        Additive mask of a piece's queries over its keys. All pieces read one matrix: where `P` keys come before the
        first query, the columns in which query `i` sees up to key `P + i`. It has a row for each token of the longest
        chain, or for as many as attend at once.
        """
        reach = window if isinstance(window, int) else None
        key = (device, dtype, window)
        if key not in self._triangles:
            rows, before = min(self.most_queries(window), int(self.sizes.max())), int(self.depth.max())
            before = before if window is None else min(before, window.size if isinstance(window, Chunk) else window)
            hidden = torch.full((rows, before + rows), float("-inf"), dtype=dtype, device=device)
            later = hidden.triu(before + 1)
            self._triangles[key] = before, later if reach is None else later + hidden.tril(before - reach)
        before, mask = self._triangles[key]
        rows, earlier = piece.end - piece.begin, piece.begin - piece.first
        return mask[:rows, before - earlier : before + rows]

    def block_mask(self, device: torch.device, window: Window) -> BlockMask:
        """FlexAttention's mask, made from the extremes of two vectors in each block, without the `(N, N)` mask."""
        key = (device, window)
        if key not in self._blocks:
            self._blocks[key] = self._block_mask(device, window)
        return self._blocks[key]

    def _block_mask(self, device: torch.device, window: Window) -> BlockMask:
        blocks = -(-self.size // BLOCK)
        padding = (0, blocks * BLOCK - self.size)
        last = np.pad(self.subtree_end, padding, constant_values=-1).reshape(blocks, BLOCK)
        depth = np.pad(self.depth, padding, mode="edge").reshape(blocks, BLOCK)
        number = np.arange(blocks)
        query, key = number[:, None], number[None, :]
        some = (query >= key) & (query * BLOCK <= last.max(axis=1)[None, :])
        every = (query > key) & ((query + 1) * BLOCK - 1 <= last.min(axis=1)[None, :])
        if window is not None:
            some &= depth.max(axis=1)[None, :] >= oldest(depth.min(axis=1), window)[:, None]
            every &= depth.min(axis=1)[None, :] >= oldest(depth.max(axis=1), window)[:, None]

        def chosen(which: np.ndarray) -> tuple[Tensor, Tensor]:
            count = torch.from_numpy(which.sum(axis=1).astype(np.int32))
            order = torch.from_numpy(np.argsort(~which, axis=1, kind="stable").astype(np.int32))
            return count[None, None].to(device), order[None, None].to(device)

        partial, full = chosen(some & ~every), chosen(every)
        ends = torch.from_numpy(last.reshape(-1)).to(device)
        depths = torch.from_numpy(depth.reshape(-1)).to(device)
        firsts = torch.from_numpy(oldest(depth.reshape(-1), window)).to(device)

        def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q <= ends[k])

        def visible_in_window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q <= ends[k]) & (depths[k] >= firsts[q])

        rule = visible if window is None else visible_in_window
        size = (self.size, self.size)
        return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=size)


CURRENT: ContextVar[TreeLayout | None] = ContextVar("tree_layout", default=None)
"""The layout of the row whose forward runs, or is computed again for its gradient."""


_SHORT = 64
"""Chains of up to this many tokens may be in one batch. Longer ones are in one batch if none is twice as long."""

Step = Callable[[list[Tensor], Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""
`(inputs, states, continued) -> (outputs, final states)`: inputs and outputs `(B, L, ...)`, states `(B, ...)` or `None`
for zeros. Final states are needed if the chains are `continued`.
"""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Chains that run side by side, padded on the right."""

    chains: list[int]
    parents: list[int]
    shape: tuple[int, int]
    tokens: int
    padded: np.ndarray
    kept: np.ndarray


class Schedule:
    """The order of a row's `C` chains: those that others continue level by level, then all others side by side."""

    def __init__(self, starts: np.ndarray, sizes: np.ndarray, parents: list[int], parent: np.ndarray) -> None:
        self._starts, self._sizes, self._parent = starts, sizes, parent
        self._continued = set(parents)
        levels: list[int] = []
        for above in parents:  # a chain stands before those that continue it
            levels.append(levels[above] + 1 if above >= 0 else 0)
        last = len(parents)
        groups: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
        for chain, size in enumerate(sizes.tolist()):
            level = levels[chain] if chain in self._continued else last
            groups[level, parents[chain] >= 0, (max(size, _SHORT) - 1).bit_length()].append(chain)
        self._batches = [_batch(groups[key], parents, sizes) for key in sorted(groups)]
        order = [chain for batch in self._batches for chain in batch.chains]
        self._order = np.concatenate([np.arange(starts[chain], starts[chain] + sizes[chain]) for chain in order])
        self._inverse = np.argsort(self._order)
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._tensors: dict[tuple[torch.device, int], Tensor] = {}

    def run(self, inputs: Sequence[Tensor], step: Step, padding: Sequence[float] = ()) -> Tensor:
        """Runs a recurrence over the tree."""
        device, counts = inputs[0].device, [batch.tokens for batch in self._batches]
        order = self._on(device, self._order)
        # split and cat, not slices: the backward of a slice would write a zero gradient of the whole row per batch
        pieces = [tensor.index_select(0, order).split(counts) for tensor in inputs]
        states: dict[int, Tensor] = {}
        outputs = []
        for number, batch in enumerate(self._batches):
            own = [tensors[number] for tensors in pieces]
            even = batch.tokens == batch.shape[0] * batch.shape[1]
            if not even:
                own = [
                    _with_last(tensor, 0, last).index_select(0, self._on(device, batch.padded))
                    for tensor, last in zip(own, padding or [0.0] * len(own), strict=True)
                ]
            state = None if batch.parents[0] < 0 else torch.stack([states[chain] for chain in batch.parents])
            continued = batch.chains[0] in self._continued
            output, final = step([tensor.unflatten(0, batch.shape) for tensor in own], state, continued)
            if continued and final is not None:
                states.update(zip(batch.chains, final.unbind(), strict=True))
            output = output.flatten(0, 1)
            if not even:
                output = output.index_select(0, self._on(device, batch.kept))
            outputs.append(output)
        return torch.cat(outputs).index_select(0, self._on(device, self._inverse))

    def convolve(self, inputs: Tensor, width: int, convolution: Callable[[Tensor], Tensor]) -> Tensor:
        """Runs a causal convolution over the tree, once, each chain behind the last tokens before it."""
        if width not in self._rows:
            self._rows[width] = self._row(width)
        row, own = (self._on(inputs.device, array) for array in self._rows[width])
        return convolution(_with_last(inputs, 2, 0.0).index_select(2, row)).index_select(2, own)

    def _row(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Token at each place of the row that is convolved, `N` where there is none, and place of each token."""
        history = np.empty((len(self._starts), width - 1), dtype=np.int64)
        token = self._parent[self._starts]
        for column in reversed(range(width - 1)):
            history[:, column] = token
            token = np.where(token >= 0, self._parent[token], -1)
        size = len(self._parent)
        own = np.arange(size) + np.arange(1, len(history) + 1).repeat(self._sizes) * (width - 1)
        row = np.empty(size + history.size, dtype=np.int64)
        row[own] = np.arange(size)
        before = np.ones(len(row), dtype=bool)
        before[own] = False
        row[before] = np.where(history >= 0, history, size).reshape(-1)
        return row, own

    def _on(self, device: torch.device, index: np.ndarray) -> Tensor:
        key = (device, id(index))
        if key not in self._tensors:
            self._tensors[key] = torch.from_numpy(index).to(device)
        return self._tensors[key]


def _batch(chains: list[int], parents: list[int], sizes: np.ndarray) -> _Batch:
    own = sizes[chains]
    longest, total = int(own.max()), int(own.sum())
    kept = np.concatenate([row * longest + np.arange(size) for row, size in enumerate(own.tolist())])
    padded = np.full(len(chains) * longest, total, dtype=np.int64)
    padded[kept] = np.arange(total)
    return _Batch(chains, [parents[chain] for chain in chains], (len(chains), longest), total, padded, kept)


def _with_last(tensor: Tensor, dim: int, value: float) -> Tensor:
    """The tensor with one more entry in dimension `dim`, which is `value` everywhere."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, 1), value=value)
