"""
The policy over HTTP: a server on this machine with OpenAI's and Anthropic's APIs, while there are conversations. Each
turn is sampled once, also if the client retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.parse import quote

import orjson
from aiohttp import web
from aiohttp.http import HttpProcessingError

from mt_grpo.envs.env import ConversationEnded
from mt_grpo.envs.protocols import CallProtocol, NativeProtocol, PlainTextProtocol, instruct
from mt_grpo.errors import EngineError
from mt_grpo.integrations.openai_api.dialects import DIALECTS, Choice, Dialect, Messages, Responses
from mt_grpo.integrations.openai_api.request import (
    NO_ROOM,
    OVER,
    ApiError,
    Fields,
    ParsedRequest,
    Warnings,
    read_chat,
)
from mt_grpo.media import MediumError
from mt_grpo.rollout.policy import ConversationPolicy
from mt_grpo.rollout.rendering import identity
from mt_grpo.trajectory import Message, StopReason, ToolCall, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class _UnreadCalls(PlainTextProtocol):
    """Parses no calls, though the chat template shows the tools."""

    native_tools = True


_UNREAD, _NATIVE = _UnreadCalls(), NativeProtocol()


class _Calls:
    """The tool calls of one conversation: how they are shown to the model and parsed, and their results."""

    def __init__(self, protocol: CallProtocol | None, tokenizer: PreTrainedTokenizerBase) -> None:
        self._protocol = None if protocol is None or protocol.native_tools else protocol
        self._tokenizer = tokenizer
        self._tools: list[Fields] | None = None
        self._made: dict[str, tuple[Turn, ToolCall]] = {}  # calls by identifier

    def options(self, parsed: ParsedRequest) -> Fields:
        """Arguments of `Policy.reply` beside the messages."""
        if self._protocol is not None:
            return {"stop": (*self._protocol.stop, *parsed.stop), "protocol": self._protocol}
        if parsed.tools is not None and self._tokenizer.response_template is None:
            says = "Nothing is known that reads tool calls of the model's chat template: set `response_template` on "
            says += "the tokenizer, or `call_protocol: tags` in the recipe."
            raise ApiError(400, says, "invalid_value", "tools")
        if parsed.tools != self._tools:  # keep the same list object: the renderer is found by it
            self._tools = parsed.tools
        protocol = None if parsed.tools is None else _NATIVE if parsed.reads_calls else _UNREAD
        return {"stop": parsed.stop, "tools": self._tools, "protocol": protocol}

    def written(self, messages: list[Message], parsed: ParsedRequest) -> list[Message]:
        """Messages as the model sees them: a text protocol adds its instructions to the system message."""
        if self._protocol is None:
            return messages
        written: list[Message] = []
        for by_tool, group in groupby(messages, lambda message: message["role"] == "tool"):
            if by_tool:
                results = [ToolCall("", result=message["content"]) for message in group]
                written += self._protocol.replies(Turn(0, {}, results))
            else:
                # calls are part of the content
                written += [{name: message[name] for name in message if name != "tool_calls"} for message in group]
        if not parsed.tools:
            return written
        tools = [SimpleNamespace(schema=tool) for tool in parsed.tools]
        return instruct(written, self._protocol.instructions(tools))  # type: ignore[arg-type]  # it reads schemas only

    def note_results(self, messages: Sequence[Message]) -> list[tuple[Turn, list[Message]]]:
        """Stores the results in a client's messages in the calls that they answer."""
        answered: dict[int, tuple[Turn, list[Message]]] = {}
        for message in messages:
            if message["role"] == "tool" and message.get("tool_call_id") in self._made:
                turn, call = self._made[message["tool_call_id"]]
                if call.executed:
                    continue
                call.result, call.executed = message["content"], True
                failed = "is_error" in message or call.result.startswith("Error:")
                call.error = call.result.removeprefix("Error: ") if failed else None
                answered.setdefault(turn.index, (turn, []))[1].append(message)
        return list(answered.values())

    def name(self, turn: Turn) -> None:
        """Gives the calls of a turn identifiers that are unique in the conversation."""
        for call in turn.tool_calls:
            call.id = f"call{len(self._made):05d}"  # nine letters and digits: some templates want as many
            self._made[call.id] = turn, call

    def own(self, name: str | None) -> bool:
        """Whether a call of this conversation has this identifier."""
        return name in self._made


class _ReturnedMessages:
    """Turns by the messages that the client was sent, which may lack the stop string or the reasoning."""

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = {}

    def restore(self, messages: Sequence[Message], calls: _Calls) -> tuple[list[Message], int, Turn | None]:
        """The messages with the model's own, their key, and the turn of the assistant's last."""
        key, restored, latest = 0, [], None
        made: list[str | None] = []  # identifiers of the latest turn's calls
        named: dict[str | None, str | None] = {}  # the same, by those that the client gives them
        number = 0  # of results after that turn: clients that have identifiers of their own may leave them out
        for message in messages:
            if message["role"] == "tool":
                given = message.get("tool_call_id")
                if not calls.own(given) and (own := named.get(given) or next(iter(made[number:]), None)) is not None:
                    message = message | {"tool_call_id": own}
                number += 1
            key = hash((key, identity(message)))
            if message["role"] == "assistant":
                latest, number = self._turns.get(key), 0
                made = [] if latest is None else [call.id for call in latest.tool_calls]
                given_calls = [call.get("id") for call in message.get("tool_calls") or ()]
                named = {given: own for given, own in zip(given_calls, made, strict=False) if given is not None}
                message = message if latest is None else latest.message
            restored.append(message)
        return restored, key, latest

    def note(self, key: int, sent: Message, turn: Turn) -> None:
        """Remembers the message sent for a turn that was sampled after the messages with this key."""
        self._turns[hash((key, identity(sent)))] = turn


MOST_REQUESTS = 256  # largest number of waiting requests of a conversation; a further one is told to retry later


@dataclass(eq=False)
class _Attempt:
    """A request and the parts of its answer."""

    answer: asyncio.Future[tuple[bytes, ...]]
    delivered: bool = False


class _Retries:
    """
    The requests of one conversation. A request is a retry of an earlier one if

    - it has the same `Idempotency-Key` and the same body;
    - it says so (`x-stainless-retry-count` above 0, as OpenAI's clients do) and has the same body;
    - it does not say which attempt it is, and the same body is being answered, or its answer reached nobody.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, list[_Attempt]] = {}
        self.waiting = 0

    def attempt(
        self, content: bytes, headers: Mapping[str, str], answer: Callable[[], Awaitable[tuple[bytes, ...]]]
    ) -> _Attempt:
        """The earlier attempt that a request repeats, or else another one, for which `answer` is called."""
        once, count = headers.get("Idempotency-Key"), headers.get("x-stainless-retry-count")
        key = blake2b(content, digest_size=16).hexdigest() + ("" if once is None else f" {once}")
        same = self._attempts.setdefault(key, [])
        lost = [attempt for attempt in same if not attempt.delivered]
        if once is not None:
            repeated = same
        elif count is None:
            repeated = lost
        else:
            repeated = [] if count == "0" else lost or same
        if repeated:
            return repeated[-1]
        if self.waiting >= MOST_REQUESTS:
            message = f"{MOST_REQUESTS} requests of this conversation are waiting: ask again later."
            raise ApiError(429, message, "rate_limit_exceeded", again=True)
        attempt = _Attempt(asyncio.ensure_future(answer()))
        self.waiting += 1
        same.append(attempt)

        def end(answered: asyncio.Future[tuple[bytes, ...]]) -> None:
            self.waiting -= 1
            if answered.cancelled() or answered.exception() is not None:
                same.remove(attempt)  # its retry is a request of its own

        attempt.answer.add_done_callback(end)
        return attempt

    def cancel(self) -> None:
        """Cancels the requests that have no answer."""
        for attempts in self._attempts.values():
            for attempt in attempts:
                attempt.answer.cancel()


_FIXED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PENALTIES = ("presence_penalty", "frequency_penalty")
_CHARACTERS = 16  # tools and calls with more characters per token of the model's context are too long to be rendered
_MOST_REFUSED = 100  # number of refused requests in a row after which an agent is ended


class Conversation:
    """A conversation over HTTP. Turns of concurrent requests are sampled one after another; each is trained."""

    def __init__(self, policy: ConversationPolicy, protocol: CallProtocol | None, base_url: str, api_key: str) -> None:
        self.policy, self.base_url, self.api_key = policy, base_url, api_key
        self.fixed = {name: getattr(policy.sampling, name) for name in _FIXED} | dict.fromkeys(_PENALTIES, 0.0)
        self.limit: StopReason | None = None
        self.failure: EngineError | None = None
        self.refusal: str | None = None
        self.asked = self.sampled = False
        self.over = asyncio.Event()
        self.names: list[str] = []
        self.dialects = {dialect.path: dialect() for dialect in DIALECTS}
        self._calls = _Calls(protocol, policy.tokenizer)
        self._returned, self.retries = _ReturnedMessages(), _Retries()
        self._refused = 0

    async def choices(self, parsed: ParsedRequest) -> list[Choice]:
        self.asked = True
        options = self._calls.options(parsed)
        try:
            self._check_size(parsed)
            opened = list(await self.policy.opened(parsed.messages))
        except MediumError as error:
            raise _cannot_be_shown(error) from error
        except ConversationEnded as ended:
            raise self._refusal(ended) from ended
        restored, key, before = self._returned.restore(opened, self._calls)
        answered = self._calls.note_results(restored)
        messages = self._calls.written(restored, parsed)
        choices = [await self._choose(parsed, messages, options, key) for _ in range(parsed.n)]
        if before is not None and not before.replies:  # after turns of sub-agents, the policy cannot see this
            said = next(index for index in range(len(messages))[::-1] if messages[index]["role"] == "assistant")
            before.replies = messages[said + 1 :]
        for turn, results in answered:  # a turn whose past was rewritten, by a handoff for instance
            turn.replies = turn.replies or results
        return choices

    async def count(self, parsed: ParsedRequest) -> int:
        """Tokens of the context of the turn that a request would be answered with."""
        self.asked = True
        options = self._calls.options(parsed)
        try:
            self._check_size(parsed)
            restored, _, _ = self._returned.restore(await self.policy.opened(parsed.messages), self._calls)
            return await self.policy.count(self._calls.written(restored, parsed), **options)
        except ConversationEnded as ended:
            raise ApiError.of_end(ended) from ended
        except (TypeError, ValueError) as error:
            raise _cannot_be_shown(error) from error

    def _check_size(self, parsed: ParsedRequest) -> None:
        """Ends what the template would write whole: the renderer measures only the content of messages."""
        calls = [message["tool_calls"] for message in parsed.messages if "tool_calls" in message]
        size, most = len(json.dumps([parsed.tools, calls], ensure_ascii=False)), self.policy.context_length
        if size > _CHARACTERS * most:
            most_said = f"This model's maximum context length is {most} tokens"
            says = f"{most_said}, and tools and calls have {size} characters: the prompt is too long."
            raise ConversationEnded(StopReason.CONTEXT_FULL, says)

    async def _choose(self, parsed: ParsedRequest, messages: list[Message], options: Fields, key: int) -> Choice:
        try:
            turn = await self.policy.reply(messages, max_tokens=parsed.max_tokens, **options)
        except ConversationEnded as ended:
            raise self._refusal(ended) from ended
        except EngineError as error:
            self.failure = error
            raise ApiError(503, str(error), "engine_error") from error
        except Exception as error:
            if self.policy.failure is error:  # a bug of the engine: it ends the run
                raise ApiError(500, "The engine failed.", "engine_error") from error
            if isinstance(error, (TypeError, ValueError)):  # what the messages hold, or their template refuses
                raise _cannot_be_shown(error) from error
            raise
        exhausted = self.policy.exhausted
        own_limit = parsed.max_tokens is not None and turn.num_tokens >= parsed.max_tokens  # is no failure
        self.limit, self.failure, self._refused = None if own_limit else exhausted, None, 0
        self.sampled, self.refusal = True, None
        if not (parsed.tools and parsed.reads_calls):
            turn.error = None  # a text protocol misses a call where none was asked for
        self._calls.name(turn)
        choice = Choice.of(turn, parsed, self._token_logprobs() if parsed.logprobs else None)
        self._returned.note(key, choice.message, turn)
        return choice

    def _token_logprobs(self) -> list[Fields]:
        """The tokens of the latest turn with their log-probabilities."""
        ids, logprobs = self.policy.sampled
        texts = [self.policy.tokenizer.decode([token]) for token in ids]
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]

    def note_refusal(self, error: ApiError) -> None:
        """Keeps why a request was refused, since an agent may go on; not a limit or an engine's failure."""
        self.asked = True
        if error.again or error.status >= 500 or error.code in (NO_ROOM, OVER):
            return
        self.policy.refuse(error.message)
        if not (self.limit or self.failure):
            self.refusal = self.refusal or error.message

    def _refusal(self, ended: ConversationEnded) -> ApiError:
        """The error of a request that a limit refuses; counted, to end an agent that does not stop asking."""
        self.limit, self._refused = ended.stop_reason, self._refused + 1
        if self._refused >= _MOST_REFUSED:
            self.over.set()
        return ApiError.of_end(ended)


def _cannot_be_shown(error: Exception) -> ApiError:
    """The error of a request with messages that the chat template refuses."""
    return ApiError(400, f"These messages cannot be shown: {error}", "invalid_value", "messages")


# The server


class _UnauthorizedAttempts:
    """Counts requests without a conversation's key, or that are no HTTP, for one log line."""

    def __init__(self) -> None:
        self.count, self._told = 0, False
        self.log = logging.Logger(f"{__name__}.http")  # outside the tree of loggers: it writes nothing itself
        self.log.addFilter(self._judge)

    def warn(self) -> None:
        """Logs their number, once."""
        if self.count and not self._told:
            self._told = True
            logger.warning(
                "Requests that the server of the agents refused: %d so far. They are no HTTP, or have no key of a "
                "conversation; agents find theirs in `client.api_key` or `OPENAI_API_KEY`. This is said once.",
                self.count,
            )

    def _judge(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self.count += 1
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
    Serves the policies of the conversations under way, each with a key of its own, under `/SESSION/v1/...`, or under
    `/v1/...` with the header `X-Session-ID: SESSION`. `relay_key` reaches each by a name that `add_session` gave it,
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
            says = f"There is no {request.method} {request.path}: POST to chat/completions, messages or responses."
            error = ApiError(wrong.status, says, "not_found")
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
            self._unauthorized.count += 1
            raise ApiError(403, f"This server is for {self.host} alone.", "wrong_host")
        key = self._key(request)
        if key != self.relay_key and key not in self._keys and key not in self._ended:
            self._unauthorized.count += 1
            raise ApiError(401, "The API key is missing or wrong.", "invalid_api_key")

    def _session(self, request: web.Request) -> str | None:
        return request.match_info.get("session", request.headers.get("X-Session-ID"))

    def _key(self, request: web.Request) -> str:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        other = request.headers.get("x-api-key", request.headers.get("x-goog-api-key", ""))
        return key.strip() if scheme.lower() == "bearer" else other

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
