"""Attention for any device: a few calls per unforked chain, or one with the whole mask."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mt_grpo.forward.attention.layout import PLAIN, Score, TreeLayout, Window, attend, attention_kernel, oldest


@attention_kernel("segment")
def segment_attention(
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
    grouped = query.size(1) != key.size(1)
    most = layout.most_queries(window, 1 if score.plain else query.size(1))
    outputs = []
    for chain, path in enumerate(layout.paths):
        begin = first = int(layout.depth[layout.starts[chain]])
        parts: list[tuple[Tensor, Tensor]] = []
        needed = int(oldest(np.array([begin]), window)[0])
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
            if piece.causal:
                output = F.scaled_dot_product_attention(
                    q, seen_k, seen_v, None, score.dropout, is_causal=True, scale=scaling, enable_gqa=grouped
                )
                outputs.append(output)
                continue
            mask = layout.piece_mask(query.device, value.dtype, window, piece)
            if score.plain:
                output = F.scaled_dot_product_attention(
                    q, seen_k, seen_v, mask, score.dropout, scale=scaling, enable_gqa=grouped
                )
            elif len(pieces) > 1 and torch.is_grad_enabled():  # a backward keeps the scores of one piece at a time
                arguments = (q, seen_k, seen_v, mask, scaling, score, piece.first)
                output = checkpoint(attend, *arguments, use_reentrant=False)
            else:
                output = attend(q, seen_k, seen_v, mask, scaling, score, piece.first)
            outputs.append(output)
    return torch.cat(outputs, dim=2)


@attention_kernel("dense")
def dense_attention(
    layout: TreeLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: Window,
    score: Score = PLAIN,
) -> Tensor:
    """As `segment_attention`, with the whole `(N, N)` mask."""
    mask = layout.dense_mask(query.device, window)
    if score.plain:
        grouped = query.size(1) != key.size(1)
        return F.scaled_dot_product_attention(
            query, key, value, mask, score.dropout, scale=scaling, enable_gqa=grouped
        )
    hidden = torch.zeros(mask.shape, dtype=value.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return attend(query, key, value, hidden, scaling, score, torch.from_numpy(layout.depth).to(query.device))
