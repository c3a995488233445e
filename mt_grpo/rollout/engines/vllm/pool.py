"""
Places conversations on servers: all of a group on one server, so that its prefix cache helps them. Apart from the
client, since weight sync reads the list of servers too, and placing needs no HTTP.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from mt_grpo.rollout.engines.vllm.http import Server


class ServerPool:
    """
    Places conversations on servers.

    Conversations with the same first context, as in a GRPO group, are a group. A group goes to the server with the
    fewest conversations. A hash that is the same in every process breaks ties. A conversation stays on its server
    while that is up.

    Args:
        urls (`list[str]`): The servers.
        api_key (`str`, *optional*): Their key.
    """

    def __init__(self, urls: list[str], api_key: str | None = None) -> None:
        self.servers = [Server(url.rstrip("/"), api_key) for url in urls]
        self._server: dict[str, Server] = {}
        self._group: dict[str, int] = {}
        self._server_of_group: dict[int, Server] = {}
        self._members: Counter[int] = Counter()

    def place(self, session: str, context: list[int]) -> Server | None:
        """The server of a conversation; `None` while no server is up."""
        server = self._server.get(session)
        if server is not None and server.up:
            return server
        if session not in self._group:
            self._group[session] = hash(tuple(context))
            self._members[self._group[session]] += 1
        group = self._group[session]
        chosen = self._server_of_group.get(group)
        if chosen is None or not chosen.up:
            up = [candidate for candidate in self.servers if candidate.up]
            if not up:
                return None
            chosen = min(up, key=lambda one: (len(one.sessions), zlib.crc32(f"{one.url}/{group}".encode())))
            self._server_of_group[group] = chosen
        if server is not None:
            server.sessions.discard(session)
        self._server[session] = chosen
        chosen.sessions.add(session)
        return chosen

    def join(self, session: str, other: str) -> None:
        """Puts a conversation that is not placed yet into the group of another one."""
        if other in self._group:
            self._group[session] = self._group[other]
            self._members[self._group[session]] += 1

    def wait_anew(self) -> None:
        """Restarts the clock of servers that are down: between rollouts nobody asked whether they are back."""
        for server in self.servers:
            if not server.up:
                server.down_since = time.monotonic()

    def release(self, session: str) -> None:
        """Forgets a conversation, and its group after the last member."""
        group = self._group.pop(session, None)
        if group is None:
            return
        server = self._server.pop(session, None)
        if server is not None:
            server.sessions.discard(session)
        self._members[group] -= 1
        if not self._members[group]:
            del self._members[group]
            self._server_of_group.pop(group, None)


@dataclass
class Connections:
    """
    The parts of a client that belong to one event loop: connections, tasks that wait for servers, and the number of
    requests under way.
    """

    loop: asyncio.AbstractEventLoop
    http: aiohttp.ClientSession
    gate: asyncio.Semaphore
    watchers: dict[str, asyncio.Future[None]]
    asking: int = 0

    @property
    def busy(self) -> bool:
        """Whether a request is under way, which would break if the connections were closed."""
        return self.asking > 0 and self.loop is asyncio.get_running_loop()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits until one more request may start."""
        self.asking += 1
        try:
            async with self.gate:
                yield
        finally:
            self.asking -= 1

    def end_watch(self, server: Server, done: asyncio.Future[None]) -> None:
        """Ends a watch. If it failed to restore a server's weights, all conversations fail, and with them the run."""
        self.watchers.pop(server.url, None)
        if not done.cancelled():
            server.failure = done.exception()
