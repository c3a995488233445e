"""Which server serves which conversation."""

from __future__ import annotations

import time
import zlib
from collections import Counter

from mt_grpo.rollout.engines.vllm.http import Server


class ServerPool:
    """
    Places conversations on servers.

    Conversations with the same first context, as in a GRPO group, are a group. A group goes to the server with the
    fewest conversations. A hash that is the same in every process breaks ties. A conversation stays on its server
    while that is up.
    """

    def __init__(self, urls: list[str], api_key: str | None = None, home: str | None = None) -> None:
        self._home = home
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
            chosen = min(up, key=lambda one: self._rank(one, group))
            self._server_of_group[group] = chosen
        if server is not None:
            server.sessions.discard(session)
        self._server[session] = chosen
        chosen.sessions.add(session)
        return chosen

    def _rank(self, server: Server, group: int) -> tuple[bool, int, int]:
        """The least is chosen."""
        by_name = zlib.crc32(f"{server.url}/{group}".encode())
        return server.url != self._home, len(server.sessions), by_name

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
