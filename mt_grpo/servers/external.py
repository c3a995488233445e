"""
Servers of others. They are asked over HTTP: an answer is whole in time, and of a bounded size once it is decompressed.
Of environment servers of one kind each conversation gets the one with the fewest, and none is asked too much.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import sys
import threading
import time
import weakref
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

import httpx

from mt_grpo.concurrency import ConcurrencyLimit, LoopThread, OnePerProcess, waiting
from mt_grpo.errors import ConfigError, describe_error

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


T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_STARTING = 16
"""Conversations that may begin on a server at the same time; others wait."""
_RETRY_AFTER = 30.0  # seconds in which a server that could not be reached is asked only if no other is left
START_TIMEOUT = 30.0
"""Seconds for which a conversation tries to begin while no server can be reached."""
FULL_TIMEOUT = 300.0
"""Seconds for which it waits for a place while others than this process hold all of them."""
POLL = 0.02  # seconds between looks for a free place, of the one conversation that is next
MIN_BACKOFF, MAX_BACKOFF = 0.1, 5.0

_random = random.SystemRandom()  # the processes of a run share the seeds of the other generators


def backoff(attempt: int) -> float:
    """Seconds before another attempt, evenly drawn below a bound that doubles ("full jitter", Brooker, AWS, 2015)."""
    return _random.uniform(0.0, min(MAX_BACKOFF, MIN_BACKOFF * 2.0 ** min(attempt, 16)))


def in_words(faults: Mapping[str, object]) -> str:
    """What is wrong with servers, by address, for a sentence: the first three, and how many there are besides."""
    said = [f"{url}: {fault}" for url, fault in faults.items()]
    return "; ".join([*said[:3], *([f"and {len(said) - 3} more"] if len(said) > 3 else [])])


class Unreachable(Exception):
    """A server on which nothing could begin; why, as a clause."""


class Full(Exception):
    """A server that answered that its places are taken."""


class ServerLost(Exception):
    """The server of a conversation is gone, and what was done there with it. It ends the conversation."""


@dataclass
class _Host:
    """What is known of one server."""

    taken: int = 0  # conversations on it, those that are about to begin among them
    begun: int = 0
    rests: float = 0.0  # until then
    places: float = math.inf  # as far as it has said
    refusals: int = 0  # in a row, of one conversation more than `places`
    ask: float = 0.0  # from then on one more may be tried
    starts: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit(MAX_STARTING))

    def order(self, now: float) -> tuple[bool, int, float]:
        """The least comes first. Ties are broken by chance: other processes have the same servers."""
        return self.rests > now, self.taken, _random.random()


class EnvServerPool:
    """Servers of one kind, for all event loops of the process."""

    def __init__(self, urls: Iterable[str], kind: str) -> None:
        self.kind = kind
        self._hosts = {url: _Host() for url in urls}
        self._lock = threading.Lock()
        self._entrance = ConcurrencyLimit(1)  # conversations begin in the order they came

    def __deepcopy__(self, memo: object) -> EnvServerPool:
        """The copy of an environment counts with it."""
        return self

    @property
    def urls(self) -> list[str]:
        """The addresses."""
        return list(self._hosts)

    async def begin(self, start: Callable[[str], Awaitable[T]], patience: float | None = None) -> tuple[str, T]:
        """Begins on the reachable server with room and the fewest conversations; give it back with `give`."""
        tried: set[str] = set()
        failure, deadline, rounds = Unreachable(), math.inf, 0
        while True:
            async with self._entrance:
                with waiting():
                    chosen = await self._next(tried)
            if chosen is None:
                pause, now = backoff(rounds), time.monotonic()
                deadline = min(deadline, now + min(START_TIMEOUT, math.inf if patience is None else patience))
                if now + pause > deadline:
                    raise ServerLost(f"No {self.kind} can be reached ({failure}).") from failure
                await asyncio.sleep(pause)
                tried.clear()
                rounds += 1
                continue
            url, asks = chosen
            host = self._hosts[url]
            try:
                async with host.starts:
                    if asks or host.begun < host.places:  # else another has just been told that it is full
                        begun = await start(url)
                        self._note_begun(url)
                        return url, begun
                self._release(url)
            except Full:
                self._note_full(url, asks)
                deadline, rounds = math.inf, 0
            except Unreachable as error:
                failure = error
                tried.add(url)
                self._release(url, str(error))
            except Exception as error:  # what fails fast would have the fewest, and fail all others too
                self._release(url, describe_error(error))
                raise
            except BaseException:
                self._release(url)
                raise

    def give(self, url: str, lost: str | None = None) -> None:
        """A conversation on a server is over."""
        with self._lock:
            self._hosts[url].begun -= 1
        self._release(url, lost)

    def rest(self, urls: Iterable[str]) -> None:
        """Servers are known to be gone: they are asked again as if a conversation had found out."""
        with self._lock:
            for url in urls:
                self._hosts[url].rests = time.monotonic() + _RETRY_AFTER

    async def _next(self, tried: set[str]) -> tuple[str, bool] | None:
        """The server to begin on, and whether this finds out its room; `None` if none is reachable."""
        since = time.monotonic()
        while True:
            with self._lock:
                now = time.monotonic()
                left = {url: host for url, host in self._hosts.items() if url not in tried or host.rests <= now}
                free = [url for url, host in left.items() if host.taken < host.places or host.ask <= now]
                if free:
                    return self._take(min(free, key=lambda url: left[url].order(now)), now)
                if not left:
                    return None
                if any(host.begun for host in self._hosts.values()):
                    since = now
            if now - since > FULL_TIMEOUT:
                raise ServerLost(f"No {self.kind} had room for a conversation for {FULL_TIMEOUT:g} s.")
            await asyncio.sleep(POLL)

    def _take(self, url: str, now: float) -> tuple[str, bool]:
        host = self._hosts[url]
        asks = host.taken >= host.places
        if asks:
            host.ask = math.inf  # one at a time
        if host.rests:
            host.rests = now + _RETRY_AFTER  # one finds out whether it is back
        host.taken += 1
        return url, asks

    def _note_begun(self, url: str) -> None:
        with self._lock:
            host = self._hosts[url]
            if host.rests:
                logger.warning("The %s at %s is back.", self.kind, url)
            host.rests = 0.0
            host.begun += 1
            if host.begun > host.places:
                host.places, host.refusals, host.ask = host.begun, 0, 0.0
            else:
                host.ask = min(host.ask, time.monotonic() + MAX_BACKOFF)

    def _note_full(self, url: str, asked: bool) -> None:
        with self._lock:
            host, now = self._hosts[url], time.monotonic()
            if host.places == math.inf:
                logger.warning(
                    "The %s at %s is full: conversations wait for room. Start it with more, or start more of them.",
                    self.kind,
                    url,
                )
            host.taken -= 1
            host.places = host.begun
            if asked or host.ask <= now:
                host.ask = now + backoff(host.refusals)
                host.refusals += 1

    def _release(self, url: str, lost: str | None = None) -> None:
        with self._lock:
            host, now = self._hosts[url], time.monotonic()
            host.taken -= 1
            host.ask = min(host.ask, now + MAX_BACKOFF)  # whoever was to find out has not
            if lost is not None:
                if host.rests <= now:
                    logger.warning(
                        "The %s at %s is passed over for %g s: %s.", self.kind, url, _RETRY_AFTER, lost.rstrip(".")
                    )
                host.rests = now + _RETRY_AFTER
