"""An MCP server: started when it is needed, shared by all conversations, started again after it ended."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import threading
import time
import weakref
from typing import Any

from mt_grpo.concurrency import OnePerProcess, retrieve
from mt_grpo.errors import ConfigError
from mt_grpo.servers.env_servers import backoff
from mt_grpo.tools.mcp.config import McpServerConfig
from mt_grpo.tools.mcp.life import PROBE_SECONDS, Life, McpThread, ServerEnded, StartError, mcp_thread

logger = logging.getLogger(__name__)

ATTEMPTS = 6
"""Attempts to begin a session with a server that refuses it for now. They take three seconds at most."""
RESTARTS = 5
"""Starts in a row without a call that was answered, after which the next one waits."""
PAUSE_SECONDS = 60.0
"""How long it waits then."""


class McpToolError(Exception):
    """A call that an MCP server did not answer, or answered with an error. The model reads the message."""


class McpServerGone(McpToolError):
    """A call that was not answered since the server ended, or cannot be started; why, as a clause."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class McpServer:
    """
    One MCP server of this process. It starts with the first call, from whatever event loop, and is shared by all; it
    ends with the process, or once no tool refers to it. A forked process starts its own.

    Args:
        config (`McpServerConfig`): How it is reached.

    Raises:
        ConfigError: If the `mcp` library is not installed.
    """

    def __init__(self, config: McpServerConfig) -> None:
        try:
            import mcp  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(
                "Tools of MCP servers need the library `mcp`, which is not installed: run `pip install mt-grpo[mcp]`."
            ) from error
        self.config = config
        self._connection: Connection | None = None

    @classmethod
    def shared(cls, config: McpServerConfig) -> McpServer:
        """The server of this configuration. All callers share one, as long as any of them refers to it."""
        with _lock.get():
            server = _shared.get(config.key)
            if server is None:
                server = _shared[config.key] = cls(config)
            return server

    def list_tools(self) -> list[dict[str, Any]]:
        """
        The tools of the server, in the protocol's form (`name`, `description`, `inputSchema`); starts it.

        Raises:
            ConfigError: If it cannot be started.
        """
        connection = self.connection()
        try:
            return connection.thread.wait(connection.list_tools())
        except StartError as error:
            config = self.config
            mend = "check that it runs, its `url` and its `auth_token`"
            if config.command is not None:
                mend = f"run `{shlex.join([config.command, *config.args])}` by hand to see why"
            raise ConfigError(f"The MCP server {config.name!r} cannot be started: {error}; {mend}.") from error

    async def call(self, tool: str, arguments: dict[str, Any], life: Life | None = None) -> Any:
        """
        Calls a tool; awaited in any event loop. A call that is cancelled leaves the server to the others.

        Args:
            tool (`str`): Its name.
            arguments (`dict`): By name.
            life (`Life`, *optional*): The life of the server in which it is to be called, as `ready` returned it. By
                default the present one; a server that does not run is started.

        Returns:
            The library's `CallToolResult`, which may be an error of the tool.

        Raises:
            McpServerGone: If the server ends before it answers, has ended that life, or cannot be started.
            McpToolError: If it answers with an error of the protocol.
        """
        connection = self.connection()
        return await connection.thread.run(connection.call(tool, arguments, life))

    async def ready(self) -> Life:
        """
        Starts the server if it does not run, and asks it whether it answers; awaited in any event loop.

        Raises:
            StartError: If it cannot be started, or does not answer.
        """
        connection = self.connection()
        return await connection.thread.run(connection.ready())

    def connection(self) -> Connection:
        """The part of it that lives in the thread of this process."""
        with _lock.get():
            thread = mcp_thread.get()
            if self._connection is None or self._connection.thread is not thread:
                self._connection = Connection(self.config, thread)
                weakref.finalize(self, _stop, self._connection, os.getpid()).atexit = False
            return self._connection


class Connection:
    """The part of an `McpServer` that lives in the thread. It has one `Life` after another."""

    def __init__(self, config: McpServerConfig, thread: McpThread) -> None:
        self.config = config
        self.thread = thread
        self._transports = config.transports
        self._life: Life | None = None
        self._start: asyncio.Task[Life] | None = None
        self._check: asyncio.Task[Life] | None = None
        self._one_by_one = asyncio.Lock()
        self._starts = 0  # since the last call that was answered
        self._started_at = 0.0

    async def list_tools(self) -> list[dict[str, Any]]:
        return (await self._alive()).tools

    async def ready(self) -> Life:
        """The running server, pinged. Calls that come together wait for one ping."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._pinged())
            self._check.add_done_callback(retrieve)
        return await asyncio.shield(self._check)

    async def _pinged(self) -> Life:
        life = await self._alive()
        if not await life.answers():
            raise StartError(f"it does not answer a ping within {PROBE_SECONDS:g} s")
        return life

    async def call(self, tool: str, arguments: dict[str, Any], life: Life | None) -> Any:
        name = self.config.name
        try:
            if life is not None and life.over.done():
                raise ServerEnded("")
            result = await (life or await self._alive()).call(tool, arguments)
        except StartError as error:
            raise McpServerGone(f"the MCP server {name!r} cannot be started: {error}.", str(error)) from error
        except ServerEnded as error:
            words = f" with {str(error)!r}" if str(error) else ""
            raise McpServerGone(
                f"the MCP server {name!r} ended during the call{words}; the next call starts it again.",
                f"it ended{words}",
            ) from error
        except Exception as error:  # what each version of the library makes of an answer that is no result
            raise McpToolError(str(error) or type(error).__name__) from error
        self._starts = 0
        return result

    def stop(self) -> None:
        """Stops the server, if it was started."""
        if self._life is not None:
            self._life.stop()

    async def _alive(self) -> Life:
        """The running server, started if it does not run. All calls wait for one start, which none of them cancels."""
        async with self._one_by_one:
            start = self._start
            if start is None or (start.done() and not await self._lives(start)):
                start = self._start = asyncio.create_task(self._begin())
                start.add_done_callback(retrieve)
        return await asyncio.shield(start)

    @staticmethod
    async def _lives(start: asyncio.Task[Life]) -> bool:
        return start.exception() is None and await start.result().checked()

    async def _begin(self) -> Life:
        if self._life is not None:
            await self._life.ended()
        wait = self._started_at + PAUSE_SECONDS - time.monotonic()
        if self._starts >= RESTARTS and wait > 0:
            raise StartError(
                f"it was started {self._starts} times without answering a call, and is started again in {wait:.0f} s"
            )
        if self._life is not None and self._life.started.exception() is None:
            logger.warning("The MCP server %r has ended, and is started again.", self.config.name)
        self._starts += 1
        self._started_at = time.monotonic()
        for attempt in range(ATTEMPTS):
            errors = []
            for transport in self._transports:
                self._life = Life(self.config, transport, self.thread)
                try:
                    await self._life.started
                except StartError as error:
                    errors.append(error)
                    await self._life.ended()
                else:
                    self._transports = (transport,)
                    return self._life
            if attempt + 1 == ATTEMPTS or not errors[0].transient:
                break
            await asyncio.sleep(backoff(attempt))
        raise errors[0]


def _stop(connection: Connection, process: int) -> None:
    """Stops a server that nobody refers to. It runs in the thread that collects garbage, so it does not wait."""
    if os.getpid() == process and not connection.thread.loop.is_closed():
        connection.thread.loop.call_soon_threadsafe(connection.stop)


_shared: weakref.WeakValueDictionary[str, McpServer] = weakref.WeakValueDictionary()
_lock = OnePerProcess(threading.Lock)
