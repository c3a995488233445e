"""Messages as clients send them, and which of them the model has said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mt_grpo.integrations.openai_api.errors import ApiError
from mt_grpo.rollout.transcript import identity
from mt_grpo.tools.results import too_deep
from mt_grpo.trajectory import Message, Turn

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MOST_MESSAGES = 2048
"""Messages of one request, as with OpenAI. The chat template, which takes its time for each, holds up all others."""
TEXTS = ("text", "input_text", "output_text", "refusal")
"""Types of content parts that are text."""


def read_messages(given: Any) -> list[Message]:
    """
    A client's messages in one form: content as text, arguments of calls as JSON objects, nothing else that differs
    between clients.

    Raises:
        ApiError: If they are no messages, or hold something other than text.
    """
    if not isinstance(given, list) or not given:
        raise wrong("messages", "is no list with messages in it")
    if len(given) > MOST_MESSAGES:
        raise wrong("messages", f"has {len(given)} messages, above {MOST_MESSAGES}: leave out or join old ones")
    return [_read(message, f"messages[{index}]") for index, message in enumerate(given)]


def wrong(param: str, problem: str) -> ApiError:
    """The error about a field of a request."""
    return ApiError(400, f"`{param}` {problem}.", "invalid_value", param)


def _read(message: Any, place: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise wrong(place, f"has no role out of {', '.join(ROLES)}")
    role = ROLES[message["role"]]
    read: Message = {"role": role, "content": read_text(message.get("content"), f"{place}.content")}
    if role == "tool":
        read |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
    elif role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            read["reasoning_content"] = reasoning
        if message.get("tool_calls"):
            read["tool_calls"] = [_read_call(call, f"{place}.tool_calls") for call in message["tool_calls"]]
    return read


def read_text(content: Any, place: str) -> str:
    """Content as text; parts are joined by line feeds, as vLLM joins them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(place, "is neither text nor a list of parts")
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in TEXTS:
            part = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(part, str):
            raise wrong(place, "has a part that is no text, and the policy reads text only")
        texts.append(part)
    return "\n".join(texts)


def _read_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(place, "has a call without the name of a function")
    arguments = _parsed(function)
    if too_deep(arguments):
        raise wrong(place, "has arguments whose brackets are too deep")
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return read | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _parsed(function: dict[str, Any]) -> Any:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    return arguments


class Told:
    """
    The turns of one conversation by what the client was told of them, each after the messages that led to it. A told
    message may lack what the model said: a stop string, its reasoning.
    """

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = {}

    def restore(self, messages: Sequence[Message]) -> tuple[list[Message], int, Turn | None]:
        """
        The messages, those that the model said in its own words; a key of the whole; and the turn that the last
        messages answer, where nothing but answers to it follows.
        """
        key, restored, latest = 0, [], None
        for message in messages:
            key = hash((key, identity(message)))
            if message["role"] == "assistant":
                latest = self._turns.get(key)
            restored.append(latest.message if latest is not None and message["role"] == "assistant" else message)
        return restored, key, latest

    def note(self, key: int, told: Message, turn: Turn) -> None:
        """Takes note of what the client is told of a turn that was sampled after the messages with this key."""
        self._turns[hash((key, identity(told)))] = turn
