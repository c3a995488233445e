"""Which layers of a model carry a state from token to token, and how they run over a packed row."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import Token
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from mt_grpo.forward.attention.layout import CURRENT, TreeLayout
from mt_grpo.forward.recurrence import FUNCTIONS, Function, Schedule, state_space

LIGHTNING = (MiniMaxLightningAttention,) if "mamba2_chunk_scan" in vars(modeling_mamba2) else ()
"""MiniMax's layers call no function that could run along a tree; with an older transformers there is no scan."""


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


def recurrent_layers(model: nn.Module) -> list[Any]:
    """
    The layers that carry a state by functions that can run along a tree. All else that they compute must depend on one
    token only, which the probe tests.
    """
    return [module for module in model.modules() if isinstance(module, LIGHTNING) or _called(type(module))]


def extend_recurrent_layers(model: nn.Module) -> None:
    """
    Extends these layers' forwards: given a `tree_layout`, or within `over_tree`, they run over the tree. They project
    all tokens at once, as they would those of one sequence. Only the functions that carry a state run once per batch
    of chains.
    """
    for module in recurrent_layers(model):
        if "_forward_along_sequence" not in vars(module):
            module._forward_along_sequence = module.forward
            module.forward = types.MethodType(_forward, module)  # a deep copy of the layer has its own


class _Carrier:
    """
    Has the layout that a block runs over in `CURRENT` while the block runs, whoever calls it. A block that is given
    none is run again by its checkpoint with the states that it had, outside `over_tree`.
    """

    def __init__(self, block: nn.Module) -> None:
        self._tokens: list[Token[TreeLayout | None]] = []
        self._layouts: MutableMapping[Tensor, TreeLayout] = WeakTensorKeyDictionary()
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        block.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def _begin(self, block: nn.Module, args: Any, options: dict[str, Any]) -> None:
        states = args[0] if args else options["hidden_states"]
        layout = options.get("tree_layout") or CURRENT.get() or self._layouts.get(states)
        if layout is not None:
            self._layouts[states] = layout
        self._tokens.append(CURRENT.set(layout))

    def _end(self, block: nn.Module, args: Any, options: dict[str, Any], output: Any) -> None:
        CURRENT.reset(self._tokens.pop())


def extend_blocks(model: nn.Module, number: int) -> None:
    """
    Lets the `number` blocks of a model tell what is in them which layout they run over. `over_tree` does not reach
    blocks that FSDP's activation checkpointing runs again.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            for block in module:
                _Carrier(block)


@contextmanager
def over_tree(model: nn.Module, layout: TreeLayout) -> Iterator[None]:
    """
    Some blocks pass no keyword arguments to their recurrent layers, and none to their routers. These find the layout
    in `CURRENT`, also when gradient checkpointing runs their block again in a backward. A model without a state to
    carry and without routes to replay is left as it is.
    """
    modules: list[Any] = list(model.modules())
    if layout.choose is None and not any("_forward_along_sequence" in vars(module) for module in modules):
        yield
        return
    checkpoints = {
        module: vars(module)["_gradient_checkpointing_func"]
        for module in modules
        if "_gradient_checkpointing_func" in vars(module)
    }

    def within(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_within(*args: Any) -> Any:
            token = CURRENT.set(layout)
            try:
                return run(*args)
            finally:
                CURRENT.reset(token)

        return run_within

    def carrying(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        return lambda run, *args: checkpoint(within(run), *args)

    token = CURRENT.set(layout)
    try:
        for module, checkpoint in checkpoints.items():
            module._gradient_checkpointing_func = carrying(checkpoint)
        yield
    finally:
        for module, checkpoint in checkpoints.items():
            module._gradient_checkpointing_func = checkpoint
        CURRENT.reset(token)


def _forward(
    self: Any, hidden_states: Tensor, *args: Any, tree_layout: TreeLayout | None = None, **kwargs: Any
) -> Any:
    layout = tree_layout or CURRENT.get()
    if layout is None:
        return self._forward_along_sequence(hidden_states, *args, **kwargs)
    layout.layers.add(self.layer_idx)
    if isinstance(self, LIGHTNING):
        return lightning_attention(self, layout.schedule, hidden_states)
    kwargs["attention_mask"] = None  # no token of a row is padding
    return _along_tree(type(self), layout)(self, hidden_states, *args, **kwargs)


def _along_tree(kind: type[nn.Module], layout: TreeLayout) -> Function:
    """
    The layer's own forward, in which other functions stand behind the names that it calls. Neither the class nor
    transformers' modules are changed.
    """
    forward = inspect.unwrap(kind.forward)
    names = dict(forward.__globals__)
    for name in _called(kind):
        names[name] = FUNCTIONS[name](names[name], layout.schedule)
    along_tree = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    along_tree.__kwdefaults__ = forward.__kwdefaults__
    return along_tree


def _called(kind: type[nn.Module]) -> set[str]:
    forward: Callable[..., Any] = inspect.unwrap(kind.forward)
    return FUNCTIONS.keys() & set(forward.__code__.co_names) if isinstance(forward, types.FunctionType) else set()
