"""
What training keeps of a forward for its backward: inputs of layers in groups, or all of it in the machine's memory.
Apart from the trainer, whose every other part is the same whichever is chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import PartialState
from torch import nn
from trl.models import get_act_offloading_ctx_manager

from mt_grpo.errors import ConfigError
from mt_grpo.forward.layer_groups import layers_in_groups
from mt_grpo.training.config import MTGRPOConfig

logger = logging.getLogger(__name__)


def check_checkpointing(args: MTGRPOConfig, model: nn.Module) -> None:
    """
    Whether gradients reach all layers. A reentrant checkpoint stops those of what layers hand on beside their output:
    keys and values that later layers share (Gemma 3n, Gemma 4 E2B and E4B).
    """
    reentrant = args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if reentrant and any(vars(module).get("is_kv_shared_layer") for module in model.modules()):
        raise ConfigError(
            "`gradient_checkpointing_kwargs: {use_reentrant: true}` loses gradients of this model, whose layers share "
            "keys and values: leave it out. TRL sets it for an adapter under DeepSpeed ZeRO-3: shard with FSDP2 or "
            "ZeRO-2, or set `gradient_checkpointing: false`."
        )


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
