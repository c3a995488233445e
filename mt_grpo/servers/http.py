"""
HTTP to a vLLM server, and the check that it can serve a run. Every failure is one sentence with the URL, the status
and the server's words.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import aiohttp
import orjson

from mt_grpo.concurrency import run
from mt_grpo.errors import EngineError, ServerSetupError, WeightSyncError
from mt_grpo.vllm_plugin import IDENTITY, StoredKey

T = TypeVar("T")

CONNECT_TIMEOUT = 5.0
"""Seconds after which a host that does not answer counts as unreachable."""
_KEEP_ALIVE = 4.0
"""Seconds that an idle connection is kept: a little less than vLLM keeps it, so that it is not closed in use."""
_PROBE = 'The 3 quick-brown foxes\n\tsaid: «naïve café» → 東京 {"x": 1.5}'
_REPEATABLE = {408, 425, 429}
_NO_ROUTE = 404
"""The answer of some proxies while the server behind them starts, and that of a server without this endpoint."""
POLL = 0.5
"""Seconds between looks at a server that is down."""
_FIRST_TOLD = 10.0  # seconds after which a wait is told of again
_CHECK_TIMEOUT = 60.0  # seconds for a call of the checks at the start
_LAST_WORDS = 10.0  # seconds for a call that tidies up after a failure


DELAYS = (0.25, 0.5, 1.0)
"""Seconds before a control call is repeated."""

_Read = Callable[[Any], Any]  # takes from an answer what is wanted, or raises as a lookup does


def _whole(answer: object) -> Any:
    return answer


class RequestFailed(EngineError):
    """A request came back without a usable answer."""

    def __init__(self, message: str, repeat: bool, unreachable: bool = False, status: int | None = None) -> None:
        super().__init__(message)
        self.repeat = repeat
        self.unreachable = unreachable
        self.status = status


def find_key(base_url: str) -> str | None:
    """A server's key: `VLLM_API_KEY`, or what a server of this machine left for its user; else `None`."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        return os.environ.get("VLLM_API_KEY") or StoredKey(parts.hostname, port).read()
    except PermissionError as error:
        raise ServerSetupError(str(error)) from error


def _headers(api_key: str | None) -> dict[str, str]:
    """The headers of every request. No cache on the way may answer it."""
    always = {"Content-Type": "application/json", "Cache-Control": "no-cache, no-store", "Pragma": "no-cache"}
    return always | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


def open_session() -> aiohttp.ClientSession:
    """Opens connections of the running event loop, to any number of servers and without a limit."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE))


def _read_answer(request: str, status: int, body: bytes) -> Any:
    """The decoded JSON of an answer, `None` for an empty one."""
    if status != 200:
        raise RequestFailed(
            f"{request} was answered with HTTP {status}: {_words(body)}",
            repeat=_passes(status) or status < 400,  # vLLM says 200 or what is wrong: someone else answered for it
            status=status,
        )
    try:
        return orjson.loads(body) if body else None
    except ValueError as error:
        raise RequestFailed(
            f"{request} was answered with something that is not JSON: {_cut(body.decode(errors='replace'))}", True
        ) from error


def _no_answer(request: str, error: Exception) -> RequestFailed:
    """The failure for a lost connection or a timeout."""
    words = str(error) or "nothing was said"
    if isinstance(error, aiohttp.ClientResponseError):
        return RequestFailed(
            f"{request} was answered with something that is not HTTP: {error.message}", True, True, error.status
        )
    if isinstance(error, TimeoutError):
        words = "it took longer than the time limit of a request"
    return RequestFailed(f"{request} got no answer ({type(error).__name__}: {words}).", True, unreachable=True)


@dataclass(eq=False)
class Server:
    """
    One server as its clients see it. Control calls (`get`, `post`) are made from plain functions, each over a
    connection of its own: after an error the server closes it, perhaps under the next call. One that fails in a way
    that may pass is repeated after `DELAYS`.
    """

    url: str
    api_key: str | None = None
    timeout: float = 300.0
    down_since: float | None = None
    fault: str = ""
    fingerprint: str | None = None
    past: set[str] = field(default_factory=set)
    failure: BaseException | None = None
    context_length: int = 0
    version: str | None = None
    awaits_proof: bool = False
    drops: int = 0
    sessions: set[str] = field(default_factory=set)
    layout: Any = None
    images: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.url, self.key = self.url.rstrip("/"), self.api_key

    def renew_key(self) -> bool:
        """Looks up its key again after a refusal. Returns whether the key changed, as it does after a restart."""
        before, self.key = self.key, self.api_key or find_key(self.url)
        return self.key != before

    @property
    def up(self) -> bool:
        """Whether conversations are sent to it."""
        return self.down_since is None

    def drop(self, fault: str) -> None:
        """Leaves the server out until `mark_up`."""
        if self.up:
            self.down_since, self.fault = time.monotonic(), fault
            self.drops += 1

    def mark_up(self) -> None:
        """Uses the server for conversations again."""
        self.down_since, self.fault, self.fingerprint, self.images = None, "", None, set()

    def setup_error(self, fault: str) -> ServerSetupError:
        """The error for a server that cannot serve a run."""
        return ServerSetupError(f"The vLLM server at {self.url} {fault}")

    def sync_error(self, fault: str) -> WeightSyncError:
        """The error for a server that cannot get weights, or has others."""
        return WeightSyncError(f"The vLLM server at {self.url} {fault}")

    async def exchange(
        self, http: aiohttp.ClientSession, method: str, path: str, content: bytes | None, timeout: float
    ) -> tuple[int, bytes, str | None]:
        """Its status, body and identity; it is asked again if it refuses the key and there is another."""
        limit = aiohttp.ClientTimeout(timeout, sock_connect=CONNECT_TIMEOUT)
        url = self.url + path
        if method == "GET":  # some caches keep answers whatever the headers say, each under its address
            url += f"{'&' if '?' in path else '?'}asked={time.time_ns()}"
        while True:
            key = self.key
            try:
                async with http.request(method, url, data=content, timeout=limit, headers=_headers(key)) as answer:
                    status, body, identity = answer.status, await answer.read(), answer.headers.get(IDENTITY)
            except (TimeoutError, aiohttp.ClientError) as error:
                raise _no_answer(f"{method} {self.url}{path}", error) from error
            # another request may have looked the key up meanwhile
            if status != 401 or not (self.key != key or self.renew_key()):
                return status, body, identity

    async def ask(
        self,
        http: aiohttp.ClientSession,
        method: str,
        path: str,
        content: bytes | None = None,
        timeout: float = CONNECT_TIMEOUT,
    ) -> Any:
        """Its decoded answer, or `RequestFailed`."""
        answer, _ = await self.ask_identified(http, method, path, content, timeout)
        return answer

    async def ask_identified(
        self, http: aiohttp.ClientSession, method: str, path: str, content: bytes | None, timeout: float
    ) -> tuple[Any, str | None]:
        """Its decoded answer, and the identity that its guard gives it; `None` where there is no guard."""
        status, body, identity = await self.exchange(http, method, path, content, timeout)
        return _read_answer(f"{method} {self.url}{path}", status, body), identity

    async def ask_text(self, http: aiohttp.ClientSession, path: str) -> str:
        """What it says at a path, whatever that is, or `RequestFailed`: of `/health` the status says all."""
        status, body, _ = await self.exchange(http, "GET", path, None, CONNECT_TIMEOUT)
        if status != 200:
            _read_answer(f"GET {self.url}{path}", status, body)
        return body.decode(errors="replace")

    async def check(self, model: str | None, tokenizer: Any, several: bool = False) -> None:
        """Compares the server with what the trainer expects, and notes its context length and its version."""
        url = self.url
        async with open_session() as http:

            async def call(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
                content = None if body is None else orjson.dumps(body)
                return await self.ask(http, method, path, content, _CHECK_TIMEOUT)

            get, post = functools.partial(call, "GET"), functools.partial(call, "POST")
            try:
                try:
                    models = (await get("/v1/models"))["data"]
                except RequestFailed as error:
                    if error.status is not None or error.unreachable:
                        raise
                    models = (await get("/v1/models"))["data"]  # half an answer; another kind of page stays one
                served = next((entry for entry in models if model is None or _same(model, entry)), None)
                roots = ", ".join(repr(entry["root"]) for entry in models)
                length = 0 if served is None else int(served["max_model_len"])
                if served is not None and length < 1:
                    raise ValueError(length)
            except RequestFailed as error:
                if error.status == 401:
                    raise self.setup_error(
                        "refuses the API key: start server and trainer with the same `VLLM_API_KEY`, or both without "
                        "it, on one machine and as one user."
                    ) from error
                if error.unreachable or (error.status is not None and _passes(error.status)):
                    raise
                raise _foreign(url, str(error)) from error
            except (KeyError, TypeError, ValueError) as error:
                raise _foreign(url, f"GET {url}/v1/models was answered with no list of models") from error
            await self._check_router(get)
            if served is None:
                raise self.setup_error(f"serves {roots}, not {model!r}: start it with this run's recipe.")
            text = _PROBE + "".join(sorted(tokenizer.get_added_vocab()))
            body = {"model": served["id"], "prompt": text, "add_special_tokens": False}
            tokens = find_in(await post("/tokenize", body), itemgetter("tokens"), f"POST {url}/tokenize")
            if tokens != tokenizer.encode(text, add_special_tokens=False):
                raise self.setup_error(
                    "has a tokenizer that encodes text differently from the trainer's: start it with the model and "
                    "the tokenizer of this run's recipe."
                )
            try:
                info = await get("/server_info?config_format=json")
            except RequestFailed as error:
                if error.status != 404:
                    raise
                raise self.setup_error(
                    "has no endpoints for weight sync: start it with `mt-grpo serve`, or with "
                    "`VLLM_SERVER_DEV_MODE=1` in its environment and `--middleware mt_grpo.vllm_plugin.guard.Guard`."
                ) from error
            config = find_in(info, lambda it: dict(it["vllm_config"]["model_config"]), f"GET {url}/server_info")
            media, mode = config.get("multimodal_config"), config.get("logprobs_mode")
            if isinstance(media, dict) and media.get("mm_processor_cache_gb") == 0:
                raise self.setup_error(
                    "keeps no images, and dies of a request that names one: start it with `mt-grpo serve`, or without "
                    "`--mm-processor-cache-gb 0`."
                )
            if mode != "processed_logprobs":
                raise self.setup_error(
                    f"reports log-probabilities as {mode!r}, not those it samples with: start it with `mt-grpo "
                    "serve`, or with `--logprobs-mode processed_logprobs`."
                )
            if several:
                self.version = find_in(await get("/version"), itemgetter("version"), f"GET {url}/version")
            self.context_length = length

    async def _check_router(self, get: Callable[..., Awaitable[Any]]) -> None:
        """vLLM's router lists its workers. It sends a pause or an update to one of them, and answers as if to all."""
        try:
            workers = (await get("/workers"))["workers"]
            urls = ", ".join(worker["url"] for worker in workers)
        except RequestFailed as error:
            if error.unreachable or _passes(error.status or 200):
                raise
            return
        except (KeyError, TypeError):
            return
        raise ServerSetupError(router_words(self.url, f"is a router before {urls}"))

    def get(self, path: str, read: _Read = _whole, **params: str) -> Any:
        """GET; what `read` finds in the answer."""
        return self._insist("GET", path, None, params, read)

    def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        read: _Read = _whole,
        *,
        final: str = "",
        repeat: bool = True,
        timeout: float = 0.0,
        **params: str,
    ) -> Any:
        """POST; what `read` finds in the answer. A failure whose words have `final` in them is not repeated."""
        return self._insist("POST", path, body, params, read, final, repeat, max(timeout, self.timeout))

    def tidy_up(self, path: str, body: dict[str, Any] | None = None, **params: str) -> None:
        """POST after a failure, perhaps of the server: its result is ignored, and it takes a few seconds at most."""
        with contextlib.suppress(RequestFailed):
            self._call("POST", path, body, params, _LAST_WORDS)

    def setting(self, config: object, section: str, name: str, kind: Callable[[str], T]) -> T | None:
        """A setting in its configuration: `None` where the section is empty, `RequestFailed` where it is broken."""
        request = f"GET {self.url}/server_info"
        return find_in(config, lambda it: it[section] and kind(it[section][name]), request) or None

    def weight_version(self) -> str:
        """The weight version of the server."""
        return str(self.get("/weight_info", itemgetter("weight_version")))

    def healthy(self, repeat: bool = True) -> bool:
        """Whether the server says so; it is asked once without `repeat`. It may answer though its engine has died."""
        try:
            self._insist("GET", "/health", repeat=repeat, timeout=min(self.timeout, CONNECT_TIMEOUT))
        except RequestFailed:
            return False
        return True

    def _insist(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
        read: _Read = _whole,
        final: str = "",
        repeat: bool = True,
        timeout: float = 0.0,
    ) -> Any:
        first: RequestFailed | None = None
        for delay in (*DELAYS, None):
            try:
                answer = self._call(method, path, body, params, timeout or self.timeout)
                return find_in(answer, read, f"{method} {self.url}{path}")
            except RequestFailed as error:
                lost = isinstance(error.__cause__, (TimeoutError, aiohttp.ClientConnectorError))
                passes = error.repeat or error.status == _NO_ROUTE
                if lost or not repeat or not passes or (final and re.search(final, str(error))):
                    raise
                first = first or error  # the cause; what comes after it may be a consequence
                if delay is None:
                    raise (error if error.unreachable else first) from error.__cause__
            time.sleep(delay)

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, params: dict[str, str] | None, limit: float
    ) -> Any:
        content = None if body is None else orjson.dumps(body)
        target = f"{path}?{urlencode(params)}" if params else path
        if self.key is None:
            self.renew_key()

        async def call() -> tuple[int, bytes, str | None]:
            async with open_session() as http:
                return await self.exchange(http, method, target, content, limit)

        status, answer, _ = run(call())
        if status == 200 and (path.endswith("_lora_adapter") or path == "/health"):  # answered in plain words
            return answer.decode(errors="replace")
        return _read_answer(f"{method} {self.url}{target}", status, answer)


def find_in(answer: object, read: _Read, request: str) -> Any:
    """What `read` finds in an answer; `RequestFailed` if it is not there."""
    try:
        return read(answer)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        shown = _cut(str(answer))
        raise RequestFailed(f"{request} was answered without what was asked for: {shown}", True) from error


async def wait_for_servers(
    servers: list[Server],
    enough: int,
    since: float,
    timeout: float,
    progress: Callable[[str], None],
    check: Callable[[Server], Awaitable[None]] | None = None,
) -> list[Server]:
    """Asks servers for their health, again and again, until enough of them answer."""
    silent, told = list(servers), 0.0
    async with open_session() as http:

        async def hear(server: Server) -> None:
            try:
                await server.ask_text(http, "/health")
                if check is not None:
                    await check(server)
                silent.remove(server)
            except RequestFailed as error:
                server.fault = str(error)
                # a server that has fitted before may be restarting behind a proxy, which does not ask for keys
                restarts = server.context_length and error.status not in (401, 403)
                if error.status is not None and not (_passes(error.status) or restarts):
                    raise _foreign(server.url, str(error)) from error

        while True:
            # at the same time, since each that does not answer takes seconds
            for failure in await asyncio.gather(*map(hear, silent), return_exceptions=True):
                if failure is not None:
                    raise failure
            waited = time.monotonic() - since
            if len(servers) - len(silent) >= enough or waited >= timeout:
                return silent
            if waited >= told:
                urls = ", ".join(server.url for server in silent)
                progress(
                    f"Waiting for the vLLM server at {urls}, which `mt-grpo serve` starts ({waited:.0f} of "
                    f"{timeout:.0f} s)."
                )
                told = max(2 * told, _FIRST_TOLD)  # a server that takes minutes is told of a few times
            await asyncio.sleep(min(POLL, max(0.0, timeout - waited)))


def _passes(status: int) -> bool:
    """Whether a refusal with this status may pass by itself."""
    return status >= 500 or status in _REPEATABLE


def _foreign(url: str, words: str) -> ServerSetupError:
    return ServerSetupError(
        f"What answers at {url} is no vLLM server ({words.removesuffix('.')}): give the address of one, which "
        "`mt-grpo serve` starts."
    )


def _words(body: bytes) -> str:
    """The server's message, from any of the forms in which vLLM reports errors."""
    try:
        answer = orjson.loads(body)
    except ValueError:
        return _cut(body.decode(errors="replace"))
    for key in ("error", "message", "detail"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return _cut(answer if isinstance(answer, str) else json.dumps(answer))


def _cut(text: str, length: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]} ..."


def router_words(url: str, what: str) -> str:
    """Why weights are not sent to a router."""
    return (
        f"What answers at {url} {what}: a pause, weights and their proof would reach one server only, so name the "
        "servers themselves in `vllm_server_base_url`; the conversations of a group stay on one of them all the same."
    )


def _same(model: str, entry: dict[str, Any]) -> bool:
    """Whether two model names agree. Of local folders only the last part counts: the server's may be elsewhere."""
    return model in (entry["id"], entry["root"]) or Path(model).name == Path(entry["root"]).name
