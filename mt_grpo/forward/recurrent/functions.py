"""
What transformers' layers run along a sequence, run along a tree instead.

Each function here takes the one that the layer calls (a kernel where one is installed, else PyTorch), and returns one
with the same arguments that calls it once per batch of chains, with the states at their ends as the initial states of
the chains that continue them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_grpo.forward.schedule import Schedule, Step

Function = Callable[..., Any]

NO_STEP = -1e4
"""A `dt` whose softplus is 0 in every precision."""


def convolution(along_sequence: Function, schedule: Schedule) -> Function:
    """A causal convolution of each channel."""

    def along_tree(hidden_states: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return schedule.convolve(
            hidden_states, weight.size(-1), lambda row: along_sequence(row, weight, *args, **kwargs)
        )

    return along_tree


def delta_rule(along_sequence: Function, schedule: Schedule) -> Function:
    """The gated delta rule, with a gate per head (Gated DeltaNet) or per channel (Kimi Delta Attention)."""

    def along_tree(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        def step(inputs: list[Tensor], state: Tensor | None, continued: bool) -> tuple[Tensor, Tensor | None]:
            query, key, value, g, beta = inputs
            chunk = {"chunk_size": _chunk(query, 64)} if query.device.type == "cpu" else {}  # kernels have their own
            output, final = along_sequence(
                query,
                key,
                value,
                g=g,
                beta=beta,
                **options,
                **chunk,
                initial_state=state,
                output_final_state=continued,
            )
            return output, final

        options = {name: value for name, value in kwargs.items() if name not in _OURS}
        return schedule.run([tensor[0] for tensor in (query, key, value, g, beta)], step)[None], None

    return along_tree


_OURS = ("chunk_size", "initial_state", "output_final_state", "cu_seqlens")


def state_space(along_sequence: Function, schedule: Schedule) -> Function:
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
        **kwargs: Any,
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

        return _scan(schedule, step, (hidden_states, dt, B, C), NO_STEP if dt_softplus else 0.0)[None]

    return along_tree


def selective_scan(along_sequence: Function, schedule: Schedule) -> Function:
    """
    The state space of Mamba. What the layer calls takes no initial state, and its kernel gives its final state no
    gradient. The scan is linear in its state, so what the initial state adds, and the final state, are computed here.
    """

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
        **kwargs: Any,
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
        output = _scan(schedule, step, inputs, NO_STEP if delta_softplus else 0.0).T[None]
        return output if z is None else output * F.silu(z)

    return along_tree


def not_fused(along_sequence: Function, schedule: Schedule) -> Function:
    """A kernel that convolves and scans at once. Layers go on without it if it returns nothing."""
    return lambda *args, **kwargs: None


def _scan(schedule: Schedule, step: Step, inputs: Sequence[Tensor], no_step: float) -> Tensor:
    """Runs a state space. `inputs` are `(1, N, ...)`, the second is a step size: at `no_step` the state stays."""
    return schedule.run([tensor[0] for tensor in inputs], step, padding=(0.0, no_step, 0.0, 0.0))


def _step_size(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def _chunk(inputs: Tensor, most: int) -> int:
    """
    Tokens per chunk for inputs `(B, L, ...)`. PyTorch pads to whole chunks, so on a CPU no more than are needed.
    Kernels are compiled for the layer's own.
    """
    return min(most, 1 << (inputs.size(1) - 1).bit_length()) if inputs.device.type == "cpu" else most


FUNCTIONS: dict[str, Callable[[Function, Schedule], Function]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": state_space,
    "mamba2_split_conv1d_scan_combined": not_fused,
    "mamba_selective_scan": selective_scan,
    "mamba_inner_fn": not_fused,
}
"""By the name under which a layer calls it."""
