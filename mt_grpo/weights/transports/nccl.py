"""Transport by NCCL broadcast between GPUs: TRL's own client and group, one bucket of weights at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from trl.generation.vllm_client import VLLMClient
from trl.import_utils import is_vllm_available

from mt_grpo.errors import ConfigError
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.servers.http import RequestFailed, ServerControl, find_key
from mt_grpo.weights.transport import weight_transport
from mt_grpo.weights.transports.buckets import BUCKET, BucketTransport, Walk
from mt_grpo.weights.updates import WeightSyncError


@weight_transport("nccl")
class NcclTransport(BucketTransport):
    """
    Sends weights by NCCL broadcast between GPUs, as TRL does. It needs vLLM in the trainer's environment too. The
    server joins a process group when the run begins. A server that is restarted cannot join it again, so the run ends,
    and can be resumed from its checkpoint.
    """

    server_backend = "nccl"

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
        self._group: NcclGroup | None = None
        self._group_port = group_port

    @staticmethod
    def options(args: Any) -> dict[str, Any]:
        return {"group_port": args.vllm_group_port}

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

    def _take(self, walk: Walk) -> Bucket:
        bucket = take_bucket(walk, self.accelerator.is_main_process)
        self._finish()  # two groups that broadcast at the same time may deadlock
        return bucket

    def _deliver(self, server: ServerControl, bucket: Bucket) -> None:
        assert self._group is not None  # the process that sends has made it in `_prepare`
        send_bucket(server, self._group, bucket)

    def restore(self, base_url: str) -> None:
        raise WeightSyncError(
            f"The vLLM server at {base_url} was restarted and has left the NCCL group of this run: resume the run "
            "from its latest checkpoint."
        )


Bucket = list[tuple[str, torch.Tensor]]


class NcclGroup:
    """The NCCL group of a trainer's process and a server's workers."""

    def __init__(self, base_url: str, api_key: str | None, port: int, timeout: float, device: torch.device) -> None:
        self._client = KeyedClient(base_url, group_port=port, connection_timeout=timeout, api_key=api_key)
        self._client.init_communicator(device=device)

    def send(self, bucket: Bucket) -> None:
        """Broadcasts tensors in order, and waits until they are sent."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(iter(bucket), self._client.communicator, 0, lambda item: item[1])

    def abort(self) -> None:
        """Ends a running broadcast, from any thread. Nothing can be sent afterwards."""
        self._client.communicator.destroy()


def take_bucket(walk: Walk, keep: bool, size: int = BUCKET) -> Bucket:
    """The next tensors of a walk, together `size` bytes or little more; empty at the end."""
    bucket, taken = [], 0
    while taken < size and (item := next(walk, None)) is not None:
        name, tensor = item
        taken += tensor.nbytes
        bucket.append((name, tensor.clone() if keep else tensor.new_empty(0)))
    return bucket


def send_bucket(server: ServerControl, group: NcclGroup, bucket: Bucket) -> None:
    """
    Makes the server receive tensors while they are broadcast. If the server fails, it never takes part in the
    broadcast, so the broadcast is ended here.
    """
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


class KeyedClient(VLLMClient):
    """Sends the server's key with every request."""

    def __init__(self, *args: Any, api_key: str | None, **options: Any) -> None:
        self._api_key = api_key
        super().__init__(*args, **options)

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """Finds the key, which exists when the server is up. TRL calls this before any request that needs the key."""
        super().check_server(*args, **kwargs)
        key = self._api_key or find_key(self.base_url)
        if key is not None:
            self.session.headers["Authorization"] = f"Bearer {key}"
