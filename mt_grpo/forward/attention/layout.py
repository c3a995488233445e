"""Which token sees which in a packed row, the masks for it, and the registry of kernels that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mt_grpo.forward.packing import Packed
from mt_grpo.forward.recurrence import Schedule
from mt_grpo.forward.sequence_parallel import SequenceGroup, Share
from mt_grpo.imports import Registry


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


@dataclass(frozen=True, eq=False)
class Score:
    """What becomes of the scaled product of a query and a key."""

    cap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    eager: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None

    @property
    def plain(self) -> bool:
        """Whether PyTorch's call computes it."""
        return self.cap is None and self.bias is None and self.sinks is None


PLAIN = Score()


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, score: Score, first: int | Tensor
) -> Tensor:
    """Attention written out, as transformers' eager attention has it."""
    if score.eager is not None:
        return score.eager(query, key, value, mask)
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if score.cap is not None:
        scores = score.cap * torch.tanh(scores / score.cap)
    if score.bias is not None:
        depths = slice(first, first + key.size(2)) if isinstance(first, int) else first
        scores = scores + score.bias[:, depths].unsqueeze(1)
    scores = scores + mask
    if score.sinks is not None:
        sinks = score.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, scores.size(2), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if score.sinks is not None:
        weights = weights[..., :-1]
    weights = torch.nn.functional.dropout(weights.to(value.dtype), score.dropout)
    return weights @ value


BLOCK = 128
"""Side of a block of FlexAttention's mask, in tokens."""

MASK_ELEMENTS = 2**24
"""Entries of the mask that a row's chains share: 64 MiB in float32, however long the row is."""

FEWEST_QUERIES = 16
"""Queries that attend at once at least: rows of more than a million tokens take larger masks."""


class Piece(NamedTuple):
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

    def pieces(self, chain: int, window: Window, most: int, masked: bool) -> Iterator[Piece]:
        """
        A chain's queries, in parts that attend at once. Chunks begin where they begin, so no part is in two of them.
        """
        begin = int(self.depth[self.starts[chain]])
        end = begin + int(self.sizes[chain])
        while begin < end:
            first = int(oldest(np.array([begin]), window)[0])
            stop = min(end, first + window.size) if isinstance(window, Chunk) else end
            causal = first == begin and (not isinstance(window, int) or stop - begin <= window) and not masked
            stop = stop if causal else min(stop, begin + most)
            yield Piece(begin, stop, first, causal)
            begin = stop

    def most_queries(self, window: Window, heads: int = 1) -> int:
        """How many queries attend at once, so that scores of `heads` heads have about `MASK_ELEMENTS` entries."""
        longest = int(self.depth.max()) + 1
        keys = longest if window is None else min(longest, window.size if isinstance(window, Chunk) else window)
        return max(FEWEST_QUERIES, min(isqrt(MASK_ELEMENTS // heads), MASK_ELEMENTS // heads // keys))

    def piece_mask(self, device: torch.device, dtype: torch.dtype, window: Window, piece: Piece) -> Tensor:
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


Kernel = Callable[..., Tensor]
"""`(layout, query, key, value, scaling: float, window: Window, score: Score) -> (1, heads, N, head_dim)`."""

KERNELS: Registry[Kernel] = Registry("attention kernel", "mt_grpo.forward.attention")
"""The names that `tree_attention` knows, besides `auto`."""


def attention_kernel(name: str) -> Callable[[Kernel], Kernel]:
    """
    Registers an attention kernel under a name.

    Raises:
        RegistrationError: If the name is no word, or another file has registered it.
    """
    return KERNELS.register(name)
