"""The HTTP calls of a weight update. They leave the server running, whatever fails."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mt_grpo.errors import WeightSyncError
from mt_grpo.servers.http import RequestFailed, ServerControl
from mt_grpo.servers.owner import weight_version
from mt_grpo.vllm_plugin import BACKEND
from mt_grpo.vllm_plugin.checksum import file_checksum

_ACTIVE, _INACTIVE = "already active", "without a matching start"
"""What vLLM says of an update that has begun, and of one that has not."""
_VERDICT = "checksum"
"""A word in the error of a worker that has other weights; asking again does not help."""


@contextlib.contextmanager
def paused(server: ServerControl, images: bool = False) -> Iterator[None]:
    """
    Pauses the server. Requests under way continue afterwards. The prefix cache, of other weights, is emptied, and with
    `images` what the vision tower made of images. A sleep of level 0 is vLLM's `/pause` without the 20 ms that this
    waits afterwards.
    """
    try:
        server.post("/sleep", level="0", mode="keep")
        yield
        if not server.post("/reset_prefix_cache", read=itemgetter("success"), reset_running_requests="true"):
            raise WeightSyncError(f"The vLLM server at {server.base_url} could not empty its prefix cache.")
        if images:  # after it, which takes every request under way out of the batch that holds some of it
            server.post("/reset_encoder_cache")
    except BaseException:  # Ctrl-C as well: a server that stays paused answers nobody
        server.tidy_up("/wake_up", tags="scheduling")
        raise
    server.post("/wake_up", tags="scheduling")


@contextlib.contextmanager
def updating(server: ServerControl, version: str) -> Iterator[None]:
    """Begins an update and always ends it. Only a successful update sets the server's weight version."""
    try:
        server.post("/start_weight_update", {}, final=_ACTIVE)
    except RequestFailed as error:
        if _ACTIVE not in str(error):
            raise
        # left behind by a trainer that was killed, or begun by a call whose answer was lost
        _end_update(server)
        server.post("/start_weight_update", {})
    try:
        yield
    except BaseException:
        server.tidy_up("/finish_weight_update", {})
        raise
    _end_update(server, version)


def _end_update(server: ServerControl, version: str | None = None) -> None:
    """Ends an update. With a version, the server then has it."""
    try:
        server.post("/finish_weight_update", {} if version is None else {"weight_version": version}, final=_INACTIVE)
    except RequestFailed as error:  # ended by a call whose answer was lost
        if _INACTIVE not in str(error) or (version is not None and weight_version(server) != version):
            raise


def fall_asleep(server: ServerControl, level: int) -> None:
    """
    Frees the memory of a server on the trainer's GPUs. Requests are paused first: one that was being computed would
    read memory that is gone (vLLM issue 28714).
    """
    server.post("/sleep", level="0", mode="keep")
    server.post("/sleep", level=str(level), mode="abort")


def wake_weights(server: ServerControl) -> None:
    """Gives the weights of a sleeping server their memory. Of level 2 their contents are gone. It stays paused."""
    server.post("/wake_up", tags="weights")


def wake_cache(server: ServerControl) -> None:
    """Gives the cache its memory, and ends the pause."""
    server.post("/wake_up", tags="kv_cache")


def load_file(server: ServerControl, path: Path, checksum: str) -> None:
    """
    Within an update: makes the server load a file of weights, and each of its workers confirm what its model received.
    """
    server.post("/update_weights", {"update_info": {"path": str(path)}}, final=_VERDICT)
    confirm(server, checksum)


def push_adapter(server: ServerControl, path: Path, version: str, checksum: str, previous: str | None) -> None:
    """Makes the server load an adapter under the name of its folder, then forget the previous one."""
    confirm(server, checksum, path / "adapter_model.safetensors")
    server.post("/v1/load_lora_adapter", {"lora_name": path.name, "lora_path": str(path), "load_inplace": True})
    served = server.get("/v1/models", lambda it: {(entry["id"], entry["root"]) for entry in it["data"]})
    if (path.name, str(path)) not in served:
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} did not load the adapter {path}: it serves "
            f"{', '.join(sorted(name for name, _ in served))}."
        )
    server.post("/update_weight_version", {"new_version": version})
    if previous is not None:
        with contextlib.suppress(RequestFailed):  # a server that was restarted does not know it
            server.post("/v1/unload_lora_adapter", {"lora_name": previous})


def confirm(server: ServerControl, checksum: str, path: Path | None = None) -> None:
    """
    Asks every worker of a server whether the file at `path`, or the weights that it loaded last, have a checksum.
    """
    info = {"checksum": checksum} if path is None else {"checksum": checksum, "path": str(path)}
    try:
        server.post("/init_weight_transfer_engine", {"init_info": info}, final=_VERDICT)
    except RequestFailed as error:
        if error.status is None or error.status < 500:
            raise
        raise WeightSyncError(
            f"The weights did not arrive at the vLLM server at {server.base_url} as they were sent: {error}"
        ) from error


def check_folder(
    server: ServerControl,
    config: dict[str, Any],
    folder: Path,
    bring: Callable[[Path], Path] = lambda file: file,
) -> None:
    """Makes sure that a server sees the trainer's files."""
    transfer = config["weight_transfer_config"]
    if transfer is None or transfer["backend"] != BACKEND:
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} does not load weights from files: start it with `mt-grpo serve` "
            "and this run's recipe."
        )
    nonce = folder / f"{uuid.uuid4().hex}.nonce"
    save_file({"nonce": torch.randn(8)}, nonce)
    seen = bring(nonce)
    try:
        confirm(server, file_checksum(nonce), seen)
    except WeightSyncError as error:
        raise WeightSyncError(
            f"The vLLM server at {server.base_url} does not see the files in {folder}, where the trainer hands "
            "weights over: set `weight_sync_folder` to a folder that trainer and server see under one path, and both "
            f"may read ({error.__cause__})."
        ) from error
    try:
        confirm(server, "wrong on purpose", seen)
    except WeightSyncError:
        nonce.unlink()
        return
    raise WeightSyncError(
        f"The vLLM server at {server.base_url} agrees with whatever it is told about weights, even with what is wrong "
        "on purpose: start it with `mt-grpo serve` and this run's recipe."
    )
