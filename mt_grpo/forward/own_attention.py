"""
Attention of decoders that compute it themselves: BLOOM, MPT and Falcon, whose biases grow with the distance (ALiBi).

Each function is a layer's forward over a packed row, with that layer's own projections. A bias depends on the key's
depth alone: what is added to all scores of a query changes none of its weights.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import MptAttention

from mt_grpo.forward.interface import TreeMask, attend_over_tree


def _bloom(
    self: Any, hidden_states: Tensor, residual: Tensor, *, alibi: Tensor, attention_mask: TreeMask, **others: Any
) -> tuple[Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    output = attend_over_tree(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.inv_norm_factor,
        alibi=alibi.squeeze(1),
        dropout=self.attention_dropout.p if self.training else 0.0,
    )
    return dropout_add(self.dense(output.flatten(2)), residual, self.hidden_dropout, self.training), None


def _mpt(
    self: Any, hidden_states: Tensor, position_bias: Tensor, *, attention_mask: TreeMask, **others: Any
) -> tuple[Tensor, None]:
    projected = self.Wqkv(hidden_states)
    if self.clip_qkv:
        projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        part.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for part in projected.chunk(3, dim=2)
    )
    length = int(attention_mask.tree.depth.max()) + 1
    output = attend_over_tree(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.softmax_scale,
        alibi=position_bias[:, 0, -length:],
        dropout=self.attn_dropout_p if self.training else 0.0,
    )
    return self.out_proj(output.flatten(2)), None


def _falcon(
    self: Any,
    hidden_states: Tensor,
    *,
    alibi: Tensor | None,
    attention_mask: TreeMask,
    position_embeddings: tuple[Tensor, Tensor],
    **others: Any,
) -> tuple[Tensor, None]:
    query, key, value = (part.transpose(1, 2) for part in self._split_heads(self.query_key_value(hidden_states)))
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        alibi = alibi.squeeze(1) * self.inv_norm_factor
    dropout = 0.0 if alibi is None or not self.training else self.attention_dropout.p
    output = attend_over_tree(
        self, query, key, value, attention_mask, scaling=self.inv_norm_factor, alibi=alibi, dropout=dropout
    )
    return self.dense(output.flatten(2)), None


OVER_TREE: dict[type[nn.Module], Callable[..., tuple[Tensor, None]]] = {
    BloomAttention: _bloom,
    MptAttention: _mpt,
    FalconAttention: _falcon,
}


def has_own_attention(model: nn.Module) -> bool:
    """Whether a model computes its attention itself, in one of the ways that are known here."""
    return any(type(module) in OVER_TREE for module in model.modules())


def extend_own_attention(model: nn.Module) -> None:
    """Extends the forwards of these layers: with the mask of a packed row, they attend over its trees."""
    module: Any
    for module in model.modules():
        if type(module) in OVER_TREE and "_forward_over_rows" not in vars(module):
            if isinstance(module, FalconAttention):  # it looks up there what it is to call
                module.config = copy.copy(module.config)
            module._forward_over_rows = module.forward
            module.forward = types.MethodType(_forward, module)  # a deep copy of the layer has its own


def _forward(self: Any, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    if isinstance(attention_mask, TreeMask):
        return OVER_TREE[type(self)](self, *args, attention_mask=attention_mask, **kwargs)
    return self._forward_over_rows(*args, attention_mask=attention_mask, **kwargs)
