"""Programs forked from a process that has imported what they need, for those whose imports are not what is tested."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import accelerate.commands.launch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from support import forking
from support.forking import Forked, serve_forks

__all__ = ["Forked", "fork_what_is_launched", "run_processes", "start_ranks"]
IMPORTED = "support.ranks", "mt_grpo.app.train", "support.trainers", "accelerate.utils", "torch.distributed.fsdp"


def start_ranks(arguments: list[str], processes: int, log: Path, environment: dict[str, str]) -> list[Forked]:
    """
    Starts a program once, or as the ranks of a group, on a CPU.

    Args:
        arguments, log: See `Forked`.
        processes: How many there are.
        environment: Further environment variables.
    """
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", **environment}
    if processes == 1:
        return [Forked(arguments, log, environment)]
    # they meet as those of torchrun do, at a port that is chosen where it is opened
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(processes)}
    group |= {"LOCAL_WORLD_SIZE": str(processes), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    group |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [
        Forked(arguments, log, environment | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.store = store  # it is open as long as they are known
    return ranks


def run_processes(arguments: list[str], processes: int, log: Path, environment: dict[str, str]) -> None:
    """Runs what `start_ranks` starts to its end; all must end with the status 0."""
    ranks = start_ranks(arguments, processes, log, environment)
    deadline = time.monotonic() + 300
    while not all(rank.poll() == 0 for rank in ranks):
        if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
                rank.wait()
            raise AssertionError(f"{[rank.returncode for rank in ranks]}: {log.read_text(errors='replace')}")
        time.sleep(0.02)


def prepare() -> None:
    """In the process that programs are forked from."""
    for module in IMPORTED:
        __import__(module)


def fork_what_is_launched() -> None:
    """For a forked launcher: what accelerate starts is forked from it as it is here, and writes where it does."""
    asking, answers = os.pipe(), os.pipe()
    if os.fork() == 0:
        asked: list[int] = []
        signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
        os.close(asking[1])
        os.close(answers[0])
        serve_forks(((line, answers[1]) for line in os.fdopen(asking[0])), asked)
        sys.exit()
    os.close(asking[0])
    os.close(answers[1])
    questions, answered = os.fdopen(asking[1], "w"), os.fdopen(answers[0])

    def ask(of: str, request: object) -> int:
        print(json.dumps(request), file=questions, flush=True)
        return int(answered.readline())

    forking.ask_forks = ask
    log = Path(os.readlink("/proc/self/fd/1"))
    SubprocessHandler._popen = lambda self, words, environment: Forked([*words[2:]], log, environment)
    single = SimpleNamespace(**vars(subprocess) | {"Popen": lambda words, env: Forked(words[1:], log, env)})
    accelerate.commands.launch.subprocess = single
