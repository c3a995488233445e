"""
What training keeps of a forward for its backward: inputs of layers in groups, or all of it in the machine's memory.

Checkpointing keeps the input of each layer, so what is kept grows with their number L. In groups of k only the first
input of a group is kept: L / k of them. In a group's backward its layers run once more without a gradient, for their
k inputs; then each layer is computed again as without groups. So at most L / k + k inputs are there at a time, and
the least for k near √L (Chen et al. 2016, arXiv 1604.06174, in which a group is computed again as a whole). This takes
up to one more forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from trl.models import get_act_offloading_ctx_manager

from mt_grpo.errors import ConfigError
from mt_grpo.training.config import MTGRPOConfig

logger = logging.getLogger(__name__)


class Activations:
    """How a run keeps activations."""

    def __init__(self, args: MTGRPOConfig, device: torch.device) -> None:
        if args.activation_offloading and device.type == "cpu":
            raise ConfigError(
                "`activation_offloading: true` moves activations from a GPU to the machine's memory, and this run is "
                "on a CPU: leave it out."
            )
        self._args = args
        self._warned = args.gradient_checkpointing_layers == 1
        self._offloading: AbstractContextManager[object] | None = None

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[None]:
        """For a forward of the model with a loss; its backward is outside, so that nothing of it is moved again."""
        if self._args.activation_offloading and self._offloading is None:
            self._offloading = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
        with layers_in_groups(model, self._args.gradient_checkpointing_layers) as groups:
            with self._offloading or nullcontext():
                yield
        if not self._warned and groups.largest < 2 and PartialState().is_main_process:
            logger.warning(
                "The layers of this model do not take just what the layer before them returns, so "
                "`gradient_checkpointing_layers: %d` has no effect: each keeps its input.",
                self._args.gradient_checkpointing_layers,
            )
        self._warned = True


Run = Callable[[Tensor], Any]


@contextmanager
def layers_in_groups(model: nn.Module, size: int) -> Iterator[Groups]:
    """
    Within it, a forward keeps one input for each `size` layers that follow upon each other. A layer whose input is not
    just what the layer before it returned begins another group. Layers that are not checkpointed are left alone.
    """
    groups = Groups(size)
    modules: Iterable[Any] = model.modules() if size > 1 else ()
    layers = [module for module in modules if "_gradient_checkpointing_func" in vars(module)]
    checkpoints = [layer._gradient_checkpointing_func for layer in layers]
    try:
        for layer, checkpoint in zip(layers, checkpoints, strict=True):
            layer._gradient_checkpointing_func = groups.of(layer, checkpoint)
        yield groups
    finally:
        for layer, checkpoint in zip(layers, checkpoints, strict=True):
            layer._gradient_checkpointing_func = checkpoint


class Groups:
    """The groups of one forward, made as its layers are called."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.largest = 0
        self._group: _Group | None = None
        self._last: Tensor | None = None  # what the layer before returned, and its version
        self._version = 0

    def of(self, layer: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """What checkpoints a layer as `checkpoint` does, and keeps its input in its group."""

        def in_group(run: Run, *args: Any) -> Any:
            states, *others = args
            if any(other is not None for other in others) or not torch.is_grad_enabled():
                return checkpoint(run, *args)
            run = partial(_with, run, others)  # Gemma 4 hands over None where it has no inputs of layers
            group = self._group
            if group is None or len(group.layers) == self._size or not self._follows(states):
                group = self._group = _Group(states)
                group.layers.append((layer, run))
                output = checkpoint(run, states)
            else:
                group.layers.append((layer, run))
                with torch.autograd.graph.saved_tensors_hooks(*group.hooks(states)):
                    output = checkpoint(run, states)
            self.largest = max(self.largest, len(group.layers))
            self._last = output if isinstance(output, Tensor) else output[0]
            self._version = self._last._version
            return output

        return in_group

    def _follows(self, states: Tensor) -> bool:
        """Whether they are what the last layer returned, unchanged. A wrapper may have made a view of them."""
        last = self._last
        return (
            last is not None
            and states.data_ptr() == last.data_ptr()
            and states.shape == last.shape
            and states.dtype == last.dtype
            and states._version == self._version
        )


def _with(run: Callable[..., Any], others: list[Any], states: Tensor) -> Any:
    return run(states, *others)


class _Group:
    """Layers that follow upon each other."""

    def __init__(self, first: Tensor) -> None:
        self.layers: list[tuple[nn.Module, Run]] = []
        self._first = first.detach()
        kind, on_gpu = first.device.type, first.device.type != "cpu"
        self._device = torch.get_device_module(kind)
        self._devices = [first.device] if on_gpu else []
        self._random = torch.get_rng_state()
        self._random_of_devices = [self._device.get_rng_state(device) for device in self._devices]
        self._cast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        self._inputs: list[Tensor] = []  # of the layers after the first one, in the group's backward

    def hooks(self, states: Tensor) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """For what autograd saves around the group's latest layer: its input is let go, and made again."""
        place, pointer, shape = len(self.layers) - 2, states.data_ptr(), states.shape

        def pack(tensor: Tensor) -> Tensor | None:
            return None if tensor.data_ptr() == pointer and tensor.shape == shape else tensor

        def unpack(kept: Tensor | None) -> Tensor:
            if kept is not None:
                return kept
            if len(self._inputs) <= place:
                self._inputs = self._run()
            made = self._inputs[place]
            del self._inputs[place:]  # a backward comes from the last layer
            return made

        return pack, unpack

    def _run(self) -> list[Tensor]:
        """The inputs of all layers but the first one, with the numbers that were drawn in the forward."""
        states, inputs = self._first, []
        kind = self._cast["device_type"]
        with torch.random.fork_rng(self._devices, device_type=kind), torch.no_grad(), torch.autocast(**self._cast):
            torch.set_rng_state(self._random)
            for device, random in zip(self._devices, self._random_of_devices, strict=True):
                self._device.set_rng_state(random, device)
            for layer, run in self.layers[:-1]:
                if isinstance(layer, FSDPModule):
                    layer.unshard()
                output = run(states)
                if isinstance(layer, FSDPModule):
                    layer.reshard()
                states = output if isinstance(output, Tensor) else output[0]
                inputs.append(states)
        return inputs
