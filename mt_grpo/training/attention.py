"""Attention over packed trees, for any decoder that goes through transformers' attention interface.

Three implementations of one rule, `token q sees token k iff k <= q <= exit[k]`: `segment` (any device), `flex` (GPU)
and `dense` (the whole mask; small rows, and the oracle of the tests).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mt_grpo.training.packing import Packed

BLOCK = 128
"""Side of a block of FlexAttention's mask, in tokens."""


class TreeLayout:
    """
    Who sees whom in a packed row of `N` tokens; handed to the model's forward as `tree_layout`.

    Args:
        packed (`Packed`): The row.
        attention (`str`): `"auto"`, `"segment"`, `"flex"` or `"dense"`.

    Masks are made where the queries are, which need not be one device for all layers, and kept.
    """

    def __init__(self, packed: Packed, attention: str = "auto") -> None:
        self.exit, self.depth = packed.exit, packed.position_ids
        self.size = len(packed.exit)
        self.layers: set[int] = set()
        """Layers whose attention this layout has reached."""
        indices = np.arange(self.size)
        # a chain goes on while the next token is the only child
        begins = packed.parent != indices - 1
        begins[1:] |= self.exit[1:] != self.exit[:-1]
        begins[:1] = True
        self.starts = begins.nonzero()[0]
        self.sizes = np.diff(np.array([*self.starts, self.size]))
        parents = packed.parent[self.starts]
        owners = np.searchsorted(self.starts, parents, side="right") - 1
        self.paths: list[list[int]] = []
        """For each chain the chains from the root to it, itself included."""
        for chain, (parent, owner) in enumerate(zip(parents.tolist(), owners.tolist(), strict=True)):
            self.paths.append([*(self.paths[owner] if parent >= 0 else []), chain])
        self._attention = attention
        self._cache: dict[Any, Any] = {}

    def attention(self, device: torch.device) -> str:
        """The kernel for queries on `device`."""
        if self._attention != "auto":
            return self._attention
        return "flex" if device.type == "cuda" else "segment"

    def dense_mask(self, device: torch.device, window: int | None) -> Tensor:
        """`(N, N)` bool, queries by keys."""
        key = ("dense", device, window)
        if key not in self._cache:
            arrays = (np.arange(self.size), self.exit, self.depth)
            index, last, depth = (torch.from_numpy(array).to(device) for array in arrays)
            mask = (index[:, None] >= index) & (index[:, None] <= last)
            if window is not None:
                mask &= depth[:, None] - depth < window
            self._cache[key] = mask
        return self._cache[key]

    def chain_mask(
        self, device: torch.device, chain: int, first: int, dtype: torch.dtype, window: int | None
    ) -> Tensor:
        """
        Additive mask of a chain's queries over the keys of its path from depth `first` on. All chains share one
        matrix: a chain with `P` tokens before it reads the columns in which query `i` ends at `P + i`.
        """
        key = ("chain", device, dtype, window)
        if key not in self._cache:
            begins = self.depth[self.starts]
            masked = (begins > 0) | (self.sizes > (window or self.size))
            rows, before = int(self.sizes[masked].max()), int(begins.max())
            gap = before + torch.arange(rows)[:, None] - torch.arange(before + rows)
            hidden = (gap < 0) | (gap >= (window or self.size))
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._cache[key] = (before, mask.to(device))
        before, mask = self._cache[key]
        begin, size = int(self.depth[self.starts[chain]]), int(self.sizes[chain])
        return mask[:size, before - begin + first : before + size]

    def block_mask(self, device: torch.device, window: int | None) -> BlockMask:
        """FlexAttention's mask, from the extremes of the two vectors in each block; never `(N, N)`."""
        key = ("block", device, window)
        if key not in self._cache:
            self._cache[key] = self._block_mask(device, window)
        return self._cache[key]

    def _block_mask(self, device: torch.device, window: int | None) -> BlockMask:
        blocks = -(-self.size // BLOCK)
        padding = (0, blocks * BLOCK - self.size)
        last = np.pad(self.exit, padding, constant_values=-1).reshape(blocks, BLOCK)
        depth = np.pad(self.depth, padding, mode="edge").reshape(blocks, BLOCK)
        number = np.arange(blocks)
        query, key = number[:, None], number[None, :]
        some = (query >= key) & (query * BLOCK <= last.max(axis=1)[None, :])
        every = (query > key) & ((query + 1) * BLOCK - 1 <= last.min(axis=1)[None, :])
        if window is not None:
            some &= depth.min(axis=1)[:, None] - depth.max(axis=1)[None, :] < window
            every &= depth.max(axis=1)[:, None] - depth.min(axis=1)[None, :] < window
        lists = []
        for chosen in (some & ~every, every):
            lists.append(torch.from_numpy(chosen.sum(axis=1).astype(np.int32)))
            lists.append(torch.from_numpy(np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)))
        tensors = [item[None, None].to(device) for item in lists]
        exits = torch.from_numpy(last.reshape(-1)).to(device)
        depths = torch.from_numpy(depth.reshape(-1)).to(device)

        def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q <= exits[k])

        def visible_in_window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q <= exits[k]) & (depths[q] - depths[k] < window)

        rule = visible if window is None else visible_in_window
        return BlockMask.from_kv_blocks(*tensors, BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=(self.size, self.size))


def segment_attention(
    layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """
    One call of scaled-dot-product attention for each unary chain: its queries against the keys on its root path.

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


def dense_attention(
    layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """The same with the whole `(N, N)` mask."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        layout.dense_mask(query.device, window),
        scale=scaling,
        enable_gqa=query.size(1) != key.size(1),
    )


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)


def flex_block_attention(
    layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """The same with FlexAttention, compiled once for all lengths. Its backward needs a GPU."""
    return _compiled_flex_attention()(
        query,
        key,
        value,
        block_mask=layout.block_mask(query.device, window),
        scale=scaling,
        enable_gqa=query.size(1) != key.size(1),
    )


KERNELS = {"segment": segment_attention, "flex": flex_block_attention, "dense": dense_attention}


def register(original: str) -> str:
    """
    Registers with transformers an attention that reads `tree_layout` where the forward is given one, and is `original`
    where it is not; `"sdpa"` for kernels that transformers looks up by the name of the model's attention, as it does
    FlashAttention's. Returns its name.
    """
    original = original if original == "flex_attention" else "sdpa"
    name = f"tree_or_{original}"
    if name in ALL_ATTENTION_FUNCTIONS:
        return name
    plain = ALL_ATTENTION_FUNCTIONS[original]

    def attention(
        module: torch.nn.Module,
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


class UnsupportedModelError(ValueError):
    """The model cannot run over packed trees."""


def _check_call(module: torch.nn.Module, mask: Tensor | None, options: dict[str, Any]) -> None:
    """Refuses a layer that attends otherwise than its configuration says: its tokens would not see their history."""
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


def check_model(model: PreTrainedModel) -> None:
    """
    Refuses a causal language model that cannot run over packed trees, or may score them wrongly without
    `mt_grpo.training.probe` seeing it.

    Raises:
        UnsupportedModelError: With the reason, and the mend.
    """
    reason = _obstacle(model)
    if reason is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} {reason}, so trees cannot be packed for it; set `forward: padded`."
        )


def _obstacle(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    # cannot run
    if not model._supports_attention_backend:
        return "does not go through transformers' attention interface"
    if model.base_model is model or not isinstance(model.get_output_embeddings(), torch.nn.Module):
        return "has no output layer apart from the rest"
    # the probe has no images and no other sequence to attend to
    if config.is_encoder_decoder or model.config is not config:
        return "is more than a text decoder"
    # the probe is too small to fill an expert, and compares no losses
    if getattr(config, "expert_capacity", None) or getattr(config, "output_router_logits", False):
        return "routes or balances experts by the batch"
    # a cap shows only where scores are large, which training may make them
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "caps its attention scores"
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if getattr(config, name, None) is not None:
            return f"caps its logits (`{name}`)"
    # the probe runs as evaluation does, without dropout
    for name, value in config.to_dict().items():
        if "att" in name and "drop" in name and value:
            return f"drops attention weights (`{name}`)"
    return None
