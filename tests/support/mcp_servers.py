"""MCP servers over HTTP in processes of their own."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from support.forkserver import ForkedServer
from support.mcp_server import MCPServer, server


class Door:
    """Refuses requests without the token, and the first ones if it is `busy`; `/events` is another name of `/sse`."""

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


def app(said: Connection, kind: str, busy: int, token: str | None) -> Door:
    found = server.sse_app() if kind == "sse" else (other() if kind == "other" else server).streamable_http_app()
    return Door(found, token, busy)


class HttpServer(ForkedServer):
    """A server of a kind ("http", "sse", or "other" with another tool); it refuses the first requests if `busy`."""

    def __init__(self, kind: str = "http", busy: int = 0, token: str | None = None) -> None:
        self.path = "sse" if kind == "sse" else "mcp"
        super().__init__(app, kind, busy, token)

    @property
    def url(self) -> str:
        return f"{super().url}/{self.path}"

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def restart(self) -> None:
        self.kill()
        self.start()
