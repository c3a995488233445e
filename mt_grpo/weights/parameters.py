"""Iterates over a trainer's full parameters, under the names that vLLM loads."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch.distributed.fsdp import FSDPModule
from trl.generation.vllm_generation import VLLMGeneration

from mt_grpo.weights.proof import HALF


class NcclTransfer(VLLMGeneration):
    """TRL's walk over the parameters, as they are sent to a server."""

    dtype: torch.dtype | None = None
    """The server's dtype. Wider parameters are cast to it: FSDP and mixed precision keep them in float32."""
    changed: set[str] | None = None
    """Names of the parameters that are sent halved, for a proof."""

    def _iter_named_params(self) -> Any:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward leaves the outermost weights gathered
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if is_peft_model(model) else model
        wide = [*model._keep_in_fp32_modules, *model._keep_in_fp32_modules_strict]

        def as_sent(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
            name, tensor = item
            wider = self.dtype is not None and tensor.is_floating_point() and tensor.itemsize > self.dtype.itemsize
            if wider and not any(part in name for part in wide):
                tensor = tensor.to(self.dtype)
            return name, tensor * HALF if name in (self.changed or ()) else tensor

        return map(as_sent, super()._iter_named_params())  # not a generator: after an error it can be walked on


class FullParameters(NcclTransfer):
    """
    TRL's walk over a trainer's full parameters, under the names that vLLM loads. It supports FSDP, DeepSpeed ZeRO and
    adapters, which are merged during the walk. Iterating is a collective operation: every process must iterate to the
    end.

    Args:
        model: The trainer's model.
        accelerator (`Accelerator`): Its accelerator.
    """

    def __init__(self, model: Any, accelerator: Accelerator) -> None:
        super().__init__(model, accelerator, None, mode="server")

    def _init_vllm(self) -> None:
        """Does nothing: the walk needs no server."""

    def __iter__(self) -> Any:
        return self._iter_named_params()
