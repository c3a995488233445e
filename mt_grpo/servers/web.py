"""Asks servers of others over HTTP: an answer is whole in time, and of a bounded size once it is decompressed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import weakref
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx

from mt_grpo.concurrency import LoopThread, OnePerProcess
from mt_grpo.errors import ConfigError

MAX_BYTES = 32 << 20
"""Bytes of an answer, decompressed."""

_REACH_SECONDS = 10.0
"""In which an endpoint has to answer before a run begins."""
_MOST_WORDS = 500  # characters of an endpoint's words in an error

_thread = OnePerProcess(lambda: LoopThread("mt-grpo-web"))


class _Answer(NamedTuple):
    """An answer: status and headers, and all of its content, decompressed."""

    response: httpx.Response
    content: bytes

    def json(self) -> Any:
        """What it holds; raises `ValueError` if that is no JSON, or too deep."""
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("the brackets of the answer are too deep") from None


async def ask(http: httpx.AsyncClient, method: str, url: str, seconds: float, **request: Any) -> _Answer:
    """Asks for an answer."""
    raw = bytearray()
    begun = time.monotonic()
    try:
        async with asyncio.timeout(seconds), http.stream(method, url, timeout=seconds, **request) as response:
            async for part in response.aiter_raw():
                raw += part
                if len(raw) > MAX_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise httpx.ReadTimeout(f"no whole answer within {time.monotonic() - begun:.0f} s") from None
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    return _Answer(response, _decompressed(bytes(raw), encoding))


def _decompressed(raw: bytes, encoding: str) -> bytes:
    if encoding == "identity":
        return raw
    if encoding not in ("gzip", "x-gzip"):
        raise httpx.DecodingError(f"the answer has the encoding {encoding!r}, and only gzip was asked for")
    gzip = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        content = gzip.decompress(raw, MAX_BYTES + 1)
    except zlib.error as error:
        raise httpx.DecodingError(f"the answer is no gzip: {error}") from error
    if len(content) > MAX_BYTES:
        raise _too_large()
    return content


def _too_large() -> httpx.RemoteProtocolError:
    return httpx.RemoteProtocolError(f"the answer has more than {MAX_BYTES:,} bytes")


def retry_after(response: httpx.Response) -> float | None:
    """Seconds of a header `Retry-After`, which has these or a date; `None` without one, or with neither."""
    said = response.headers.get("Retry-After", "").strip()
    try:
        if not said[:1].isalpha():
            seconds = float(said)
        else:
            date = parsedate_to_datetime(said)
            seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    except (ValueError, OverflowError):  # the second: a date in a zone beyond all others
        return None
    return max(0.0, seconds)


async def _ask_plainly(request: Any) -> None:
    request.headers["Accept-Encoding"] = "identity"


async def _bound(response: Any) -> None:
    library: Any = sys.modules[type(response).__module__.partition(".")[0]]
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise library.DecodingError(f"the answer has the encoding {encoding!r}, and none was asked for")
    says = f"the answer has more than {MAX_BYTES:,} bytes"
    response.stream = bounded(response, MAX_BYTES, lambda: library.RemoteProtocolError(says))


def bounded(response: Any, most: int, refuse: Callable[[], Exception], events: bool = False) -> Any:
    """The stream of an answer of httpx or httpx2, of `most` bytes; with `events`, of each event of it."""
    library: Any = sys.modules[type(response).__module__.partition(".")[0]]
    source = response.stream

    class Bounded(library.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size, tail = 0, b""
            async for part in source:
                seen = tail + part
                # an empty line ends an event
                end = max(seen.rfind(b"\n\n"), seen.rfind(b"\r\n\r\n")) if events else -1
                size = size + len(part) if end < 0 else len(seen) - end
                if size > most:
                    raise refuse()
                tail = seen[-3:]
                yield part

        async def aclose(self) -> None:
            await source.aclose()

    return Bounded()


BOUNDED: Mapping[str, list[Callable[..., Any]]] = {"request": [_ask_plainly], "response": [_bound]}
"""`event_hooks` of a client of httpx or httpx2 that a library asks with: its answers are bounded too."""


class WebClient:
    """Asks a server from any thread. Requests of all threads are sent by one, which can end each in time."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        given = {"Accept-Encoding": "gzip", **(headers or {})}
        self._http = httpx.AsyncClient(headers=given, limits=httpx.Limits(max_connections=None))
        weakref.finalize(self, _close, self._http).atexit = False

    def ask(self, method: str, url: str, seconds: float, **request: Any) -> _Answer:
        """See `ask`."""
        return _thread.get().wait(ask(self._http, method, url, seconds, **request))


class OpenAIEndpoint:
    """
    An endpoint that speaks OpenAI's interface, and its key, which no sentence repeats. `option` names the environment
    variable that holds it; `what` begins sentences.
    """

    def __init__(self, url: str, variable: str | None, option: str, what: str = "The endpoint") -> None:
        self.url, self._variable, self._option = url.rstrip("/"), variable, option
        self._what = f"{what} {self.url}"
        if variable is not None and self.key is None:
            raise ConfigError(
                f"`{option}` is {variable!r}, an environment variable that is not set: set it to the key, or leave it "
                "out where the endpoint needs none."
            )

    @property
    def key(self) -> str | None:
        """The key, without a line feed at its end, which is not allowed in a header."""
        return None if self._variable is None else os.environ.get(self._variable, "").strip() or None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def ask_models(self) -> _Answer:
        """Its answer about its models; raises `ConfigError` if it cannot be reached, or refuses the key."""
        try:
            answer = WebClient(self.headers).ask("GET", f"{self.url}/models", _REACH_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            says = f"{self._what} cannot be reached ({self.hidden(error)}): start it, or mend its address."
            raise ConfigError(says) from None
        if answer.response.status_code in (401, 403):
            raise ConfigError(self.refusal(answer.response.status_code))
        return answer

    def refusal(self, status: int) -> str:
        """What is said where it refuses the key."""
        refused = "requests without a key" if self._variable is None else f"the key in {self._variable}"
        return (
            f"{self._what} refuses {refused} (status {status}): name the environment variable that holds its key in "
            f"`{self._option}`."
        )

    def hidden(self, said: object) -> str:
        """Words, or an error, in one line without the key, which some endpoints repeat."""
        kind = f"{type(said).__name__}: " if isinstance(said, Exception) else ""
        words = " ".join(f"{kind}{said}".split()).removesuffix(":")
        return (words.replace(self.key, "***") if self.key else words)[:_MOST_WORDS].rstrip(".")


def _close(http: httpx.AsyncClient) -> None:
    thread = _thread.get()
    if thread.thread.is_alive():
        asyncio.run_coroutine_threadsafe(http.aclose(), thread.loop)
