"""Rank 0's end of a transfer by NCCL: TRL's group with the server, and one bucket of weights at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from mt_grpo.rollout.engines.vllm.http import RequestFailed, ServerControl
from mt_grpo.weights.nccl_client import KeyedClient
from mt_grpo.weights.update_calls import WeightSyncError

BUCKET = 2**28
"""Bytes that are gathered before they are sent. The server needs as much memory beside its model."""

Bucket = list[tuple[str, torch.Tensor]]


class NcclGroup:
    """
    The NCCL group of a trainer's process and a server's workers.

    Args:
        base_url (`str`): The server.
        api_key (`str`, *optional*): Its key.
        port (`int`): Port of the group.
        timeout (`float`): Seconds to wait for the server.
        device (`torch.device`): This process's GPU.
    """

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


def take_bucket(walk: Iterator[tuple[str, torch.Tensor]], keep: bool, size: int = BUCKET) -> Bucket:
    """
    The next tensors of a walk, together `size` bytes or little more; empty at the end.

    Args:
        walk (`Iterator`): Names and whole tensors. A tensor may change when the walk continues.
        keep (`bool`): Whether this process needs the contents.
        size (`int`, *optional*): Bytes.
    """
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

    Raises:
        RequestFailed: With the server's words.
        WeightSyncError: If the broadcast fails.
    """
    info = {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }
    failures: list[RequestFailed] = []

    def ask() -> None:
        try:
            server.post("/update_weights", {"update_info": info})
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
