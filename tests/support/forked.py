"""
Programs that are forked from a process which has imported what they need, instead of importing it themselves, which
takes longer than most of what they are started for. For those whose imports are not what is tested.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import accelerate.commands.launch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from support.forking import serve_forks

IMPORTED = "support.ranks", "mt_grpo.app.train", "support.trainers", "accelerate.utils", "torch.distributed.fsdp"


class Forked:
    """
    A program in a session of its own, with the methods of `subprocess.Popen`.

    Args:
        arguments: What comes after `python` on its command line: a script, or `-m` and a module.
        log: File that takes its output.
        environment: All of its environment variables.
        ask: Asks the process that it is forked from.
    """

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        environment: dict[str, str] | None = None,
        ask: Callable[[object], int] | None = None,
    ) -> None:
        request = {
            "arguments": arguments,
            "log": str(log),
            "environment": dict(os.environ) if environment is None else environment,
            "folder": os.getcwd(),
        }
        log.touch()
        self._ask = ask or _ask
        self.pid: int = self._ask(request)
        self.returncode: int | None = None
        self._ends = os.pidfd_open(self.pid)
        self.store: TCPStore | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ends], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ends], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            os.close(self._ends)
            self.returncode = os.waitstatus_to_exitcode(self._ask(self.pid))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


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


def _ask(request: object) -> int:
    parent = _parent()
    parent.stdin.write(json.dumps(request) + "\n")
    parent.stdin.flush()
    return json.loads(parent.stdout.readline())


@functools.cache
def _parent() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "support.forked"]
    parent = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(parent.communicate)
    return parent


def main() -> None:
    """The process that programs are forked from. It ends with its standard input, and they with it."""
    for module in IMPORTED:
        __import__(module)
    answers = os.dup(1)
    serve_forks((line, answers) for line in sys.stdin)


def fork_what_is_launched() -> None:
    """
    For a launcher that was forked itself. What accelerate starts then is forked from a copy of it as it is here: with
    its imports and namespaces, and without the threads that torchrun begins. It writes where the launcher does.
    """
    requests, answers = os.pipe(), os.pipe()
    if os.fork() == 0:
        asked: list[int] = []
        signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
        os.close(requests[1])
        os.close(answers[0])
        serve_forks(((line, answers[1]) for line in os.fdopen(requests[0])), asked)
        sys.exit()
    os.close(requests[0])
    os.close(answers[1])
    parent = SimpleNamespace(stdin=os.fdopen(requests[1], "w"), stdout=os.fdopen(answers[0]))
    globals()["_parent"] = lambda: parent
    log = Path(os.readlink("/proc/self/fd/1"))
    SubprocessHandler._popen = lambda self, words, environment: Forked([*words[2:]], log, environment)
    single = SimpleNamespace(**vars(subprocess) | {"Popen": lambda words, env: Forked(words[1:], log, env)})
    accelerate.commands.launch.subprocess = single


if __name__ == "__main__":
    main()
