"""HTTP on loopback: a server that answers from a script, and a proxy that spoils what it is told to."""

import json
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx

from mt_grpo.servers.http import _headers, find_key


def free_port(number: int = 1) -> int:
    """The first of so many ports that nobody listens on, outside those that a system gives to whoever asks for any."""
    while True:
        first = random.SystemRandom().randrange(10_000, 32_000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


class Request(NamedTuple):
    """What was asked: the method, the path with its query, headers by name, the body."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes


class Reply(NamedTuple):
    """A status, a body and headers; where `length` is more than the body, the connection is closed in its middle."""

    status: int
    content: bytes
    length: int
    headers: dict[str, str] = {}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that closed its connection, as one that is refused does while others are asked."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Loopback:
    """An HTTP server on this machine; where its answer is `None`, the connection is closed without one."""

    def __init__(self, answer: Callable[[Request], Reply | None], port: int = 0) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = answer(Request(self.command, self.path, dict(self.headers), content))
                self.close_connection = reply is None or len(reply.content) < reply.length
                if reply is None:
                    return
                try:
                    self.send_response(reply.status)
                    self.send_header("Content-Length", str(reply.length))
                    for name, value in reply.headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(reply.content)
                except OSError:  # the client gave up
                    self.close_connection = True

            do_GET = do_POST = _answer

            def log_message(self, *args: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuses connections."""
        self._server.shutdown()
        self._server.server_close()


Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]] | None
Script = Callable[[str, str, dict[str, Any]], Answer]


class ScriptedServer(Loopback):
    """
    An HTTP server whose every answer is scripted: a function of method, path and decoded body returns status, JSON
    value (a string goes out as it is) and headers, if any, or `None` to close the connection without an answer. Where
    it has a `key`, it wants that as a real one does.
    """

    def __init__(self, script: Script, port: int = 0) -> None:
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.calls: list[str] = []
        """Their paths, with their queries."""
        self.key: str | None = None
        self.stopped = False
        self.last: Request | None = None
        self._script = script
        super().__init__(self._answer, port)

    @property
    def last_headers(self) -> dict[str, str]:
        """Headers of the latest request."""
        return self.last.headers if self.last else {}

    def _answer(self, request: Request) -> Reply | None:
        body = json.loads(request.content) if request.content else {}
        path = request.path.split("?")[0]
        self.requests.append((request.method, path, body))
        self.calls.append(request.path)
        self.last = request
        answer = None if self.stopped else self._script(request.method, path, body)
        if self.key and path != "/health" and request.headers.get("Authorization") != f"Bearer {self.key}":
            answer = (401, {"error": "The key is missing or wrong."})
        if answer is None:
            return None
        status, value, *extra = answer
        content = (value if isinstance(value, str) else json.dumps(value)).encode()
        return Reply(status, content, len(content), *extra)

    def stop(self) -> None:
        """Refuses connections, and closes open ones at their next request without an answer."""
        self.stopped = True
        super().stop()

    def asked(self, path: str) -> list[dict[str, Any]]:
        """Bodies of the requests for a path."""
        return [body for _, asked, body in self.requests if asked == path]


Fault = Callable[[str, int, int], str | None]


class Proxy(Loopback):
    """
    A reverse proxy between a client and a real server. What happens to a request is a function of its path, of the
    weight updates before it, and of the requests for that path since the latest update: `500`, or another status;
    `garbage`, half of the JSON as if it were all; `cut`, the connection is closed in the middle of the answer;
    `closed`, without an answer; `dead`, the same to all requests from here on; `hang`, nothing until `go` is set;
    `None`, the server answers.
    """

    def __init__(self, upstream: str, fault: Fault = lambda path, updates, number: None) -> None:
        self.go = threading.Event()
        self.contexts: list[list[int]] = []
        self.faults: list[str] = []
        self._upstream, self._fault, self._lock = upstream, fault, threading.Lock()
        self._updates, self._numbers, self._dead = 0, Counter(), False
        super().__init__(self._answer)

    def _answer(self, request: Request) -> Reply | None:
        kind = self._kind(request)
        if kind == "hang":
            self.go.wait()
        status = int(kind) if kind and kind.isdigit() else 500
        answer = b"" if status == 204 else b'{"error": {"message": "made to fail"}}'
        if kind in (None, "garbage", "cut", "hang"):
            options = {"content": request.content, "headers": _headers(find_key(self._upstream))}
            options |= {"timeout": 300.0, "verify": False}
            try:
                response = httpx.request(request.method, self._upstream + request.path, **options)
            except httpx.TransportError:  # the server is gone: so is the connection
                return None
            status, answer = response.status_code, response.content
        if kind in ("closed", "dead"):
            return None
        sent = answer[: len(answer) // 2] if kind in ("garbage", "cut") else answer
        return Reply(status, sent, len(answer if kind == "cut" else sent))

    def _kind(self, request: Request) -> str | None:
        """What happens to a request; counts it."""
        path = request.path.split("?")[0]
        with self._lock:
            kind = "closed" if self._dead else self._fault(path, self._updates, self._numbers[path])
            if path == "/v1/completions":
                self.contexts.append(json.loads(request.content)["prompt"])
            self._numbers[path] += 1
            if path == "/update_weights":
                self._updates, self._numbers = self._updates + 1, Counter()
            self.faults += [kind] if kind else []
            self._dead |= kind == "dead"
        return kind

    def stop(self) -> None:
        self.go.set()
        super().stop()
