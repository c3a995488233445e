"""
Where transformers' attention meets our kernels: an attention and a mask that are registered with it under one name.

A model makes its masks once per forward, and hands them on to its layers. The mask of a packed row is a `_TreeMask`,
which says what a layer sees. So it also reaches layers that pass no keyword arguments on, and layers that gradient
checkpointing computes again.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import MptAttention

from mt_grpo.forward.attention import KERNELS, Chunk, Score, TreeLayout, Window, holding, oldest
from mt_grpo.forward.packing import cannot_pack

_PREFIX = "tree_or_"
_HARMLESS = ("position_ids", "cache_position", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
"""Tensors that some layers hand to their attention, and that change nothing where there is a mask."""


_row: ContextVar[TreeLayout | None] = ContextVar("row", default=None)
"""The packed row whose masks are made. Its layers have them, also where they are computed again for a gradient."""


def base_model(model: nn.Module) -> PreTrainedModel:
    """The model of transformers in a wrapper, the one whose forward is extended where there are several."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return next((each for each in models if "_forward_without_trees" in vars(each)), models[0])


class _AttentionLayer(Protocol):
    """What transformers calls an attention with: a module of a decoder's layer."""

    layer_idx: int | None


class _TreeMask(Tensor):
    """A mask of one element for one over all pairs; what is computed of it, but for a full slice, is plain."""

    tree: TreeLayout
    window: Window
    known: bool

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.cat, torch.concat):
            raise cannot_pack("A layer joins its mask with another (compressed keys)")
        if function is Tensor.__getitem__ and _takes_all(args[1]):  # Gemma 4, before layers that share keys and values
            return args[0]
        if function is Tensor.detach:  # a reentrant checkpoint, of what a block is given by place (GPT-2)
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def of(
        cls, layout: TreeLayout, sees: Callable[..., Tensor], size: int | None, device: torch.device, dimensions: int
    ) -> _TreeMask:
        """The mask of a packed row, for layers that see a token as `sees` says."""
        mask = torch.ones([1] * dimensions, dtype=torch.bool, device=device).as_subclass(cls)
        windows = _windows(sees, size, layout, device)
        mask.tree, mask.window, mask.known = layout, next(iter(windows), None), bool(windows)
        return mask


def _takes_all(index: object) -> bool:
    """Whether an index of a mask takes all of it: no slice has an end, though one element has none to lose."""
    return isinstance(index, tuple) and all(
        isinstance(part, slice) and not part.start and part.stop is None and part.step is None for part in index
    )


def packed_row(layout: TreeLayout) -> AbstractContextManager[None]:
    """A context in which a model makes the masks of a packed row."""
    return holding(_row, layout)


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Has a text decoder use an attention. Towers for images and sounds keep theirs: some have one way only."""
    config = model.config
    text = config.get_text_config()
    own = [key for key in config.sub_configs if getattr(config, key, None) is text]
    config._attn_implementation = {"": name, **dict.fromkeys(own, name)} if own or text is config else name


def _register(original: str) -> str:
    """Registers an attention and its mask with transformers: packed rows over trees, others as `original`."""
    name = f"{_PREFIX}{original}"
    if name in ALL_ATTENTION_FUNCTIONS:
        return name
    plain_mask: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[original]

    def attention(
        module: _AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        tree_layout: TreeLayout | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(attention_mask, _TreeMask):
            return _attend_over_tree(module, query, key, value, attention_mask, **kwargs), None
        if tree_layout is not None or _row.get() is not None:
            raise cannot_pack(f"{type(module).__name__} has a mask of its own making")
        plain = _eager(module) if original == "eager" else ALL_ATTENTION_FUNCTIONS[original]
        return plain(module, query, key, value, attention_mask, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        layout = _row.get()
        if layout is None:
            return plain_mask(*args, **kwargs)
        # Falcon would compute another mask from one of four dimensions
        dimensions = 3 if getattr(kwargs["config"], "alibi", False) else 4
        return _TreeMask.of(layout, kwargs["mask_function"], kwargs.get("local_size"), kwargs["device"], dimensions)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def _eager(module: _AttentionLayer) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A layer's attention written out: each of transformers' files has its own."""
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"]  # type: ignore[no-any-return]


def _attend_over_tree(
    module: _AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: _TreeMask,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi: Tensor | None = None,
    dropout: float = 0.0,
    **others: object,
) -> Tensor:
    """Attention over a packed row of `N` tokens; of a row of several processes each has its tokens'."""
    if not mask.known:
        raise cannot_pack(f"{type(module).__name__} has a mask that is neither causal nor a window")
    unknown = [name for name, value in others.items() if isinstance(value, Tensor) and name not in _HARMLESS]
    if unknown:
        raise cannot_pack(f"{type(module).__name__} attends by `{unknown[0]}` too")
    layout = mask.tree
    layout.layers.add(module.layer_idx)
    # normalised queries and keys can be wider than values under autocast
    query, key = _at_depth(module, query, layout).to(value.dtype), key.to(value.dtype)
    share = layout.share
    if share is not None:
        query, key, value = share.to_heads(query, key, value)
        s_aux = None if s_aux is None else share.of_heads(s_aux)
    scaling = scaling or query.size(-1) ** -0.5

    def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        options = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, "dropout": dropout}
        return _eager(module)(module, query, key, value, mask[None, None], **options)[0].transpose(1, 2)

    # a layer's own way counts on all of its heads
    score = Score(softcap, alibi, s_aux, dropout, eager if alibi is None and share is None else None)
    kernel = KERNELS[layout.attention(query.device, dropout)]
    output = kernel(layout, query, key, value, scaling, mask.window, score)
    if share is not None:
        output = share.to_tokens(output)
    return output.transpose(1, 2).contiguous()


def _at_depth(module: Any, query: Tensor, layout: TreeLayout) -> Tensor:
    """Llama 4 scales queries by their index in the row, every 8192 tokens; here by their depth."""
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    def scale(position: np.ndarray) -> np.ndarray:
        scales: np.ndarray = np.log1p((position + 1) // module.floor_scale) * module.attn_scale + 1
        return scales

    depth = layout.depth if layout.share is None else layout.depth[layout.share.tokens]
    ratio = scale(depth) / scale(np.arange(len(depth)))
    return query * torch.from_numpy(ratio).to(query)[:, None]


def _windows(sees: Callable[..., Tensor], size: int | None, layout: TreeLayout, device: torch.device) -> list[Window]:
    """What a mask shows, if that is a range of depths up to the token's own: both ends are tested for every depth."""
    depth = np.arange(int(layout.depth.max()) + 1)
    query = torch.from_numpy(depth).to(device)  # a chunk's mask holds where rows begin, on the model's device
    batch = torch.zeros((), dtype=torch.long, device=device)

    def shows(key: Tensor) -> Tensor:
        return sees(batch, batch, query, key).expand(query.shape)

    def fits(window: Window) -> bool:
        first = torch.from_numpy(oldest(depth, window)).to(device)
        return bool(shows(first).all()) and not (shows(first - 1) & (first > 0)).any()

    known: list[Window] = [size, Chunk(size)] if size else [None]
    return [window for window in known if fits(window)] if shows(query).all() and not shows(query + 1).any() else []


# Decoders that compute their attention themselves: BLOOM, MPT and Falcon, whose biases grow with the distance (ALiBi).
# Each function is a layer's forward over a packed row, with that layer's own projections. A bias depends on the key's
# depth alone: what is added to all scores of a query changes none of its weights.


def _bloom(
    self: BloomAttention,
    hidden_states: Tensor,
    residual: Tensor,
    *,
    alibi: Tensor,
    attention_mask: _TreeMask,
    **others: object,
) -> tuple[Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    alibi, dropout = alibi.squeeze(1), self.attention_dropout.p if self.training else 0.0
    output = _attend_over_tree(
        self, query, key, value, attention_mask, scaling=self.inv_norm_factor, alibi=alibi, dropout=dropout
    )
    return dropout_add(self.dense(output.flatten(2)), residual, self.hidden_dropout, self.training), None


def _mpt(
    self: MptAttention, hidden_states: Tensor, position_bias: Tensor, *, attention_mask: _TreeMask, **others: object
) -> tuple[Tensor, None]:
    projected = self.Wqkv(hidden_states)
    if self.clip_qkv:
        projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        part.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for part in projected.chunk(3, dim=2)
    )
    length, dropout = int(attention_mask.tree.depth.max()) + 1, self.attn_dropout_p if self.training else 0.0
    alibi = position_bias[:, 0, -length:]
    output = _attend_over_tree(
        self, query, key, value, attention_mask, scaling=self.softmax_scale, alibi=alibi, dropout=dropout
    )
    return self.out_proj(output.flatten(2)), None


def _falcon(
    self: FalconAttention,
    hidden_states: Tensor,
    *,
    alibi: Tensor | None,
    attention_mask: _TreeMask,
    position_embeddings: tuple[Tensor, Tensor],
    **others: object,
) -> tuple[Tensor, None]:
    query, key, value = (part.transpose(1, 2) for part in self._split_heads(self.query_key_value(hidden_states)))
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        alibi = alibi.squeeze(1) * self.inv_norm_factor
    dropout = 0.0 if alibi is None or not self.training else self.attention_dropout.p
    output = _attend_over_tree(
        self, query, key, value, attention_mask, scaling=self.inv_norm_factor, alibi=alibi, dropout=dropout
    )
    return self.dense(output.flatten(2)), None


_OVER_TREE: dict[type[nn.Module], Callable[..., tuple[Tensor, None]]] = {
    BloomAttention: _bloom,
    MptAttention: _mpt,
    FalconAttention: _falcon,
}


def has_own_attention(model: nn.Module) -> bool:
    """Whether a model computes its attention itself, in one of the ways that are known here."""
    return any(type(module) in _OVER_TREE for module in model.modules())


def extend_attention(model: PreTrainedModel) -> None:
    """
    Has a model attend over trees where it is given a packed row: by another forward of layers that compute attention
    themselves, else by an attention that stands before PyTorch's or the model's own.
    """
    # a reference model is made with the policy's configuration, which may have our name already
    name = model._attention_without_trees = model.config._attn_implementation.removeprefix(_PREFIX)
    module: Any
    for module in model.modules():
        if type(module) in _OVER_TREE and "_forward_over_rows" not in vars(module):
            if isinstance(module, FalconAttention):  # it looks up there what it is to call
                module.config = copy.copy(module.config)
            module._forward_over_rows = module.forward
            module.forward = types.MethodType(_forward, module)  # a deep copy of the layer has its own
    if name not in ("flex_attention", "eager", "sdpa"):
        name = "sdpa" if model._supports_sdpa else "eager"
    use_attention(model, _register(name))


def _forward(self: Any, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    if isinstance(attention_mask, _TreeMask):
        return _OVER_TREE[type(self)](self, *args, attention_mask=attention_mask, **kwargs)
    return self._forward_over_rows(*args, attention_mask=attention_mask, **kwargs)
