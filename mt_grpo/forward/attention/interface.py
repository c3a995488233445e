"""Attention over packed trees, for any decoder that uses transformers' attention interface.

Three implementations of one rule, `token q sees token k iff k <= q <= subtree_end[k]`: `segment` (any device), `flex`
(GPU) and `dense` (the whole mask; small rows, and the oracle of the tests).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward.attention.kernels import KERNELS
from mt_grpo.forward.attention.layout import TreeLayout


class AttentionLayer(Protocol):
    """What transformers calls an attention with: a module of a decoder's layer."""

    layer_idx: int


def register(original: str) -> str:
    """
    Registers an attention with transformers, and returns its name. If the forward is given a `tree_layout`, it attends
    over the tree. If not, it is `original`, or `"sdpa"` if transformers looks up `original` by the name of the model's
    attention, as it does with FlashAttention.
    """
    original = original if original == "flex_attention" else "sdpa"
    name = f"tree_or_{original}"
    if name in ALL_ATTENTION_FUNCTIONS:
        return name
    plain: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS[original]

    def attention(
        module: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        tree_layout: TreeLayout | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if tree_layout is None:
            return plain(module, query, key, value, attention_mask, **kwargs)
        _check_call(module, attention_mask, kwargs)
        tree_layout.layers.add(module.layer_idx)
        scaling = kwargs.get("scaling") or query.size(-1) ** -0.5
        # normalised queries and keys can be wider than values under autocast
        query, key = query.to(value.dtype), key.to(value.dtype)
        kernel = KERNELS[tree_layout.attention(query.device)]
        output = kernel(tree_layout, query, key, value, scaling, kwargs.get("sliding_window"))
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    return name


def _check_call(module: AttentionLayer, mask: Tensor | None, options: dict[str, Any]) -> None:
    """Refuses a layer whose attention differs from its configuration: its tokens would not see their history."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    slides = types is None or types[module.layer_idx] == "sliding_attention"
    window = getattr(config, "sliding_window", None) if slides else None
    if (
        (mask is not None and mask.numel() > 1)
        or options.get("dropout")
        or (window and not options.get("sliding_window"))
    ):
        raise UnsupportedModelError(
            f"{type(module).__name__} has a mask, a window or dropout of its own making, so trees cannot be packed "
            "for it; set `forward: padded`."
        )
