"""A real vLLM server on this machine's CPU, for tests and benchmarks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from mt_grpo.app.serve import server_command
from mt_grpo.servers.http import _headers, find_key
from support.forked import Forked
from support.forking import OTHER_PROCESSOR, SERVER_PYTHON, VLLM_FORKS, begin_forks
from support.loopback import free_port
from support.recipes import parse_recipe

ROOT = Path(__file__).parents[2]
needs_server = pytest.mark.skipif(
    not SERVER_PYTHON.exists(), reason="there is no .venv-vllm: make it with `make server-cpu`"
)
START_LIMIT = 900.0
"""Seconds a real server may take to start: two cores, shared with whatever else runs."""
WATCH = """
import os, signal, sys, time
sys.stdin.read()  # ends with the process that holds the other end
try:
    os.killpg(int(sys.argv[1]), signal.SIGTERM)
    time.sleep(20)
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
except ProcessLookupError:
    pass
"""


def nobody_left(group: int) -> bool:
    """Whether no process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


class ServerProcess:
    """
    A server in a process group of its own, that downloads nothing. It ends with this process, whatever ends that. vLLM
    is forked after `begin_forks`.

    Args:
        command: What starts it.
        port: Where it listens.
        log: File that takes its output.
        environment: Further environment variables.
    """

    def __init__(self, command: list[str], port: int, log: Path, environment: dict[str, str] | None = None) -> None:
        self.command, self.port, self.log = command, port, log
        self.url = f"http://127.0.0.1:{port}"
        ours = {name: value for name, value in os.environ.items() if name not in OTHER_PROCESSOR}
        self._environment = {**ours, "HF_HUB_OFFLINE": "1", **(environment or {})}
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        self._segments: set[str] = set()  # of shared memory, which stay where its processes are killed

    @property
    def pid(self) -> int | None:
        """Of the process that it was started with last, and of its group."""
        return self._process and self._process.pid

    def start(self) -> ServerProcess:
        """Starts it, and waits until it is up."""
        self._process = self._begin()
        command = [sys.executable, "-S", "-c", WATCH, str(self.pid)]
        self._watch = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._wait()
        except BaseException:  # nobody has it yet, to stop it
            self.stop(signal.SIGKILL)
            raise
        return self

    def _begin(self) -> subprocess.Popen[bytes] | Forked:
        if VLLM_FORKS in os.environ and self.command[0] == str(SERVER_PYTHON):
            return Forked(self.command[1:], self.log, self._environment, VLLM_FORKS)
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                self.command, cwd=ROOT, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"The server ended:\n{self.last_words()}")
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200:
                    server = psutil.Process(self.pid)
                    for each in (server, *server.children(recursive=True)):
                        with suppress(OSError):  # it has ended
                            maps = Path(f"/proc/{each.pid}/maps").read_text()
                            self._segments.update(re.findall(r"/dev/shm/psm_\w+", maps))
                    return
            time.sleep(0.2)
        raise RuntimeError(f"The server did not start:\n{self.last_words()}")

    def wait_gone(self, seconds: float = 10.0) -> None:
        """Until it has ended by itself, and everything that it started: what shares memory removes it last."""
        self._process.wait(60)
        deadline = time.monotonic() + seconds
        while not nobody_left(self.pid):
            assert time.monotonic() < deadline, f"It has left a process:\n{self.last_words()}"
            time.sleep(0.02)

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends the server and everything it started, if it was started."""
        if self._process is None:
            return
        if self._watch is not None:  # what ends this process may come between the two
            self._watch.kill()
            self._watch.communicate()
        with suppress(ProcessLookupError, subprocess.TimeoutExpired, AssertionError):
            os.killpg(self.pid, how)
            self.wait_gone()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for segment in self._segments:
            Path(segment).unlink(missing_ok=True)

    def get(self, path: str) -> httpx.Response:
        """What it answers to somebody who has its key."""
        return get(self.url, path)

    def metric(self, name: str, **labels: str) -> float:
        """See `metric`."""
        return metric(self.url, name, **labels)


def get(url: str, path: str) -> httpx.Response:
    """What a server answers to somebody who has its key."""
    return httpx.get(f"{url}{path}", headers=_headers(find_key(url)), timeout=30.0)


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a Prometheus metric of a server over all its series that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in get(url, "/metrics").text.splitlines()
        if line.split("{")[0] == name and all(label in line for label in wanted)
    )


class RealServer(ServerProcess):
    """
    The vLLM server as `mt-grpo serve` starts it, forked where vLLM is imported.

    Args:
        model: `embedded`, or the folder of a model.
        log: File that takes its output.
        options: Further options of the recipe, as on a command line.
        transport: How weights reach it.
        by_command: Whether it is started by `mt-grpo serve` itself, and imports vLLM.
    """

    def __init__(
        self, model: str, log: Path, *options: str, transport: str = "auto", by_command: bool = False
    ) -> None:
        port = free_port()
        recipe = ["--config", str(ROOT / "recipes/quickstart.yaml"), "--use_vllm", "true", "--weight_sync", transport]
        recipe += ["--model_name_or_path", model, "--vllm_server_host", "127.0.0.1", "--vllm_server_port", str(port)]
        self._options, self.by_command = [*recipe, *options], by_command
        self._recipe = parse_recipe(self._options)  # not at a start: it resets what an `Accelerator` shares
        super().__init__([], port, log)

    def _begin(self) -> subprocess.Popen[bytes] | Forked:
        if self.by_command:
            return Forked(["-m", "mt_grpo", "serve", *self._options], self.log, self._environment)
        begin_forks()
        self.command, variables = server_command(self._recipe)
        self._environment |= variables
        return super()._begin()
