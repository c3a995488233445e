"""What the process has imported that vLLM servers are forked from, see `support.forking`."""

import importlib
import multiprocessing
import os
import socket

from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from vllm.entrypoints.serve.dev.server_info import api_router
from vllm.utils import system_utils

IMPORTED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "torch._inductor.compile_fx",
)


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


def prepare() -> None:
    """In the process that servers are forked from."""
    # The CPU build starts engine and worker with a new interpreter each, so that every one imports vLLM for 8 seconds.
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    os.register_at_fork(after_in_child=leave_ports)
    for module in IMPORTED:  # they take from `system_utils` what was put there
        importlib.import_module(module)
    # what each would find out again, by starting ten programs: which machine this is, and what can be compiled for it
    api_router._get_system_env_info_cached()
    valid_vec_isa_list()
