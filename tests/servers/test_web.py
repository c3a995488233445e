"""Servers of others that answer slowly, without end, or with a few bytes that are gigabytes: both are bounded."""

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import httpx
import pytest
from support.loopback import Loopback, Reply

from mt_grpo.errors import ConfigError
from mt_grpo.integrations import openenv
from mt_grpo.integrations.openenv import openenv_server
from mt_grpo.servers import external
from mt_grpo.tools.mcp import McpServer, McpServerConfig, session
from mt_grpo.tools.python_sandbox import RemotePython
from mt_grpo.tools.search import RetrievalSearch, WikipediaSearch

DEEP = b"[" * 200_000
FORM = {"Content-Type": "application/json"}


@contextmanager
def dripping(head: bytes) -> Iterator[str]:
    """A server that sends `head` at once, and then a byte every 20 ms for as long as somebody reads."""
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(head)
            while not over.wait(0.02):
                connection.sendall(b"a")

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def answered():
    """Makes a server that gives one answer to everything."""
    opened = []

    def open_one(content: bytes, **headers: str) -> str:
        reply = Reply(200, content, len(content), {name.replace("_", "-"): text for name, text in headers.items()})
        opened.append(Loopback(lambda request: reply))
        return opened[-1].url

    yield open_one
    for each in opened:
        each.stop()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["head", "body"])
def test_an_answer_that_drips_ends_in_time(head, monkeypatch):
    with dripping(head) as url:
        for tool in (RetrievalSearch(url, timeout=0.2), WikipediaSearch(base_url=url, timeout=0.2)):
            with pytest.raises(RuntimeError, match="no whole answer within"):
                tool.search("Peru")
        monkeypatch.setattr("mt_grpo.tools.python_sandbox.SPARE_SECONDS", 0.1)
        with pytest.raises(RuntimeError, match="no whole answer"):
            RemotePython(url, time_limit=0.1).python("print(1)")
        monkeypatch.setattr(openenv, "CHECK_SECONDS", 0.2)
        asyncio.run(openenv._compare([url, url], "environment_urls"))


def test_a_client_that_never_connects_ends_in_time(monkeypatch):
    def silent(base_url):
        return SimpleNamespace(connect=asyncio.Event().wait)

    monkeypatch.setattr(openenv, "CHECK_SECONDS", 0.1)
    env = openenv_server("http://127.0.0.1:1", action=dict, client=silent)
    with pytest.raises(ConfigError, match="Cannot reach the server of `url`"):
        asyncio.run(env.check())


def test_an_answer_is_bounded_before_it_is_decompressed(answered, monkeypatch):
    monkeypatch.setattr(external, "MAX_BYTES", 1_000)
    bomb = gzip.compress(bytes(10_000))
    for url in (answered(bytes(2_000)), answered(bomb, Content_Encoding="gzip")):
        with pytest.raises(RuntimeError, match="the answer has more than 1,000 bytes"):
            RetrievalSearch(url).search("Peru")
    for url, problem in (
        (answered(gzip.compress(bomb), Content_Encoding="gzip, gzip"), "has the encoding 'gzip, gzip', and only gzip"),
        (answered(b"abc", Content_Encoding="gzip"), "the answer is no gzip"),
    ):
        with pytest.raises(RuntimeError, match=problem):
            RetrievalSearch(url).search("Peru")
    whole = gzip.compress(json.dumps({"result": [[{"document": {"contents": "Lima"}}]]}).encode())
    assert RetrievalSearch(answered(whole, Content_Encoding="gzip")).search("Peru")[0] == "[1] Lima"


def test_brackets_without_end_are_one_error(answered):
    url = answered(DEEP)
    for tool in (RetrievalSearch(url), WikipediaSearch(base_url=url)):
        with pytest.raises(RuntimeError, match="the brackets of the answer are too deep"):
            tool.search("Peru")
    with pytest.raises(RuntimeError, match="the brackets of the answer are too deep"):
        RemotePython(url).python("print(1)")
    asyncio.run(openenv._compare([url, answered(b"[" * 900 + b"]" * 900)], "environment_urls"))


@pytest.mark.parametrize("transport", ["http", "sse"])
def test_an_mcp_server_is_bounded(answered, monkeypatch, transport):
    monkeypatch.setattr(session, "MOST_BYTES", 1_000)
    monkeypatch.setattr(session, "START_SECONDS", 5.0)
    kind = {"Content_Type": "application/json" if transport == "http" else "text/event-stream"}
    for url, problem in (
        (answered(gzip.compress(bytes(10_000)), Content_Encoding="gzip", **kind), "it answers in gzip, though"),
        (answered(b"data: " + bytes(2_000), **kind), "it sent a message of more than 1,000 bytes"),
        (answered(b"event: endpoint\ndata: /\n\n" + DEEP[:500], **kind), "The MCP server 'strange'"),
    ):
        server = McpServer(McpServerConfig("strange", url=url, transport=transport))
        with pytest.raises(ConfigError, match=problem):
            server.list_tools()


def test_a_client_can_be_dropped():
    client = external.WebClient()
    with pytest.raises(httpx.HTTPError):
        client.ask("GET", "http://127.0.0.1:1", 1.0)
    del client
