"""The process that vLLM servers are forked from: `python -m support.vllm_forks DESCRIPTOR`, see `support.servers`."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import select
import socket
import sys
from collections.abc import Iterator

from vllm.utils import system_utils

from support.forking import serve_forks

IMPORTED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)


def requests(listening: socket.socket) -> Iterator[tuple[str, int]]:
    """Until standard input ends."""
    while sys.stdin not in select.select([sys.stdin, listening], [], [])[0]:
        asking = listening.accept()[0].detach()
        with os.fdopen(os.dup(asking)) as lines:
            line = lines.readline()
        yield line, asking
        os.close(asking)


def leave_ports() -> None:
    """A server that is killed leaves its port at once, as it would if its engine knew nothing of it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            found = socket.socket(fileno=number)
        except OSError:  # it is something else
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6):
            os.dup2(nothing, number)  # Python may close the number later
        found.detach()
    os.close(nothing)


if __name__ == "__main__":
    # The CPU build starts engine and worker with a new interpreter each, so that every one imports vLLM for 8 seconds.
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    os.register_at_fork(after_in_child=leave_ports)
    for module in IMPORTED:  # they take from `system_utils` what was put there
        importlib.import_module(module)
    serve_forks(requests(socket.socket(fileno=int(sys.argv[1]))))
