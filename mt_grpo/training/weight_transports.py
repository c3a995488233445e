"""The ways weights travel: a file, an adapter, or NCCL."""

from __future__ import annotations

import atexit
import contextlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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
from mt_grpo.training.nccl_client import KeyedClient
from mt_grpo.training.weight_files import Layout, WeightFile, exhaust, make_folder, write_weights
from mt_grpo.training.weight_push import WeightSyncError, paused, push_adapter, push_file
from mt_grpo.training.weight_sync import ServerSync


class Transfer(VLLMGeneration):
    """
    TRL's transfer by NCCL, with the server's key, and a walk over the parameters that every process can finish.

    Args:
        api_key (`str`, *optional*): The key; see `find_key` where none is given.
        args, options: Those of TRL's transfer.
    """

    walk: Iterable[Any] = ()
    """The walk under way."""

    def __init__(self, *args: Any, api_key: str | None = None, **options: Any) -> None:
        self.api_key = api_key
        super().__init__(*args, **options)

    def _init_vllm(self) -> None:
        if self.accelerator.is_main_process:
            self.vllm_client = KeyedClient(
                self.server_base_url,
                group_port=self.group_port,
                connection_timeout=self.server_timeout,
                api_key=self.api_key,
            )
            self.vllm_client.init_communicator(device=self.accelerator.device)

    def _iter_named_params(self) -> Any:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward leaves the outermost weights gathered
        self.walk = super()._iter_named_params()
        return self.walk


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


class SafetensorsSync(ServerSync):
    """
    By a file, in shared memory on one host or in a folder that all hosts see. Works on every device.

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
        self._parameters = Parameters(get_model(), accelerator)
        self._layout: Layout | None = None
        self._folder = shared_folder(folder, accelerator)
        self._files: list[WeightFile] = []
        atexit.register(self.close)

    def _gather(self, step: int) -> None:
        self._parameters.model = self.get_model()
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
            write_weights(self._files[0], self._file(step), tensors)
        finally:
            exhaust(tensors)
        self._files.reverse()

    def _push(self, server: ServerControl, step: int) -> None:
        push_file(server, self._file(step), step)

    def _file(self, step: int) -> Path:
        return self._folder / f"weights-{step:08d}.safetensors"

    def close(self) -> None:
        """Removes the weight file and its folder."""
        atexit.unregister(self.close)
        if self.accelerator.is_main_process:
            shutil.rmtree(self._folder, ignore_errors=True)


class LoraSync(ServerSync):
    """
    By adapter: the server keeps the base model and loads each version of the adapter under a name of its own, which
    requests then ask for. Much less to send; the server must be started for it (`mt-grpo serve` does so).

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
        if not is_peft_model(accelerator.unwrap_model(get_model())):
            raise ConfigError("`weight_sync: lora` sends an adapter, and there is none: set `use_peft: true`.")
        super().__init__(client, get_model, accelerator, **options)
        self._folder = shared_folder(folder, accelerator)
        self._previous: Path | None = None
        atexit.register(self.close)

    def _gather(self, step: int) -> None:
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

    def _push(self, server: ServerControl, step: int) -> None:
        adapter = self._adapter(step)
        previous = None if self._previous in (None, adapter) else self._previous.name
        push_adapter(server, adapter.name, adapter, step, previous)

    def _pushed(self, step: int) -> None:
        self.client.model = self._adapter(step).name
        if self.accelerator.is_main_process and self._previous not in (None, self._adapter(step)):
            shutil.rmtree(self._previous)
        self._previous = self._adapter(step)

    def _adapter(self, step: int) -> Path:
        return self._folder / f"adapter-{step:08d}"

    def close(self) -> None:
        """Removes the adapter's files."""
        atexit.unregister(self.close)
        if self.accelerator.is_main_process:
            shutil.rmtree(self._folder, ignore_errors=True)


class NcclSync(ServerSync):
    """
    By NCCL broadcast between GPUs, TRL's own, which needs vLLM in the trainer's environment too. The server joins a
    process group when the run begins, so that one which is restarted cannot be given its weights again: the run ends,
    and is resumed from its checkpoint.

    Args:
        group_port (`int`, *optional*, defaults to `51216`): Port of that process group.

    Raises:
        ConfigError: If TRL's client cannot talk to the servers: no vLLM here, or several of them.
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
        self._generation = Transfer(
            get_model(),
            accelerator,
            client.tokenizer,
            mode="server",
            api_key=client.api_key,
            server_base_url=client.base_urls[0],
            server_timeout=client.server_timeout,
            group_port=group_port,
        )

    def _gather(self, step: int) -> None:
        server = self._control(self.client.base_urls[0])
        with contextlib.closing(server), contextlib.ExitStack() as pause:
            # before anyone walks over the parameters, which all must do or none
            self._run(lambda: None, lambda: (self._wait_for_one(), pause.enter_context(paused(server))))
            self._generation.model = self.get_model()
            try:
                self._generation.sync_weights()
            except Exception as error:  # TRL raises it bare, perhaps in the middle of the walk
                exhaust(self._generation.walk)
                raise WeightSyncError(f"TRL could not send the weights by NCCL: {error}") from error
            if self.accelerator.is_main_process:
                server.post("/update_weight_version", {"new_version": str(step)})

    def _push(self, server: ServerControl, step: int) -> None:
        """Sent already: every process takes part in it."""

    def restore(self, base_url: str) -> None:
        raise WeightSyncError(
            f"The vLLM server at {base_url} was restarted and has left the NCCL group of this run: resume the run "
            "from its latest checkpoint."
        )
