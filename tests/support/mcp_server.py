"""
A small MCP server, written with either version of the `mcp` library: `python mcp_server.py stdio|sse|http`. Over HTTP
it prints its port as the first line, and wants the token of the variable `TOKEN` where there is one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time

try:
    from mcp.server.mcpserver import MCPServer
except ModuleNotFoundError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer

if "BROKEN" in os.environ:
    print("starting", file=sys.stderr)
    sys.exit("no licence for this machine")

server = MCPServer("small")


@server.tool()
async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def weigh(what: str) -> dict[str, float]:
    """Weighs something."""
    return {"kilograms": float(len(what))}


@server.tool()
async def slow(seconds: float) -> str:
    """Takes its time."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
async def fail(reason: str) -> str:
    """Fails."""
    raise ValueError(reason)


@server.tool()
async def process() -> int:
    """The server's process."""
    return os.getpid()


@server.tool()
async def variable(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "unset")


@server.tool()
async def die(words: str) -> str:
    """Ends the server."""
    print(words, file=sys.stderr, flush=True)
    os._exit(1)


@server.tool()
async def freeze() -> str:
    """Stops the server's process."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "thawed"


@server.tool()
async def block(seconds: float) -> str:
    """Blocks the server's event loop."""
    time.sleep(seconds)
    return "done"


@server.tool()
async def big(characters: int) -> str:
    """A long text."""
    return "x" * characters


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


def serve_http(app) -> None:
    import uvicorn

    listening = socket.create_server(("127.0.0.1", int(os.environ.get("PORT", 0))))
    print(listening.getsockname()[1], flush=True)
    app = Door(app, os.environ.get("TOKEN"))
    uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)).run(sockets=[listening])


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "stdio":
        server.run("stdio")
    else:
        serve_http(server.sse_app() if kind == "sse" else server.streamable_http_app())
