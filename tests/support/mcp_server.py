"""A small MCP server over standard input and output, written with either version of the `mcp` library."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

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
async def big(characters: int) -> str:
    """A long text."""
    return "x" * characters


if __name__ == "__main__":
    server.run("stdio")
