"""Servers for tests: a real vLLM server on this machine's CPU, and an HTTP upstream that answers from a script."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from mt_grpo.rollout.engines.vllm.http import find_key, headers

ROOT = Path(__file__).parents[2]
SERVER_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
START_LIMIT = 300.0
"""Seconds a real server may take to start: two cores, shared with whatever else runs."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class RealServer:
    """
    The vLLM server as `mt-grpo serve` starts it.

    Args:
        model: `embedded`, or the folder of a model.
        log: File that takes its output.
        options: Further options of the recipe, as on a command line.
        transport: How weights reach it.
    """

    def __init__(self, model: str, log: Path, *options: str, transport: str = "auto") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [sys.executable, "-m", "mt_grpo", "serve"]
        self._command += ["--config", "recipes/quickstart.yaml", "--weight_sync", transport]
        self._command += ["--model_name_or_path", model, "--vllm_server_host", "127.0.0.1"]
        self._command += ["--vllm_server_port", str(self.port), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, wait: bool = True) -> RealServer:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        if wait:
            self.wait()
        return self

    def wait(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            assert self._process.poll() is None, f"The server ended:\n{self.log.read_text()[-3000:]}"
            try:
                if httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"The server did not start:\n{self.log.read_text()[-3000:]}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends the server and everything it started."""
        try:
            os.killpg(self._process.pid, how)
            self._process.wait(60)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def get(self, path: str) -> httpx.Response:
        """What it answers to somebody who has its key."""
        return httpx.get(f"{self.url}{path}", headers=headers(find_key(self.url)), timeout=30.0)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a Prometheus metric over all its series that have these labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            if line.split("{")[0] == name and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total


Answer = tuple[int, Any] | None
Script = Callable[[str, str, dict[str, Any]], Answer]


class ScriptedServer:
    """
    An HTTP server on loopback whose every answer is scripted. Where it has a `key`, it wants that as a real one does.

    Args:
        script: Function of method, path and decoded body; returns status and JSON value (a string goes out as it is),
            or `None` to close the connection without an answer.
        port: Where it listens; a free port where none is given.
    """

    def __init__(self, script: Script, port: int = 0) -> None:
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.key: str | None = None
        self.stopped = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                path = self.path.split("?")[0]
                outer.requests.append((self.command, path, body))
                outer.last_headers = dict(self.headers)
                answer = None if outer.stopped else script(self.command, path, body)
                if outer.key and path != "/health" and self.headers["Authorization"] != f"Bearer {outer.key}":
                    answer = (401, {"error": "The key is missing or wrong."})
                if answer is None:
                    self.close_connection = True
                    return
                status, value = answer
                content = (value if isinstance(value, str) else json.dumps(value)).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:  # the client gave up
                    self.close_connection = True

            do_GET = do_POST = _answer

            def log_message(self, *args: Any) -> None:
                pass

        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.last_headers: dict[str, str] = {}
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuses connections, and closes open ones at their next request without an answer."""
        self.stopped = True
        self._server.shutdown()
        self._server.server_close()

    def asked(self, path: str) -> list[dict[str, Any]]:
        """Bodies of the requests for a path."""
        return [body for _, asked, body in self.requests if asked == path]


Fault = Callable[[str, int, int], str | None]


class Proxy:
    """
    A reverse proxy on loopback, between a client and a real server, that spoils what it is told to.

    Args:
        upstream: Base URL of the server.
        fault: Function of a request's path, of the weight updates before it, and of the requests for that path since
            the latest update; what happens to the request: `500`; `garbage`, half of the JSON as if it were all;
            `cut`, the connection is closed in the middle of the answer; `closed`, without an answer; `dead`, the same
            to all requests from here on; `hang`, nothing until `go` is set; `None`, the server answers.
    """

    def __init__(self, upstream: str, fault: Fault = lambda path, updates, number: None) -> None:
        self.go = threading.Event()
        self.contexts: list[list[int]] = []
        self.faults: list[str] = []
        self._updates, self._numbers, self._dead = 0, Counter(), False
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.split("?")[0]
                with lock:
                    kind = "closed" if outer._dead else fault(path, outer._updates, outer._numbers[path])
                    if path == "/v1/completions":
                        outer.contexts.append(json.loads(content)["prompt"])
                    outer._numbers[path] += 1
                    if path == "/update_weights":
                        outer._updates, outer._numbers = outer._updates + 1, Counter()
                    outer.faults += [kind] if kind else []
                    outer._dead |= kind == "dead"
                if kind == "hang":
                    outer.go.wait()
                status, answer = 500, b'{"error": {"message": "made to fail"}}'
                if kind in (None, "garbage", "cut", "hang"):
                    try:
                        request = {"content": content, "headers": headers(find_key(upstream)), "timeout": 300.0}
                        response = httpx.request(self.command, upstream + self.path, **request)
                        status, answer = response.status_code, response.content
                    except httpx.TransportError:  # the server is gone: so is the connection
                        kind = "closed"
                self.close_connection = kind in ("closed", "dead", "cut")
                if kind in ("closed", "dead"):
                    return
                sent = answer[: len(answer) // 2] if kind in ("garbage", "cut") else answer
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(answer if kind == "cut" else sent)))
                    self.end_headers()
                    self.wfile.write(sent)
                except OSError:  # the client gave up
                    self.close_connection = True

            do_GET = do_POST = _answer

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()
