"""
Layers that carry a state from token to token (convolutions, delta rules, state spaces), and how they run over a packed
row's tree.

Such a layer calls a function along a sequence: a kernel where one is installed, else PyTorch's. In `FUNCTIONS` each of
these has one that runs along a tree instead. It has the same arguments, and calls the other once per batch of chains,
with the states at their ends as the initial states of the chains that continue them.
"""

from __future__ import annotations

import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Token
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from mt_grpo.forward.attention import CURRENT, TreeLayout, holding
from mt_grpo.forward.lm_head import replaced

_SHORT = 64
"""Chains of up to this many tokens may be in one batch. Longer ones are in one batch if none is twice as long."""

_Step = Callable[[list[Tensor], Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""
`(inputs, states, continued) -> (outputs, final states)`: inputs and outputs `(B, L, ...)`, states `(B, ...)` or `None`
for zeros. Final states are needed if the chains are `continued`.
"""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Chains that run side by side, padded on the right."""

    chains: list[int]
    parents: list[int]
    shape: tuple[int, int]
    tokens: int
    padded: np.ndarray
    kept: np.ndarray


class _Schedule:
    """The order of a row's `C` chains: those that others continue level by level, then all others side by side."""

    def __init__(self, layout: TreeLayout) -> None:
        self._starts, self._sizes, self._parent = layout.starts, layout.sizes, layout.parent
        starts, sizes, parents = layout.starts, layout.sizes, layout.parents
        self._continued = set(parents)
        levels: list[int] = []
        for above in parents:  # a chain stands before those that continue it
            levels.append(levels[above] + 1 if above >= 0 else 0)
        last = len(parents)
        groups: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
        for chain, size in enumerate(sizes.tolist()):
            level = levels[chain] if chain in self._continued else last
            groups[level, parents[chain] >= 0, (max(size, _SHORT) - 1).bit_length()].append(chain)
        self._batches = [_batch(groups[key], parents, sizes) for key in sorted(groups)]
        order = [chain for batch in self._batches for chain in batch.chains]
        self._order = np.concatenate([np.arange(starts[chain], starts[chain] + sizes[chain]) for chain in order])
        self._inverse = np.argsort(self._order)
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._tensors: dict[tuple[torch.device, int], Tensor] = {}

    @classmethod
    def of(cls, layout: TreeLayout) -> _Schedule:
        """That of a row, which is made once."""
        layout.schedule = schedule = layout.schedule or cls(layout)
        return schedule

    def run(self, inputs: Sequence[Tensor], step: _Step, padding: Sequence[float] = ()) -> Tensor:
        """Runs a recurrence over the tree."""
        device, counts = inputs[0].device, [batch.tokens for batch in self._batches]
        order = self._on(device, self._order)
        # split and cat, not slices: the backward of a slice would write a zero gradient of the whole row per batch
        pieces = [tensor.index_select(0, order).split(counts) for tensor in inputs]
        states: dict[int, Tensor] = {}
        outputs = []
        for number, batch in enumerate(self._batches):
            own = [tensors[number] for tensors in pieces]
            even = batch.tokens == batch.shape[0] * batch.shape[1]
            if not even:
                own = [
                    _with_last(tensor, 0, last).index_select(0, self._on(device, batch.padded))
                    for tensor, last in zip(own, padding or [0.0] * len(own), strict=True)
                ]
            state = None if batch.parents[0] < 0 else torch.stack([states[chain] for chain in batch.parents])
            continued = batch.chains[0] in self._continued
            output, final = step([tensor.unflatten(0, batch.shape) for tensor in own], state, continued)
            if continued and final is not None:
                states.update(zip(batch.chains, final.unbind(), strict=True))
            output = output.flatten(0, 1)
            if not even:
                output = output.index_select(0, self._on(device, batch.kept))
            outputs.append(output)
        return torch.cat(outputs).index_select(0, self._on(device, self._inverse))

    def convolve(self, inputs: Tensor, width: int, convolution: Callable[[Tensor], Tensor]) -> Tensor:
        """Runs a causal convolution over the tree, once, each chain behind the last tokens before it."""
        if width not in self._rows:
            self._rows[width] = self._row(width)
        row, own = (self._on(inputs.device, array) for array in self._rows[width])
        return convolution(_with_last(inputs, 2, 0.0).index_select(2, row)).index_select(2, own)

    def _row(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Token at each place of the row that is convolved, `N` where there is none, and place of each token."""
        history = np.empty((len(self._starts), width - 1), dtype=np.int64)
        token = self._parent[self._starts]
        for column in reversed(range(width - 1)):
            history[:, column] = token
            token = np.where(token >= 0, self._parent[token], -1)
        size = len(self._parent)
        own = np.arange(size) + np.arange(1, len(history) + 1).repeat(self._sizes) * (width - 1)
        row = np.empty(size + history.size, dtype=np.int64)
        row[own] = np.arange(size)
        before = np.ones(len(row), dtype=bool)
        before[own] = False
        row[before] = np.where(history >= 0, history, size).reshape(-1)
        return row, own

    def _on(self, device: torch.device, index: np.ndarray) -> Tensor:
        key = (device, id(index))
        if key not in self._tensors:
            self._tensors[key] = torch.from_numpy(index).to(device)
        return self._tensors[key]


def _batch(chains: list[int], parents: list[int], sizes: np.ndarray) -> _Batch:
    own = sizes[chains]
    longest, total = int(own.max()), int(own.sum())
    kept = np.concatenate([row * longest + np.arange(size) for row, size in enumerate(own.tolist())])
    padded = np.full(len(chains) * longest, total, dtype=np.int64)
    padded[kept] = np.arange(total)
    return _Batch(chains, [parents[chain] for chain in chains], (len(chains), longest), total, padded, kept)


def _with_last(tensor: Tensor, dim: int, value: float) -> Tensor:
    """The tensor with one more entry in dimension `dim`, which is `value` everywhere."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, 1), value=value)


_Function = Callable[..., Any]

_NO_STEP = -1e4  # A `dt` whose softplus is 0 in every precision


def _convolution(along_sequence: _Function, schedule: _Schedule) -> _Function:
    """A causal convolution of each channel."""

    def along_tree(hidden_states: Tensor, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
        return schedule.convolve(
            hidden_states, weight.size(-1), lambda row: along_sequence(row, weight, *args, **kwargs)
        )

    return along_tree


def _delta_rule(along_sequence: _Function, schedule: _Schedule) -> _Function:
    """The gated delta rule, with a gate per head (Gated DeltaNet) or per channel (Kimi Delta Attention)."""

    def along_tree(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: object
    ) -> tuple[Tensor, None]:
        def step(inputs: list[Tensor], state: Tensor | None, continued: bool) -> tuple[Tensor, Tensor | None]:
            query, key, value, g, beta = inputs
            carried: dict[str, Any] = {"initial_state": state, "output_final_state": continued}
            if query.device.type == "cpu":  # kernels have chunks of their own
                carried["chunk_size"] = _chunk(query, 64)
            output, final = along_sequence(query, key, value, g=g, beta=beta, **options, **carried)
            return output, final

        options = {name: value for name, value in kwargs.items() if name not in _OURS}
        return schedule.run([tensor[0] for tensor in (query, key, value, g, beta)], step)[None], None

    return along_tree


_OURS = ("chunk_size", "initial_state", "output_final_state", "cu_seqlens")


def _state_space(along_sequence: _Function, schedule: _Schedule) -> _Function:
    """The state space of Mamba 2."""

    def along_tree(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        *,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        initial_states: None = None,
        return_final_states: bool = False,
        **kwargs: object,
    ) -> Tensor:
        if dt_limit[0] > 0:  # would move the state at padding
            dt = _step_size(dt, dt_bias, dt_softplus).clamp(*dt_limit)
            dt_bias, dt_softplus, dt_limit = None, False, (0.0, float("inf"))
        kwargs |= {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

        def step(inputs: list[Tensor], state: Tensor | None, continued: bool) -> tuple[Tensor, Tensor | None]:
            hidden_states, dt, B, C = inputs
            chunk = _chunk(hidden_states, chunk_size)
            output, final = along_sequence(
                hidden_states, dt, A, B, C, chunk_size=chunk, initial_states=state, return_final_states=True, **kwargs
            )
            return output, final

        return _scan(schedule, step, (hidden_states, dt, B, C), _NO_STEP if dt_softplus else 0.0)[None]

    return along_tree


def _selective_scan(along_sequence: _Function, schedule: _Schedule) -> _Function:
    """The state space of Mamba: what its initial state adds, and its final state, are computed here."""

    def along_tree(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: object,
    ) -> Tensor:
        def step(inputs: list[Tensor], state: Tensor | None, continued: bool) -> tuple[Tensor, Tensor | None]:
            hidden_states, dt, B, C = (tensor.transpose(1, 2).contiguous() for tensor in inputs)
            steps = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
            output, final = along_sequence(hidden_states, dt, A, B, C, D=D, **steps, **kwargs), None
            dt = _step_size(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)
            passed = dt.cumsum(dim=-1)
            if continued:
                decay = (A[:, :, None] * (passed[..., -1:] - passed)[:, :, None]).exp()
                final = torch.einsum("bcl,bnl,bcnl->bcn", dt * hidden_states, B.float(), decay)
            if state is not None:
                decay = (A[:, :, None] * passed[:, :, None]).exp()
                output = output + torch.einsum("bcnl,bcn,bnl->bcl", decay, state, C.float()).to(output.dtype)
                if final is not None:
                    final = final + decay[..., -1] * state
            return output.transpose(1, 2), final

        inputs = [tensor.transpose(1, 2) for tensor in (hidden_states, dt, B, C)]
        output = _scan(schedule, step, inputs, _NO_STEP if delta_softplus else 0.0).T[None]
        return output if z is None else output * F.silu(z)

    return along_tree


def _not_fused(along_sequence: _Function, schedule: _Schedule) -> _Function:
    """A kernel that convolves and scans at once. Layers go on without it if it returns nothing."""
    return lambda *args, **kwargs: None


def _scan(schedule: _Schedule, step: _Step, inputs: Sequence[Tensor], no_step: float) -> Tensor:
    """Runs a state space. `inputs` are `(1, N, ...)`, the second is a step size: at `no_step` the state stays."""
    return schedule.run([tensor[0] for tensor in inputs], step, padding=(0.0, no_step, 0.0, 0.0))


def _step_size(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def _chunk(inputs: Tensor, most: int) -> int:
    """Tokens per chunk for `(B, L, ...)`: as needed on a CPU, else the layer's own, for which kernels are compiled."""
    return min(most, 1 << (inputs.size(1) - 1).bit_length()) if inputs.device.type == "cpu" else most


FUNCTIONS: dict[str, Callable[[_Function, _Schedule], _Function]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _not_fused,
    "mamba_selective_scan": _selective_scan,
    "mamba_inner_fn": _not_fused,
}
"""By the name under which a layer calls it."""


_LIGHTNING = (MiniMaxLightningAttention,) if "mamba2_chunk_scan" in vars(modeling_mamba2) else ()
"""MiniMax's layers call no function that could run along a tree; with an older transformers there is no scan."""


def _lightning_attention(
    layer: MiniMaxLightningAttention, schedule: _Schedule, hidden_states: Tensor
) -> tuple[Tensor, None]:
    """`MiniMaxLightningAttention` over a tree: a state space of Mamba 2 whose steps are all 1."""
    states = layer.act_fn(layer.qkv_proj(hidden_states))
    query, key, value = states.unflatten(2, (layer.num_attention_heads, -1)).chunk(3, dim=3)
    steps, decay = value.new_ones(value.shape[:3]), -layer.slope_rate.flatten()
    scan = _state_space(modeling_mamba2.mamba2_chunk_scan, schedule)
    output = scan(value, steps, decay, key, query, chunk_size=layer.block_size).to(value.dtype)
    output = layer.norm(output.flatten(2))
    return layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * output), None


def recurrent_layers(model: nn.Module) -> list[Any]:
    """The layers that carry a state by functions that can run along a tree; all else is for the probe to test."""
    return [module for module in model.modules() if isinstance(module, _LIGHTNING) or _called(type(module))]


class _Carrier:
    """Has a block's layout in `CURRENT` while it runs, also when its checkpoint runs it again."""

    def __init__(self, block: nn.Module) -> None:
        self._tokens: list[Token[TreeLayout | None]] = []
        self._layouts: MutableMapping[Tensor, TreeLayout] = WeakTensorKeyDictionary()
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        block.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def _begin(self, block: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        states = args[0] if args else options["hidden_states"]
        layout = options.get("tree_layout") or CURRENT.get() or self._layouts.get(states)
        if layout is not None:
            self._layouts[states] = layout
        self._tokens.append(CURRENT.set(layout))

    def _end(self, block: nn.Module, args: object, options: object, output: object) -> None:
        CURRENT.reset(self._tokens.pop())


def extend_recurrence(model: nn.Module, number: int) -> None:
    """
    Has layers that carry a state run over a tree, given as `tree_layout` or by `over_tree`, once per batch of chains.
    The `number` blocks of a model say their layout, also where FSDP's checkpointing runs them again.
    """
    for module in recurrent_layers(model):
        if "_forward_along_sequence" not in vars(module):
            module._forward_along_sequence = module.forward
            module.forward = types.MethodType(_forward, module)  # a deep copy of the layer has its own
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            for block in module:
                _Carrier(block)


@contextmanager
def over_tree(model: nn.Module, layout: TreeLayout) -> Iterator[None]:
    """
    A context in which layers find the layout in `CURRENT`, also when a checkpoint runs their block again: some blocks
    pass no keyword arguments to their recurrent layers, and none to their routers.
    """
    modules: list[Any] = list(model.modules())
    if layout.choose is None and not any("_forward_along_sequence" in vars(module) for module in modules):
        yield
        return
    name = "_gradient_checkpointing_func"

    def carrying(checkpoint: Callable[..., object]) -> Callable[..., Any]:
        return lambda run, *args: checkpoint(holding(CURRENT, layout)(run), *args)

    with ExitStack() as stack:
        stack.enter_context(holding(CURRENT, layout))
        for attributes in (vars(module) for module in modules if name in vars(module)):
            stack.enter_context(replaced(attributes, name, carrying(attributes[name])))
        yield


def _forward(
    self: Any, hidden_states: Tensor, *args: Any, tree_layout: TreeLayout | None = None, **kwargs: Any
) -> Any:
    layout = tree_layout or CURRENT.get()
    if layout is None:
        return self._forward_along_sequence(hidden_states, *args, **kwargs)
    layout.layers.add(self.layer_idx)
    if isinstance(self, _LIGHTNING):
        return _lightning_attention(self, _Schedule.of(layout), hidden_states)
    kwargs["attention_mask"] = None  # no token of a row is padding
    return _along_tree(type(self), layout)(self, hidden_states, *args, **kwargs)


def _along_tree(kind: type[nn.Module], layout: TreeLayout) -> _Function:
    """The layer's own forward with other functions behind the names that it calls; no class is changed."""
    forward = inspect.unwrap(kind.forward)
    names = dict(forward.__globals__)
    for name in _called(kind):
        names[name] = FUNCTIONS[name](names[name], _Schedule.of(layout))
    along_tree = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    along_tree.__kwdefaults__ = forward.__kwdefaults__
    return along_tree


def _called(kind: type[nn.Module]) -> set[str]:
    forward: Callable[..., Any] = inspect.unwrap(kind.forward)
    return FUNCTIONS.keys() & set(forward.__code__.co_names) if isinstance(forward, types.FunctionType) else set()
