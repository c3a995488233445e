"""
MCP servers, and their tools as tools of a conversation; `MCPBaseTool` is verl's class to subclass for them. A server
is started when it is needed, shared by all conversations, and started again after it ended. Several servers of the
same tools are one `_McpPool`: each conversation has one of them until it ends. The `mcp` library is imported when a
server is started, no sooner.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import shlex
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from mt_grpo.concurrency import Conversation, OnePerProcess, OutOfTime, call, consume_exception, in_thread, waiting
from mt_grpo.errors import ConfigError, refuse_first
from mt_grpo.imports import did_you_mean, need_library
from mt_grpo.media import Part, read_parts
from mt_grpo.servers.external import (
    MAX_STARTING,
    EnvServerPool,
    ServerLost,
    Unreachable,
    backoff,
    in_words,
)
from mt_grpo.sounds import decoded, is_wav
from mt_grpo.tools.function import Tool, ToolDefinitionError
from mt_grpo.tools.loading import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.tools.mcp.session import (
    PROBE_SECONDS,
    Listed,
    McpServerConfig,
    McpThread,
    ServerEnded,
    ServerSession,
    StartError,
    mcp_thread,
    read_servers,
)
from mt_grpo.trajectory import Arguments, ToolSchema

__all__ = ["MCPBaseTool", "McpServer", "McpServerConfig", "McpToolError", "mcp_tools", "read_servers"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

ATTEMPTS = 6  # attempts to begin a session with a server that refuses it for now; they take three seconds at most
RESTARTS = 5  # starts in a row without a call that was answered, after which the next one waits
PAUSE_SECONDS = 60.0  # how long it waits then


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
    """

    def __init__(self, config: McpServerConfig) -> None:
        need_library("mcp", "A tool of an MCP server", "mt-grpo[mcp]")
        self.config = config
        self._connection: _Connection | None = None

    @classmethod
    def shared(cls, config: McpServerConfig) -> McpServer:
        """The server of this configuration. All callers share one, as long as any of them refers to it."""
        return _once(config.key, lambda: cls(config))

    def list_tools(self) -> list[Listed]:
        """The tools of the server, in the protocol's form (`name`, `description`, `inputSchema`); starts it."""
        connection = self.connection()
        try:
            return connection.thread.wait(connection.list_tools())
        except StartError as error:
            config = self.config
            mend = "check that it runs, its `url` and its `auth_token`"
            if config.command is not None:
                mend = f"run `{shlex.join([config.command, *config.args])}` by hand to see why"
            raise ConfigError(f"The MCP server {config.name!r} cannot be started: {error}; {mend}.") from error

    async def call(self, tool: str, arguments: Arguments, session: ServerSession | None = None) -> Any:
        """
        Calls a tool, in a session that `ready` returned or else the present one; a call that is cancelled leaves the
        server to others.
        """
        connection = self.connection()
        return await connection.thread.run(connection.call(tool, arguments, session))

    async def ready(self) -> ServerSession:
        """Starts the server if it does not run, and pings it; raises `StartError` if it does not answer."""
        connection = self.connection()
        return await connection.thread.run(connection.ready())

    def connection(self) -> _Connection:
        """The part of it that lives in the thread of this process."""
        with _lock.get():
            thread = mcp_thread.get()
            if self._connection is None or self._connection.thread is not thread:
                self._connection = _Connection(self.config, thread)
                weakref.finalize(self, _stop, self._connection, os.getpid()).atexit = False
            return self._connection


class _Connection:
    """The part of an `McpServer` that lives in the thread. It has one `ServerSession` after another."""

    def __init__(self, config: McpServerConfig, thread: McpThread) -> None:
        self.config = config
        self.thread = thread
        self._transports = config.transports
        self._session: ServerSession | None = None
        self._start: asyncio.Task[ServerSession] | None = None
        self._check: asyncio.Task[ServerSession] | None = None
        self._one_by_one = asyncio.Lock()
        self._starts = 0  # since the last call that was answered
        self._started_at = 0.0

    async def list_tools(self) -> list[Listed]:
        return (await self._alive()).tools

    async def ready(self) -> ServerSession:
        """The running server, pinged. Calls that come together wait for one ping."""

        async def pinged() -> ServerSession:
            session = await self._alive()
            if not await session.answers():
                raise StartError(f"it does not answer a ping within {PROBE_SECONDS:g} s")
            return session

        if self._check is None or self._check.done():
            self._check = asyncio.create_task(pinged())
            self._check.add_done_callback(consume_exception)
        return await asyncio.shield(self._check)

    async def call(self, tool: str, arguments: Arguments, session: ServerSession | None) -> Any:
        name = self.config.name
        try:
            if session is not None and session.over.done():
                raise ServerEnded("")
            result = await (session or await self._alive()).call(tool, arguments)
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
        if self._session is not None:
            self._session.stop()

    async def _alive(self) -> ServerSession:
        """The running server, started if it does not run. All calls wait for one start, which none of them cancels."""
        async with self._one_by_one:
            start = self._start
            lives = start is not None and (
                not start.done() or (start.exception() is None and await start.result().checked())
            )
            if start is None or not lives:
                start = self._start = asyncio.create_task(self._begin())
                start.add_done_callback(consume_exception)
        return await asyncio.shield(start)

    async def _begin(self) -> ServerSession:
        if self._session is not None:
            await self._session.ended()
        wait = self._started_at + PAUSE_SECONDS - time.monotonic()
        if self._starts >= RESTARTS and wait > 0:
            raise StartError(
                f"it was started {self._starts} times without answering a call, and is started again in {wait:.0f} s"
            )
        if self._session is not None and self._session.started.exception() is None:
            logger.warning("The MCP server %r has ended, and is started again.", self.config.name)
        self._starts += 1
        self._started_at = time.monotonic()
        for attempt in range(ATTEMPTS):
            errors = []
            for transport in self._transports:
                self._session = ServerSession(self.config, transport, self.thread)
                try:
                    await self._session.started
                except StartError as error:
                    errors.append(error)
                    await self._session.ended()
                else:
                    self._transports = (transport,)
                    return self._session
            if attempt + 1 == ATTEMPTS or not errors[0].transient:
                break
            await asyncio.sleep(backoff(attempt))
        raise errors[0]


def _stop(connection: _Connection, process: int) -> None:
    """Stops a server that nobody refers to. It runs in the thread that collects garbage, so it does not wait."""
    if os.getpid() == process and not connection.thread.loop.is_closed():
        connection.thread.loop.call_soon_threadsafe(connection.stop)


@dataclass
class _Lease:
    """A server that a conversation has."""

    url: str
    session: ServerSession
    lost: str | None = None


class _McpPool:
    """
    MCP servers at several URLs. All calls of a conversation go to one of them, that with the fewest conversations when
    the first is made. A server that dies ends the conversations that have it.
    """

    def __init__(self, config: McpServerConfig) -> None:
        self.config = config
        self._servers = {str(member.url): McpServer.shared(member) for member in config.members}
        self._pool = EnvServerPool(self._servers, f"MCP server {config.name!r}")
        self._tools: list[Listed] = []

    def list_tools(self) -> list[Listed]:
        """The tools of the servers, all started; those that cannot be reached join once they can."""
        connections = {url: server.connection() for url, server in self._servers.items()}

        async def ask() -> dict[str, list[Listed] | StartError]:
            limit = asyncio.Semaphore(MAX_STARTING)

            async def one(connection: _Connection) -> list[Listed] | StartError:
                async with limit:
                    try:
                        return await connection.list_tools()
                    except StartError as error:
                        return error

            answers = await asyncio.gather(*map(one, connections.values()))
            return dict(zip(connections, answers, strict=True))

        found = next(iter(connections.values())).thread.wait(ask())
        faults = {url: answer for url, answer in found.items() if isinstance(answer, StartError)}
        listed = {url: answer for url, answer in found.items() if not isinstance(answer, StartError)}
        name = self.config.name
        said = in_words(faults)
        wrong = [
            f"The address {url} of the MCP server {name!r} cannot be used ({fault}): correct it, its path and its "
            "`auth_token`, or leave it out."
            for url, fault in faults.items()
            if fault.foreign
        ]
        if not listed:
            wrong.append(
                f"None of the {len(found)} servers of the MCP server {name!r} can be started ({said}): check that "
                "they run, and their `url`."
            )
        first, self._tools = next(iter(listed.items()), ("", []))
        for url, tools in listed.items():
            if difference := _difference(self._tools, tools):
                wrong.append(
                    f"The addresses {first} and {url} of the MCP server {name!r} have different tools "
                    f"({difference!r}): give addresses of the same server."
                )
        if wrong:
            raise ConfigError(wrong[0])
        if faults:
            self._pool.rest(faults)
            logger.warning(
                "%d of the %d servers of the MCP server %r cannot be started (%s). The run goes on with the others; "
                "conversations go there once it answers.",
                len(faults),
                len(found),
                name,
                said,
            )
        return self._tools

    async def call(self, tool: str, arguments: Arguments) -> Any:
        """Calls a tool on the server of the conversation; outside of conversations, on the one with the fewest."""
        conversation = Conversation.current()
        if conversation is None:
            with Conversation.begun():
                return await self.call(tool, arguments)
        with waiting():  # for another call of the turn, which begins there
            await conversation.lock.acquire()
        try:
            lease: _Lease | None = conversation.held.get(self)
            if lease is None:
                lease = conversation.held[self] = _Lease(*await self._pool.begin(self._start))
                conversation.at_end.callback(lambda: self._pool.give(lease.url, lease.lost))
        finally:
            conversation.lock.release()
        try:
            return await self._servers[lease.url].call(tool, arguments, lease.session)
        except McpServerGone as error:
            lease.lost = error.why
            raise ServerLost(
                f"The MCP server {self.config.name!r} at {lease.url}, which this conversation used, is gone: "
                f"{error.why}."
            ) from error

    async def _start(self, url: str) -> ServerSession:
        try:
            session = await self._servers[url].ready()
        except StartError as error:
            raise Unreachable(str(error)) from error
        if self._tools and (difference := _difference(self._tools, session.tools)):
            raise Unreachable(f"it has other tools than the others ({difference!r})")
        return session


def _difference(these: list[Listed], those: list[Listed]) -> str | None:
    """A tool that is not in both lists, or takes other arguments."""
    one, other = (
        {tool["name"]: json.dumps(tool["inputSchema"], sort_keys=True) for tool in tools} for tools in (these, those)
    )
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)


def _shared_server(config: McpServerConfig) -> McpServer | _McpPool:
    """The server of a configuration, or the pool of its several. All callers share it, as `McpServer.shared`."""
    members = config.members
    return McpServer.shared(members[0]) if len(members) == 1 else _once(config.key, lambda: _McpPool(config))


def _once(key: str, make: Callable[[], T]) -> T:
    """What is known by a key; it is made where nobody has it."""
    with _lock.get():
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = make()
        return found


_shared: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = OnePerProcess(threading.RLock)

# Tools


@dataclass(frozen=True)
class McpRemote:
    """One tool of one server."""

    server: McpServer | _McpPool
    listed: Listed
    timeout: float | None = None
    pace: _Pace | None = None

    @property
    def schema(self) -> ToolSchema:
        """The description in OpenAI's form."""
        function = {
            "name": self.listed["name"],
            "description": self.listed.get("description") or "",
            "parameters": self.listed["inputSchema"],
        }
        return {"type": "function", "function": function}

    @property
    def only_reads(self) -> bool:
        """Whether the server says that a call of it changes nothing (`readOnlyHint`)."""
        return (self.listed.get("annotations") or {}).get("readOnlyHint") is True

    async def call(self, arguments: Arguments) -> tuple[list[Any], dict[str, Any] | None]:
        """Calls the tool."""
        if self.pace is not None:
            await self.pace.wait()
        name = self.listed["name"]
        try:
            result = await call(self.server.call, name, arguments, what=name, timeout=self.timeout)
        except OutOfTime as error:
            raise McpToolError(str(error)) from error
        rest = result.model_dump(by_alias=True, mode="json", exclude={"content"})
        if rest.get("isError"):
            raise McpToolError(_result_text(result.content) or f"{self.listed['name']} failed.")
        data = rest.get("structuredContent")
        if not result.content and data is not None:
            return [_Text(json.dumps(data, ensure_ascii=False))], data
        return result.content, data


@dataclass
class McpTool(Tool):
    """A tool of an MCP server as the model sees it."""

    remote: McpRemote = field(kw_only=True)


@dataclass(frozen=True)
class _Text:
    """Data that came without text, in the form of the text that servers should add."""

    text: str
    type: str = "text"


class _Pace:
    """Spaces calls, with a burst of one second's worth."""

    def __init__(self, per_second: float) -> None:
        self._interval = 1.0 / per_second
        self._burst = max(1.0, self._interval)
        self._due = 0.0

    async def wait(self) -> None:
        """Waits for the caller's turn."""
        now = time.monotonic()
        self._due = max(self._due, now) + self._interval
        with waiting():
            await asyncio.sleep(max(0.0, self._due - now - self._burst))


READ_SECONDS = 60.0
"""Processor time for the schemas of all tools of a file."""


def remote_tools(
    path: str, selected: list[str] | None = None, timeout: float | None = None, rate_limit: float | None = None
) -> list[McpRemote]:
    """Starts the servers of a file and lists their tools."""
    pace = None if rate_limit is None else _Pace(rate_limit)
    tools = [
        McpRemote(server, listed, timeout, pace)
        for server in [_shared_server(config) for config in read_servers(path)]
        for listed in server.list_tools()
    ]
    names = [tool.listed["name"] for tool in tools]
    what = f"The MCP servers of {path} have no tool"
    refuse_first(
        *(
            (
                name not in names,
                f"{what} {name!r} (`tool_selected_list`){did_you_mean(name, names)}: they have "
                f"{', '.join(names) or 'none'}.",
            )
            for name in selected or []
        ),
        (not names, f"{what}s."),
        error=ToolDefinitionError,
    )
    return [tool for tool in tools if not selected or tool.listed["name"] in selected]


def mcp_tools(
    path: str, selected: list[str] | None = None, timeout: float | None = None, rate_limit: float | None = None
) -> list[Tool]:
    """The tools of the MCP servers of a file; see `remote_tools` for arguments and errors."""
    remotes, tools = remote_tools(path, selected, timeout, rate_limit), list[Tool]()
    begin = time.thread_time()
    for remote in remotes:
        tools.append(_as_tool(remote))
        if time.thread_time() - begin > READ_SECONDS:  # schemas of a stranger may take seconds each
            raise ToolDefinitionError(
                f"The {len(remotes)} tools of the MCP servers of {path} take more than {READ_SECONDS:g} s to read: "
                "name those that are needed in `tool_selected_list`."
            )
    return tools


def _as_tool(remote: McpRemote) -> Tool:
    async def call(**arguments: object) -> object:
        content, data = await remote.call(arguments)
        shown: Any = _result_text(content)
        if any(part.type in ("image", "audio") for part in content):
            shown = await in_thread(partial(_result_parts, content), "mt-grpo-mcp-result") or shown
        # the library wraps a plain value as `{"result": value}`, which says nothing beyond the text
        return shown if data is None or data.keys() == {"result"} else (shown, data)

    return McpTool(**remote.schema["function"], function=call, remote=remote, keeps_state=True)


def _result_parts(content: list[Any]) -> list[Part] | None:
    """The parts of a result that shows images or plays sounds; `None` if none does."""
    parts = [_part(part) for part in content]
    return read_parts(parts) if any(part["type"] != "text" for part in parts) else None


def _part(part: Any) -> Part:
    words = _part_text(part)
    if part.type == "image" and importlib.util.find_spec("PIL") is not None:
        return {"type": "image", "image": decoded(part.data, "An image of an MCP server"), "alt": words}
    data = decoded(part.data, "A sound of an MCP server") if part.type == "audio" else b""
    if data and (is_wav(data) or importlib.util.find_spec("soundfile") is not None):
        return {"type": "audio", "audio": data, "alt": words}
    return {"type": "text", "text": words}


def _result_text(content: list[Any]) -> str:
    """The text of a result's content, one part per line. A part that is not text is named by its kind."""
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if part.type == "text":
        return part.text
    if part.type == "resource" and "text" in (resource := part.resource.model_dump()):
        return resource["text"]
    return f"[{part.type}: not text]"


class MCPBaseTool(BaseTool):
    """
    Reads the results of an MCP server in its own way: override `_parse_tool_result`. Name the subclass as the
    `class_name` of an entry of `type: mcp`; one object is made for each tool of its servers.
    """

    remote: McpRemote  # the tool behind it

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)

    async def execute(self, instance_id: str, parameters: Arguments, **kwargs: object) -> tuple[Any, float, dict]:
        """Calls the tool of the server; an error of it is raised, and reaches the model as the error of its call."""
        content, _ = await self.remote.call(parameters)
        text, metrics = self._parse_tool_result(content)
        return ToolResponse(text=text), 0.0, metrics

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict]:
        """Reads a result."""
        return _result_text(content), {}
