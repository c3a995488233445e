"""
The file of MCP servers that `mcp_servers_config_path` names, `{"mcpServers": {name: server}}`, and the session with
one of them, from its start until it ends, is stopped or no longer answers. An `McpServer` outlives it: one that ended
is started again, with another session.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import difflib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO

from mt_grpo.concurrency import Future, LoopThread, OnePerProcess, consume_exception
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.servers import expand_addresses
from mt_grpo.servers.external import bounded
from mt_grpo.trajectory import Arguments

_TRANSPORTS = {"stdio": "stdio", "sse": "sse", "http": "http", "streamable-http": "http", "streamable_http": "http"}


@dataclass(frozen=True)
class McpServerConfig:
    """
    How one MCP server is reached: by a command, over its standard input and output, or at a URL (several, or a range:
    as many servers of the same tools). `env` comes beside the few variables that the library passes on. Without a
    `transport`, a URL that ends in `/sse` is SSE; any other is tried as streamable HTTP, then as SSE, as the
    specification says.
    """

    name: str
    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | list[str] | None = None
    auth_token: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    transport: str | None = None

    @property
    def members(self) -> list[McpServerConfig]:
        """Each server by itself; raises `ConfigError` where several addresses are wrong."""
        if self.url is None or (isinstance(self.url, str) and not _SEVERAL.search(self.url)):
            return [self]
        urls = expand_addresses(self.url, f"url of the MCP server {self.name}")
        if not urls:
            raise ConfigError(f"The MCP server {self.name!r} has an empty list as its `url`: give an address.")
        return [replace(self, url=url) for url in urls]

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports to try, in this order."""
        if self.transport is not None:
            return (self.transport,)
        if self.url is None:
            return ("stdio",)
        assert isinstance(self.url, str)  # that of one of `members`
        return ("sse",) if self.url.partition("?")[0].rstrip("/").endswith("/sse") else ("http", "sse")

    @property
    def key(self) -> str:
        """Equal for servers that are one."""
        return json.dumps([getattr(self, part.name) for part in fields(self)], sort_keys=True)


Listed = dict[str, Any]  # a tool as its server lists it: `name`, `description`, `inputSchema`

_SEVERAL = re.compile(r"\[\d[\d,-]*\]|,\s*https?://")  # what a text has that is several addresses

_KEYS: dict[str, Any] = {
    "command": str,
    "args": list,
    "env": dict,
    "cwd": str,
    "url": str | list,
    "auth_token": str,
    "headers": dict,
    "transport": str,
    "type": str,
}


def read_servers(path: str) -> list[McpServerConfig]:
    """Reads a file of MCP servers. Keys that only other programs know are left alone."""
    content, fault = None, "(`mcp_servers_config_path`) does not exist"
    if Path(path).is_file():
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            fault = 'names no server: write `{"mcpServers": {"a name": {...}}}`'
        except ValueError as error:
            fault = f"is not valid JSON: {error}"
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f"The file of MCP servers {path!r} {fault}.")
    return [_server(name, entry, path) for name, entry in servers.items()]


def _server(name: str, entry: object, path: str) -> McpServerConfig:
    where = f"The MCP server {name!r} in {path}"
    if not isinstance(entry, dict) or ("command" in entry) == ("url" in entry):
        raise ConfigError(f"{where} needs either a `command` to start it with or the `url` it listens at.")
    faults = []
    for key, value in entry.items():
        if key not in _KEYS:
            if difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.8):
                faults.append(f"the unknown key {key!r}{did_you_mean(key, _KEYS)}")
        elif not isinstance(value, _KEYS[key]) or (
            key == "url" and not all(isinstance(url, str) for url in value)  # a text's characters are texts
        ):
            kind = "str or list of str" if key == "url" else _KEYS[key].__name__
            faults.append(f"a `{key}` that is no {kind}: {value!r}")
        elif isinstance(value, dict) and None in value.values():  # it would be sent as the text `None`
            empty = next(part for part in value if value[part] is None)
            faults.append(f"a `{key}` whose {empty!r} is null: give text, or leave it out")
    known = {key: value for key, value in entry.items() if key in _KEYS}
    transport = known.pop("type", None)
    transport = known.pop("transport", transport)
    if isinstance(transport, str):
        if transport not in _TRANSPORTS:
            near = did_you_mean(transport, _TRANSPORTS)
            faults.append(f"the transport {transport!r}{near}: write one of {', '.join(_TRANSPORTS)}")
        elif (transport == "stdio") != ("command" in entry):
            faults.append(f"the transport {transport!r}: `stdio` needs a `command`, others a `url`")
        known["transport"] = _TRANSPORTS.get(transport)
    if faults:
        raise ConfigError(f"{where} has {faults[0]}.")
    for key in ("env", "headers"):
        if key in known:
            known[key] = {part: str(value) for part, value in known[key].items()}
    if "args" in known:
        known["args"] = [str(argument) for argument in known["args"]]
    config = McpServerConfig(name, **known)
    config.members  # noqa: B018  # it refuses addresses that are none
    return config


logger = logging.getLogger(__name__)


START_SECONDS = 60.0  # how long a server may take until it has listed its tools
PROBE_SECONDS = 10.0  # how long a server may take to answer a ping after a call that failed or ran out of time
HEARTBEAT_SECONDS = 5.0  # time between pings of a server at a URL while it works on a call
_BUSY = (429, 502, 503, 504)  # statuses of a server, or of a proxy in front of it, that may take a session later
MOST_BYTES = 96 << 20  # bytes of one message of a server at a URL: a file of an image in base64, and more
MOST_TOOLS = 4096
_STOP_SECONDS = 15.0
"""How long the end of this process waits for its servers. The library kills a server earlier than that."""

_FIRST = asyncio.FIRST_COMPLETED


class _StderrTail:
    """Logs the standard error of a server and keeps the last line."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = ""
        self._rest = b""
        self._reading: int | None = None
        self._closed = asyncio.Event()

    def pipe(self) -> TextIO:
        """A file for the server to write to."""
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._read)
        return os.fdopen(writing, "w")

    async def last(self) -> str:
        """The last line that the server wrote. Of a server that ends, it waits for the rest of its output."""
        if self._reading is not None:
            await asyncio.wait([asyncio.ensure_future(self._closed.wait())], timeout=1.0)
        return self._line

    def close(self) -> None:
        """Reads what is there and closes the file. A process that the server left behind may hold it open."""
        while self._reading is not None and self._read():
            pass
        self._end()

    def _read(self) -> bool:
        """Reads once. Returns whether there was something to read."""
        assert self._reading is not None  # nothing calls it after the end
        try:
            data = os.read(self._reading, 65536)
        except BlockingIOError:
            return False
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-1000:] if data else b""
        for line in lines if data else [rest]:
            if text := line.decode("utf-8", "replace").strip():
                logger.debug("%s: %s", self._name, text)
                self._line = text[:1000]
        if not data:
            self._end()
        return bool(data)

    def _end(self) -> None:
        if self._reading is not None:
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)
            self._reading = None
        self._closed.set()


class McpThread(LoopThread):
    """The thread with the sessions of all MCP servers of this process, which outlive event loops."""

    def __init__(self) -> None:
        super().__init__("mt-grpo-mcp")
        self.open: set[ServerSession] = set()

    def close(self) -> None:
        """Stops every server, waits until they have ended, `_STOP_SECONDS` at most, and ends the thread."""

        async def stop() -> None:
            ending = list(self.open)
            for server in ending:
                server.stop()
            await asyncio.gather(*[server.ended() for server in ending])

        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(stop(), self.loop)], timeout=_STOP_SECONDS)
        self.stop()
        self.thread.join(timeout=1.0)


mcp_thread = OnePerProcess(McpThread)
"""The thread of this process. A forked process leaves its parent's servers alone."""


@atexit.register
def _close_servers() -> None:
    """Stops all MCP servers of this process; a later call of a tool starts its server again."""
    thread = mcp_thread.take()
    if thread is not None:
        thread.close()


class StartError(Exception):
    """A server did not start."""

    def __init__(self, why: str, transient: bool = False, foreign: bool = False) -> None:
        super().__init__(why)
        self.transient, self.foreign = transient, foreign


class ServerEnded(Exception):
    """The server ended during a call; its last words."""


class ServerSession:
    """Holds a server's session open in one task, as the library needs, in the thread of `McpThread`."""

    def __init__(self, config: McpServerConfig, transport: str, thread: McpThread) -> None:
        self.config = config
        self.transport = transport
        self.tools: list[Listed] = []
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session: Any = None
        self._status: tuple[int, str] | None = None  # of a request that was refused
        self._refused: str | None = None  # why an answer was refused
        self._stderr = _StderrTail(config.name)
        self._probing: asyncio.Task[bool] | None = None
        self._owner = asyncio.create_task(self._own(), name=f"MCP server {config.name!r}")
        thread.open.add(self)
        self._owner.add_done_callback(lambda _: thread.open.discard(self))

    async def call(self, tool: str, arguments: Arguments) -> Any:
        """Calls a tool of the server."""
        request = asyncio.ensure_future(self._session.call_tool(tool, arguments))
        try:
            # not every version of the library reports that a server at a URL is gone, but a ping then fails
            pause = None if self.transport == "stdio" else HEARTBEAT_SECONDS
            while not (await asyncio.wait({request, self.over}, timeout=pause, return_when=_FIRST))[0]:
                self._probe(patient=True)
            if not request.done() or request.exception() is not None:
                self._probe()
                if not await self.checked():
                    raise ServerEnded(await self._stderr.last())
            return request.result()
        except asyncio.CancelledError:
            self._probe()
            raise
        finally:
            request.cancel()
            request.add_done_callback(consume_exception)

    async def checked(self) -> bool:
        """Whether the server lives. After a call that failed, this waits for the answer to a ping."""
        if self._probing is not None:
            waits: set[Future] = {self._probing, self.over}
            await asyncio.wait(waits, return_when=_FIRST)
        return not self.over.done()

    async def answers(self) -> bool:
        """Whether the server answers a ping in time. One that is silent is not ended: it may be busy for others."""
        self._probe(patient=True)
        probing = self._probing
        return await self.checked() and probing is not None and probing.result()

    def stop(self) -> None:
        """Ends the session, and cancels a start that has not succeeded yet."""
        if not self.started.done():
            self._owner.cancel()
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    async def ended(self) -> None:
        """Waits until the session and the server's process have ended."""
        await asyncio.wait([self._owner])

    def _probe(self, patient: bool = False) -> None:
        """Pings the server, and ends it without an answer; if `patient`, after an error alone."""
        if self.over.done() or (self._probing is not None and not self._probing.done()):
            return

        async def probe() -> bool:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._session.send_ping()
                return True
            except Exception as error:  # whatever transport and server make of a ping that fails
                if patient and isinstance(error, TimeoutError):
                    return False
                logger.warning(
                    "The MCP server %r does not answer (%s): it is ended.", self.config.name, _in_words(error)
                )
                self._end()
                return False

        self._probing = asyncio.create_task(probe())

    async def _own(self) -> None:
        try:
            async with asyncio.timeout(START_SECONDS) as deadline, AsyncExitStack() as stack:
                await self._begin(stack)
                stack.callback(self._end)  # before the session is closed, which would raise an error of its own
                deadline.reschedule(None)
                self.started.set_result(None)
                await asyncio.wait({self.over})
        except Exception as error:  # whatever the transport, the server and the library make of a failure
            if self.started.done():
                logger.debug("The MCP server %r ended: %s", self.config.name, error)
            else:
                self.started.set_exception(await self._failure(error))
                consume_exception(self.started)
        except asyncio.CancelledError:
            self.started.set_exception(StartError(self._refused or "it was stopped before it had started"))
            consume_exception(self.started)
        finally:
            self._end()
            self._stderr.close()

    async def _begin(self, stack: AsyncExitStack) -> None:
        from mcp import ClientSession
        from mcp.types import PaginatedRequestParams

        read, write, *_ = await stack.enter_async_context(self._connect())
        watched = await stack.enter_async_context(self._watched(read))
        session = await stack.enter_async_context(ClientSession(watched, write))
        await session.initialize()
        page = await session.list_tools()
        while True:
            listed = page.model_dump(by_alias=True, mode="json")
            self.tools += listed["tools"]
            if len(self.tools) > MOST_TOOLS:
                raise StartError(f"it lists more than {MOST_TOOLS:,} tools")
            if not listed.get("nextCursor"):
                break
            page = await session.list_tools(params=PaginatedRequestParams(cursor=listed["nextCursor"]))
        self._session = session

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        config = self.config
        headers = {"Accept-Encoding": "identity", **config.headers}
        if config.auth_token is not None:
            headers["Authorization"] = f"Bearer {config.auth_token}"
        if self.transport == "stdio":
            from mcp import StdioServerParameters
            from mcp.client.stdio import stdio_client

            assert config.command is not None  # a server without one has another transport
            command = config.command
            if command == "python" and shutil.which(command, path=(config.env or {}).get("PATH")) is None:
                command = sys.executable
            server = StdioServerParameters(command=command, args=config.args, env=config.env, cwd=config.cwd)
            with self._stderr.pipe() as errors:
                async with stdio_client(server, errlog=errors) as streams:
                    errors.close()  # the server has it, and it is to end with the server
                    yield streams
        elif self.transport == "sse":
            from mcp.client.sse import sse_client

            assert isinstance(config.url, str)  # a server without one has another transport
            forever: Any = None  # a server may be silent for as long as the optimiser works
            async with sse_client(
                config.url, headers=headers, sse_read_timeout=forever, httpx_client_factory=self._client
            ) as streams:
                yield streams
        else:
            from mcp.client.streamable_http import streamable_http_client

            assert isinstance(config.url, str)
            async with self._client(headers=headers) as client:
                async with streamable_http_client(config.url, http_client=client) as streams:
                    yield streams

    @asynccontextmanager
    async def _watched(self, source: Any) -> AsyncIterator[Any]:
        """Passes on the server's messages, and ends this life when they end: not every version of the library does."""
        import anyio

        sink, watched = anyio.create_memory_object_stream[Any](0)

        async def forward() -> None:
            async with sink:
                try:
                    async for message in source:
                        await sink.send(message)
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    pass  # the session is closed
                if self.started.done():
                    self._end()

        task = asyncio.create_task(forward())
        try:
            yield watched
        finally:
            task.cancel()
            await asyncio.wait([task])
            watched.close()

    def _client(self, headers: dict[str, str] | None = None, timeout: Any = None, auth: Any = None) -> Any:
        """The library's client, whose answers are bounded."""
        from mcp.shared._httpx_utils import create_mcp_http_client

        client = create_mcp_http_client(headers, timeout, auth)
        client.event_hooks = {"response": [self._note_status, self._bound]}
        return client

    async def _note_status(self, response: Any) -> None:
        """Keeps the status of a refusal, which not every version of the library tells."""
        if response.status_code >= 400:
            self._status = response.status_code, response.reason_phrase

    async def _bound(self, response: Any) -> None:
        """Bounds each message of an answer, which may not be compressed: a few bytes may be any number then."""
        library: Any = sys.modules[type(response).__module__.partition(".")[0]]

        def refuse(why: str) -> Exception:
            self._refused = why
            if self.started.done():
                self._end()
            else:  # not every transport of the library ends with an error of its stream
                self._owner.cancel()
            return library.RemoteProtocolError(why)

        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise refuse(f"it answers in {encoding}, though it was asked for none")
        events = "text/event-stream" in response.headers.get("Content-Type", "")
        says = f"it sent a message of more than {MOST_BYTES:,} bytes"
        response.stream = bounded(response, MOST_BYTES, lambda: refuse(says), events)

    async def _failure(self, error: Exception) -> StartError:
        if isinstance(error, StartError):
            return error
        if self._refused is not None:
            return StartError(self._refused)
        if isinstance(error, TimeoutError):
            return StartError(f"it has not listed its tools within {START_SECONDS:g} s")
        cause = error
        while isinstance(cause, ExceptionGroup):
            cause = cause.exceptions[0]
        if self.transport == "stdio":
            if isinstance(cause, FileNotFoundError):
                return StartError(f"there is no command {self.config.command!r}")
            words = await self._stderr.last()
            return StartError(f"it ended with {words!r}" if words else _in_words(cause))
        kind = type(cause).__name__  # of httpx or of httpx2, as the version of the library has it
        if kind == "HTTPStatusError":
            response: Any = cause
            await self._note_status(response.response)
        if self._status is not None:
            number, phrase = self._status
            why = f"it answered {number} {phrase}".rstrip()
            return StartError(why, number in _BUSY, number not in _BUSY and (number < 500 or number == 501))
        refused = kind in ("ConnectError", "ReadError")
        return StartError(_in_words(cause), refused, not refused and kind not in ("ConnectTimeout", "ReadTimeout"))


def _in_words(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
