"""
OpenAI's Responses: translates requests into chat completions, and answers into the form of Responses. Each dialect has
a file, since it changes when its provider does.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from mt_grpo.integrations.openai_api.chat import Choice, count_usage, event
from mt_grpo.integrations.openai_api.request import (
    TOOL,
    ApiError,
    ParsedRequest,
    Warnings,
    check_output,
    check_tool,
    wrong,
)
from mt_grpo.trajectory import Message

SAME = ("model", "tool_choice", "parallel_tool_calls", "top_logprobs", "stream")
READ = frozenset(
    (
        *SAME,
        *"""input instructions tools max_output_tokens previous_response_id text include truncation stream_options
        background conversation prompt""".split(),
    )
)
"""Fields that are honoured, or refused with a sentence of their own."""


@dataclass(frozen=True)
class Kept:
    """What a conversation keeps of its responses."""

    messages: dict[str, list[Message]] = field(default_factory=dict)
    items: dict[str, dict[str, Any]] = field(default_factory=dict)


def as_chat(kept: Kept, warnings: Warnings, body: dict[str, Any]) -> dict[str, Any]:
    """The body of the same request as a chat completion."""
    for name in ("background", "conversation"):
        if body.get(name):
            raise wrong(name, "is nothing that this server keeps: send the whole conversation as `input`")
    if body.get("prompt"):
        raise wrong("prompt", "is kept by OpenAI, and nothing is fetched: send `instructions` and `input`")
    previous = body.get("previous_response_id")
    if previous is not None and previous not in kept.messages:
        raise ApiError(404, f"There is no response {previous!r}.", "not_found", "previous_response_id")
    before = [] if previous is None else kept.messages[previous]
    if body.get("instructions"):  # they replace those of the previous response
        before = before[1:] if before and before[0]["role"] == "system" else before
        before = [{"role": "system", "content": body["instructions"]}, *before]
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise wrong("input", "is neither text nor a list of items")
    check_output(body.get("text"), "text", "verbosity", warnings)
    chat = {name: body.get(name) for name in SAME}
    chat |= {"messages": [*before, *_messages(items, kept.items)], "max_tokens": body.get("max_output_tokens")}
    chat["logprobs"] = "message.output_text.logprobs" in (body.get("include") or ())
    if body.get("tools"):
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(body["tools"])]
    return chat


def _tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise wrong(f"tools[{index}]", "is no function of the client's")
    check_tool(tool, TOOL, f"tools[{index}]")
    return {"type": "function", "function": tool}


def _messages(items: list[Any], kept: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Items as messages; `kept` are those that the client may refer to. What the assistant says in a row is one message.
    """
    messages: list[dict[str, Any]] = []
    said: dict[str, Any] | None = None
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if not isinstance(item, dict):
            raise wrong(place, "is no item")
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "item_reference":
            if item.get("id") not in kept:
                raise ApiError(404, f"There is no item {item.get('id')!r}.", "not_found", place)
            item = kept[item["id"]]
            kind = item["type"]
        if kind == "reasoning":
            continue
        if kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append(result)
            said = None
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if said is None:
                messages.append(said := {"role": "assistant", "content": "", "tool_calls": []})
            said["tool_calls"].append({"type": "function", "id": item.get("call_id"), "function": function})
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content"), "tool_calls": []})
            said = messages[-1] if item.get("role") == "assistant" else None
        else:
            raise wrong(place, f"is of the type {kind!r}, which the policy does not read")
    return messages


def answer(parsed: ParsedRequest, choices: Sequence[Choice], kept: Kept) -> Iterator[bytes]:
    """The answer: one JSON object, or the events of a stream. It is kept, for requests that go on from it."""
    (choice,) = choices
    name, items = _named("resp"), _items(choice)
    kept.messages[name] = [*parsed.messages, choice.message]
    kept.items.update((item["id"], item) for item in items)
    usage, cut = count_usage(choices), choice.finish_reason == "length"
    whole = {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": parsed.model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{**tool["function"], "type": "function", "strict": False} for tool in parsed.tools or ()],
        "metadata": {},
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
    if not parsed.stream:
        yield orjson.dumps(whole)
        return
    for number, (kind, data) in enumerate(_events(whole)):
        yield event({"type": kind, "sequence_number": number, **data}, kind)


def _items(choice: Choice) -> list[dict[str, Any]]:
    message, items = choice.message, []
    if "reasoning_content" in message:
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "id": _named("rs"), "summary": [], "content": [thought]})
    if message["content"] or not message.get("tool_calls"):
        text: dict[str, Any] = {"type": "output_text", "text": message["content"] or "", "annotations": []}
        if choice.logprobs is not None:
            text["logprobs"] = choice.logprobs
        said = {"id": _named("msg"), "status": "completed", "role": "assistant", "content": [text]}
        items.append({"type": "message", **said})
    for call in message.get("tool_calls", ()):
        made = {"id": _named("fc"), "call_id": call["id"], "status": "completed"} | call["function"]
        items.append({"type": "function_call", **made})
    return items


def _named(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _events(whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {"message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"content": []}}
        begun = item | empty[item["type"]] | ({} if item["type"] == "reasoning" else {"status": "in_progress"})
        yield "response.output_item.added", {"output_index": index, "item": begun}
        if item["type"] == "message":
            (part,) = item["content"]
            place = place | {"content_index": 0}
            yield "response.content_part.added", place | {"part": part | {"text": ""}}
            logprobs = part.get("logprobs", [])
            yield "response.output_text.delta", place | {"delta": part["text"], "logprobs": logprobs}
            yield "response.output_text.done", place | {"text": part["text"], "logprobs": logprobs}
            yield "response.content_part.done", place | {"part": part}
        elif item["type"] == "function_call":
            yield "response.function_call_arguments.delta", place | {"delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", place | done
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole['status']}", {"response": whole}
