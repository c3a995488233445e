"""Writing turns as OpenAI's chat completions, whole or as events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from mt_grpo.integrations.openai_api.request import ParsedRequest
from mt_grpo.trajectory import Message, Turn

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which response templates put the model's reasoning."""


@dataclass(frozen=True)
class Choice:
    """One answer."""

    message: Message
    finish_reason: str
    turn: Turn
    logprobs: list[dict[str, Any]] | None = None


def turn_to_message(turn: Turn, stop: Sequence[str], reads_calls: bool) -> tuple[Message, str]:
    """A turn as a message, with the reasoning apart and the stop string cut, and the finish reason."""
    content = turn.message.get("content") or ""
    reasoning = next((turn.message[name] for name in REASONING if turn.message.get(name)), None)
    if reasoning is None and "</think>" in content:
        reasoning, _, content = content.partition("</think>")
        reasoning, content = reasoning.removeprefix("<think>").strip("\n"), content.lstrip("\n")
    content = content[: min((content.find(text) for text in _ended_by(turn, stop) if text in content), default=None)]
    told: Message = {"role": "assistant", "content": content}
    if reasoning:
        told["reasoning_content"] = reasoning
    if not (reads_calls and turn.tool_calls):
        return told, turn.finish_reason
    told["content"] = content or None
    told["tool_calls"] = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in turn.tool_calls
    ]
    return told, "tool_calls"


def ended_by(turn: Turn, stop: Sequence[str]) -> str | None:
    """The stop string that ended a turn."""
    return min(_ended_by(turn, stop), key=turn.text.find, default=None)


def _ended_by(turn: Turn, stop: Sequence[str]) -> list[str]:
    return [text for text in stop if text in turn.text] if turn.finish_reason == "stop" else []


def token_logprobs(tokenizer: Any, ids: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
    """Sampled tokens with their log-probabilities."""
    texts = [tokenizer.decode([token]) for token in ids]
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
        for text, logprob in zip(texts, logprobs, strict=True)
    ]


def count_usage(choices: Sequence[Choice]) -> dict[str, int]:
    """The token counts of a request."""
    prompt, sampled = choices[0].turn.context_length, sum(choice.turn.num_tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def answer(parsed: ParsedRequest, choices: Sequence[Choice], kept: None = None) -> Iterator[bytes]:
    """The answer: one JSON object, or the events of a stream."""
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time())}
    head["model"] = parsed.model
    if not parsed.stream:
        listed = [
            {
                "index": index,
                "message": choice.message,
                "finish_reason": choice.finish_reason,
                "logprobs": _listed(choice.logprobs),
            }
            for index, choice in enumerate(choices)
        ]
        yield orjson.dumps(head | {"choices": listed, "usage": count_usage(choices)})
        return
    head["object"] = "chat.completion.chunk"
    if parsed.usage:
        head["usage"] = None
    for index, choice in enumerate(choices):
        for delta, logprobs, reason in _deltas(choice):
            part = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            yield event(head | {"choices": [part]})
    if parsed.usage:
        yield event(head | {"choices": [], "usage": count_usage(choices)})
    yield b"data: [DONE]\n\n"


def event(data: dict[str, Any], kind: str | None = None) -> bytes:
    """One server-sent event."""
    return (b"" if kind is None else b"event: %s\n" % kind.encode()) + b"data: %s\n\n" % orjson.dumps(data)


def _deltas(choice: Choice) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None, str | None]]:
    yield {"role": "assistant", "content": ""}, None, None
    if "reasoning_content" in choice.message:
        yield {"reasoning_content": choice.message["reasoning_content"]}, None, None
    if choice.message["content"] or choice.logprobs:
        yield {"content": choice.message["content"] or ""}, _listed(choice.logprobs), None
    for number, call in enumerate(choice.message.get("tool_calls") or ()):
        yield {"tool_calls": [{"index": number, **call}]}, None, None
    yield {}, None, choice.finish_reason


def _listed(logprobs: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if logprobs is None else {"content": logprobs, "refusal": None}
