"""
Transports between GPUs, bucket by bucket while all processes gather the weights: by NCCL broadcast, with TRL's own
client and group, and within a GPU, where a server maps the trainer's memory with vLLM's own `ipc` engine.
"""

from __future__ import annotations

import base64
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.multiprocessing.reductions import reduce_tensor
from trl.generation.vllm_client import VLLMClient
from trl.import_utils import is_vllm_available

from mt_grpo.errors import ConfigError, WeightSyncError
from mt_grpo.servers.http import RequestFailed, Server, find_key
from mt_grpo.weights.transport import Source, Transport, Update, weight_transport

BUCKET = 2**28
"""Bytes that are gathered before they are sent. The server needs as much memory beside its model."""

_Walk = Iterator[tuple[str, torch.Tensor]]  # names and whole tensors


def _all_have_their_part(accelerator: Accelerator) -> None:
    """Every process: waits until all of them have their part of a bucket."""
    if accelerator.device.type == "cuda":
        torch.accelerator.synchronize()
    accelerator.wait_for_everyone()


@weight_transport("nccl")
class NcclTransport(Transport):
    """
    Sends weights by NCCL broadcast between GPUs, as TRL does. It needs vLLM in the trainer's environment too. The
    server joins a process group when the run begins. A server that is restarted cannot join it again, so the run ends,
    and can be resumed from its checkpoint.
    """

    server_backend = "nccl"
    repeatable = False

    def __init__(self, source: Source, *, group_port: int = 51216) -> None:
        for fault, hindrance in (
            ("needs vLLM in the trainer's environment too, where it is not installed", not is_vllm_available()),
            ("reaches one server, and several are named", len(source.client.base_urls) > 1),
        ):
            if hindrance:
                raise ConfigError(f"`weight_sync: nccl` {fault}: mend that, or choose `weight_sync: safetensors`.")
        super().__init__(source)
        self.group: _NcclGroup | None = None
        self._group_port = group_port

    @staticmethod
    def options(args: Any) -> dict[str, Any]:
        return {"group_port": args.vllm_group_port}

    def prepare(self, server: Server, config: dict[str, Any]) -> None:
        client, device = self.source.client, self.source.accelerator.device
        try:
            self.group = _NcclGroup(server.url, client.api_key, self._group_port, client.server_timeout, device)
        except Exception as error:  # TRL raises it bare
            raise WeightSyncError(
                f"No NCCL group with the vLLM server at {server.url} could be made ({error}): start it with "
                "`mt-grpo serve` and this run's recipe, or choose `weight_sync: safetensors`."
            ) from error

    def pack(self, step: int | None) -> Iterator[_Bucket]:
        accelerator = self.source.accelerator
        with self.source.walk() as walk:
            while True:
                bucket = _take_bucket(walk, accelerator.is_main_process)
                _all_have_their_part(accelerator)  # two groups that broadcast at the same time may deadlock
                if not bucket:
                    return
                yield bucket

    def deliver(self, update: Update, bucket: _Bucket) -> None:
        assert self.group is not None  # the process that sends has made it in `prepare`
        _send_bucket(update.server, self.group, bucket)

    def on_restart(self, base_url: str) -> None:
        """Ends the run."""
        raise WeightSyncError(
            f"The vLLM server at {base_url} was restarted and has left the NCCL group of this run: resume the run "
            "from its latest checkpoint."
        )


_Bucket = list[tuple[str, torch.Tensor]]


class _NcclGroup:
    """The NCCL group of a trainer's process and a server's workers."""

    def __init__(self, base_url: str, api_key: str | None, port: int, timeout: float, device: torch.device) -> None:
        self._client = _KeyedClient(base_url, group_port=port, connection_timeout=timeout, api_key=api_key)
        self._client.init_communicator(device=device)

    def send(self, bucket: _Bucket) -> None:
        """Broadcasts tensors in order, and waits until they are sent."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(iter(bucket), self._client.communicator, 0, lambda item: item[1])

    def abort(self) -> None:
        """Ends a running broadcast, from any thread. Nothing can be sent afterwards."""
        self._client.communicator.destroy()


def _take_bucket(walk: _Walk, keep: bool, size: int = BUCKET) -> _Bucket:
    """The next tensors of a walk, together `size` bytes or little more; empty at the end."""
    bucket, taken = [], 0
    while taken < size and (item := next(walk, None)) is not None:
        name, tensor = item
        taken += tensor.nbytes
        bucket.append((name, tensor.clone() if keep else tensor.new_empty(0)))
    return bucket


def _send_bucket(server: Server, group: _NcclGroup, bucket: _Bucket) -> None:
    """Makes the server receive tensors during their broadcast, which ends if the server fails."""
    info = {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }
    failures: list[RequestFailed] = []

    def ask() -> None:
        try:
            server.post("/update_weights", {"update_info": info}, repeat=False)
        except RequestFailed as error:
            failures.append(error)
            group.abort()

    asking = threading.Thread(target=ask, daemon=True)  # the interpreter does not wait for it when the run ends
    asking.start()
    try:
        group.send(bucket)
    except BaseException as error:
        group.abort()
        if failures:
            raise failures[0] from error
        if isinstance(error, RuntimeError):
            raise WeightSyncError(f"The weights could not be broadcast by NCCL: {error}") from error
        raise
    asking.join()
    if failures:
        raise failures[0]


class _KeyedClient(VLLMClient):
    """Sends the server's key with every request."""

    def __init__(self, *args: object, api_key: str | None, **options: object) -> None:
        self._api_key = api_key
        super().__init__(*args, **options)

    def check_server(self, *args: object, **kwargs: object) -> None:
        """Finds the key, which exists when the server is up. TRL calls this before any request that needs the key."""
        super().check_server(*args, **kwargs)
        key = self._api_key or find_key(self.base_url)
        if key is not None:
            self.session.headers["Authorization"] = f"Bearer {key}"


@dataclass(frozen=True)
class _Packed:
    """Tensors one after another in the memory that is shared."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    sizes: list[int]
    handles: dict[str, Any]


@weight_transport("ipc")
class IpcTransport(Transport):
    """
    Sends weights to servers on the trainer's own GPUs, without a copy through the machine's memory. Each process packs
    a bucket into memory of its GPU, and each worker of a server reads that of the GPU that it shares. A server that
    missed weights gets those of the next sync.
    """

    server_backend = "ipc"
    repeatable = False
    _shared: _Shared | None = None

    @staticmethod
    def server_flags(model_args: object) -> tuple[list[str], dict[str, str]]:
        # how the memory is mapped is pickled; the guard lets nobody but the trainer send it
        return [], {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

    def prepare(self, server: Server, config: dict[str, Any]) -> None:
        if server.setting(config, "weight_transfer_config", "backend", str) != self.server_backend:
            raise server.sync_error(
                "does not map the trainer's memory: `weight_sync: ipc` is for servers that the trainer starts "
                "(`vllm_mode: colocate`)."
            )
        server.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})

    def pack(self, step: int | None) -> Iterator[_Packed]:
        accelerator = self.source.accelerator
        with self.source.walk() as walk:
            self._shared = _Shared(accelerator.device)
            while (packed := self._shared.take(walk)) is not None:
                _all_have_their_part(accelerator)
                handles = gather_object([packed.handles])
                merged = {gpu: handle for of_rank in handles for gpu, handle in of_rank.items()}
                yield replace(packed, handles=merged)

    def deliver(self, update: Update, bucket: _Packed) -> None:
        info = {
            "names": bucket.names,
            "dtype_names": bucket.dtypes,
            "shapes": bucket.shapes,
            "tensor_sizes": bucket.sizes,
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(bucket.handles)).decode(),
        }
        update.server.post("/update_weights", {"update_info": info}, repeat=False)

    def delivered(self) -> None:
        self._shared = None
        if self.source.accelerator.device.type == "cuda":
            torch.cuda.ipc_collect()  # the servers have let go of the memory


class _Shared:
    """Memory of a GPU that another process maps. It is handed out once, and filled again for each bucket."""

    def __init__(self, device: torch.device, size: int = BUCKET) -> None:
        self._device = device
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._handle = _exported(self._memory)
        self._next: tuple[str, torch.Tensor] | None = None

    def take(self, walk: _Walk) -> _Packed | None:
        """Packs the next tensors of a walk, as many as there is room for; `None` at its end."""
        packed, end = _Packed([], [], [], [], {}), 0
        while (item := self._next or next(walk, None)) is not None:
            self._next = item
            name, tensor = item
            whole = end + tensor.nbytes <= self._memory.numel() and end % tensor.itemsize == 0
            if not whole and packed.names:
                break
            if not whole:
                self._memory = torch.empty(tensor.nbytes, dtype=torch.uint8, device=self._device)
                self._handle = _exported(self._memory)
            place = self._memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor)
            packed.names.append(name)
            packed.dtypes.append(str(tensor.dtype).removeprefix("torch."))
            packed.shapes.append(list(tensor.shape))
            packed.sizes.append(tensor.nbytes)
            end += tensor.nbytes
            self._next = None
        return replace(packed, handles=self._handle) if packed.names else None


def _exported(memory: torch.Tensor) -> dict[str, Any]:
    """How another process maps this memory, by the id of its GPU, as vLLM's `ipc` engine takes it."""
    _, arguments = reduce_tensor(memory)
    return {str(torch.cuda.get_device_properties(memory.device).uuid): arguments}
