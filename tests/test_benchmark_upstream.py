"""The server behind the benchmarks of a client."""

from __future__ import annotations

import asyncio
import random
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def upstream(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield runpy.run_path(str(BENCHMARKS / "upstream.py"))["Upstream"]
    sys.modules.pop("processes", None)


class Wire:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False


POST = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody"


@pytest.mark.parametrize("size", [1, 7, len(POST) - 4, 1000])
def test_requests_are_read_however_they_are_cut(upstream, size):
    async def go() -> list[bytes]:
        wire, subject = Wire(), upstream(b"{}", 0.0, 0.0, random.Random(0))
        subject.connection_made(wire)
        for request in (b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n", POST, POST):
            for start in range(0, len(request), size):
                subject.data_received(request[start : start + size])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return wire.written

    first, *others = asyncio.run(go())
    assert first.startswith(b"HTTP/1.1 404")
    assert others == [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"] * 2
