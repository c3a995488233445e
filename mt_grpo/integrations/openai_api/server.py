"""The policy over HTTP: a server on this machine with OpenAI's and Anthropic's APIs, while there are conversations."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from urllib.parse import quote

import orjson
from aiohttp import web
from aiohttp.http import HttpProcessingError

from mt_grpo.envs.protocols import CallProtocol
from mt_grpo.integrations.openai_api.conversation import Conversation
from mt_grpo.integrations.openai_api.dialects import DIALECTS, Dialect, Messages, Responses
from mt_grpo.integrations.openai_api.request import OVER, ApiError, ParsedRequest, Warnings, read_chat
from mt_grpo.rollout.policy import ConversationPolicy

logger = logging.getLogger(__name__)


class _UnauthorizedAttempts:
    """Counts requests without a conversation's key, or that are no HTTP, for one log line."""

    def __init__(self) -> None:
        self._count, self._told = 0, False
        self.log = logging.Logger(f"{__name__}.http")  # outside the tree of loggers: it writes nothing itself
        self.log.addFilter(self._judge)

    def note(self) -> None:
        self._count += 1

    def warn(self) -> None:
        """Logs their number, once."""
        if self._count and not self._told:
            self._told = True
            logger.warning(
                "Requests that the server of the agents refused: %d so far. They are no HTTP, or have no key of a "
                "conversation; agents find theirs in `client.api_key` or `OPENAI_API_KEY`. This is said once.",
                self._count,
            )

    def _judge(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self.note()
        elif isinstance(error, (web.RequestPayloadError, ConnectionError)):
            pass  # a damaged body or a closed connection, which is answered elsewhere
        elif record.levelno >= logging.ERROR:  # a bug
            logger.error("The server of the agents could not answer a request.", exc_info=error)
        return False


_LARGEST = 8 << 20  # largest size of a request in bytes: several times the text of the longest contexts
_ENDED = 4096  # number of ended conversations whose keys are kept, so that late requests are told that theirs is over
_OPEN_FILES = 8192  # number of open files and connections for this process, if the system allows as many
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Endpoint:
    """
    Serves the policies of the conversations under way, each under a path of its own,

        POST http://127.0.0.1:PORT/SESSION/v1/chat/completions

    (also `/responses`, Anthropic's `/messages`, and what counts the tokens of both), or under `/v1/...` with the
    header `X-Session-ID: SESSION`. It runs as long as there are conversations. Each conversation has a key of its own,
    without which no request reaches it. `relay_key` reaches every conversation by a name that `add_session` gave it,
    for code of this process that serves several with one client; agents never get it.
    """

    def __init__(self, host: str = _LOOPBACK[0]) -> None:
        self.host, self.relay_key = host, secrets.token_urlsafe(24)
        self._warnings, self._unauthorized = Warnings(), _UnauthorizedAttempts()
        self._conversations: dict[str, Conversation] = {}
        self._keys: dict[str, Conversation] = {}
        self._ended: deque[str] = deque(maxlen=_ENDED)  # keys
        self._entered = 0
        self._start: asyncio.Future[tuple[web.AppRunner, int]] | None = None

    @contextlib.asynccontextmanager
    async def conversation(
        self, policy: ConversationPolicy, protocol: CallProtocol | None = None, session: str | None = None
    ) -> AsyncIterator[Conversation]:
        """Serves a policy inside the context; `protocol` writes and reads calls as text, see `Calls`."""
        session = policy.session if session is None else session
        self._entered += 1
        if self._start is None:
            self._start = asyncio.ensure_future(self._listen())
        start = self._start
        try:
            _, port = await asyncio.shield(start)
            host = f"[{self.host}]" if ":" in self.host else self.host
            base_url = f"http://{host}:{port}/{quote(session, safe='')}/v1"
            conversation = Conversation(policy, protocol, base_url, secrets.token_urlsafe(24))
            self._conversations[session] = conversation
            self._keys[conversation.api_key] = conversation
            try:
                yield conversation
            finally:
                for name in (session, *conversation.names):
                    del self._conversations[name]
                del self._keys[conversation.api_key]
                self._ended.append(conversation.api_key)
                conversation.retries.cancel()
        finally:
            self._entered -= 1
            if self._entered == 0:
                self._start = None
                await (await start)[0].cleanup()
                self._unauthorized.warn()

    def add_session(self, conversation: Conversation, name: str) -> None:
        """Gives a conversation a further name until it ends; may be called from any thread."""
        if name in self._conversations:
            raise ValueError(f"A conversation has the name {name!r} already.")
        self._conversations[name] = conversation
        conversation.names.append(name)

    async def _listen(self) -> tuple[web.AppRunner, int]:
        _allow_files()
        app = web.Application(client_max_size=_LARGEST, middlewares=[self._guard])
        for prefix in ("", "/{session}"):
            for dialect in DIALECTS:
                app.router.add_post(f"{prefix}/v1/{dialect.path}", partial(self._serve, dialect.path))
            app.router.add_post(f"{prefix}/v1/responses/input_tokens", partial(self._count, Responses.path))
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", partial(self._count, Messages.path))
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0, logger=self._unauthorized.log)
        await runner.setup()
        await web.TCPSite(runner, self.host, 0, backlog=_OPEN_FILES).start()
        return runner, runner.addresses[0][1]

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuses requests without a key, and answers errors in a form that clients read."""
        try:
            self._admit(request)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            error = ApiError(413, f"The request has more than {_LARGEST} bytes.", "request_too_large")
        except web.HTTPException as wrong:
            error = ApiError(wrong.status, f"There is no {request.method} {request.path}.", "not_found")
        except web.RequestPayloadError:
            error = ApiError(400, "The body of the request is damaged: its encoding is not what its headers say.")
        except ApiError as refusal:
            error = refusal
        key = self._key(request)
        asked = self._keys.get(key)
        if asked is None and key == self.relay_key:
            asked = self._conversations.get(self._session(request) or "")
        if asked is not None and request.method == "POST":  # clients look around with other methods
            asked.note_refusal(error)
        return web.json_response(error.body, status=error.status, headers=error.headers)

    def _admit(self, request: web.Request) -> None:
        try:
            host = request.url.host
        except ValueError:  # a port that is none, for instance
            host = None
        if self.host in _LOOPBACK and host not in _LOOPBACK:  # a page in a browser, by DNS rebinding
            self._unauthorized.note()
            raise ApiError(403, f"This server is for {self.host} alone.", "wrong_host")
        key = self._key(request)
        if key != self.relay_key and key not in self._keys and key not in self._ended:
            self._unauthorized.note()
            raise ApiError(401, "The API key is missing or wrong.", "invalid_api_key")

    def _session(self, request: web.Request) -> str | None:
        return request.match_info.get("session", request.headers.get("X-Session-ID"))

    def _key(self, request: web.Request) -> str:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")

    def _found(self, request: web.Request) -> Conversation:
        """The conversation that a request names, if its key is right."""
        key, session = self._key(request), self._session(request)
        if session is None:
            raise ApiError(404, "No conversation is named: set the header `X-Session-ID`.", "conversation_not_found")
        found = self._conversations.get(session)
        if found is None or key != found.api_key and (key != self.relay_key or session not in found.names):
            message = f"There is no conversation {session!r} for this key: it is over, or has not begun."
            raise ApiError(404, message, "conversation_not_found")
        return found

    async def _read(self, path: str, request: web.Request) -> tuple[Conversation, Dialect, bytes, ParsedRequest]:
        """Reads a request as a chat completion; also its conversation, its dialect, and its bytes."""
        content = await request.read()
        conversation = self._found(request)
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"The body of the request is no JSON: {error}.", "invalid_json") from error
        dialect = conversation.dialects[path]
        parsed = read_chat(body, dialect.fields, dialect.as_chat, conversation.fixed, self._warnings)
        return conversation, dialect, content, parsed

    async def _count(self, path: str, request: web.Request) -> web.StreamResponse:
        """Answers how many tokens a request has."""
        conversation, dialect, _, parsed = await self._read(path, request)
        return web.json_response({**dialect.counted, "input_tokens": await conversation.count(parsed)})

    async def _serve(self, path: str, request: web.Request) -> web.StreamResponse:
        """Reads a request, has it answered, and writes the answer in the client's dialect."""
        conversation, dialect, content, parsed = await self._read(path, request)

        async def answer() -> tuple[bytes, ...]:
            return tuple(dialect.answer(parsed, await conversation.choices(parsed)))

        attempt = conversation.retries.attempt(content, request.headers, answer)
        try:
            parts = await asyncio.shield(attempt.answer)
        except asyncio.CancelledError:
            if attempt.answer.cancelled():
                raise ApiError(404, "The conversation ended before the turn did.", OVER) from None
            raise
        if parsed.stream:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        else:
            response = web.Response(body=parts[0], content_type="application/json")
        with contextlib.suppress(ConnectionError):  # the client is gone; a retry gets this answer
            await response.prepare(request)
            if parsed.stream:
                for part in parts:
                    await response.write(part)
            await response.write_eof()
            attempt.delivered = True
        return response

    async def _models(self, request: web.Request) -> web.Response:
        asked = request.match_info.get("model")
        model = {"id": asked or "policy", "object": "model", "created": 0, "owned_by": "mt_grpo"}
        return web.json_response({"object": "list", "data": [model]} if asked is None else model)


def _allow_files() -> None:
    """Raises the limit of open files: a conversation needs two and more, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
