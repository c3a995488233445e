"""The trainer's side of weights over the network: offers the files of a folder to those who know a secret address."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from mt_grpo.concurrency import LoopThread

logger = logging.getLogger(__name__)

HEAD_TIME = 10.0
"""Most seconds that a request may take to arrive."""
LONGEST_HEAD = 2**13
"""Most bytes of a request."""
MOST_WAITING = 256
"""Connections whose request has not arrived. One more ends the oldest of them."""
SENDERS = 64
"""Files that are sent at a time; further ones wait."""
SILENCE = 30.0
"""Seconds after which a receiver that takes nothing counts as gone."""
STRETCH = 2**24
"""Bytes that are sent at a time."""
TOLD_EVERY = 10.0
"""Seconds between two lines about a file that is being sent."""

_REFUSAL = b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_NOT_FOUND, _BAD, _BEYOND = b"404 Not Found", b"400 Bad Request", b"416 Range Not Satisfiable"


class FileOffer:
    """
    Offers the files of a folder to those who know a secret part of the URL, from any byte on. A connection costs a
    thread only when its request has arrived and has the secret.
    """

    def __init__(self, folder: Path, host: str, port: int = 0) -> None:
        self._socket = socket.create_server((host, port), backlog=MOST_WAITING)
        self._socket.setblocking(False)
        self._port = self._socket.getsockname()[1]
        self._folder, self._secret = folder, secrets.token_urlsafe(32)
        self._wanted = re.compile(rf"GET /{re.escape(self._secret)}/(\w[\w.-]*) HTTP/1\.[01]\r\n".encode())
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._sending: set[socket.socket] = set()
        self._senders = ThreadPoolExecutor(SENDERS, "mt-grpo-weights")
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
            if len(self._waiting) >= MOST_WAITING:
                next(iter(self._waiting)).cancel()
            task = asyncio.ensure_future(self._answer(connection, peer[0]))
            self._waiting[task] = None
            task.add_done_callback(self._waiting.pop)

    async def _answer(self, connection: socket.socket, peer: str) -> None:
        """Reads a request, and has a thread send what it asks for."""
        loop, sent = asyncio.get_running_loop(), False
        connection.setblocking(False)
        try:
            async with asyncio.timeout(HEAD_TIME):
                head = b""
                while b"\r\n\r\n" not in head:
                    received = await loop.sock_recv(connection, LONGEST_HEAD)
                    head += received
                    if not received or len(head) > LONGEST_HEAD:
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
                connection.settimeout(SILENCE)
                connection.sendall(
                    f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {offset}-{size - 1}/{size}\r\n"
                    f"Content-Length: {size - offset}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n".encode()
                )
                begun = told = time.monotonic()
                while offset < size and (sent := connection.sendfile(file, offset, min(STRETCH, size - offset))):
                    offset += sent
                    if (now := time.monotonic()) - told >= TOLD_EVERY:
                        told, done = now, f"{offset / 1e9:.1f} of {size / 1e9:.1f} GB"
                        logger.warning("%s has fetched %s of the weights in %.0f s.", peer, done, now - begun)
        except OSError:  # the server has gone, or has had enough
            pass
        finally:
            self._sending.discard(connection)
