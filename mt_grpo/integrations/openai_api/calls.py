"""How a conversation's tool calls are written and read: by the chat template, by a text protocol, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

from mt_grpo.envs.dialogue import Words
from mt_grpo.envs.protocols import CallProtocol, NativeProtocol
from mt_grpo.integrations.openai_api.errors import ApiError
from mt_grpo.integrations.openai_api.request import Wish
from mt_grpo.trajectory import Message, ToolCall, Turn


class Text(Words):
    """Looks for no calls, though the chat template shows tools."""

    native_tools = True


_TEXT, _NATIVE = Text(), NativeProtocol()


class Calls:
    """
    The calls of one conversation.

    Args:
        protocol (`CallProtocol`, *optional*): Writes and reads calls as text; without it, the chat template does.
        tokenizer: The model's.
    """

    def __init__(self, protocol: CallProtocol | None, tokenizer: Any) -> None:
        self._protocol = None if protocol is None or protocol.native_tools else protocol
        self._tokenizer = tokenizer
        self._tools: list[dict[str, Any]] | None = None
        self._count = 0
        self._open: dict[str, tuple[Turn, ToolCall]] = {}  # without a result, by the identifiers that the client knows

    def asked(self, wish: Wish) -> dict[str, Any]:
        """
        What `Policy.reply` is asked beside messages.

        Raises:
            ApiError: If the model cannot be shown the tools.
        """
        if self._protocol is not None:
            return {"stop": (*self._protocol.stop, *wish.stop), "protocol": self._protocol}
        if wish.tools is not None and self._tokenizer.response_template is None:
            raise ApiError(
                400,
                "Nothing is known that reads tool calls of the model's chat template: set `response_template` on the "
                "tokenizer, or `call_protocol: tags` in the recipe.",
                "invalid_value",
                "tools",
            )
        if wish.tools != self._tools:  # the same list for the same tools: a renderer is found by it
            self._tools = wish.tools
        protocol = None if wish.tools is None else _NATIVE if wish.reads_calls else _TEXT
        return {"stop": wish.stop, "tools": self._tools, "protocol": protocol}

    def written(self, messages: list[Message], wish: Wish) -> list[Message]:
        """Messages as the model sees them. A text protocol's instructions stand in for a system message."""
        if self._protocol is None:
            return messages
        written: list[Message] = []
        for by_tool, group in groupby(messages, lambda message: message["role"] == "tool"):
            if by_tool:
                results = [ToolCall("", result=message["content"]) for message in group]
                written += self._protocol.replies(Turn(0, {}, results))
            else:
                written += [_without_calls(message) for message in group]
        if wish.tools and messages[0]["role"] != "system":
            prompt = self._protocol.default_system_prompt([SimpleNamespace(schema=tool) for tool in wish.tools])
            written.insert(0, {"role": "system", "content": prompt})
        return written

    def note_results(self, messages: Sequence[Message]) -> list[tuple[Turn, list[Message]]]:
        """
        Writes the results that a client's messages bring into the calls that they answer.

        Returns:
            The turns that they answer, each with its results.
        """
        answered: dict[int, tuple[Turn, list[Message]]] = {}
        for message in messages:
            if message["role"] == "tool" and message.get("tool_call_id") in self._open:
                turn, call = self._open.pop(message["tool_call_id"])
                call.result, call.executed = message["content"], True
                call.error = call.result.removeprefix("Error: ") if call.result.startswith("Error:") else None
                answered.setdefault(turn.index, (turn, []))[1].append(message)
        return list(answered.values())

    def name(self, turn: Turn) -> None:
        """Gives the calls of a turn identifiers that no other call of the conversation has."""
        for call in turn.tool_calls:
            call.id = f"call{self._count:05d}"  # nine letters and digits: some templates want as many
            self._open[call.id] = turn, call
            self._count += 1


def _without_calls(message: Message) -> Message:
    """In a text protocol, calls are part of the content."""
    return (
        {name: value for name, value in message.items() if name != "tool_calls"}
        if "tool_calls" in message
        else message
    )
