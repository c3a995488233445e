"""Which token sees which in a packed row, the masks for it, and the registry of kernels that use them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mt_grpo.forward.attention.score import Chunk, Window, oldest
from mt_grpo.forward.packing import Packed
from mt_grpo.forward.recurrent.schedule import Schedule
from mt_grpo.forward.sequence_parallel import SequenceGroup, Share
from mt_grpo.imports import Registry

BLOCK = 128
"""Side of a block of FlexAttention's mask, in tokens."""


class TreeLayout:
    """
    Which token sees which in a packed row of `N` tokens.

    Args:
        packed (`Packed`): The row.
        attention (`str`): `"auto"`, `"segment"`, `"flex"` or `"dense"`.
        sequence (`SequenceGroup`, *optional*): The processes that compute the row together.

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
        self._chains: dict[tuple[torch.device, torch.dtype, Window], tuple[int, Tensor]] = {}
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

    def is_causal(self, chain: int, window: Window) -> bool:
        """Whether each token of a chain sees all tokens from the root to itself, and the chain begins with a root."""
        begin, size = int(self.depth[self.starts[chain]]), int(self.sizes[chain])
        return begin == 0 and not oldest(np.array([size - 1]), window).any()

    def chain_mask(self, device: torch.device, chain: int, first: int, dtype: torch.dtype, window: Window) -> Tensor:
        """
        Additive mask of a chain's queries over the keys of its path from depth `first` on. All chains share one
        matrix. A chain with `P` tokens before it reads the columns in which query `i` sees up to key `P + i`. Chunks
        begin where they begin, so a chain has its own.
        """
        begin, size = int(self.depth[self.starts[chain]]), int(self.sizes[chain])
        if isinstance(window, Chunk):
            query = np.arange(begin, begin + size)
            key = np.arange(first, begin + size)
            hidden = (key > query[:, None]) | (key < oldest(query, window)[:, None])
            return _additive(torch.from_numpy(hidden), dtype).to(device)
        shared = (device, dtype, window)
        if shared not in self._chains:
            begins = self.depth[self.starts]
            masked = (begins > 0) | (self.sizes > (window or self.size))
            rows, before = int(self.sizes[masked].max()), int(begins.max())
            gap = before + torch.arange(rows)[:, None] - torch.arange(before + rows)
            hidden_gap = (gap < 0) | (gap >= (window or self.size))
            self._chains[shared] = (before, _additive(hidden_gap, dtype).to(device))
        before, mask = self._chains[shared]
        return mask[:size, before - begin + first : before + size]

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


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


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
