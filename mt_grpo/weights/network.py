"""
Transports over the network: the servers fetch the trainer's weights, or what changed in them, before they are paused.
No folder is shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from mt_grpo.concurrency import LoopThread
from mt_grpo.errors import WeightSyncError
from mt_grpo.servers import is_local
from mt_grpo.servers.http import RequestFailed, Server
from mt_grpo.vllm_plugin.fetch import difference, time_limit
from mt_grpo.vllm_plugin.guard import FETCH
from mt_grpo.weights.files import WeightFiles, check_folder, make_folder
from mt_grpo.weights.transport import Payload, Source, Transport, Update, confirm, weight_transport

logger = logging.getLogger(__name__)

_FETCH_SLACK = 30.0  # seconds that a server has to say that a fetch has failed
WHOLE_EVERY = 50
"""One sync in so many sends all weights, where changes are sent."""
_HERE = "127.0.0.1"
HEAD_TIMEOUT = 10.0
"""Most seconds that a request may take to arrive."""
_MAX_HEAD = 2**13  # most bytes of a request
MAX_WAITING = 256
"""Connections whose request has not arrived. One more ends the oldest of them."""
_MAX_SENDERS = 64  # files that are sent at a time; further ones wait
_SEND_TIMEOUT = 30.0  # seconds after which a receiver that takes nothing counts as gone
_SEND_CHUNK = 2**24  # bytes that are sent at a time
NOTICE_EVERY = 10.0
"""Seconds between two lines about a file that is being sent."""

_REFUSAL = b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_NOT_FOUND, _BAD, _BEYOND = b"404 Not Found", b"400 Bad Request", b"416 Range Not Satisfiable"

_Way = Callable[[], Path]  # brings a server the weights; their path there


@weight_transport("http")
class HttpTransport(Transport):
    """
    Offers a safetensors file over HTTP. Each server fetches it while conversations go on, resuming a broken
    connection, and is paused only to load it from memory. Replicas of one machine load one copy.
    """

    keeps_files = True
    folder: Path

    def __init__(self, source: Source, *, port: int | None = None, folder: str | None = None) -> None:
        super().__init__(source)
        self.folder = source.from_main(lambda: make_folder(folder))
        self.files = WeightFiles(source, self.folder)
        self._offer: _FileOffer | None = None
        self._shares: dict[tuple[str, str], bool] = {}  # whether one server sees what another has fetched
        try:
            self._bases = source.from_main(lambda: self._begin_offer(port or 0))
        except WeightSyncError:
            self.close()
            raise

    @staticmethod
    def options(args: Any) -> dict[str, Any]:
        return {"port": args.weight_sync_port, "folder": args.weight_sync_folder}

    def _begin_offer(self, port: int) -> dict[str, str]:
        """Offers the files; where, for each server."""
        urls = self.source.client.base_urls
        addresses = {url: _own_address(url) for url in urls}
        alone = all(is_local(urlsplit(url).hostname) for url in urls)
        try:
            self._offer = _FileOffer(self.folder, _HERE if alone else "", port)
        except OSError as error:
            raise WeightSyncError(
                f"The weights cannot be offered at port {port} ({error.strerror}): set `weight_sync_port` to another "
                "one, or leave it out."
            ) from error
        return {url: self._offer.url(address) for url, address in addresses.items()}

    def prepare(self, server: Server, config: dict[str, Any]) -> None:
        check_folder(server, config, self.folder, lambda file: self._fetched(server, file, file.stat().st_size))

    def pack(self, step: int | None) -> list[Payload]:
        return [self.files.pack(step)]

    def deliver(self, update: Update, payload: Payload) -> None:
        self.deliver_by(update, payload, self.ways(update, payload, payload.path, payload.size))

    def deliver_by(self, update: Update, payload: Payload, ways: list[_Way]) -> None:
        """Brings a server the weights in one of these ways, the cheapest first and the surest last."""
        for way in ways:
            try:
                return update.load(way(), payload.checksum)
            except (RequestFailed, WeightSyncError) as error:  # in doubt, the next one
                if way is ways[-1]:
                    raise
                url = update.server.url
                logger.warning("The vLLM server at %s gets its weights in another way: %s", url, error)

    def ways(self, update: Update, payload: Payload, file: Path, size: int, **more: str) -> list[_Way]:
        """How a server comes to a file: a neighbour fetches it, or the server itself."""
        server, neighbour = update.server, self._neighbour(update.server)
        those = [server] if neighbour is None else [neighbour, server]
        more["label"] = payload.checksum
        return [functools.partial(self._seen, server, one, file, size, **more) for one in those]

    def _neighbour(self, server: Server) -> Server | None:
        """The first server that is up on the machine of another, and fetches for both; `None` if it is itself."""
        host = _host(server.url)
        for one in self.source.client.servers:
            if one.url == server.url:
                return None
            if one.up and _host(one.url) == host and self._shares.get((server.url, one.url), True):
                return one
        return None

    def _seen(self, server: Server, fetching: Server, file: Path, size: int, **more: str) -> Path:
        """Has one server fetch a file that another sees; its path. Containers may share an address, and no memory."""
        path, pair = self._fetched(fetching, file, size, **more), (server.url, fetching.url)
        if fetching is not server and pair not in self._shares:
            try:
                confirm(server, more["label"], path)
            except WeightSyncError:
                self._shares[pair] = False
                raise
            self._shares[pair] = True
        return path

    def _fetched(self, server: Server, file: Path, size: int, **more: str) -> Path:
        """Has a server fetch a file; its path there. `more` are further arguments of `Fetcher.fetch`."""
        url = f"{self._bases[server.url]}/{file.name}"
        try:
            path = server.post(
                FETCH,
                {"url": url, "size": size, **more},
                itemgetter("path"),
                timeout=time_limit(size) + _FETCH_SLACK,
            )
        except RequestFailed as error:
            if error.unreachable or error.status is None:
                raise
            raise server.sync_error(
                f"cannot fetch the trainer's weights: {error} Start it with `mt-grpo serve`, and let it reach the "
                "trainer's machine on any port, or on `weight_sync_port`."
            ) from error
        return Path(path)

    def close(self) -> None:
        """Ends the offer too."""
        offer, self._offer = self._offer, None  # a run may be closed twice
        if offer is not None:
            offer.close()
        super().close()


@weight_transport("delta")
class DeltaTransport(Transport):
    """
    Sends the words of the file that changed, as `http` sends the file; a server puts them into its copy and loads the
    whole. All weights are sent where a server holds another file, where a checksum does not fit, once in `WHOLE_EVERY`
    syncs, and where half a file or more would be sent anyway.
    """

    keeps_files = True
    folder: Path
    options = staticmethod(HttpTransport.options)

    def __init__(self, source: Source, **options: Any) -> None:
        super().__init__(source)
        self.http = HttpTransport(source, **options)
        self.folder = self.http.folder
        self._latest: Payload | None = None
        self._base = ""
        """Checksum of the weights that the latest change starts from; empty if all weights are to be sent."""
        self._num_syncs = 0

    def prepare(self, server: Server, config: dict[str, Any]) -> None:
        self.http.prepare(server, config)

    def pack(self, step: int | None) -> list[Payload]:
        before, (after,) = self._latest, self.http.pack(step)
        self._latest, self._base = after, ""
        whole = step is None or self._num_syncs % WHOLE_EVERY == 0
        self._num_syncs += step is not None
        if self.source.accelerator.is_main_process:
            for old in self.folder.glob("change-*"):
                old.unlink()
            if before is not None and not whole:
                older, newer = self.http.files.files
                change = difference(older.content, newer.content)
                if change is not None:
                    self._change = self.folder / f"change-{step:08d}"
                    try:
                        self._change.write_bytes(change.numpy().tobytes())
                        self._base = before.checksum
                    except OSError as error:
                        logger.warning("All weights are sent, since what changed cannot be written: %s.", error)
                        self._change.unlink(missing_ok=True)
        return [after]

    def deliver(self, update: Update, payload: Payload) -> None:
        """Brings the change; in doubt, all weights."""
        ways = self.http.ways(update, payload, payload.path, payload.size)
        if self._base:
            size = self._change.stat().st_size
            ways = self.http.ways(update, payload, self._change, size, base=self._base) + ways
        self.http.deliver_by(update, payload, ways)

    def close(self) -> None:
        """Ends the offer too."""
        self.http.close()


def _host(url: str) -> str | None:
    """The machine of a server, as far as its address says."""
    host = urlsplit(url).hostname
    return _HERE if is_local(host) else host


def _own_address(url: str) -> str:
    """The address that this machine has in the network of a server. Nothing is sent to find it."""
    parts = urlsplit(url)
    if is_local(parts.hostname):
        return _HERE
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, *_, target = min(found, key=lambda each: each[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise WeightSyncError(f"There is no way from here to the vLLM server at {url}: {error}.") from error
    return f"[{address}]" if ":" in address else address


class _FileOffer:
    """Offers a folder's files, from any byte on, to those who know a secret part of the URL."""

    def __init__(self, folder: Path, host: str, port: int = 0) -> None:
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=MAX_WAITING, dualstack_ipv6=both)
        self._socket.setblocking(False)
        self._port = self._socket.getsockname()[1]
        self._folder, self._secret = folder, secrets.token_urlsafe(32)
        self._wanted = re.compile(rf"GET /{re.escape(self._secret)}/(\w[\w.-]*) HTTP/1\.[01]\r\n".encode())
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._sending: set[socket.socket] = set()
        self._senders = ThreadPoolExecutor(_MAX_SENDERS, "mt-grpo-weights")
        self._thread = LoopThread("mt-grpo-weights")
        self._accepting = self._thread.wait(self._begin())

    def url(self, address: str) -> str:
        """The URL of the folder, for somebody who reaches this machine at an address."""
        return f"http://{address}:{self._port}/{self._secret}"

    def close(self) -> None:
        """Refuses connections, and ends those that there are."""
        self._thread.wait(self._end())
        self._thread.stop()
        for connection in list(self._sending):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._senders.shutdown(cancel_futures=True)

    async def _begin(self) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._accept())

    async def _end(self) -> None:
        tasks = [self._accepting, *self._waiting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._socket)
            except OSError:  # gone again, or there are too many files open
                await asyncio.sleep(0.1)
                continue
            if len(self._waiting) >= MAX_WAITING:
                oldest = next(iter(self._waiting))
                self._waiting.pop(oldest)
                oldest.cancel()
            task = asyncio.ensure_future(self._answer(connection, peer[0].removeprefix("::ffff:")))
            self._waiting[task] = None
            task.add_done_callback(lambda ended: self._waiting.pop(ended, None))
            await asyncio.sleep(0)  # an accept does not wait while more connect, and requests would not be read

    async def _answer(self, connection: socket.socket, peer: str) -> None:
        """Reads a request, and has a thread send what it asks for."""
        loop, sent = asyncio.get_running_loop(), False
        connection.setblocking(False)
        try:
            async with asyncio.timeout(HEAD_TIMEOUT):
                head = b""
                while b"\r\n\r\n" not in head:
                    received = await loop.sock_recv(connection, _MAX_HEAD)
                    head += received
                    if not received or len(head) > _MAX_HEAD:
                        return
                found = self._find(head)
                if isinstance(found, bytes):
                    await loop.sock_sendall(connection, _REFUSAL % found)
                    return
            self._sending.add(connection)
            self._senders.submit(self._send, connection, peer, *found)
            sent = True
        except (OSError, TimeoutError):  # it has gone, or brings nothing
            pass
        finally:
            if not sent:
                connection.close()

    def _find(self, head: bytes) -> bytes | tuple[BinaryIO, int, int]:
        """The file that a request asks for, the first byte and the size, or the status that refuses it."""
        wanted = self._wanted.match(head)
        if wanted is None:
            return _NOT_FOUND
        asked = re.search(rb"\r\nRange:([^\r]*)", head, re.IGNORECASE)
        begin = re.fullmatch(rb"\s*bytes=(\d{1,18})-\s*", asked[1] if asked else b"bytes=0-")
        if begin is None:
            return _BAD
        try:
            file = open(self._folder / wanted[1].decode(), "rb")  # noqa: SIM115  # who sends it closes it
        except OSError:
            return _NOT_FOUND
        offset, size = int(begin[1]), file.seek(0, 2)
        if offset >= size:
            file.close()
            return _BEYOND
        return file, offset, size

    def _send(self, connection: socket.socket, peer: str, file: BinaryIO, offset: int, size: int) -> None:
        try:
            with connection, file:
                connection.settimeout(_SEND_TIMEOUT)
                connection.sendall(
                    f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {offset}-{size - 1}/{size}\r\n"
                    f"Content-Length: {size - offset}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n".encode()
                )
                begun = told = time.monotonic()
                while offset < size and (sent := connection.sendfile(file, offset, min(_SEND_CHUNK, size - offset))):
                    offset += sent
                    if (now := time.monotonic()) - told >= NOTICE_EVERY:
                        told, done = now, f"{offset / 1e9:.1f} of {size / 1e9:.1f} GB"
                        logger.warning("%s has fetched %s of the weights in %.0f s.", peer, done, now - begun)
        except OSError:  # the server has gone, or has had enough
            pass
        finally:
            self._sending.discard(connection)
