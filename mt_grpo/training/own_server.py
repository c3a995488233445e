"""Servers that a trainer starts on its own GPUs (`vllm_mode: colocate`), one for each tensor-parallel group."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from trl import ModelConfig

from mt_grpo.concurrency import run
from mt_grpo.errors import ConfigError
from mt_grpo.options.rules import check_groups
from mt_grpo.rollout.engines.vllm.http import Server, ServerSetupError, wait_for_servers
from mt_grpo.training import keeper
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.processes import everywhere
from mt_grpo.training.server_command import check_vllm, command_at
from mt_grpo.training.servers import colocates, own_port, server_urls
from mt_grpo.vllm_plugin.guard import SLEEPS
from mt_grpo.vllm_plugin.keys import check_folder
from mt_grpo.weights.transport import WeightTransport

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
LAUNCHERS = ("ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_", "TORCH_NCCL_", "OMP_")
"""Environment variables of a process that was launched, and the beginnings of others; a server is none."""
SLICE = 1.0
"""Seconds between two looks at a server that starts."""
TOLD = 15.0
"""Seconds after which it is said that a server starts."""
GONE = 20.0
"""Seconds to wait for a server that was up: nobody starts it again."""

logger = logging.getLogger(__name__)


def check_own_servers(args: MTGRPOConfig) -> None:
    """Whether this machine can hold the servers that a run starts. This is a collective call."""
    if colocates(args):
        everywhere(lambda: _check(args))


def _check(args: MTGRPOConfig) -> None:
    check_groups(vars(args), args.world_size)
    if int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)) < args.world_size:
        raise ConfigError(
            "`vllm_mode: colocate` starts servers for the processes of one machine, and these are on several: set "
            "`vllm_mode: server`, and start the servers with `mt-grpo serve`."
        )
    check_vllm()
    if not os.environ.get("VLLM_API_KEY"):
        try:
            check_folder()
        except PermissionError as error:
            raise ConfigError(str(error)) from error
    if _leads(args) and not is_free(own_port(args)):
        raise ConfigError(
            f"Port {own_port(args)} is taken, and `vllm_mode: colocate` starts a server on it: give the run another "
            "`vllm_server_port`; its servers take that one and those after it."
        )


def _leads(args: MTGRPOConfig) -> bool:
    """Whether this process starts a server: the first one of each group."""
    return args.process_index % args.vllm_tensor_parallel_size == 0


def is_free(port: int) -> bool:
    """Whether a program can listen on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port that was just left is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class OwnServer:
    """A server that this process starts, and that ends with it. Its output goes to a file of its own."""

    def __init__(self, command: list[str], environment: dict[str, str], url: str) -> None:
        self.url = url
        handle, path = tempfile.mkstemp(prefix=f"mt-grpo-server-{url.rsplit(':', 1)[1]}-", suffix=".log")
        self.log = Path(path)
        with open(handle, "wb") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is for the trainer
            )

    def wait(self, seconds: float) -> None:
        """Waits until it answers."""
        server, began, told = Server(self.url), time.monotonic(), TOLD
        while run(wait_for_servers([server], 1, time.monotonic(), SLICE, lambda words: None)):
            waited = time.monotonic() - began
            if self._keeper.poll() is not None:
                raise ServerSetupError(f"The vLLM server that this run started ended{self._reason()}. {self.where}")
            if waited > seconds:
                raise ServerSetupError(
                    f"The vLLM server that this run started did not answer within {seconds:.0f} s: raise "
                    f"`vllm_server_timeout`. {self.where}"
                )
            if waited > told:
                logger.warning("The vLLM server of this run starts (%.0f of %.0f s). %s", waited, seconds, self.where)
                told *= 3

    @property
    def where(self) -> str:
        """Where its output is."""
        return f"Its output is in {self.log}."

    def _reason(self) -> str:
        """Its last words, as far as they name an error."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        errors = re.findall(r"^.*?\b(\w+(?:Error|Exception): .+)$", text, re.MULTILINE)
        return f" ({errors[-1].strip()[:300]})" if errors else ""

    def close(self) -> None:
        """Ends it, and removes its output, unless it had ended by itself."""
        ended = self._keeper.poll() is not None
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.wait()
        if not ended:
            self.log.unlink(missing_ok=True)


def start_own_server(args: MTGRPOConfig, model: Any) -> OwnServer | None:
    """
    Starts the server of this process's group, and returns when all servers of the run answer. This is a collective
    call.
    """

    def start() -> OwnServer | None:
        if not _leads(args):
            return None
        name = model.config.name_or_path
        if not name:
            raise ConfigError(
                "`vllm_mode: colocate` starts a server with the model, which was made without a name: save it to a "
                "folder, and give that folder as the model."
            )
        peft = model.peft_config["default"] if is_peft_model(model) else None
        kwargs = args.model_init_kwargs or {}
        about = ModelConfig(
            model_name_or_path=name,
            model_revision=kwargs.get("revision") or "main",
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            lora_r=16 if peft is None else peft.r,
        )
        command, environment = command_at("127.0.0.1", own_port(args), args, about)
        environment |= _gpus(args)
        if args.vllm_enable_sleep_mode:
            environment[SLEEPS] = "1"
        server = OwnServer(command, {**_surroundings(), **environment}, server_urls(args)[_group(args)])
        try:
            server.wait(args.vllm_server_timeout)
        except BaseException:
            server.close()
            raise
        return server

    return everywhere(start)


@contextmanager
def own_server(args: MTGRPOConfig, model: Any) -> Iterator[OwnServer | None]:
    """
    The server of this process's group, if there is one; see `start_own_server`. It ends where the context fails, and
    lives on where it does not.
    """
    server = start_own_server(args, model) if colocates(args) else None
    try:
        yield server
    except BaseException:
        if server is not None:
            server.close()
        raise


def hand_over(server: OwnServer | None, args: MTGRPOConfig, sync: WeightTransport) -> None:
    """Lets the end of weight sync end the server, and its client know where to look when it is gone."""
    if not colocates(args):
        return
    sync.client.server_timeout = GONE
    sync.client.remedy = "The run that started it has to be started again."
    if server is not None:
        sync.end_server = server.close
        sync.client.remedy += f" {server.where}"


def _group(args: MTGRPOConfig) -> int:
    return int(args.process_index) // args.vllm_tensor_parallel_size


def _surroundings() -> dict[str, str]:
    names = {name for name in os.environ if name in LAUNCHER or name.startswith(LAUNCHERS)}
    return {name: value for name, value in os.environ.items() if name not in names}


def _gpus(args: MTGRPOConfig) -> dict[str, str]:
    """The GPUs of the group, for the server alone."""
    if args.device.type != "cuda":
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
    size = args.vllm_tensor_parallel_size
    first = args.local_process_index // size * size
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + size])}
