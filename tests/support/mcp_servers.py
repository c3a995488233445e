"""MCP servers over HTTP in processes of their own. A process that has imported the library once is forked for each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from multiprocessing.connection import Connection

import uvicorn

from support.mcp_server import MCPServer, server


class Door:
    """
    Refuses requests without the token, where there is one, and the first ones if it is `busy`; `/events` is another
    name of `/sse`.
    """

    def __init__(self, app, token: str | None, busy: int = 0) -> None:
        self.app, self.header, self.busy = app, token and f"Bearer {token}".encode(), busy

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and self.header and dict(scope["headers"]).get(b"authorization") != self.header:
            await self.refuse(401, send)
        elif scope["type"] == "http" and self.busy:
            self.busy -= 1
            await self.refuse(503, send)
        else:
            path = {"path": "/sse"} if scope.get("path") == "/events" else {}
            await self.app({**scope, **path}, receive, send)

    async def refuse(self, status: int, send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})


def other() -> MCPServer:
    """A server of another tool."""
    made = MCPServer("other")

    @made.tool()
    async def subtract(a: int, b: int) -> int:
        """Subtracts a number."""
        return a - b

    return made


def serve(port: int, kind: str, busy: int, token: str | None, pipe: Connection) -> None:
    listening = socket.create_server(("127.0.0.1", port))
    app = server.sse_app() if kind == "sse" else (other() if kind == "other" else server).streamable_http_app()
    pipe.send(listening.getsockname()[1])
    config = uvicorn.Config(Door(app, token, busy), log_level="error", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])


class HttpServer:
    """
    A server of a kind ("http", "sse", or "other" with another tool) that can be killed, and started again at the same
    address; it refuses the first requests if `busy`.
    """

    def __init__(self, kind: str = "http", busy: int = 0, token: str | None = None) -> None:
        self.kind, self.busy, self.token, self.port = kind, busy, token, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{'sse' if self.kind == 'sse' else 'mcp'}"

    def start(self) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload([__name__])
        said, pipe = forks.Pipe()
        about = (self.port, self.kind, self.busy, self.token, pipe)
        self.process = forks.Process(target=serve, args=about, daemon=True)
        self.process.start()
        pipe.close()
        self.port = said.recv()
        said.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def restart(self) -> None:
        self.kill()
        self.start()

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
