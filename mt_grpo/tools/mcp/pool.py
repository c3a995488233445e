"""Several MCP servers of the same tools, as one: each conversation has one of them until it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from mt_grpo.call_clock import waiting
from mt_grpo.concurrency import OnePerProcess
from mt_grpo.errors import ConfigError
from mt_grpo.servers.env_servers import (
    STARTS,
    Conversation,
    EnvServerPool,
    ServerLost,
    Unreachable,
    current_conversation,
    in_words,
)
from mt_grpo.tools.mcp.config import McpServerConfig
from mt_grpo.tools.mcp.life import Life, StartError
from mt_grpo.tools.mcp.server import McpServer, McpServerGone

logger = logging.getLogger(__name__)


@dataclass
class _Lease:
    """A server that a conversation has."""

    url: str
    life: Life
    lost: str | None = None


class McpPool:
    """
    MCP servers at several URLs. All calls of a conversation go to one of them, that with the fewest conversations when
    the first is made. A server that dies ends the conversations that have it.
    """

    def __init__(self, config: McpServerConfig) -> None:
        self.config = config
        self._servers = {str(member.url): McpServer.shared(member) for member in config.members}
        self._pool = EnvServerPool(self._servers, f"MCP server {config.name!r}")
        self._tools: list[dict[str, Any]] = []

    def list_tools(self) -> list[dict[str, Any]]:
        """
        The tools of the servers, as `McpServer.list_tools` has them; starts all. Servers that cannot be reached are
        named in a warning, and join once they can.
        """
        connections = {url: server.connection() for url, server in self._servers.items()}

        async def ask() -> dict[str, list[dict[str, Any]] | StartError]:
            limit = asyncio.Semaphore(STARTS)

            async def one(connection: Any) -> list[dict[str, Any]] | StartError:
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
        for url, fault in faults.items():
            if fault.foreign:
                raise ConfigError(
                    f"The address {url} of the MCP server {name!r} cannot be used ({fault}): correct it, its path and "
                    "its `auth_token`, or leave it out."
                )
        said = in_words(faults)
        if not listed:
            raise ConfigError(
                f"None of the {len(found)} servers of the MCP server {name!r} can be started ({said}): check that "
                "they run, and their `url`."
            )
        (first, self._tools), *others = listed.items()
        for url, tools in others:
            if difference := _difference(self._tools, tools):
                raise ConfigError(
                    f"The addresses {first} and {url} of the MCP server {name!r} have different tools "
                    f"({difference!r}): give addresses of the same server."
                )
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

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Calls a tool on the server of the conversation; outside of conversations, on the one with the fewest."""
        conversation = current_conversation()
        if conversation is None:
            lease = await self._take()
            try:
                return await self._call(lease, tool, arguments)
            finally:
                self._give(lease)
        return await self._call(await self._leased(conversation), tool, arguments)

    async def _leased(self, conversation: Conversation) -> _Lease:
        with waiting():  # for another call of the turn, which begins there
            await conversation.lock.acquire()
        try:
            lease: _Lease | None = conversation.held.get(self)
            if lease is None:
                lease = conversation.held[self] = await self._take()
                conversation.at_end.callback(self._give, lease)
            return lease
        finally:
            conversation.lock.release()

    def _give(self, lease: _Lease) -> None:
        self._pool.give(lease.url, lease.lost)

    async def _take(self) -> _Lease:
        return _Lease(*await self._pool.begin(self._start))

    async def _start(self, url: str) -> Life:
        try:
            life = await self._servers[url].ready()
        except StartError as error:
            raise Unreachable(str(error)) from error
        if self._tools and (difference := _difference(self._tools, life.tools)):
            raise Unreachable(f"it has other tools than the others ({difference!r})")
        return life

    async def _call(self, lease: _Lease, tool: str, arguments: dict[str, Any]) -> Any:
        try:
            return await self._servers[lease.url].call(tool, arguments, lease.life)
        except McpServerGone as error:
            lease.lost = error.why
            raise ServerLost(
                f"The MCP server {self.config.name!r} at {lease.url}, which this conversation used, is gone: "
                f"{error.why}."
            ) from error


def _difference(these: list[dict[str, Any]], those: list[dict[str, Any]]) -> str | None:
    """A tool that is not in both lists, or takes other arguments."""
    one, other = (
        {tool["name"]: json.dumps(tool["inputSchema"], sort_keys=True) for tool in tools} for tools in (these, those)
    )
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)


def shared_server(config: McpServerConfig) -> McpServer | McpPool:
    """The server of a configuration, or the pool of its several. All callers share it, as `McpServer.shared`."""
    members = config.members
    if len(members) == 1:
        return McpServer.shared(members[0])
    with _lock.get():
        pool = _shared.get(config.key)
        if pool is None:
            pool = _shared[config.key] = McpPool(config)
        return pool


_shared: weakref.WeakValueDictionary[str, McpPool] = weakref.WeakValueDictionary()
_lock = OnePerProcess(threading.Lock)
