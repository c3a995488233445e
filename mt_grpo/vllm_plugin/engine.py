"""The server's side of weight sync by file: a safetensors file on a path both machines see becomes the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform


@dataclass
class SafetensorsInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class SafetensorsUpdateInfo(WeightTransferUpdateInfo):
    """
    One update.

    Args:
        path (`str`): File with every parameter under its checkpoint name; each worker reads it.
    """

    path: str


class SafetensorsWeightTransferEngine(WeightTransferEngine[SafetensorsInitInfo, SafetensorsUpdateInfo]):
    """
    Loads weights from a file through vLLM's layer-wise reload, which keeps the model's memory where it is.

    The reload begins and ends inside `receive_weights`, after the file was opened: a missing or broken file leaves the
    model as it was, where an update that is abandoned between `start` and `finish` would leave it without weights.
    """

    init_info_cls = SafetensorsInitInfo
    update_info_cls = SafetensorsUpdateInfo

    def init_transfer_engine(self, init_info: SafetensorsInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one file. The base class ends in `torch.accelerator.synchronize()`, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        with safe_open(update_info.path, framework="pt", device="cpu") as file:
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(_tensors(file))
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
                self._repack_output_layers()

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def _repack_output_layers(self) -> None:
        """On a CPU a layer multiplies with a packed copy; one that shares the embedding's weight got no new copy."""
        if current_platform.is_cpu() and self.model_config.hf_text_config.tie_word_embeddings:
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)


def _tensors(file: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in file.keys():
        yield name, file.get_tensor(name)
