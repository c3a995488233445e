"""
Attention over packed trees: which token sees which in a row, the masks for it, and three implementations of one rule,
`token q sees token k iff k <= q <= subtree_end[k]`.

`segment` runs on any device, `flex` on a GPU. `dense` has the whole mask: for small rows, and the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from math import isqrt
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from mt_grpo.errors import ConfigError
from mt_grpo.forward.packing import Packed, SequenceGroup, Share
from mt_grpo.imports import Registry

T = TypeVar("T")


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
    """Which token sees which in a packed row of `N` tokens. Masks are made on the device of the queries, and kept."""

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
        self.parent = packed.parent
        parents = np.searchsorted(self.starts, packed.parent[self.starts], side="right") - 1  # -1 for a root
        self.parents: list[int] = parents.tolist()
        self.paths: list[list[int]] = []
        """Per chain, the chains from the root to it, including itself."""
        for chain, parent in enumerate(self.parents):
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), chain])
        self.schedule: Any = None
        """In which order recurrences run over the chains, once one asks."""
        self._attention = attention
        self._dense: dict[tuple[torch.device, Window], Tensor] = {}
        self._triangles: dict[tuple[torch.device, torch.dtype, Window], tuple[int, Tensor]] = {}
        self._blocks: dict[tuple[torch.device, Window], BlockMask] = {}

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


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A context in which a variable has a value; it decorates functions too."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# Kernels

RECOMPILE_LIMIT = 64
"""
Most kernels that a process compiles: one per head layout, dtype, kind of window and kind of score, with and without
gradient.
"""

_ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


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

Kernel = Callable[..., Tensor]
"""`(layout, query, key, value, scaling: float, window: Window, score: Score) -> (1, heads, N, head_dim)`."""

KERNELS: Registry[Kernel] = Registry("attention kernel", "mt_grpo.forward")
"""The names that `tree_attention` knows, besides `auto`."""


attention_kernel = KERNELS.register
"""Registers an attention kernel under a name."""


@attention_kernel("segment")
def _segment(
    layout: TreeLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: Window,
    score: Score = PLAIN,
) -> Tensor:
    """
    Attends per unforked chain: its queries against the keys on the path from the root. Where scores are plain, this is
    PyTorch's scaled-dot-product attention. Long chains attend in pieces, so that memory grows with the row's length
    and not with its square.
    """
    sizes = layout.sizes.tolist()
    # split and cat, not slices: the backward of a slice would write a zero gradient of the whole row for each chain
    queries, keys, values = (tensor.split(sizes, dim=2) for tensor in (query, key, value))
    most = layout.most_queries(window, 1 if score.plain else query.size(1))
    outputs = []
    for chain, path in enumerate(layout.paths):
        # the keys and values that the chain sees, from depth `first` on
        begin = first = int(layout.depth[layout.starts[chain]])
        needed = int(oldest(np.array([begin]), window)[0])
        parts: list[tuple[Tensor, Tensor]] = []
        for link in reversed(path):
            if link != chain:
                first -= sizes[link]
            parts.append((keys[link], values[link]))
            if first <= needed:
                break
        k, v = (torch.cat(part[::-1], dim=2) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))

        pieces = list(layout.pieces(chain, window, most, masked=not score.plain))
        parts_of_chain = queries[chain].split([piece.end - piece.begin for piece in pieces], dim=2)
        for piece, q in zip(pieces, parts_of_chain, strict=True):
            seen = slice(piece.first - first, piece.end - first)
            seen_k, seen_v = (k, v) if seen == slice(0, k.size(2)) else (k[:, :, seen], v[:, :, seen])
            mask = None if piece.causal else layout.piece_mask(query.device, value.dtype, window, piece)
            if mask is None or score.plain:
                outputs.append(_scaled_dot_product(q, seen_k, seen_v, mask, scaling, score))
            elif len(pieces) > 1 and torch.is_grad_enabled():  # a backward keeps the scores of one piece at a time
                arguments = (q, seen_k, seen_v, mask, scaling, score, piece.first)
                outputs.append(checkpoint(_attend, *arguments, use_reentrant=False))
            else:
                outputs.append(_attend(q, seen_k, seen_v, mask, scaling, score, piece.first))
    return torch.cat(outputs, dim=2)


@attention_kernel("dense")
def _dense(
    layout: TreeLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: Window,
    score: Score = PLAIN,
) -> Tensor:
    """As `segment`, with the whole `(N, N)` mask."""
    mask = layout.dense_mask(query.device, window)
    if score.plain:
        return _scaled_dot_product(query, key, value, mask, scaling, score)
    hidden = torch.zeros(mask.shape, dtype=value.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return _attend(query, key, value, hidden, scaling, score, torch.from_numpy(layout.depth).to(query.device))


def _scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, score: Score
) -> Tensor:
    grouped = query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(
        query, key, value, mask, score.dropout, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, score: Score, first: int | Tensor
) -> Tensor:
    """Attention written out, as transformers' eager attention has it. Keys begin at depth `first`, or are at these."""
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
    weights = F.dropout(weights.to(value.dtype), score.dropout)
    return weights @ value


@attention_kernel("flex")
def _flex(
    layout: TreeLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: Window,
    score: Score = PLAIN,
) -> Tensor:
    """
    As `segment`, with FlexAttention, compiled once for all lengths; GPUs only. With `l` the logarithm of a query's sum
    over its keys, a sink `s` shrinks its output by `exp(l) / (exp(l) + exp(s))`.
    """
    attend = _compiled_flex(query.device)
    # for this call only: the limit of other compiled functions stays what their owner set
    with config.patch(recompile_limit=RECOMPILE_LIMIT):
        try:
            output, lse = attend(
                query,
                key,
                value,
                _score_mod(layout, query.device, score),
                layout.block_mask(query.device, window),
                scaling,
                query.size(1) != key.size(1),
                score.sinks is not None,
            )
        except FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"FlexAttention was compiled for {RECOMPILE_LIMIT} layouts of heads in this process, and would run "
                f"the next one, queries of shape {tuple(query.shape)}, with the whole mask in memory: start a process "
                "for fewer models, or choose `segment`."
            ) from error
    if score.sinks is None or lse is None:
        return output
    share = torch.sigmoid(lse - score.sinks.to(lse.dtype).view(1, -1, 1))
    return output * share.unsqueeze(-1).to(output.dtype)


def _compiled_flex(device: torch.device) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """FlexAttention for queries on a device, which is a GPU: it never runs uncompiled."""
    if device.type == "cpu":
        raise ConfigError(
            "FlexAttention (`flex`) is compiled for GPUs only, and the model is on a CPU: choose `auto` or `segment`."
        )
    return _compiled()


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor | None]]:
    # a whole graph or an error: past the limit of recompilations dynamo would otherwise run it uncompiled
    return torch.compile(_uncompiled_flex, dynamic=True, fullgraph=True)


def _uncompiled_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: _ScoreMod | None,
    block_mask: BlockMask,
    scaling: float,
    grouped: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Outputs, and the logarithms of the sums over keys. Dynamo counts by function, so this is not transformers'."""
    options = {"score_mod": score_mod, "block_mask": block_mask, "scale": scaling, "enable_gqa": grouped}
    if with_lse:
        return flex_attention(query, key, value, return_lse=True, **options)  # type: ignore[call-overload, no-any-return]
    return flex_attention(query, key, value, **options), None  # type: ignore[call-overload]


def _score_mod(layout: TreeLayout, device: torch.device, score: Score) -> _ScoreMod | None:
    cap, bias = score.cap, score.bias
    if bias is None:
        if cap is None:
            return None

        def capped(value: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return cap * torch.tanh(value / cap)

        return capped
    depth = torch.from_numpy(layout.depth).to(device)

    def biased(value: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        value = value if cap is None else cap * torch.tanh(value / cap)
        return value + bias[head, depth[k]]

    return biased
