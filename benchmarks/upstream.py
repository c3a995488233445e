"""
An HTTP server that answers every `/v1/completions` with the same action, each after a time of its own: what a client
costs, with nothing behind it. It runs in a process of its own and prints its port.

    python benchmarks/upstream.py ANSWER_FILE MEDIAN_SECONDS SIGMA
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import running


class Upstream(asyncio.Protocol):
    """Reads requests off one connection; bodies are counted, not read. It has no metrics."""

    def __init__(self, answer: bytes, median: float, sigma: float, rng: random.Random) -> None:
        self._answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer)
        self._seconds = lambda: median * rng.lognormvariate(0.0, sigma)
        self._head = b""
        self._left: int | None = None  # of the body, once the head is read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._left is None:
            head, end, body = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                self._head = head
                return
            self._head, data = b"", body
            if head.startswith(b"GET "):
                self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                return
            name = b"content-length:"
            self._left = next(int(line[len(name) :]) for line in head.lower().split(b"\r\n") if line.startswith(name))
        self._left -= len(data)
        if not self._left:
            self._left = None
            asyncio.get_running_loop().call_later(self._seconds(), self._write)

    def _write(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._answer)


async def serve(answer: bytes, median: float, sigma: float) -> None:
    rng = random.Random(0)
    server = await asyncio.get_running_loop().create_server(lambda: Upstream(answer, median, sigma, rng), "127.0.0.1")
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def upstream(answer: bytes, median: float, sigma: float) -> Iterator[str]:
    """URL of such a server while the context lasts."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(answer)
        command = [sys.executable, __file__, file.name, str(median), str(sigma)]
        with running(command) as process:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]).read_bytes(), float(sys.argv[2]), float(sys.argv[3])))
