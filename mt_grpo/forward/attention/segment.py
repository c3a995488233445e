"""Attention by scaled-dot-product calls, for any device: one per unforked chain, or one with the whole mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_grpo.forward.attention.layout import TreeLayout, attention_kernel


@attention_kernel("segment")
def segment_attention(
    layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """
    Calls scaled-dot-product attention once per unforked chain: its queries against the keys on the path from the root.

    Args:
        query (`Tensor`): `(1, heads, N, head_dim)`.
        key, value (`Tensor`): `(1, key_value_heads, N, head_dim)`.

    Returns:
        `(1, heads, N, head_dim)`.
    """
    sizes = layout.sizes.tolist()
    # split and cat, not slices: the backward of a slice would write a zero gradient of the whole row for each chain
    queries, keys, values = (tensor.split(sizes, dim=2) for tensor in (query, key, value))
    outputs = []
    for chain, path in enumerate(layout.paths):
        begin, size = int(layout.depth[layout.starts[chain]]), sizes[chain]
        first = begin
        parts: list[tuple[Tensor, Tensor]] = []
        oldest = 0 if window is None else max(0, begin - window + 1)
        for link in reversed(path):
            if link != chain:
                first -= sizes[link]
            parts.append((keys[link], values[link]))
            if first <= oldest:
                break
        k, v = (torch.cat(part[::-1], dim=2) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
        causal = begin == 0 and size <= (window or size)
        mask = None if causal else layout.chain_mask(query.device, chain, first, value.dtype, window)
        outputs.append(
            F.scaled_dot_product_attention(
                queries[chain], k, v, mask, is_causal=causal, scale=scaling, enable_gqa=query.size(1) != key.size(1)
            )
        )
    return torch.cat(outputs, dim=2)


@attention_kernel("dense")
def dense_attention(
    layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """As `segment_attention`, with the whole `(N, N)` mask."""
    mask, grouped = layout.dense_mask(query.device, window), query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=grouped)
