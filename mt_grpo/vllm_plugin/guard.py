"""The guard before a server's endpoints: `--middleware mt_grpo.vllm_plugin.guard.Guard`; see docs/server.md."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import os
import secrets
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from mt_grpo.vllm_plugin import IDENTITY, StoredKey
from mt_grpo.vllm_plugin.fetch import Fetcher, FetchError

Message = dict[str, Any]
_Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_App = Callable[[Message, _Receive, Send], Awaitable[None]]

_HEALTH = ("GET", "/health")
FETCH = "/mt_grpo/fetch"
"""The guard's own endpoint: brings a file of weights here, see `fetch.py`."""
_MAX_BODY = 2**14  # most bytes of a request to it
BODY_TIMEOUT = 30.0
"""Most seconds that such a request may take to arrive."""
_BEGINS = frozenset(
    {
        _HEALTH,
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/inference/v1/generate"),
    }
)
"""What is refused from the moment the server is told to end, so that clients go elsewhere."""
ALLOWED = frozenset(
    {
        _HEALTH,
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("GET", "/metrics"),
        ("GET", "/server_info"),
        ("GET", "/get_world_size"),
        ("GET", "/is_paused"),
        ("GET", "/weight_info"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/tokenize"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/reset_encoder_cache"),
        ("POST", "/init_weight_transfer_engine"),
        ("POST", "/start_weight_update"),
        ("POST", "/update_weights"),
        ("POST", "/finish_weight_update"),
        ("POST", "/update_weight_version"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
    }
)
"""The endpoints that a trainer and its user need. Paths are compared decoded and exactly, as the router does."""

SCHEDULING = frozenset({("POST", "/sleep", b"level=0&mode=keep"), ("POST", "/wake_up", b"tags=scheduling")})
"""A pause and its end, with their whole queries: with another one, these endpoints take the weights out of memory."""

SLEEP = frozenset(
    {
        ("POST", "/sleep", b"level=1&mode=abort"),
        ("POST", "/sleep", b"level=2&mode=abort"),
        ("POST", "/wake_up", b"tags=weights"),
        ("POST", "/wake_up", b"tags=kv_cache"),
    }
)
"""What frees memory and takes it back. Only a server that shares its trainer's GPUs is asked for it."""

SLEEPS = "MT_GRPO_SLEEPS"
"""Environment variable of such a server."""


class Guard:
    """
    ASGI middleware around the whole server, since vLLM's development endpoints run any method of a worker for anyone.
    A request passes only if its method and path are in `allowed`, or with its query in `SCHEDULING` (where GPUs are
    shared with the trainer, `SLEEP`), it has no `Origin` header as those of web pages have, and it has the key
    (`Authorization: Bearer KEY`), except for the health check. The key is `--api-key`, `VLLM_API_KEY`, or one that the
    server makes, which trainers of the same user on this machine can read. From SIGTERM on, health and completions are
    answered with 503, while vLLM finishes the requests under way.
    """

    allowed = ALLOWED

    def __init__(self, app: _App) -> None:
        self._app = app
        self._keys: list[str] = []
        self._fetcher = Fetcher()
        self._queries = SCHEDULING | SLEEP if os.environ.get(SLEEPS) else SCHEDULING
        self._ending = False
        self._identity: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Message, receive: _Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                with self._listening():
                    await self._live(scope, receive, send)
            finally:
                self._fetcher.close()
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif (refusal := self._refusal(scope)) is not None:
            await _refuse(send, *refusal)
        elif scope["path"] == FETCH:
            await self._fetch(receive, send)
        else:

            async def named(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], *self._identity]}
                await send(message)

            await self._app(scope, receive, named)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Notices the signals that end the server, and leaves them to it."""
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        if threading.current_thread() is not threading.main_thread():  # others get no signals
            handlers = {}

        def heard(before: Callable[..., object], number: int, frame: object) -> None:
            self._ending = True
            before(number, frame)

        for number, before in handlers.items():
            if callable(before):
                signal.signal(number, functools.partial(heard, before))
        try:
            yield
        finally:
            for number, before in handlers.items():
                signal.signal(number, before)

    async def _live(self, scope: Message, receive: _Receive, send: Send) -> None:
        args = scope["app"].state.args
        self._keys = [key for key in args.api_key or [os.environ.get("VLLM_API_KEY")] if key]
        # one of its own where this is the server's only process: what is given may be that of other servers too
        alone = vars(args).get("api_server_count") in (None, 1)
        if identity := secrets.token_hex(8) if alone else vars(args).get("fingerprint_value"):
            self._identity = [(IDENTITY.encode(), identity.encode())]
        if self._keys:
            return await self._app(scope, receive, send)
        key, stored = secrets.token_urlsafe(32), StoredKey(args.host, args.port)
        self._keys = [key]

        async def announce(message: Message) -> None:
            # not before: the port is this server's by now, and nobody else can wait there for the key
            if message["type"] == "lifespan.startup.complete":
                stored.write(key)
            await send(message)

        try:
            await self._app(scope, receive, announce)
        finally:
            stored.remove(key)

    async def _fetch(self, receive: _Receive, send: Send) -> None:
        try:
            asked = json.loads(await asyncio.wait_for(_body(receive), BODY_TIMEOUT))
            path = await asyncio.to_thread(self._fetcher.fetch, **asked)
        except TimeoutError:
            await _answer(send, 408, {"error": f"The request did not arrive within {BODY_TIMEOUT:.0f} s."})
        except (FetchError, ValueError, TypeError, RecursionError) as error:
            await _answer(send, 424, {"error": str(error)})  # 502 is a proxy's, and may pass
        else:
            await _answer(send, 200, {"path": path})

    def _refusal(self, scope: Message) -> tuple[int, str] | None:
        """Status and reason if a request does not pass; `None` if it does."""
        headers = dict(scope["headers"])
        request = (scope["method"], scope["path"])
        if b"origin" in headers:
            return 403, "Requests of web pages are refused."
        if self._ending and request in _BEGINS:
            return 503, "This server is shutting down."
        if request not in (*self.allowed, ("POST", FETCH)) and (*request, scope["query_string"]) not in self._queries:
            return 403, "This server answers its trainer's requests only, and this is none of them."
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        known = [hmac.compare_digest(given, key.encode()) for key in self._keys]
        if request == _HEALTH or (scheme.lower() == b"bearer" and any(known)):
            return None
        return 401, "The key of this server is missing or wrong."


async def _body(receive: _Receive) -> bytes:
    """The body of a request. Raises `ValueError` if it is too long."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > _MAX_BODY:
            raise ValueError(f"A request for a file takes at most {_MAX_BODY} bytes.")
    return body


async def _refuse(send: Send, status: int, reason: str) -> None:
    await _answer(send, status, {"error": reason}, *([(b"www-authenticate", b"Bearer")] if status == 401 else []))


async def _answer(send: Send, status: int, content: dict[str, str], *more: tuple[bytes, bytes]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
