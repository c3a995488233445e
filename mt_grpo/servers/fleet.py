"""
The vLLM servers of a run: which of them are up and hold its weights, who owns them, and the connections to them.
A server's weight version names the run that set it, and the run's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import socket
import time
import uuid
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from mt_grpo.errors import ServerGoneError
from mt_grpo.servers.cache_scheduler import CacheScheduler, Gate, Pressure
from mt_grpo.servers.http import (
    CONNECT_TIMEOUT,
    POLL,
    RequestFailed,
    Server,
    ServerSetupError,
    open_session,
    wait_for_servers,
)

_MOST_RESTORES = 3  # times that a server is sent the same weights
_RELEASED = ":released"
_LABEL = re.compile(
    rf"(?P<run>(?P<host>.+)-(?P<machine>\w+\.\w+)-(?P<process>\d+)-(?P<start>\d+)-\w+):(?P<step>\w+)({_RELEASED})?"
)


@dataclass(frozen=True)
class Owner:
    """The run that a server's weight version names."""

    run: str
    step: str
    words: str
    here: bool
    over: bool

    @staticmethod
    def new_run() -> str:
        """A name for a run of this process: host, boot, process numbering, process, start, and a part of its own."""
        process = os.getpid()
        return f"{socket.gethostname()}-{_machine()}-{process}-{_start(process)}-{uuid.uuid4().hex[:6]}"

    @staticmethod
    def label(run: str | None, version: int | str) -> str:
        """The weight version that a server gets: `RUN:STEP`, or only the step if no run is given."""
        return str(version) if run is None else f"{run}:{version}"

    @classmethod
    def read(cls, label: str) -> Owner | None:
        """The run that a weight version names; `None` if no run of this project set it."""
        match = _LABEL.fullmatch(label)
        if match is None:
            return None
        process, here = int(match["process"]), match["machine"] == _machine()
        gone = here and (process == os.getpid() or _start(process) != int(match["start"]))
        words = f"process {process} on {match['host']}, step {match['step']}"
        return cls(match["run"], match["step"], words, here, gone or label == cls.released(label))

    @staticmethod
    def released(label: str) -> str:
        """The weight version of a run that is over."""
        return f"{label.removesuffix(_RELEASED)}{_RELEASED}"

    @classmethod
    def check(cls, server: Server, run: str) -> None:
        """Makes sure that no other run uses a server."""
        other = cls.read(server.weight_version())
        if other is None or other.run == run or other.over:
            return
        end = "end it first" if other.here else "end it first, or restart the server if that run was killed"
        raise server.sync_error(
            f"holds the weights of another run ({other.words}): give this run a server of its own on another port "
            f"(`vllm_server_port`), or {end}."
        )

    @classmethod
    def check_still(cls, server: Server, label: str) -> None:
        """Makes sure that a server held the weights of `label` while it was sampled from."""
        version = server.weight_version()
        if version in (label, cls.released(label)):
            return
        other = cls.read(version)
        if other is None:
            raise RequestFailed(f"The server at {server.url} was restarted.", True, unreachable=True)
        raise server.sync_error(
            f"does not hold the weights that this run sent it, but others ({other.words}): another run sent them "
            "while this run sampled from it, or a proxy answered a call that it did not pass on. These conversations "
            "are not trained on: give each run a server of its own, on another port (`vllm_server_port`), and name "
            "the server itself, not a proxy before it."
        )

    @classmethod
    def give_back(cls, server: Server, run: str) -> None:
        """Tells a server that a run is over, if the server can be reached and holds the run's weights."""
        with contextlib.suppress(RequestFailed):
            version = server.weight_version()
            held = cls.read(version)
            if held is not None and held.run == run and version != cls.released(version):
                server.post("/update_weight_version", {"new_version": cls.released(version)})


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _start(process: int) -> int | None:
    """When a process started, in ticks since the machine booted; `None` if it is gone, or has ended as a zombie."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rsplit(")", 1)[1].split()
    return None if state in ("Z", "X") else int(fields[18])


logger = logging.getLogger(__name__)
METRICS = "/metrics"
_START_COMMAND = "mt-grpo serve --config R.yaml"


class VLLMServers:
    """
    The vLLM servers of a run. One that stops answering is left out until it answers and holds the weights of
    `weight_version`. Only the health check decides that, so a request that hangs stops no other.
    """

    def __init__(
        self,
        base_urls: str | list[str],
        tokenizer: Any,
        *,
        model: str | None = None,
        api_key: str | None = None,
        request_timeout: float = 600.0,
        max_retries: int = 4,
        max_concurrent: int = 1024,
        server_timeout: float = 240.0,
        home: str | None = None,
        media_tokens: Mapping[int, int] | None = None,
        min_servers: int | None = None,
        by_cache: bool = True,
        processes: int = 1,
    ) -> None:
        urls = [base_urls] if isinstance(base_urls, str) else base_urls
        self.servers = [Server(url, api_key) for url in urls]
        self.placement = _Placement(self.servers, home)
        self.tokenizer, self.api_key = tokenizer, api_key
        self.expected_model, self.model = model, ""
        self.request_timeout, self.max_retries, self.max_concurrent = request_timeout, max_retries, max_concurrent
        self.server_timeout, self.min_servers = server_timeout, min_servers
        self.media_tokens = dict(media_tokens or {})
        self.by_cache, self.salted = by_cache, False
        self.context_length = 0
        self.weight_version: int | None = None
        self.incoming_version: int | None = None
        self.run: str | None = None
        self.restore: Callable[[str], None] | None = None
        self.remedy = f"Start it with `{_START_COMMAND}`, R.yaml being this run's recipe."
        self._schedulers = {server.url: CacheScheduler(processes) for server in self.servers}
        self._wire: _Connections | None = None

    @property
    def base_urls(self) -> list[str]:
        """URLs of the servers."""
        return [server.url for server in self.servers]

    async def connect(self, progress: Callable[[str], None] = logger.warning) -> None:
        """Waits for the servers, then checks that they hold the right model and learns their context length."""
        try:
            servers, began = self.servers, time.monotonic()
            enough = self.min_servers or len(servers)

            async def fits(server: Server) -> None:
                await server.check(self.expected_model, self.tokenizer, len(servers) > 1)

            silent = await wait_for_servers(servers, enough, began, self.server_timeout, progress, fits)
            if len(servers) - len(silent) < (self.min_servers or 1):
                raise ServerGoneError(self.gone(silent))
            for server in silent:
                server.drop(server.fault)
                progress(
                    f"Going on without the vLLM server at {server.url}, which joins when it is up: {server.fault}"
                )
            up = [server for server in servers if server.up]
            self.context_length = min(server.context_length for server in up)
            for server in up:
                self._check_beside(server)
        finally:
            await self.close()

    async def check(self, server: Server) -> None:
        """Holds a server that comes later against what the run needs."""
        await server.check(self.expected_model, self.tokenizer, len(self.servers) > 1)
        self._check_beside(server)

    def _check_beside(self, server: Server) -> None:
        """Whether a server can stand in for the others."""
        first = next(one for one in self.servers if one.context_length)
        if server.version != first.version:
            raise ServerSetupError(
                f"The servers run different versions of vLLM, {first.version} at {first.url} and {server.version} at "
                f"{server.url}, which compute different log-probs: install the same version for both."
            )
        if server.context_length < self.context_length:
            raise ServerSetupError(
                f"The vLLM server at {server.url} takes {server.context_length} tokens of context, and this run began "
                f"with {self.context_length}: start it with this run's recipe."
            )

    async def close(self) -> None:
        """Closes the connections, once no request is under way. The next request opens them again."""
        wire = self._wire
        if wire is None:
            return
        wire.closing = wire.busy
        if not wire.busy:
            self._wire = None  # a request that comes meanwhile opens others
            for task in wire.watchers.values():
                task.cancel()
            try:
                await asyncio.gather(*wire.watchers.values(), return_exceptions=True)
                await asyncio.gather(*(gate.close() for gate in wire.gates.values()))
            finally:  # who closes may be cancelled meanwhile
                await wire.http.close()

    @asynccontextmanager
    async def _under_way(self) -> AsyncIterator[_Connections]:
        """Counts a request as under way. The last one closes the connections, if they were to be closed meanwhile."""
        wire = self._connection()
        wire.asking += 1
        try:
            yield wire
        finally:
            wire.asking -= 1
            if wire.closing and not wire.asking:
                await self.close()

    async def _server(self, session: str, context: list[int]) -> Server:
        """The server of a conversation. It waits while fewer servers than needed are up."""
        wire = self._connection()
        while True:
            for server in self.servers:
                if not server.up and server.url not in wire.watchers:
                    watcher = asyncio.ensure_future(self._watch(server, wire))
                    wire.watchers[server.url] = watcher
                    watcher.add_done_callback(functools.partial(wire.end_watch, server))
                if server.failure is not None:
                    raise server.failure
            if sum(one.up for one in self.servers) >= (self.min_servers or 1):
                placed = self.placement.place(session, context)
                if placed is not None:
                    return placed
            since = max(one.down_since for one in self.servers if one.down_since is not None)
            left = since + self.server_timeout - time.monotonic()
            if left <= 0:
                raise ServerGoneError(self.gone())
            await asyncio.wait(wire.watchers.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _watch(self, server: Server, wire: _Connections) -> None:
        """Waits until a server answers and holds the right weights, then uses it again."""
        restored: Counter[int | str | None] = Counter()
        while True:
            try:
                await self._call(server, "GET", "/health", timeout=CONNECT_TIMEOUT)
                if not server.context_length:
                    await self.check(server)
                held = await self._weights_of(server)
                if server.awaits_proof:  # the next sync proves it
                    server.fault = f"The server at {server.url} is up, and joins at the next weight sync."
                    await asyncio.sleep(POLL)
                    continue
                if self.incoming_version is not None:  # a sync has left it out, and goes on
                    await asyncio.sleep(POLL)
                    continue
                if self.weight_version is None or held == Owner.label(self.run, self.weight_version):
                    break
                if self.restore is not None:
                    if restored[self.weight_version] == _MOST_RESTORES:
                        raise server.setup_error(
                            f"took the weights {_MOST_RESTORES} times and still says that it has others: restart it."
                        )
                    logger.warning("The vLLM server at %s was restarted: sending it the weights again.", server.url)
                    await asyncio.to_thread(self.restore, server.url)
                    restored[self.weight_version] += 1
                else:
                    server.fault = f"The server at {server.url} was restarted and waits for its weights."
            except ServerSetupError as error:  # the others serve the run
                if server.fault != str(error):
                    logger.warning("%s The run goes on without it.", error)
                server.fault = str(error)
            except (RequestFailed, OSError) as error:
                server.fault = str(error)
            await asyncio.sleep(POLL)
        logger.warning("The vLLM server at %s is back.", server.url)
        server.mark_up()

    async def _serves(self, server: Server) -> bool:
        try:
            await self._call(server, "GET", "/health", timeout=CONNECT_TIMEOUT)
            return await self._has_weights(server)
        except RequestFailed:
            return False

    async def _has_weights(self, server: Server) -> bool:
        """Whether a server that is in use has this run's weights; while a sync goes on, those of before or after."""
        if self.weight_version is None:
            return True
        fitting = {self.weight_version}
        held = await self._weights_of(server)
        fitting |= {version for version in (self.weight_version, self.incoming_version) if version is not None}
        return held in {Owner.label(self.run, version) for version in fitting}

    async def _weights_of(self, server: Server) -> str | None:
        """The label of a server's weights, as far as this client has to know it."""
        if self.weight_version is None:
            return None
        info = await self._call(server, "GET", "/weight_info", timeout=CONNECT_TIMEOUT)
        return info.get("weight_version") if isinstance(info, dict) else None

    async def _call(
        self, server: Server, method: str, path: str, content: bytes | None = None, timeout: float | None = None
    ) -> Any:
        return await server.ask(self._connection().http, method, path, content, timeout or self.request_timeout)

    def _connection(self) -> _Connections:
        """Connections of the running event loop; those of an earlier loop cannot be used in another."""
        loop = asyncio.get_running_loop()
        if self._wire is None or self._wire.loop is not loop:
            self._wire = _Connections(loop, open_session(), asyncio.Semaphore(self.max_concurrent), {}, {}, {})
            for scheduler in self._schedulers.values():
                scheduler.forget()
            for server in self.servers:
                if not server.up:  # between rollouts nobody asked whether it is back
                    server.down_since = time.monotonic()
        return self._wire

    def gone(self, silent: list[Server] | None = None) -> str:
        """The error for when too few servers are left; `silent` are those that do not answer, by default all."""
        silent = silent or [server for server in self.servers if not server.up] or self.servers
        faults = " ".join(dict.fromkeys(server.fault for server in silent))
        urls = ", ".join(server.url for server in silent)
        answering = len(self.servers) - len(silent)
        if not answering:
            return f"No vLLM server answered for {self.server_timeout:.0f} s at {urls}. {faults} {self.remedy}"
        return (
            f"{answering} of {len(self.servers)} vLLM servers answered for {self.server_timeout:.0f} s, and "
            f"`vllm_min_servers` wants {self.min_servers}; none did at {urls}. {faults} {self.remedy}"
        )


class _Placement:
    """
    Places a group of conversations (those of one first context) on the server with the fewest, ties by a hash that
    every process shares. A conversation stays there while that server is up.
    """

    def __init__(self, servers: list[Server], home: str | None = None) -> None:
        self.servers, self._home = servers, home
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
class _Connections:
    """
    The parts of a client that belong to one event loop: connections, tasks that wait for servers or send them an image
    (by URL and name), turns that wait for room (by URL), the number of requests under way, and whether the last of
    them is to close the connections.
    """

    loop: asyncio.AbstractEventLoop
    http: aiohttp.ClientSession
    places: asyncio.Semaphore
    watchers: dict[str, asyncio.Future[None]]
    images: dict[tuple[str, str], asyncio.Future[None]]
    gates: dict[str, Gate]
    asking: int = 0
    closing: bool = False

    @property
    def busy(self) -> bool:
        """Whether a request is under way, which would break if the connections were closed."""
        return self.asking > 0 and self.loop is asyncio.get_running_loop()

    def gate(self, server: Server, scheduler: CacheScheduler) -> Gate:
        """Lets turns on a server begin."""
        if server.url not in self.gates:

            async def look() -> Pressure | None:
                return Pressure.read(await server.ask_text(self.http, METRICS))

            self.gates[server.url] = Gate(scheduler, look, lambda: server.up)
        return self.gates[server.url]

    def end_watch(self, server: Server, done: asyncio.Future[None]) -> None:
        """Ends a watch. If it failed to restore a server's weights, all conversations fail, and with them the run."""
        self.watchers.pop(server.url, None)
        if not done.cancelled():
            server.failure = done.exception()
