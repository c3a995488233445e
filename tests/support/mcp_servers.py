"""MCP servers over HTTP in processes of their own. A process that has imported the library once is forked for each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from multiprocessing.connection import Connection

import uvicorn

from support.mcp_server import Door, MCPServer, server


def other() -> MCPServer:
    """A server of another tool."""
    made = MCPServer("other")

    @made.tool()
    async def subtract(a: int, b: int) -> int:
        """Subtracts a number."""
        return a - b

    return made


def serve(port: int, kind: str, busy: int, pipe: Connection) -> None:
    listening = socket.create_server(("127.0.0.1", port))
    app = (server if kind == "small" else other()).streamable_http_app()
    pipe.send(listening.getsockname()[1])
    config = uvicorn.Config(Door(app, None, busy), log_level="error", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])


class HttpServer:
    """A server that can be killed, and started again at the same address; it refuses the first requests if `busy`."""

    def __init__(self, kind: str = "small", busy: int = 0) -> None:
        self.kind, self.busy, self.port = kind, busy, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload([__name__])
        said, pipe = forks.Pipe()
        self.process = forks.Process(target=serve, args=(self.port, self.kind, self.busy, pipe), daemon=True)
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
