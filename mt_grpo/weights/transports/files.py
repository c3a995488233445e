"""Transports of files that the servers read: all weights, or each version of an adapter to the base model."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from trl.distributed import DistributedBackend

from mt_grpo.errors import ConfigError
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.servers.http import ServerControl
from mt_grpo.vllm_plugin.checksum import file_checksum
from mt_grpo.weights.transport import WeightTransport, weight_transport
from mt_grpo.weights.updates import WeightSyncError, check_folder, load_file, push_adapter
from mt_grpo.weights.verification import shift_file, shifted
from mt_grpo.weights.weight_file import FullParameters, Layout, WeightFile, exhaust, shared_folder, write_weights


class FolderTransport(WeightTransport):
    """Sends files that the servers read."""

    def __init__(
        self,
        client: VLLMServerClient,
        get_model: Callable[[], Any],
        accelerator: Accelerator,
        *,
        folder: str | None = None,
        **options: Any,
    ) -> None:
        self._folder = shared_folder(folder, accelerator)
        super().__init__(client, get_model, accelerator, **options)

    @staticmethod
    def options(args: Any) -> dict[str, Any]:
        return {"folder": args.weight_sync_folder}

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        check_folder(server, config, self._folder)

    def close(self) -> None:
        """Removes the folder with its files, and gives the servers back."""
        if self.accelerator.is_main_process:
            shutil.rmtree(self._folder, ignore_errors=True)
        super().close()


@weight_transport("safetensors")
class SafetensorsTransport(FolderTransport):
    """Sends a safetensors file, in shared memory on one host or in a folder that all hosts see. Any device."""

    def __init__(
        self, client: VLLMServerClient, get_model: Callable[[], Any], accelerator: Accelerator, **options: Any
    ) -> None:
        super().__init__(client, get_model, accelerator, **options)
        self._parameters = FullParameters(get_model(), accelerator)
        self._layout: Layout | None = None
        self._files: list[WeightFile] = []

    def _gather(self, step: int | None) -> None:
        self._parameters.model, self._parameters.dtype = self.get_model(), self.dtype
        self._parameters.changed = self.changed
        if self._layout is None:
            self._layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._parameters]
        tensors = iter(self._parameters)
        if not self.accelerator.is_main_process:
            exhaust(tensors)
            return
        try:
            if len(self._files) < 2:
                self._files.insert(0, WeightFile(self._folder / f"{len(self._files)}.partial", self._layout))
            for file in self._files:
                file.withdraw()
            self.checksum = write_weights(self._files[0], self._file(step), tensors)
        finally:
            exhaust(tensors)
        self._files.reverse()

    def _push(self, server: ServerControl, step: int | None) -> None:
        self._load(server, self._file(step), step)

    def _load(self, server: ServerControl, path: Path, step: int | None) -> None:
        with self._updating(server, step):
            load_file(server, path, self.checksum)

    def _file(self, step: int | None) -> Path:
        return self._folder / f"weights-{'proof' if step is None else f'{step:08d}'}.safetensors"


@weight_transport("lora")
class LoraTransport(FolderTransport):
    """
    Sends only the adapter. The server keeps the base model and loads each version of the adapter under a name of its
    own, which requests then ask for. The server must be started for it, as `mt-grpo serve` does.
    """

    sleep_level = 1

    def __init__(
        self, client: VLLMServerClient, get_model: Callable[[], Any], accelerator: Accelerator, **options: Any
    ) -> None:
        if not is_peft_model(accelerator.unwrap_model(get_model())):
            raise ConfigError("`weight_sync: lora` sends an adapter, and there is none: set `use_peft: true`.")
        super().__init__(client, get_model, accelerator, **options)
        self._previous: Path | None = None
        self._written: Counter[int | None] = Counter()  # versions by their step, which the best model shares

    @staticmethod
    def server_flags(model_args: Any) -> tuple[list[str], dict[str, str]]:
        # vLLM knows certain ranks only; the next one up holds the adapter
        rank = next(size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= model_args.lora_r)
        flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(rank)]
        return flags, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        super()._prepare(server, config)
        loads = server.get(
            "/server_info", lambda it: it["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], config_format="json"
        )
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
        self._written[step] += 1
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
        with self._paused(server):
            push_adapter(server, adapter, self._label(step), self.checksum, previous)

    def _pushed(self, step: int | None) -> None:
        self.client.model = self._adapter(step).name
        if self.accelerator.is_main_process and self._previous not in (None, self._adapter(step)):
            shutil.rmtree(self._previous)
        self._previous = self._adapter(step)

    def _served_name(self, step: int | None) -> str:
        return self._adapter(step).name

    def _adapter(self, step: int | None) -> Path:
        again = f"-{self._written[step]}" if self._written[step] > 1 else ""
        return self._folder / f"adapter-{'proof' if step is None else f'{step:08d}'}{again}"

    _change = staticmethod(shifted)
