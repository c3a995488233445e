"""
Starts and ends servers: several of one command, each in a process group of its own, or one that ends with this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mt_grpo.concurrency import run
from mt_grpo.errors import ConfigError
from mt_grpo.servers import watchdog
from mt_grpo.servers.http import RequestFailed, Server, ServerSetupError, open_session, wait_for_servers
from mt_grpo.vllm_plugin import check_keys_folder

logger = logging.getLogger(__name__)
CHECK_EVERY = 1.0
"""Seconds between two looks at a server that starts."""
_NOTICE_AFTER = 15.0  # seconds after which it is said that a server starts

_LISTEN_EVERY = 5.0  # seconds between two looks at a server's health

_DIE_WITH_PARENT = 1  # of prctl
_ENDS = signal.SIGTERM, signal.SIGINT


@dataclass
class Replica:
    """A server to start; then whether its process lives, and when it last answered."""

    url: str
    command: list[str]
    environment: dict[str, str]
    lives: bool = False
    heard: float = field(default_factory=time.monotonic)

    @property
    def line(self) -> str:
        """The command as one would type it."""
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), shlex.join(self.command)])


def share_gpus(replicas: int, each: int, visible: Sequence[str]) -> list[str]:
    """The GPUs of each server, as `CUDA_VISIBLE_DEVICES` takes them."""
    if replicas * each > len(visible):
        raise ConfigError(
            f"{replicas} servers take {replicas * each} GPUs, {each} each, and {len(visible)} are visible: start "
            "fewer with `--replicas`, or name more in `CUDA_VISIBLE_DEVICES`."
        )
    return [",".join(visible[number * each : (number + 1) * each]) for number in range(replicas)]


def vitals(replicas: Sequence[Replica]) -> dict[str, dict[str, float]]:
    """What a supervisor knows of each server: whether the process that it started lives, and how long it is silent."""
    return {
        "replica_running": {each.url: float(each.lives) for each in replicas},
        "replica_silent_seconds": {each.url: time.monotonic() - each.heard for each in replicas},
    }


def run_replicas(replicas: Sequence[Replica], listens: bool = False) -> int:
    """
    Starts servers and waits until all have ended. The first Ctrl-C or SIGTERM is passed on as SIGTERM, at which each
    finishes the requests under way; the second one ends them at once. It has to be called in the main thread. With
    `listens` it asks each for its health, for `vitals`.
    """
    before = {number: signal.getsignal(number) for number in _ENDS}
    try:
        return asyncio.run(_supervise(replicas, listens))  # an event loop misses no signal, whenever it comes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _here() -> str:
    """How another command is started on this node of a Slurm job."""
    job, node = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURMD_NODENAME")
    return f"srun --jobid={job} --nodelist={node} --ntasks=1 --overlap env " if job and node else ""


async def _supervise(replicas: Sequence[Replica], listens: bool) -> int:
    processes: list[asyncio.subprocess.Process] = []
    libc, supervisor, told = ctypes.CDLL(None), os.getpid(), 0  # loaded before the fork

    def end() -> None:
        nonlocal told
        told += 1
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                if told == 1:  # the process that answers tells its own, when requests are finished
                    process.send_signal(signal.SIGTERM)
                else:
                    os.killpg(process.pid, signal.SIGKILL)

    def end_with_supervisor() -> None:
        libc.prctl(_DIE_WITH_PARENT, signal.SIGTERM)
        if os.getppid() != supervisor:  # killed before it was said
            os._exit(1)

    async def tell_end(replica: Replica, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        replica.lives = False
        if not told:
            sys.stderr.write(
                f"mt-grpo: the server at {replica.url} has ended with status {status}. The run goes on with the "
                f"others, and takes it back once it is started again here: {_here()}{replica.line}\n"
            )

    async def listen(replica: Replica) -> None:
        server = Server(replica.url)
        async with open_session() as http:
            while True:
                with contextlib.suppress(RequestFailed):
                    await server.ask_text(http, "/health")
                    replica.heard = time.monotonic()
                await asyncio.sleep(_LISTEN_EVERY)

    for number in _ENDS:
        asyncio.get_running_loop().add_signal_handler(number, end)
    watches = []
    for replica in replicas:
        if told:
            break
        print(f"{replica.line}\n", end="", flush=True)  # one write: the servers write beside it
        environment = {**os.environ, **replica.environment}
        process = await asyncio.create_subprocess_exec(
            *replica.command, env=environment, process_group=0, preexec_fn=end_with_supervisor
        )
        processes.append(process)
        replica.lives = True
        if told:  # before it was among them
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        watches.append(asyncio.create_task(tell_end(replica, process)))
    listeners = [asyncio.create_task(listen(replica)) for replica in replicas if listens]
    await asyncio.gather(*watches)
    for listener in listeners:
        listener.cancel()
    return 0 if told else 1


class OwnServer:
    """A server that this process starts, and that ends with it. Its output goes to a file of its own."""

    def __init__(self, command: list[str], environment: dict[str, str], url: str) -> None:
        self.url = url
        handle, path = tempfile.mkstemp(prefix=f"mt-grpo-server-{url.rsplit(':', 1)[1]}-", suffix=".log")
        self.log = Path(path)
        with open(handle, "wb") as log:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", watchdog.__file__, str(os.getpid()), *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is for the trainer
            )

    def wait(self, seconds: float) -> None:
        """Waits until it answers."""
        server, began, told = Server(self.url), time.monotonic(), _NOTICE_AFTER
        while run(wait_for_servers([server], 1, time.monotonic(), CHECK_EVERY, lambda words: None)):
            waited = time.monotonic() - began
            if self._watchdog.poll() is not None:
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
        ended = self._watchdog.poll() is not None
        assert self._watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._watchdog.stdin.close()
        self._watchdog.wait()
        if not ended:
            self.log.unlink(missing_ok=True)


def check_keys() -> None:
    """Whether servers can leave their keys for their user's trainers, where no key is given."""
    if not os.environ.get("VLLM_API_KEY"):
        try:
            check_keys_folder()
        except PermissionError as error:
            raise ConfigError(str(error)) from error


def is_free(port: int) -> bool:
    """Whether a program can listen on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port that was just left is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
