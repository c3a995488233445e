"""Attention with the whole mask: for small rows, and as the oracle of the tests."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mt_grpo.forward.attention.layout import TreeLayout, attention_kernel


@attention_kernel("dense")
def dense_attention(
    layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """As `segment_attention`, with the whole `(N, N)` mask."""
    mask, grouped = layout.dense_mask(query.device, window), query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=grouped)
