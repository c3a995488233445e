"""The model's forward over packed trees, for any decoder that uses transformers' attention interface."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward.attention.layout import KERNELS, TreeLayout
from mt_grpo.forward.lm_head import Truncation, chunked_logps
from mt_grpo.forward.packing import Packed
from mt_grpo.forward.recurrent.layers import extend_recurrent_layers, over_tree, recurrent_layers
from mt_grpo.forward.routes import Replayer, route_shape


class AttentionLayer(Protocol):
    """What transformers calls an attention with: a module of a decoder's layer."""

    layer_idx: int | None


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
    # blocks may share a layer, which has no number then
    slides = types is None or module.layer_idx is None or types[module.layer_idx] == "sliding_attention"
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


@dataclass(frozen=True)
class TreeScores:
    """
    What a model's forward returns for a packed row of `M` labels.

    Args:
        logps (`Tensor`): `(M,)` log-probabilities.
        entropies (`Tensor`): `(M,)` entropies in nats.
    """

    logps: Tensor
    entropies: Tensor


@dataclass(frozen=True, eq=False)
class TreeInput:
    """A packed row, as an argument that passes through wrappers unchanged: DDP, FSDP, DeepSpeed, PEFT, autocast."""

    packed: Packed
    layout: TreeLayout
    temperature: float
    truncation: Truncation | None = None
    plain: np.ndarray | None = None


def enable_trees(model: PreTrainedModel | PeftModel, cast_head_to_fp32: bool | None = None) -> None:
    """
    Makes a causal language model able to run over packed trees. `model(input_ids, position_ids, tree=TreeInput(...))`
    then returns a tuple `(logps, entropies)`. Every other forward, and generation, stays as it is.

    The model's own forward is extended. So everything that wraps the model (DDP's gradient hooks, FSDP's and ZeRO-3's
    gathering of weights, autocast) sees one ordinary forward. Backbone and head are looked up on each call, because
    wrappers replace them.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model, not wrapped for training yet.
        cast_head_to_fp32 (`bool`, *optional*): Whether to compute logits in float32, outside autocast, as TRL's
            `cast_lm_head_to_fp32` does. Unset, an earlier setting stays; the first is `False`.

    Raises:
        UnsupportedModelError: If the model cannot run over packed trees.
    """
    if isinstance(model, PeftModel):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise UnsupportedModelError(
                f"{type(model).__name__} learns a prompt before every sequence, so trees cannot be packed for it; "
                "set `forward: padded`."
            )
        model = model.get_base_model()
    check_model(model)
    enabled = "_forward_without_trees" in vars(model)
    if cast_head_to_fp32 is not None or not enabled:
        model._head_in_float32 = bool(cast_head_to_fp32)
    if enabled:
        return
    model._attention_without_trees = model.config._attn_implementation.removeprefix("tree_or_")
    # a reference model is made with the policy's configuration, which may have our name already
    model.config._attn_implementation = register(model.config._attn_implementation.removeprefix("tree_or_"))
    extend_recurrent_layers(model)
    shape = route_shape(model.config)
    model._replayer = None if shape is None else Replayer(model, shape)
    model._forward_without_trees = model.forward  # a bound method: a deep copy of the model has its own

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against the signature
    def forward(self: PreTrainedModel, *args: Any, tree: TreeInput | None = None, **kwargs: Any) -> Any:
        if tree is None:
            return self._forward_without_trees(*args, **kwargs)
        device = kwargs["input_ids"].device
        routes, replayer = tree.packed.routes, self._replayer
        replays: AbstractContextManager[None] = nullcontext()
        if routes is not None and replayer is not None:
            replays = replayer.replaying(tree.layout, routes, tree.packed.shared_routes)
        with over_tree(self, tree.layout), replays:
            hidden = self.base_model(
                input_ids=kwargs["input_ids"],
                position_ids=kwargs["position_ids"],
                # transformers passes a mask of four dimensions on as it is
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
                use_cache=False,
                tree_layout=tree.layout,
            ).last_hidden_state[0]
        config = self.config.get_text_config()
        alone = sum(kind in ("mlp", "moe") for kind in getattr(config, "layer_types", None) or [])  # one token each
        missing = len(set(range(config.num_hidden_layers)) - tree.layout.layers) - alone
        if missing:
            raise UnsupportedModelError(
                f"{missing} layers of {type(self).__name__} do not pass keyword arguments to their attention, so "
                "trees cannot be packed for it; set `forward: padded`."
            )
        predictor = torch.from_numpy(tree.packed.predictor).to(hidden.device)
        predicting = hidden.index_select(0, predictor)
        return _through_head(self.get_output_embeddings(), predicting, tree, self._head_in_float32)

    model.forward = types.MethodType(forward, model)


def _through_head(module: nn.Module, hidden: Tensor, tree: TreeInput, cast_to_fp32: bool) -> tuple[Tensor, Tensor]:
    """
    Computes log-probs inside the output layer's own forward. If that layer is sharded by itself, hooks gather its
    weights and reduce their gradients, and only a call of the module runs these hooks.
    """
    head = _linear(module)

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden.to(head.weight.device)
        label = torch.from_numpy(tree.packed.label).to(hidden.device)
        if not cast_to_fp32:
            return _logps(hidden, head, label, tree)
        with torch.autocast(hidden.device.type, enabled=False):
            return _logps(hidden.float(), head, label, tree)

    usual = vars(head).get("forward")
    vars(head)["forward"] = forward
    try:
        logps, entropies = module(hidden)
        return logps, entropies
    finally:
        if usual is None:
            del vars(head)["forward"]
        else:
            vars(head)["forward"] = usual


def _logps(hidden: Tensor, head: nn.Linear, label: Tensor, tree: TreeInput) -> tuple[Tensor, Tensor]:
    sampled = tree.temperature, tree.truncation
    if tree.plain is None or sampled == (1.0, None):
        return chunked_logps(hidden, head.weight, head.bias, label, *sampled)
    order = torch.from_numpy(np.argsort(tree.plain, kind="stable")).to(hidden.device)
    sizes = [int((~tree.plain).sum()), int(tree.plain.sum())]
    parts = zip(hidden[order].split(sizes), label[order].split(sizes), (sampled, (1.0, None)), strict=True)
    found = [chunked_logps(states, head.weight, head.bias, labels, *how) for states, labels, how in parts]
    back = order.argsort()
    logps, entropies = (torch.cat(values)[back] for values in zip(*found, strict=True))
    return logps, entropies


def _linear(head: nn.Module) -> nn.Linear:
    if isinstance(head, ModulesToSaveWrapper):
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapter]
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(
            f"The output layer is a {type(head).__name__}, not a linear layer, so trees cannot be packed for it; set "
            "`forward: padded`."
        )
    return head


def score_packed(
    model: nn.Module,
    packed: Packed,
    attention: str = "auto",
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    plain: np.ndarray | None = None,
) -> TreeScores:
    """
    One forward over a packed row.

    Args:
        model (`nn.Module`): A model after `enable_trees`, as it is or wrapped for training.
        packed (`Packed`): The row.
        attention (`str`, *optional*, defaults to `"auto"`): `"auto"`, `"segment"`, `"flex"` or `"dense"`.
        temperature (`float`, *optional*, defaults to `1.0`): Divides the logits.
        truncation (`Truncation`, *optional*): Which tokens can be drawn.
        plain (`np.ndarray`, *optional*): `(M,)` bool: labels that are scored at temperature 1 and without truncation.
    """
    device = next(model.parameters()).device
    layout = TreeLayout(packed, attention)
    input_ids, position_ids = (
        torch.from_numpy(array).to(device)[None] for array in (packed.input_ids, packed.position_ids)
    )
    tree = TreeInput(packed, layout, temperature, truncation, plain)
    return TreeScores(*model(input_ids=input_ids, position_ids=position_ids, tree=tree))


def check_model(model: PreTrainedModel) -> None:
    """
    Refuses a causal language model that cannot run over packed trees, or that may score them wrongly in a way that
    `mt_grpo.forward.probe` cannot see.

    Raises:
        UnsupportedModelError: With the reason, and how to mend it.
    """
    reason = _obstacle(model)
    if reason is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} {reason}, so trees cannot be packed for it; set `forward: padded`."
        )


def _obstacle(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    # cannot run
    if not model._supports_attention_backend and not recurrent_layers(model):
        return "does not go through transformers' attention interface"
    if model.base_model is model or not isinstance(model.get_output_embeddings(), torch.nn.Module):
        return "has no output layer apart from the rest"
    # the probe has no images and no other sequence to attend to
    if config.is_encoder_decoder or model.config is not config:
        return "is more than a text decoder"
    # the probe is too small to fill an expert, and compares no losses
    if getattr(config, "expert_capacity", None) or getattr(config, "output_router_logits", False):
        return "routes or balances experts by the batch"
    # a cap has an effect only on large scores, and training may make them large
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
