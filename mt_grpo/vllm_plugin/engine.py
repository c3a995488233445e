"""The server's side of weight sync by file: loads a safetensors file from a path that both machines see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.platforms import current_platform

from mt_grpo.vllm_plugin.fetch import Checksum


@dataclass
class _InitInfo(WeightTransferInitInfo):
    """The trainer's description of what it sent; a worker that sees something else raises (HTTP 500)."""

    checksum: str
    path: str | None = None


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):
    """One update."""

    path: str


class SafetensorsWeightTransferEngine(WeightTransferEngine[_InitInfo, _UpdateInfo]):
    """
    Loads weights from a file through vLLM's layer-wise reload, which keeps the model's memory in place. It begins and
    ends inside `receive_weights`, so that a broken file or an abandoned update leaves the model unchanged.
    """

    init_info_cls = _InitInfo
    update_info_cls = _UpdateInfo

    loaded = "none, since nothing was sent to this worker"
    """Checksum of the weights of the latest update."""

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        """Compares what the trainer sent with what this worker sees. May be called at any time, in an update too."""
        seen = self.loaded if init_info.path is None else Checksum.of_file(init_info.path)
        if seen != init_info.checksum:
            what = "the weights loaded last" if init_info.path is None else init_info.path
            raise ValueError(f"The checksum of {what} is {seen}, not {init_info.checksum}.")

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one file. The base class calls `torch.accelerator.synchronize()`, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: _UpdateInfo) -> None:
        with safe_open(update_info.path, framework="pt", device="cpu"):  # before the model is touched
            checksum, sinks = Checksum(), list[tuple[str, torch.Tensor]]()
            self.loaded = "unknown, since an update failed"
            if current_platform.is_cpu():
                self._pack_experts_again()
            initialize_layerwise_reload(self.model)
            try:
                # closed, so that all that was loaded is added, even if the model asks for no end
                with contextlib.closing(checksum.read(update_info.path)) as tensors:
                    self.model.load_weights(self._each_by_its_loader(tensors, sinks))
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
                self._repack_output_layers()
            self.model.load_weights(sinks)
            self.loaded = checksum.hexdigest()

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def _each_by_its_loader(
        self, tensors: Iterable[tuple[str, torch.Tensor]], sinks: list[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """
        The tensors as a reload can load them: it sees what goes through a loader, and vLLM copies gpt-oss's stacked
        experts and its sinks into place without one. So experts go one at a time, and `sinks` keeps what is copied
        later.
        """
        as_mixtral = any(name.endswith(".block_sparse_moe.experts") for name, _ in self.model.named_modules())
        for name, tensor in tensors:
            layer, _, kind = name.rpartition(".mlp.experts.")
            if as_mixtral and ".mlp." in name:
                yield from _named_as_mixtral(name.replace(".mlp.", ".block_sparse_moe."), tensor)
            elif not isinstance(self.model, GptOssForCausalLM):
                yield name, tensor
            elif name.endswith(".self_attn.sinks"):
                sinks.append((name, tensor))
            elif kind in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
                yield from ((f"{layer}.mlp.experts.{number}.{kind}", expert) for number, expert in enumerate(tensor))
            else:
                yield name, tensor

    def _pack_experts_again(self) -> None:
        """Has vLLM pack experts for its CPU kernels at each load. It does so at the first one only."""
        for module in self.model.modules():
            if isinstance(module, RoutedExperts) and isinstance(module.quant_method, UnquantizedFusedMoEMethod):
                module.quant_method._setup_kernel = partial(_set_up_packed, module.quant_method)

    def _repack_output_layers(self) -> None:
        """Repacks output layers on a CPU. They use a packed copy, which is old if they share the embedding."""
        # a model of images says so in its whole configuration, others in that of their text
        configs = self.model_config.hf_config, self.model_config.hf_text_config
        if current_platform.is_cpu() and any(config.to_dict().get("tie_word_embeddings") for config in configs):
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)


def _named_as_mixtral(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of a mixture's layer under the names of Mixtral's checkpoint: there each expert has three matrices."""
    experts, _, kind = name.rpartition(".")
    if kind == "gate_up_proj":
        for number, expert in enumerate(tensor):
            gate, up = expert.chunk(2)
            yield from ((f"{experts}.{number}.w1.weight", gate), (f"{experts}.{number}.w3.weight", up))
    elif kind == "down_proj":
        yield from ((f"{experts}.{number}.w2.weight", expert) for number, expert in enumerate(tensor))
    else:
        yield name, tensor


def _set_up_packed(method: UnquantizedFusedMoEMethod, layer: RoutedExperts, **weights: torch.Tensor) -> None:
    UnquantizedFusedMoEMethod._setup_kernel(method, layer, **weights)
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)
