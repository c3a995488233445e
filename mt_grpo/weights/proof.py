"""
The proof that weights reach every layer of a server.

At the start of a run the server's weights equal the trainer's before anything was sent, so equal answers would prove
nothing. The first weights that are sent are therefore changed on purpose. The trainer computes the effect without
touching its weights: halving the weights of a linear layer halves its output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import nn

HALF = 0.5
SHIFT = 0.0625
"""Added to the weights of an adapter's second factors. They begin at 0, so halving would change nothing."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "modules_to_save.default.")


@contextlib.contextmanager
def halved(model: nn.Module) -> Iterator[set[str]]:
    """
    A context in which `model` computes as if its linear layers and embeddings had half their weights and biases.

    Yields:
        `set[str]`: The names of these weights and biases, as vLLM loads them. It is filled as layers are called. A
        layer that a forward does not call is not in it.
    """
    names: set[str] = set()

    def add_hook(name: str, layer: nn.Module) -> Any:
        def halve(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            names.update((f"{name}.weight", f"{name}.bias"))
            return output * HALF

        return layer.register_forward_hook(halve)

    handles = [add_hook(name, layer) for name, layer in _layers(model)]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def shifted(model: nn.Module) -> Iterator[set[str]]:
    """A context in which `model` computes as if `SHIFT` were added to all weights of its adapter's second factors."""

    def shift(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output + SHIFT * inputs[0].sum(dim=-1, keepdim=True)

    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    factors = [factor for layer in layers for factor in layer.lora_B.values() if isinstance(factor, nn.Linear)]
    handles = [factor.register_forward_hook(shift) for factor in factors]
    try:
        yield set()
    finally:
        for handle in handles:
            handle.remove()


def shift_file(path: Path) -> None:
    """Changes a saved adapter as `shifted` does."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(".lora_B.weight"):
            tensors[name] = tensor + SHIFT
    save_file(tensors, path, metadata={"format": "pt"})


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers and embeddings by their names in a checkpoint; a layer and its merged adapter are one."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        base = module
        if isinstance(module, BaseTunerLayer):
            inside.update(module.modules())
            base = module.get_base_layer()
        if isinstance(base, (nn.Linear, nn.Embedding)):
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            yield name.removeprefix("base_model.model."), module
