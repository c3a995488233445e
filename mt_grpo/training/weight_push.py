"""The server's half of a weight update, as a sequence of HTTP calls that always leaves the server running."""

from __future__ import annotations

import contextlib
from pathlib import Path

from mt_grpo.rollout.vllm_http import RequestFailed, ServerControl


class WeightSyncError(RuntimeError):
    """The server does not hold the trainer's weights, and cannot be brought to. It ends the run."""


@contextlib.contextmanager
def paused(server: ServerControl):
    """Requests under way wait inside and go on afterwards; cached prefixes, computed with other weights, go."""
    try:
        server.post("/pause", mode="keep")
        yield
        if server.post("/reset_prefix_cache", reset_running_requests="true") != {"success": True}:
            raise WeightSyncError(f"The vLLM server at {server.base_url} could not empty its prefix cache.")
    except BaseException:  # Ctrl-C as well: a server that stays paused answers nobody
        server.tidy_up("/resume")
        raise
    server.post("/resume")


def push_file(server: ServerControl, path: Path, version: int) -> None:
    """
    Makes the server load a file of weights.

    Args:
        server (`ServerControl`): The server.
        path (`Path`): The file, on a path the server sees too.
        version (`int`): Optimiser step of the weights.

    Raises:
        RequestFailed: With the server's words, after the update was ended and the server resumed.
    """
    with paused(server):
        _start(server)
        try:
            server.post("/update_weights", {"update_info": {"path": str(path)}})
        except BaseException:
            server.tidy_up("/finish_weight_update", {})
            raise
        server.post("/finish_weight_update", {"weight_version": str(version)})


def push_adapter(server: ServerControl, name: str, path: Path, version: int, previous: str | None) -> None:
    """Makes the server load an adapter under a name of its own, then forget the previous one."""
    server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), "load_inplace": True})
    server.post("/update_weight_version", {"new_version": str(version)})
    if previous is not None:
        with contextlib.suppress(RequestFailed):  # a server that was restarted does not know it
            server.post("/v1/unload_lora_adapter", {"lora_name": previous})


def _start(server: ServerControl) -> None:
    try:
        server.post("/start_weight_update", {})
    except RequestFailed as error:
        if "already active" not in str(error):
            raise
        server.post("/finish_weight_update", {})  # left behind by a trainer that was killed
        server.post("/start_weight_update", {})
