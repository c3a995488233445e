"""
Attention over packed trees: three implementations of one rule, `token q sees token k iff k <= q <= subtree_end[k]`.

`segment` runs on any device, `flex` on a GPU. `dense` has the whole mask: for small rows, and the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from mt_grpo.errors import ConfigError
from mt_grpo.forward.layout import TreeLayout, Window, oldest
from mt_grpo.imports import Registry

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


def attention_kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Registers an attention kernel under a name."""
    return KERNELS.register(name)


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
    attend = compiled_flex(query.device)
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


def compiled_flex(device: torch.device) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """FlexAttention for queries on a device, which is a GPU: it never runs uncompiled."""
    if device.type == "cpu":
        raise ConfigError(
            "FlexAttention (`flex`) is compiled for GPUs only, and the model is on a CPU: choose `auto` or `segment`."
        )
    return _compiled()


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor | None]]:
    # a whole graph or an error: past the limit of recompilations dynamo would otherwise run it uncompiled
    return torch.compile(uncompiled_flex, dynamic=True, fullgraph=True)


def uncompiled_flex(
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
