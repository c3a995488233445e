"""MiniMax's lightning attention, whose layer calls no function that could run along a tree instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from mt_grpo.forward.recurrent.functions import state_space
from mt_grpo.forward.schedule import Schedule

LAYERS = (MiniMaxLightningAttention,) if "mamba2_chunk_scan" in vars(modeling_mamba2) else ()
"""The layers; none with a transformers whose Mamba 2 has no scan to call."""


def lightning_attention(layer: Any, schedule: Schedule, hidden_states: Tensor) -> tuple[Tensor, None]:
    """
    What `MiniMaxLightningAttention` computes, over a tree. It is a state space of Mamba 2 whose steps are all 1, so
    that each head decays by a constant per token.
    """
    states = layer.act_fn(layer.qkv_proj(hidden_states))
    query, key, value = states.unflatten(2, (layer.num_attention_heads, -1)).chunk(3, dim=3)
    steps, decay = value.new_ones(value.shape[:3]), -layer.slope_rate.flatten()
    scan = state_space(modeling_mamba2.mamba2_chunk_scan, schedule)
    output = scan(value, steps, decay, key, query, chunk_size=layer.block_size).to(value.dtype)
    output = layer.norm(output.flatten(2))
    return layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * output), None
