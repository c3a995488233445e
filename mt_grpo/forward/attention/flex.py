"""FlexAttention, compiled once for all lengths of a head layout. It never runs uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mt_grpo.errors import ConfigError
from mt_grpo.forward.attention.layout import PLAIN, Score, TreeLayout, Window, attention_kernel

RECOMPILE_LIMIT = 64
"""
Most kernels that a process compiles: one per head layout, dtype, kind of window and kind of score, with and without
gradient.
"""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def check_flex(device: torch.device) -> None:
    """Refuses a device for which FlexAttention is not compiled."""
    if device.type == "cpu":
        raise ConfigError(
            "FlexAttention (`flex`) is compiled for GPUs only, and the model is on a CPU: choose `auto` or `segment`."
        )


def compiled_flex_attention(device: torch.device) -> Callable[..., Any]:
    """`flex_attention` for queries on `device`; raises as `check_flex` does."""
    check_flex(device)
    return _call


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
) -> Any:
    # for this call only: the limit of other compiled functions stays what their owner set
    with config.patch(recompile_limit=RECOMPILE_LIMIT):
        try:
            return _compiled()(query, key, value, block_mask, scale, enable_gqa, score_mod, return_lse)
        except FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"FlexAttention was compiled for {RECOMPILE_LIMIT} layouts of heads in this process, and would run "
                f"the next one, queries of shape {tuple(query.shape)}, with the whole mask in memory: start a process "
                "for fewer models, or choose `segment`."
            ) from error


@cache
def _compiled() -> Callable[..., Any]:
    # a whole graph or an error: past the limit of recompilations dynamo would otherwise run it uncompiled
    return torch.compile(_attend, dynamic=True, fullgraph=True)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    score_mod: ScoreMod | None,
    return_lse: bool,
) -> Any:
    # a function of its own: dynamo counts by function, and transformers compiles FlexAttention too
    return flex_attention(  # type: ignore[call-overload]  # `return_lse` is no literal
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
    )


@attention_kernel("flex")
def flex_block_attention(
    layout: TreeLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: Window,
    score: Score = PLAIN,
) -> Tensor:
    """
    As `segment_attention`, with FlexAttention, compiled once for all lengths; GPUs only. It drops no weights.

    Sinks are in no score of a key: with `l` the logarithm of a query's sum over its keys, and `s` the head's sink,
    they shrink its output by `exp(l) / (exp(l) + exp(s))`.
    """
    output = compiled_flex_attention(query.device)(
        query,
        key,
        value,
        block_mask=layout.block_mask(query.device, window),
        scale=scaling,
        enable_gqa=query.size(1) != key.size(1),
        score_mod=_score_mod(layout, query.device, score),
        return_lse=score.sinks is not None,
    )
    if score.sinks is None:
        return cast(Tensor, output)
    output, lse = output
    share = torch.sigmoid(lse - score.sinks.to(lse.dtype).view(1, -1, 1))
    return cast(Tensor, output * share.unsqueeze(-1).to(output.dtype))


def _score_mod(layout: TreeLayout, device: torch.device, score: Score) -> ScoreMod | None:
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
