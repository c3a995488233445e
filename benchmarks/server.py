"""A real vLLM server for the benchmarks, started with the command that `mt-grpo serve` runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from mt_grpo.app.recipe import Recipe, parse_recipe
from mt_grpo.app.serve import GUARD, server_command
from mt_grpo.rollout.engines.vllm.http import RequestFailed, ServerControl, find_key, headers

START_LIMIT = 300.0
"""Seconds a server may take to start."""
RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart_vllm.yaml"


def read(model: str, *options: str) -> Recipe:
    """`recipes/quickstart_vllm.yaml` with another model, further options, and a port that is free."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    arguments = ["--config", str(RECIPE), "--model_name_or_path", model, "--vllm_server_host", "127.0.0.1"]
    return parse_recipe([*arguments, "--vllm_server_port", port, *options])


@contextlib.contextmanager
def serve(recipe: Recipe, *flags: str, guard: str = GUARD) -> Iterator[str]:
    """
    The recipe's server, as long as the context lasts; yields its URL. Its last words are shown when anything fails.

    Args:
        recipe (`Recipe`): On this machine.
        flags (`str`): Further flags of vLLM, after those of `mt-grpo serve`.
        guard (`str`): The class that stands before its endpoints.

    Raises:
        RuntimeError: If it ends or is not up after `START_LIMIT` seconds.
    """
    command, environment = server_command(recipe)
    command[command.index(GUARD)] = guard
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen(
            [*command, *flags],
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{recipe.training.vllm_server_port}"
            if not _comes_up(url, process):
                raise RuntimeError("The vLLM server did not start.")
            yield url
        except Exception:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            for how in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, how)
                    process.wait(60)


def _comes_up(url: str, process: subprocess.Popen[bytes]) -> bool:
    control, deadline = ServerControl(url, timeout=5.0), time.monotonic() + START_LIMIT
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(RequestFailed):
                control.get("/health")
                return True
            time.sleep(0.2)
        return False
    finally:
        control.close()


def metric(url: str, name: str) -> float:
    """The sum of a Prometheus metric of the server over all its series."""
    lines = _metrics(url).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)


def block_size(url: str) -> int:
    """Tokens of one block of the server's cache."""
    return int(re.search(r'cache_config_info\{[^}]*block_size="(\d+)"', _metrics(url))[1])


def _metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", headers=headers(find_key(url)), timeout=30.0).text
