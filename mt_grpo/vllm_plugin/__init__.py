"""
Runs inside the vLLM server, which loads it by the entry point `vllm.general_plugins`. Needs vLLM only. The key that a
server made for itself is stored where only its user's trainers on the same machine can read it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

BACKEND = "safetensors"
"""Name of the weight-transfer engine, as in `--weight-transfer-config '{"backend": "safetensors"}'`."""

IDENTITY = "mt-grpo-server"
"""Header that the guard adds to answers: which server gave them. Not all of vLLM's bodies say it."""

SECONDS_TO_END = 3
"""Seconds that requests under way have to finish when the server is told to end."""


def register() -> None:
    """
    Registers the weight-transfer engine, and bounds the time that the server takes to end: else a vLLM that is told to
    end waits for answers of its engine, which it has already killed.
    """
    import uvicorn
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM loads plugins more than once in some processes
        WeightTransferEngineFactory.register_engine(
            BACKEND, "mt_grpo.vllm_plugin.engine", "SafetensorsWeightTransferEngine"
        )
    if "MT_GRPO_SERVER" in os.environ:  # other servers of the same environment are left alone
        bounded = partialmethod(uvicorn.Config.__init__, timeout_graceful_shutdown=SECONDS_TO_END)
        uvicorn.Config.__init__ = bounded  # type: ignore[method-assign, assignment]  # vLLM has no option for it
    if os.environ.get("MT_GRPO_ROUTES"):
        _return_routes_on_cpu()


def _return_routes_on_cpu() -> None:
    """Lets the CPU's runner take `--enable-return-routed-experts`, which vLLM has for its second model runner only."""
    import numpy as np
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if VllmConfig._verify_aux_output_compatibility is _verify:  # vLLM loads plugins more than once in some processes
        return
    VllmConfig._verify_aux_output_compatibility = _verify
    initialize, execute, sample = (
        CPUModelRunner.initialize_kv_cache,
        CPUModelRunner.execute_model,
        CPUModelRunner.sample_tokens,
    )

    def initialize_kv_cache(runner: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        initialize(runner, config, *args, **kwargs)
        runner.routes = get_aux_output_connector(runner.get_model(), runner.vllm_config, config)

    def execute_model(runner: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        runner.routes.begin_step(step.aux_output_connector_metadata)
        return execute(runner, step, *args, **kwargs)

    def sample_tokens(runner: Any, grammar: Any) -> Any:
        """Takes what the batch's tokens went to before their requests change, and adds it to what was sampled."""
        batch = runner.input_batch
        number = len(batch.req_ids)
        pending = runner.routes.prepare_output(
            SimpleNamespace(
                req_ids=batch.req_ids,
                query_start_loc_np=runner.query_start_loc.np[: number + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:number].copy(),
            )
        )
        output = sample(runner, grammar)
        if pending is not None:
            sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    CPUModelRunner.initialize_kv_cache = initialize_kv_cache
    CPUModelRunner.execute_model = execute_model
    CPUModelRunner.sample_tokens = sample_tokens


def _verify(config: Any) -> None:
    wanted = config.aux_output_config.enabled
    if wanted and (config.scheduler_config.async_scheduling or not config.cache_config.enable_prefix_caching):
        raise ValueError("Routes from a CPU need --no-async-scheduling and --enable-prefix-caching.")


KEYS_ROOT = "/dev/shm"
"""Shared memory, so that no key is on a disk. Containers that share weight files share the keys too."""

_EVERYWHERE = {None, "", "0.0.0.0", "::", "localhost", "127.0.0.1", "::1"}


def check_keys_folder() -> None:
    """Makes the folder for keys if there is none."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(_keys_path(), 0o700)
    with _keys_folder():
        pass


class StoredKey:
    """The key of the server at a host and port, as it is stored for its user's trainers on this machine."""

    def __init__(self, host: str | None, port: int) -> None:
        self._host, self._port = "localhost" if host in _EVERYWHERE else host, port

    @property
    def _name(self) -> str:
        # with the network namespace, because containers may share memory but not the loopback
        return f"{os.stat('/proc/self/ns/net').st_ino}-{self._host}-{self._port}"

    def write(self, key: str) -> None:
        """Stores a key. It replaces the key of a server that is gone."""
        check_keys_folder()
        partial = f"{self._name}.partial"
        with _keys_folder() as folder:
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder)
            with open(file, "w") as text:
                text.write(key)
            os.rename(partial, self._name, src_dir_fd=folder, dst_dir_fd=folder)

    def read(self) -> str | None:
        """The key that a server stored, maybe one that was killed; `None` if there is none."""
        try:
            with _keys_folder() as folder, open(os.open(self._name, os.O_RDONLY, dir_fd=folder)) as text:
                return text.read()
        except FileNotFoundError:
            return None

    def remove(self, key: str) -> None:
        """Removes a key that was stored, unless another server has stored its own there."""
        if self.read() == key:
            with _keys_folder() as folder:
                os.unlink(self._name, dir_fd=folder)


def _keys_path() -> str:
    return f"{KEYS_ROOT}/mt-grpo-keys-{os.geteuid()}"


@contextlib.contextmanager
def _keys_folder() -> Iterator[int]:
    """A descriptor of the folder that was checked, since anybody may make another of its name."""
    path = _keys_path()
    refusal = PermissionError(
        f"{path} should hold the servers' keys, but is no folder of this user that others cannot enter: remove it, or "
        "set `VLLM_API_KEY` for server and trainer."
    )
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (NotADirectoryError, PermissionError) as error:
        raise refusal from error
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise refusal
        yield folder
    finally:
        os.close(folder)
