"""Several servers of one command: started together, told to end together, each in a process group of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from mt_grpo.errors import ConfigError

_DIE_WITH_PARENT = 1  # of prctl


@dataclass(frozen=True)
class Replica:
    """
    A server to start.

    Args:
        url (`str`): Its address.
        command (`list[str]`): What starts it.
        environment (`dict[str, str]`): Environment variables beside those of this process.
    """

    url: str
    command: list[str]
    environment: dict[str, str]

    @property
    def line(self) -> str:
        """The command as one would type it."""
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), shlex.join(self.command)])


def share_gpus(replicas: int, each: int, visible: Sequence[str]) -> list[str]:
    """
    The GPUs of each server, as `CUDA_VISIBLE_DEVICES` takes them.

    Args:
        replicas (`int`): Servers.
        each (`int`): GPUs of one server.
        visible (`Sequence[str]`): The GPUs that there are.

    Raises:
        ConfigError: If they do not suffice.
    """
    if replicas * each > len(visible):
        raise ConfigError(
            f"{replicas} servers take {replicas * each} GPUs, {each} each, and {len(visible)} are visible: start "
            "fewer with `--replicas`, or name more in `CUDA_VISIBLE_DEVICES`."
        )
    return [",".join(visible[number * each : (number + 1) * each]) for number in range(replicas)]


def run_replicas(replicas: Sequence[Replica]) -> int:
    """
    Starts servers and waits until all have ended. The first Ctrl-C or SIGTERM is passed on as SIGTERM, at which each
    finishes the requests under way; the second one ends them at once. One that ends by itself ends no other. All get
    SIGTERM where this process is killed. It has to be called in the main thread, whose end they see.

    Returns:
        `int`: 0 if they ended because they were told to, else 1.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}
    libc, supervisor = ctypes.CDLL(None), os.getpid()  # loaded before the fork
    told: list[int] = []

    def end(number: int, frame: object) -> None:
        told.append(number)
        for process in processes.values():
            if len(told) == 1:  # the process that answers tells its own, when requests are finished
                process.send_signal(signal.SIGTERM)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def end_with_supervisor() -> None:
        libc.prctl(_DIE_WITH_PARENT, signal.SIGTERM)
        if os.getppid() != supervisor:  # killed before it was said
            os._exit(1)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for replica in replicas:
            if told:
                break
            print(f"{replica.line}\n", end="", flush=True)  # one write: the servers write beside it
            environment = {**os.environ, **replica.environment}
            processes[replica.url] = subprocess.Popen(
                replica.command, env=environment, process_group=0, preexec_fn=end_with_supervisor
            )
            if told:  # before it was among them
                processes[replica.url].send_signal(signal.SIGTERM)
        watches = [threading.Thread(target=_tell_end, args=(*one, told), daemon=True) for one in processes.items()]
        for watch in watches:
            watch.start()
        for process in processes.values():
            process.wait()
        for watch in watches:
            watch.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if told else 1


def _tell_end(url: str, process: subprocess.Popen[bytes], told: list[int]) -> None:
    status = process.wait()
    if not told:
        sys.stderr.write(f"mt-grpo: the server at {url} has ended with status {status}.\n")
