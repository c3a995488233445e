"""Transport within a GPU: a server on the trainer's GPUs maps the trainer's memory, with vLLM's own `ipc` engine."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.multiprocessing.reductions import reduce_tensor

from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.servers.http import ServerControl
from mt_grpo.weights.transport import weight_transport
from mt_grpo.weights.transports.buckets import BUCKET, BucketTransport, Walk
from mt_grpo.weights.updates import WeightSyncError


@dataclass(frozen=True)
class Packed:
    """Tensors one after another in the memory that is shared."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    sizes: list[int]
    handles: dict[str, Any]


@weight_transport("ipc")
class IpcTransport(BucketTransport):
    """
    Sends weights to servers on the trainer's own GPUs, without a copy through the machine's memory. Each process packs
    a bucket into memory of its GPU, and each worker of a server reads that of the GPU that it shares.
    """

    server_backend = "ipc"

    _shared: Shared | None = None

    def __init__(self, client: VLLMServerClient, *args: Any, **options: Any) -> None:
        super().__init__(client, *args, **options)
        client.restore = None  # a server that missed weights gets those of the next sync

    @staticmethod
    def server_flags(model_args: Any) -> tuple[list[str], dict[str, str]]:
        # how the memory is mapped is pickled; the guard lets nobody but the trainer send it
        return [], {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        transfer = config["weight_transfer_config"]
        if transfer is None or transfer["backend"] != self.server_backend:
            raise WeightSyncError(
                f"The vLLM server at {server.base_url} does not map the trainer's memory: `weight_sync: ipc` is for "
                "servers that the trainer starts (`vllm_mode: colocate`)."
            )
        server.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})

    def _gather(self, step: int | None) -> None:
        self._shared = Shared(self.accelerator.device)
        try:
            super()._gather(step)
        finally:
            self._shared = None
            if self.accelerator.device.type == "cuda":
                torch.cuda.ipc_collect()  # the servers have let go of the memory

    def _take(self, walk: Walk) -> Packed | None:
        assert self._shared is not None
        packed = self._shared.take(walk)
        if packed is None:
            return None
        self._finish()
        handles = gather_object([packed.handles])
        return replace(packed, handles={gpu: handle for of_rank in handles for gpu, handle in of_rank.items()})

    def _deliver(self, server: ServerControl, bucket: Packed) -> None:
        info = {
            "names": bucket.names,
            "dtype_names": bucket.dtypes,
            "shapes": bucket.shapes,
            "tensor_sizes": bucket.sizes,
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(bucket.handles)).decode(),
        }
        server.post("/update_weights", {"update_info": info}, repeat=False)


class Shared:
    """Memory of a GPU that another process maps. It is handed out once, and filled again for each bucket."""

    def __init__(self, device: torch.device, size: int = BUCKET) -> None:
        self._device = device
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._handle = exported(self._memory)
        self._next: tuple[str, torch.Tensor] | None = None

    def take(self, walk: Iterator[tuple[str, torch.Tensor]]) -> Packed | None:
        """Packs the next tensors of a walk, as many as there is room for; `None` at its end."""
        packed, end = Packed([], [], [], [], {}), 0
        while (item := self._next or next(walk, None)) is not None:
            self._next = item
            name, tensor = item
            whole = end + tensor.nbytes <= self._memory.numel() and end % tensor.itemsize == 0
            if not whole and packed.names:
                break
            if not whole:
                self._memory = torch.empty(tensor.nbytes, dtype=torch.uint8, device=self._device)
                self._handle = exported(self._memory)
            place = self._memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor)
            packed.names.append(name)
            packed.dtypes.append(str(tensor.dtype).removeprefix("torch."))
            packed.shapes.append(list(tensor.shape))
            packed.sizes.append(tensor.nbytes)
            end += tensor.nbytes
            self._next = None
        return replace(packed, handles=self._handle) if packed.names else None


def exported(memory: torch.Tensor) -> dict[str, Any]:
    """How another process maps this memory, by the id of its GPU, as vLLM's `ipc` engine takes it."""
    _, arguments = reduce_tensor(memory)
    return {str(torch.cuda.get_device_properties(memory.device).uuid): arguments}
