"""The ways weights travel: a file, an adapter, or NCCL."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, is_peft_model
from safetensors import SafetensorError
from torch.distributed.fsdp import FSDPModule
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration
from trl.import_utils import is_vllm_available

from mt_grpo.rollout.vllm_client import VLLMServerClient
from mt_grpo.rollout.vllm_http import ServerControl
from mt_grpo.training.config import ConfigError
from mt_grpo.training.weight_files import Layout, WeightFile, exhaust, make_folder, write_weights
from mt_grpo.training.weight_nccl import NcclGroup, send_bucket, take_bucket
from mt_grpo.training.weight_proof import HALF, shift_file, shifted
from mt_grpo.training.weight_push import (
    WeightSyncError,
    check_folder,
    check_holder,
    paused,
    push_adapter,
    push_file,
    updating,
)
from mt_grpo.training.weight_sync import ServerSync
from mt_grpo.vllm_plugin.checksum import file_checksum


class Transfer(VLLMGeneration):
    """TRL's walk over the parameters, as they are sent to a server."""

    dtype: torch.dtype | None = None
    """The server's: wider parameters are narrowed to it, as FSDP and mixed precision keep them in float32."""
    changed: set[str] | None = None
    """Names of the parameters that are halved, for a proof."""

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


class Parameters(Transfer):
    """
    TRL's walk over a trainer's parameters, full and under the names vLLM loads, for FSDP, DeepSpeed ZeRO and adapters
    (merged while the walk lasts). Iterating is a collective operation: every process must, to the end.

    Args:
        model: The trainer's model.
        accelerator (`Accelerator`): Its accelerator.
    """

    def __init__(self, model: Any, accelerator: Accelerator) -> None:
        super().__init__(model, accelerator, None, mode="server")

    def _init_vllm(self) -> None:
        """No server is talked to from here."""

    def __iter__(self) -> Any:
        return self._iter_named_params()


def shared_folder(folder: str | None, accelerator: Accelerator) -> Path:
    """The folder for weight files that the main process makes, and every process can name to a server."""
    made = [str(make_folder(folder)) if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(made)
    return Path(made[0])


class FolderSync(ServerSync):
    """
    By files that the servers read.

    Args:
        folder (`str`, *optional*): Folder the servers see under the same path; shared memory where none is given.
    """

    def __init__(
        self,
        client: VLLMServerClient,
        get_model: Callable[[], Any],
        accelerator: Accelerator,
        *,
        folder: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(client, get_model, accelerator, **options)
        self._folder = shared_folder(folder, accelerator)

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        check_folder(server, config, self._folder)

    def close(self) -> None:
        """Removes the folder with its files, and gives the servers back."""
        if self.accelerator.is_main_process:
            shutil.rmtree(self._folder, ignore_errors=True)
        super().close()


class SafetensorsSync(FolderSync):
    """By a file, in shared memory on one host or in a folder that all hosts see. Works on every device."""

    def __init__(
        self, client: VLLMServerClient, get_model: Callable[[], Any], accelerator: Accelerator, **options: Any
    ) -> None:
        super().__init__(client, get_model, accelerator, **options)
        self._parameters = Parameters(get_model(), accelerator)
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
        push_file(server, self._file(step), self._label(step), self.checksum)

    def _file(self, step: int | None) -> Path:
        return self._folder / f"weights-{'proof' if step is None else f'{step:08d}'}.safetensors"


class LoraSync(FolderSync):
    """
    By adapter: the server keeps the base model and loads each version of the adapter under a name of its own, which
    requests then ask for. Much less to send; the server must be started for it (`mt-grpo serve` does so).
    """

    def __init__(
        self, client: VLLMServerClient, get_model: Callable[[], Any], accelerator: Accelerator, **options: Any
    ) -> None:
        if not is_peft_model(accelerator.unwrap_model(get_model())):
            raise ConfigError("`weight_sync: lora` sends an adapter, and there is none: set `use_peft: true`.")
        super().__init__(client, get_model, accelerator, **options)
        self._previous: Path | None = None

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


class NcclSync(ServerSync):
    """
    By NCCL broadcast between GPUs, as TRL does, which needs vLLM in the trainer's environment too. The server joins a
    process group when the run begins, so that one which is restarted cannot be given its weights again: the run ends,
    and is resumed from its checkpoint.

    Args:
        group_port (`int`, *optional*, defaults to `51216`): Port of that process group.

    Raises:
        ConfigError: If there is no vLLM here, or there are several servers.
    """

    repeatable = False

    def __init__(
        self,
        client: VLLMServerClient,
        get_model: Callable[[], Any],
        accelerator: Accelerator,
        *,
        group_port: int = 51216,
        **options: Any,
    ) -> None:
        for fault, hindrance in (
            ("needs vLLM in the trainer's environment too, where it is not installed", not is_vllm_available()),
            ("reaches one server, and several are named", len(client.base_urls) > 1),
        ):
            if hindrance:
                raise ConfigError(f"`weight_sync: nccl` {fault}: mend that, or choose `weight_sync: safetensors`.")
        super().__init__(client, get_model, accelerator, **options)
        self._parameters = Parameters(get_model(), accelerator)
        self._group: NcclGroup | None = None
        self._group_port = group_port

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        timeout = self.client.server_timeout
        try:
            self._group = NcclGroup(
                server.base_url, self.client.api_key, self._group_port, timeout, self.accelerator.device
            )
        except Exception as error:  # TRL raises it bare
            raise WeightSyncError(
                f"No NCCL group with the vLLM server at {server.base_url} could be made ({error}): start it with "
                "`mt-grpo serve` and this run's recipe, or choose `weight_sync: safetensors`."
            ) from error

    def _gather(self, step: int | None) -> None:
        """
        Sends the weights too. All processes gather a bucket, and are done with it, before the main one talks to the
        server: two groups that broadcast at once may wait for each other for ever.
        """
        server = self._control(self.client.base_urls[0])
        with contextlib.closing(server), contextlib.ExitStack() as update:

            def begin_update() -> None:
                self._wait_for_one()
                check_holder(server, self.run)
                update.enter_context(paused(server))
                update.enter_context(updating(server, self._label(step)))

            # before anyone walks over the parameters, which all must do or none
            self._run(lambda: None, begin_update)
            self._parameters.model, self._parameters.dtype = self.get_model(), self.dtype
            self._parameters.changed = self.changed
            walk = iter(self._parameters)
            try:
                while bucket := self._take(walk):
                    self._run(lambda: None, lambda bucket=bucket: send_bucket(server, self._group, bucket))
            finally:  # a failure ends all processes at the same bucket; gathering the rest takes all of them
                exhaust(walk)

    def _take(self, walk: Iterator[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        bucket = take_bucket(walk, self.accelerator.is_main_process)
        if self.accelerator.device.type == "cuda":
            torch.accelerator.synchronize()
        self.accelerator.wait_for_everyone()
        return bucket

    def _push(self, server: ServerControl, step: int | None) -> None:
        """Sent already: every process takes part in it."""

    def restore(self, base_url: str) -> None:
        raise WeightSyncError(
            f"The vLLM server at {base_url} was restarted and has left the NCCL group of this run: resume the run "
            "from its latest checkpoint."
        )
