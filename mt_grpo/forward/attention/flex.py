"""FlexAttention, compiled once for all lengths of a head layout. It never runs uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mt_grpo.errors import ConfigError
from mt_grpo.forward.attention.layout import TreeLayout, attention_kernel

RECOMPILE_LIMIT = 64
"""Most kernels that a process compiles: one per head layout, dtype and kind of window, with and without gradient."""


def check_flex(device: torch.device) -> None:
    """
    Refuses a device for which FlexAttention is not compiled.

    Raises:
        ConfigError: If it is a CPU, on which FlexAttention has no backward.
    """
    if device.type == "cpu":
        raise ConfigError(
            "FlexAttention (`flex`) is compiled for GPUs only, and the model is on a CPU: choose `auto` or `segment`."
        )


def compiled_flex_attention(device: torch.device) -> Callable[..., Tensor]:
    """`flex_attention` for queries on `device`; raises as `check_flex` does."""
    check_flex(device)
    return _call


def _call(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float, enable_gqa: bool
) -> Tensor:
    # for this call only: the limit of other compiled functions stays what their owner set
    with config.patch(recompile_limit=RECOMPILE_LIMIT):
        try:
            return _compiled()(query, key, value, block_mask, scale, enable_gqa)
        except FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"FlexAttention was compiled for {RECOMPILE_LIMIT} layouts of heads in this process, and would run "
                f"the next one, queries of shape {tuple(query.shape)}, with the whole mask in memory: start a process "
                "for fewer models, or choose `segment`."
            ) from error


@cache
def _compiled() -> Callable[..., Tensor]:
    # a whole graph or an error: past the limit of recompilations dynamo would otherwise run it uncompiled
    return torch.compile(_attend, dynamic=True, fullgraph=True)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scale: float, enable_gqa: bool
) -> Tensor:
    # a function of its own: dynamo counts by function, and transformers compiles FlexAttention too
    return flex_attention(query, key, value, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa)


@attention_kernel("flex")
def flex_block_attention(
    layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """As `segment_attention`, with FlexAttention, compiled once for all lengths; GPUs only."""
    return compiled_flex_attention(query.device)(
        query,
        key,
        value,
        block_mask=layout.block_mask(query.device, window),
        scale=scaling,
        enable_gqa=query.size(1) != key.size(1),
    )
