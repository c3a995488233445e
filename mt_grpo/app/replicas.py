"""Several servers of one command: started together, told to end together, each in a process group of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mt_grpo.errors import ConfigError

_DIE_WITH_PARENT = 1  # of prctl
_ENDS = signal.SIGTERM, signal.SIGINT


@dataclass(frozen=True)
class Replica:
    """A server to start."""

    url: str
    command: list[str]
    environment: dict[str, str]

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


def run_replicas(replicas: Sequence[Replica]) -> int:
    """
    Starts servers and waits until all have ended. The first Ctrl-C or SIGTERM is passed on as SIGTERM, at which each
    finishes the requests under way; the second one ends them at once. One that ends by itself ends no other. All get
    SIGTERM where this process is killed. It has to be called in the main thread, whose end they see.
    """
    before = {number: signal.getsignal(number) for number in _ENDS}
    try:
        return asyncio.run(_supervise(replicas))  # an event loop misses no signal, whenever it comes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _here() -> str:
    """How another command is started on this node of a Slurm job."""
    job, node = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURMD_NODENAME")
    return f"srun --jobid={job} --nodelist={node} --ntasks=1 --overlap env " if job and node else ""


async def _supervise(replicas: Sequence[Replica]) -> int:
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
        if not told:
            sys.stderr.write(
                f"mt-grpo: the server at {replica.url} has ended with status {status}. The run goes on with the "
                f"others, and takes it back once it is started again here: {_here()}{replica.line}\n"
            )

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
        if told:  # before it was among them
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        watches.append(asyncio.create_task(tell_end(replica, process)))
    await asyncio.gather(*watches)
    return 0 if told else 1
