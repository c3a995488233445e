"""
A model behind any endpoint that speaks OpenAI's chat completions, as the policy of conversations: messages out, a
message back. It is written into the token tree with the run's own tokenizer and template, without log-probs, so that
such a conversation is shown, filtered and exported as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx

from mt_grpo.envs.env import ConversationEnded
from mt_grpo.envs.protocols import CallProtocol, NativeProtocol, with_valid_text
from mt_grpo.errors import ConfigError, EngineError, ServerGoneError, ServerSetupError
from mt_grpo.rollout.chat_template import TemplateError
from mt_grpo.rollout.engines import Sample, SamplingParams
from mt_grpo.rollout.policy import ConversationPolicy
from mt_grpo.runlog.files import whole
from mt_grpo.servers.external import BOUNDED, OpenAIEndpoint, retry_after
from mt_grpo.trajectory import Message, StopReason, ToolCall, ToolSchema, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_UNBOUNDED = 1 << 30  # tokens of the context of an endpoint that does not tell
_READ_SECONDS = 600.0  # seconds without a byte of an answer after which a request is made again
_ATTEMPTS = 6  # requests for one turn of which all may fail; a refusal of too many requests is no failure
_LONGEST_PAUSE = 60.0
_PATIENCE = 3600.0  # seconds for which a turn may be put off by a limit of rates
_MOST_LOST = 8  # turns in a row that got no answer after all attempts, after which the endpoint counts as gone
_OVERFLOW = re.compile(
    r"context.{0,10}(length|window|size|limit)|maximum.{0,10}(context|prompt|model length|number of tokens)"
    r"|prompt is too long|too many tokens|tokens.{0,30}must be <=",
    re.IGNORECASE,
)
_CUT = ("length", "max_tokens", "model_length")
"""Why a turn ended that has no end, in the words of OpenAI, Anthropic and Mistral."""
_DROPPABLE = (
    *("stop", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stream_options", "stream"),
    "max_tokens",
)
"""Fields of a request that an endpoint may not know: it is asked again without them."""


@dataclass
class _Completion:
    """What an endpoint answered."""

    content: str = ""
    thought: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(str)))
    finish_reason: str | None = None
    stopped_by: str | None = None
    usage: dict[str, int] = field(default_factory=dict)

    def add(self, part: dict[str, Any]) -> None:
        """Takes in a whole answer, or a part of a streamed one."""
        if usage := part.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            cached = cached or usage.get("cached_tokens") or usage.get("prompt_cache_hit_tokens")  # Kimi's, DeepSeek's
            counts = {"prompt": usage.get("prompt_tokens"), "cached": cached}
            counts |= {"completion": usage.get("completion_tokens")}
            self.usage = {name: int(count or 0) for name, count in counts.items()}
        for choice in [each for each in part.get("choices") or [] if not each.get("index")][:1]:
            said = choice.get("delta") or choice.get("message") or {}
            content = said.get("content") or said.get("refusal") or ""
            parts: list[dict[str, Any]] = [{"text": content}] if isinstance(content, str) else content
            for each in parts:  # Mistral's thoughts are some
                self.content += whole(each.get("text") or "")
                self.thought += "".join(whole(thought["text"]) for thought in each.get("thinking") or ())
            self.thought += whole(said.get("reasoning_content") or said.get("reasoning") or "")
            for place, call in enumerate(said.get("tool_calls") or []):
                number = self._number(call, place) if choice.get("delta") else place
                mine, function = self.calls[number], call.get("function") or {}
                mine["id"] = whole(str(call.get("id") or mine["id"]))
                mine["name"] += whole(function.get("name") or "")
                arguments = function.get("arguments") or ""
                mine["arguments"] += json.dumps(arguments) if isinstance(arguments, dict) else arguments
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stopped_by = choice.get("stop_reason") or self.stopped_by

    def _number(self, call: dict[str, Any], place: int) -> int:
        """Which call a part belongs to. Some endpoints number all of them 0, or none, and send each whole."""
        number, name = call.get("index"), str(call.get("id") or "")
        if isinstance(number, int) and number not in self.calls:  # whatever its id: some endpoints give all the same
            return number
        for place_of, begun in self.calls.items():
            if name and begun["id"] == name:
                return place_of
        if not isinstance(number, int):
            number = place if name or not self.calls else max(self.calls)
        return max(self.calls) + 1 if name and number in self.calls and self.calls[number]["id"] else number

    @property
    def is_cut(self) -> bool:
        """Whether it was ended by a limit of tokens."""
        return str(self.finish_reason).lower() in _CUT

    def end_at(self, stop: Sequence[str]) -> bool:
        """Ends the text with the first of these strings, as an engine does; whether it has one."""
        if self.stopped_by in stop:  # vLLM says which one it left out
            self.content += str(self.stopped_by)
        for end in stop:  # others do not; but what was opened was closed
            if _opening(end) is not None and self.content.rfind(str(_opening(end))) > self.content.rfind(end):
                self.content += end if self.finish_reason == "stop" else ""
        found = [self.content.index(end) + len(end) for end in stop if end in self.content]
        self.content = self.content[: min(found, default=None)]
        return bool(found)


def _opening(end: str) -> str | None:
    """The tag that a string closes."""
    return f"<{end[2:]}" if re.fullmatch(r"</\w+>", end) else None


class _Refused(Exception):
    """An endpoint's refusal: the status, its words, and the seconds after which it wants to be asked again."""

    def __init__(self, status: int, words: str, after: float | None = None) -> None:
        super().__init__(f"status {status}: {words}" if status else words)
        self.status, self.words, self.after = status, words, after or None


class ChatEndpoint:
    """
    Asks an endpoint for turns. Where it limits rates, all conversations wait as long as it says; what fails in a way
    that may pass is asked again. The key is in the variable `api_key_env`. `usage` has, by session, its `requests` and
    the tokens that the endpoint counted. Once `model` or `context_length` is read, an endpoint that cannot be reached,
    refuses the key or lacks the model is refused: `ConfigError`.
    """

    def __init__(
        self, url: str, model: str | None, tokenizer: PreTrainedTokenizerBase, api_key_env: str | None = None
    ) -> None:
        self._endpoint = OpenAIEndpoint(url, api_key_env, "--api_key_env")
        self.url, self.tokenizer, self._named = self._endpoint.url, tokenizer, model
        self.usage: dict[str, Counter[str]] = {}
        self._http: httpx.AsyncClient | None = None
        self._opens = 0.0  # no request before that, by the clock of `time.monotonic`
        self._lost = 0
        self._without: set[str] = set()
        self._limit = "max_tokens"

    @property
    def model(self) -> str:
        """The endpoint's name of the model."""
        return self._found[0]

    @property
    def context_length(self) -> int:
        """Tokens of its context, as far as the endpoint tells."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[str, int]:
        model, answer, listed = self._named, self._endpoint.ask_models(), None
        with contextlib.suppress(ValueError):
            listed = answer.json()
        entries = listed.get("data") if isinstance(listed, dict) and answer.response.is_success else None
        entries = entries if isinstance(entries, list) else []
        known = {str(each["id"]): each for each in entries if isinstance(each, dict) and "id" in each}
        if model is None:
            if len(known) != 1:
                some = f"has {len(known)} models, such as {next(iter(known))}" if known else "lists no model"
                raise ConfigError(f"The endpoint {self.url} {some}: name one, as `--model NAME@{self.url}`.")
            model = next(iter(known))
        length = known.get(model, {}).get("max_model_len")
        return model, length if isinstance(length, int) else _UNBOUNDED

    async def complete(
        self,
        messages: Sequence[Message],
        tools: list[ToolSchema] | None,
        drawing: SamplingParams,
        session: str,
    ) -> _Completion:
        """The endpoint's answer to messages; raises where it fails for good, is gone, or its context is full."""
        failures, asked, bounded = 0, time.monotonic(), True
        while True:
            body = self._body(messages, tools, drawing, bounded)
            await asyncio.sleep(max(0.0, self._opens - time.monotonic()))
            if self._opens > time.monotonic():  # another one was refused meanwhile
                continue
            try:
                completion = await self._ask(body)
            except (_Refused, httpx.HTTPError, ValueError, RecursionError) as error:
                said = error if isinstance(error, _Refused) else _Refused(0, self._endpoint.hidden(error))
                if said.status in (400, 413, 422):
                    bounded = self._without_what_is_unknown(said, body, bounded)
                    continue
                self._refuse_for_good(said)
                if said.after is not None and said.after > _PATIENCE:
                    raise ServerGoneError(
                        f"The endpoint {self.url} wants to be asked again in {said.after:.0f} seconds ({said}); "
                        "what is finished is kept, and the same command goes on."
                    ) from None
                failures += said.status != 429
                pause = min(_LONGEST_PAUSE, 2.0 ** min(failures, 6)) * random.uniform(0.5, 1.0)
                if said.status == 429:
                    self._wait_for_rates(said, pause)
                elif failures < _ATTEMPTS:
                    await asyncio.sleep(pause if said.after is None else said.after)
                if failures < _ATTEMPTS and time.monotonic() - asked < _PATIENCE:
                    continue
                self._lost += 1
                if self._lost >= _MOST_LOST:
                    raise ServerGoneError(
                        f"The endpoint {self.url} did not answer in {self._lost} turns, the last time with "
                        f"{said}; what is finished is kept, and the same command goes on."
                    ) from None
                tried = f"{failures} attempts" if failures else f"{time.monotonic() - asked:.0f} seconds"
                raise EngineError(f"The endpoint {self.url} gave no answer in {tried}: {said}.") from None
            self._lost = 0
            self._count(completion, session)
            return completion

    def _body(
        self, messages: Sequence[Message], tools: list[ToolSchema] | None, drawing: SamplingParams, bounded: bool
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": list(map(_sent, messages))}
        body |= {"tools": tools} if tools else {}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"temperature": drawing.temperature, "seed": drawing.seed % 2**31}
        defaults = SamplingParams()
        for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
            if getattr(drawing, name) != getattr(defaults, name):
                body[name] = getattr(drawing, name)
        if closing := [end for end in drawing.stop if _opening(end) is not None]:
            body["stop"] = closing
        if bounded and drawing.max_tokens is not None and drawing.max_tokens < _UNBOUNDED // 2:
            body[self._limit] = drawing.max_tokens
        return {name: value for name, value in body.items() if name not in self._without}

    async def _ask(self, body: dict[str, Any]) -> _Completion:
        if self._http is None:
            limits = httpx.Limits(max_connections=None)
            options: dict[str, Any] = {"limits": limits, "timeout": _READ_SECONDS, "event_hooks": BOUNDED}
            self._http = httpx.AsyncClient(headers=self._endpoint.headers, **options)
        completion = _Completion()
        async with self._http.stream("POST", f"{self.url}/chat/completions", json=body) as response:
            if not response.is_success:
                await response.aread()
                raise _Refused(response.status_code, self._endpoint.hidden(_words(response)), retry_after(response))
            if "text/event-stream" in response.headers.get("Content-Type", ""):
                async for part in _events(response):
                    self._take(completion, part)
            else:
                self._take(completion, json.loads(await response.aread()))
        if completion.finish_reason in (None, "error"):
            raise _Refused(0, "the answer broke off")
        return completion

    def _take(self, completion: _Completion, part: Any) -> None:
        if not isinstance(part, dict):
            raise _Refused(0, f"the answer is no completion: {self._endpoint.hidden(part)}")
        if error := part.get("error"):  # in the middle of a stream
            raise _Refused(0, self._endpoint.hidden(error.get("message", error) if isinstance(error, dict) else error))
        try:
            completion.add(part)
        except (AttributeError, TypeError, LookupError, OverflowError):
            raise _Refused(0, f"the answer is no completion: {self._endpoint.hidden(part)}") from None

    def _refuse_for_good(self, said: _Refused) -> None:
        """Ends the command where asking again would not help."""
        if said.status == 403 and re.search("flagged|moderation", said.words):
            raise EngineError(f"The endpoint {self.url} refuses a request ({said}).") from None
        if said.status in (401, 403):
            raise ServerSetupError(self._endpoint.refusal(said.status)) from None
        elsewhere = said.status in (404, 405) or 300 <= said.status < 400
        if said.status == 402 or elsewhere or "insufficient_quota" in said.words:
            kept = "what is finished is kept, and the same command goes on"
            if elsewhere:
                kept = "give a model and an address that it serves"
            fault = f"The endpoint {self.url} refuses the model {self.model!r} ({said})"
            raise ServerSetupError(f"{fault}; {kept}.") from None

    def _without_what_is_unknown(self, said: _Refused, body: dict[str, Any], bounded: bool) -> bool:
        """Leaves out of later requests what a refusal names; whether the next one bounds its tokens."""
        names = set(re.findall(r"\w+", said.words))
        full = _OVERFLOW.search(said.words) is not None
        if self._limit in body and full:  # the prompt may fit, and what may follow not
            return False
        if full:
            raise ConversationEnded(StopReason.CONTEXT_FULL, said.words)
        if "max_tokens" in body and "max_completion_tokens" in names:
            self._limit = "max_completion_tokens"
            return bounded
        unknown = [name for name in _DROPPABLE if name in names and name in body]
        if not unknown:
            raise EngineError(f"The endpoint {self.url} refuses a request ({said}).") from None
        self._without.update(unknown)
        logger.warning("The endpoint %s is asked without `%s`: it says %s.", self.url, "`, `".join(unknown), said)
        return bounded

    def _wait_for_rates(self, said: _Refused, pause: float) -> None:
        if not self._opens:
            logger.warning("The endpoint %s limits rates: conversations wait as long as it says.", self.url)
        self._opens = max(self._opens, time.monotonic() + (pause if said.after is None else said.after))

    def _count(self, completion: _Completion, session: str) -> None:
        counted = completion.usage or {"prompt": 0, "cached": 0, "completion": 0, "uncounted": 1}
        self.usage.setdefault(session, Counter()).update({"requests": 1, **counted})

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        """Raises `EngineError`: it takes messages, which `EndpointPolicy` has."""
        raise EngineError("An endpoint takes messages, not token ids.")

    def release(self, session: str) -> None:
        """Does nothing: it keeps no conversation."""

    async def close(self) -> None:
        """Closes connections; the next conversation opens them again."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()


async def _events(response: httpx.Response) -> AsyncIterator[Any]:
    """What the events of a stream hold."""
    async for line in _lines(response):
        name, _, value = line.decode(errors="replace").partition(":")
        if name == "data" and value.strip() not in ("", "[DONE]"):
            yield json.loads(value)


async def _lines(response: httpx.Response) -> AsyncIterator[bytearray]:
    """Its lines; those of httpx end at characters too that JSON has as they are (U+2028)."""
    rest = bytearray()
    async for part in response.aiter_bytes():
        rest += part
        if b"\n" in part:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield line
    yield rest


def _words(response: httpx.Response) -> str:
    """What a refusal says."""
    if response.has_redirect_location:
        return f"it redirects to {response.headers['Location']}"
    try:
        said = response.json()
    except ValueError:
        return response.text
    error = said.get("error", said.get("detail", said)) if isinstance(said, dict) else said
    if isinstance(error, dict) and "message" in error:
        more = ", ".join(str(error[name]) for name in ("code", "param") if error.get(name))
        return f"{error['message']} ({more})" if more else str(error["message"])
    return json.dumps(error)


def _sent(message: Message) -> Message:
    """A message as the endpoint takes it."""
    sent: Message = {name: message[name] for name in ("role", "content", "tool_call_id") if name in message}
    if message.get("tool_calls"):
        sent["tool_calls"] = [
            {
                "id": call.get("id", f"call_{number}"),
                "type": "function",
                "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
            }
            for number, call in enumerate(message["tool_calls"])
        ]
    return sent


class EndpointPolicy(ConversationPolicy):
    """The policy of a conversation whose turns a `ChatEndpoint` takes."""

    async def opened(self, messages: Sequence[Message], of_row: bool = False) -> Sequence[Message]:
        """See `ConversationPolicy.opened`; the latest are what the endpoint is asked with."""
        self._said = await super().opened(messages, of_row)
        return self._said

    async def reply(
        self, messages: Sequence[Message], *args: Any, continue_last: bool = False, **options: Any
    ) -> Turn:
        """Samples the next turn; see `Policy.reply`."""
        if continue_last:
            raise ValueError("An endpoint does not go on with an assistant's message: leave `continue_last` out.")
        return await super().reply(messages, *args, **options)

    async def _ask(self, context: list[int], drawing: SamplingParams) -> Sample:
        endpoint = self._sampler.engine
        assert isinstance(endpoint, ChatEndpoint)
        completion = self._completion = await endpoint.complete(self._said, self.renderer.tools, drawing, self.session)
        cut = completion.end_at(drawing.stop) or completion.is_cut
        renderer, message = self.renderer, self._message()
        if "tool_calls" in message:
            ids = await self._aside(self._said, lambda: self._rendered(message))
        else:
            escaped = renderer.special_tokens.escape({"role": "assistant", "content": completion.content})
            ids = renderer.encode(escaped["content"] or "") + ([] if cut else [renderer.end_id])
        return Sample(ids, [float("nan")] * len(ids), "length" if completion.is_cut else "stop")

    def _message(self) -> Message:
        """The assistant's message, with the calls that can be read."""
        completion = self._completion
        message: Message = {"role": "assistant", "content": completion.content}
        if completion.thought:
            message["reasoning_content"] = completion.thought
        calls: list[dict[str, Any]] = []
        for number, call in sorted(completion.calls.items()):
            arguments = _object(call["arguments"])
            if arguments is None or not call["name"]:
                return message
            function = {"name": call["name"], "arguments": arguments}
            known = {"", *(each["id"] for each in calls)}
            name = f"call_{number}" if call["id"] in known else call["id"]
            calls.append({"id": name, "type": "function", "function": function})
        return message | ({"tool_calls": calls} if calls else {})

    def _rendered(self, message: Message) -> list[int]:
        """The ids with which the run's template writes a message with calls behind those before it, or of its JSON."""
        renderer, text = self.renderer, json.dumps(message["tool_calls"])
        with contextlib.suppress(TemplateError):  # it refuses them
            before = renderer.escaped(list(self._said))
            start = renderer.shown_text(before)
            whole = renderer.shown_text([*before, *renderer.escaped([message])], header=False)
            text = whole.removeprefix(start) if whole.startswith(start) else text
        ids = renderer.encode(text)
        ends = [place for place, token in enumerate(ids) if token in renderer.end_ids]
        return ids[: ends[-1] + 1] if ends else [*ids, renderer.end_id]

    def _read(self, turn: Turn, protocol: CallProtocol) -> None:
        if not isinstance(protocol, NativeProtocol):
            super()._read(turn, protocol)
            if self._completion.thought:
                turn.message["reasoning_content"] = self._completion.thought
            return
        turn.message = self._message()
        for call in turn.message.get("tool_calls", ()):
            function = call["function"]
            turn.tool_calls.append(ToolCall(function["name"], function["arguments"], id=call["id"]))
        if self._completion.calls and not turn.tool_calls:
            turn.error = "a tool call needs a name and a JSON object of arguments."
            turn.mask = [0] * turn.num_tokens  # an export would teach an end without the call
        elif not turn.tool_calls:
            turn.answer = turn.text.strip()


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text holds."""
    try:
        value = with_valid_text(json.loads(text or "{}"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
