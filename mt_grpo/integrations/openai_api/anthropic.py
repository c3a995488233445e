"""
Anthropic's Messages: translates requests into chat completions, and answers into Anthropic's form. Each dialect has a
file, since it changes when its provider does.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from mt_grpo.integrations.openai_api.chat import Choice, ended_by, event
from mt_grpo.integrations.openai_api.request import ParsedRequest, wrong

SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "metadata")
READ = frozenset((*SAME, "messages", "system", "tools", "tool_choice", "stop_sequences"))
CHOICES: dict[Any, str] = {"auto": "auto", "any": "required", "none": "none"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """
    The body of the same request as a chat completion.

    Raises:
        ApiError: If a field cannot be read.
    """
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": body["system"]})
    if body.get("n") is not None:
        raise wrong("n", "is no field of messages, which have one answer")
    given = body.get("messages")
    if not isinstance(given, list):
        raise wrong("messages", "is no list")
    for index, message in enumerate(given):
        messages += _read(message, f"messages[{index}]")
    chat = {name: value for name, value in body.items() if name in SAME or name not in READ}
    chat |= {"messages": messages, "stop": body.get("stop_sequences")}
    if body.get("tools"):
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(body["tools"])]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = CHOICES.get(choice.get("type"), named)
    return chat


def _tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or tool.get("type", "custom") != "custom":
        raise wrong(f"tools[{index}]", "is no tool of the client's with a name")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function}


def _read(message: Any, place: str) -> list[dict[str, Any]]:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
    results, texts, calls, thoughts = [], [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            read = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
            results.append(read)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"type": "function", "id": block.get("id"), "function": function})
        elif kind == "thinking":
            thoughts.append(block.get("thinking", ""))
        elif kind == "text":
            texts.append(block)
        elif kind == "image":
            texts.append({"type": "image_url", "image_url": _data_url(block.get("source"))})
        elif kind != "redacted_thinking":
            raise wrong(place, f"has a block {kind!r}, and the policy reads text and images")
    said = {"role": message.get("role"), "content": texts, "tool_calls": calls, "reasoning_content": "".join(thoughts)}
    return results + ([said] if texts or calls or not results else [])


def _data_url(source: Any) -> str | None:
    """An image that comes with the request; nothing for another."""
    if not isinstance(source, dict) or source.get("type") != "base64":
        return None
    return f"data:{source.get('media_type')};base64,{source.get('data')}"


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    message, blocks = choice.message, []
    if "reasoning_content" in message:
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        made = {"id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        blocks.append({"type": "tool_use", **made})
    return blocks


def answer(parsed: ParsedRequest, choices: Sequence[Choice]) -> Iterator[bytes]:
    """The answer: one JSON object, or the events of a stream."""
    (choice,) = choices
    usage = {"input_tokens": choice.turn.context_length, "output_tokens": choice.turn.num_tokens}
    stop = ended_by(choice.turn, parsed.stop)
    whole: dict[str, Any] = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": parsed.model,
        "content": _blocks(choice),
        "stop_reason": REASONS[choice.finish_reason] if stop is None else "stop_sequence",
        "stop_sequence": stop,
        "usage": usage,
    }
    if not parsed.stream:
        yield orjson.dumps(whole)
        return
    begun = whole | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    yield event({"type": "message_start", "message": begun}, "message_start")
    for index, block in enumerate(whole["content"]):
        for kind, data in _deltas(block):
            yield event({"type": kind, "index": index, **data}, kind)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": stop}
    yield event({"type": "message_delta", "delta": ended, "usage": usage}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def _deltas(block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one block: its start without the content, the content, and its end."""
    empty: dict[str, Any]
    if block["type"] == "tool_use":
        empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    else:
        kind = block["type"]
        empty, delta = {kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
    yield "content_block_start", {"content_block": block | empty}
    yield "content_block_delta", {"delta": delta}
    yield "content_block_stop", {}
