"""Transport of an adapter: the server keeps the base model and loads each version of the adapter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from trl.distributed import DistributedBackend

from mt_grpo.errors import ConfigError
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.rollout.engines.vllm.http import ServerControl
from mt_grpo.vllm_plugin.checksum import file_checksum
from mt_grpo.weights.proof import shift_file, shifted
from mt_grpo.weights.transport import weight_transport
from mt_grpo.weights.transports.files import FolderTransport
from mt_grpo.weights.update_calls import WeightSyncError, push_adapter


@weight_transport("lora")
class LoraTransport(FolderTransport):
    """
    Sends only the adapter. The server keeps the base model and loads each version of the adapter under a name of its
    own, which requests then ask for. The server must be started for it, as `mt-grpo serve` does.
    """

    def __init__(
        self, client: VLLMServerClient, get_model: Callable[[], Any], accelerator: Accelerator, **options: Any
    ) -> None:
        if not is_peft_model(accelerator.unwrap_model(get_model())):
            raise ConfigError("`weight_sync: lora` sends an adapter, and there is none: set `use_peft: true`.")
        super().__init__(client, get_model, accelerator, **options)
        self._previous: Path | None = None

    @staticmethod
    def server_flags(model_args: Any) -> tuple[list[str], dict[str, str]]:
        # vLLM knows certain ranks only; the next one up holds the adapter
        rank = next(size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= model_args.lora_r)
        flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(rank)]
        return flags, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        super()._prepare(server, config)
        loads = server.get("/server_info", config_format="json")["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
        if config["lora_config"] is None or not loads:
            raise WeightSyncError(
                f"The vLLM server at {server.base_url} was started without LoRA, and `weight_sync: lora` sends it an "
                "adapter: start it again with `mt-grpo serve` and this run's recipe."
            )
        rank = self.accelerator.unwrap_model(self.get_model()).peft_config["default"].r
        if rank > config["lora_config"]["max_lora_rank"]:
            raise WeightSyncError(
                f"The vLLM server at {server.base_url} takes adapters up to rank "
                f"{config['lora_config']['max_lora_rank']}, and this run's has {rank}: start it again with `mt-grpo "
                "serve` and this run's recipe."
            )

    def _gather(self, step: int | None) -> None:
        model = self.accelerator.unwrap_model(self.get_model())
        backend = DistributedBackend(self.accelerator)
        # under DeepSpeed accelerate gathers through the engine only, and the whole model
        state = self.accelerator.get_state_dict(self.get_model()) if backend.is_fsdp else None
        with backend.gather_params([parameter for parameter in model.parameters() if parameter.requires_grad]):
            if self.accelerator.is_main_process:
                # embeddings that are trained are saved all the same; to guess whether others changed asks the Hub
                try:
                    model.save_pretrained(self._adapter(step), state_dict=state, save_embedding_layers=False)
                except SafetensorError as error:
                    raise OSError(
                        f"The adapter could not be written to {self._folder} ({error}): free some room, or set "
                        "`weight_sync_folder` to another folder that the server sees too."
                    ) from error
                file = self._adapter(step) / "adapter_model.safetensors"
                if self.changed is not None:
                    shift_file(file)
                self.checksum = file_checksum(file)

    def _push(self, server: ServerControl, step: int | None) -> None:
        adapter = self._adapter(step)
        previous = None if self._previous in (None, adapter) else self._previous.name
        push_adapter(server, adapter, self._label(step), self.checksum, previous)

    def _pushed(self, step: int | None) -> None:
        self.client.model = self._adapter(step).name
        if self.accelerator.is_main_process and self._previous not in (None, self._adapter(step)):
            shutil.rmtree(self._previous)
        self._previous = self._adapter(step)

    def _adapter(self, step: int | None) -> Path:
        return self._folder / f"adapter-{'proof' if step is None else f'{step:08d}'}"

    _change = staticmethod(shifted)
