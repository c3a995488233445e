"""Which messages of a conversation were said before, so that its ids go on where its words do."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any

from mt_grpo.trajectory import Message, Turn


class Said:
    """The messages that the policy has seen and sampled in one conversation, rewritten pasts included."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # the messages up to a turn's own, hashed one by one, and that turn's index
        self._before: list[Message] = []
        self._key = 0
        self._turn: Turn | None = None
        self._whole: Message | None = None

    @property
    def _message(self) -> Message:
        return self._turn.message if self._whole is None else self._whole

    def latest(self, messages: Sequence[Message]) -> int:
        """How many messages the latest turn's conversation has, its own included, where `messages` go on from it."""
        size = len(self._before)
        if self._turn is None or len(messages) <= size or list(messages[:size]) != self._before:
            return 0
        said = self._message
        return size + 1 if messages[size] is said or identity(messages[size]) == identity(said) else 0

    def written(self, messages: Sequence[Message]) -> str | None:
        """What the assistant's message after `messages` says so far, where the latest turn wrote it; else `None`."""
        return _text(self._message.get("content")) if self._turn and list(messages) == self._before else None

    def longest(self, messages: Sequence[Message]) -> tuple[int, int]:
        """The turn with which the longest known beginning of `messages` ends, and its messages; `(-1, 0)` if none."""
        self._settle()
        key, found = 0, (-1, 0)
        for index, message in enumerate(messages):
            key = hash((key, identity(message)))
            if key in self._ends:
                found = self._ends[key], index + 1
        return found

    def add(self, messages: Sequence[Message], known: int, turn: Turn, whole: Message | None = None) -> None:
        """
        Takes note of a turn.

        Args:
            messages (`Sequence[dict]`): What it was sampled after.
            known (`int`): How many of them are the latest turn's conversation; 0 where they do not go on from it.
            turn (`Turn`): The turn; its message may still be changed until the next is added.
            whole (`dict`, *optional*): The assistant's message, where the turn is a part of it.
        """
        key = self._settle() if known else 0
        for message in messages[known:]:
            key = hash((key, identity(message)))
        self._before[known:] = messages[known:]
        if known:
            self._before[known - 1] = messages[known - 1]
        self._key, self._turn, self._whole = key, turn, whole

    def _settle(self) -> int:
        """The latest turn's message is final: its conversation can be gone on from."""
        if self._turn is None:
            return 0
        key = hash((self._key, identity(self._message)))
        self._ends[key] = self._turn.index
        return key


def identity(message: Message) -> Hashable:
    """What makes two messages the same: role, content, and calls with their arguments parsed; reasoning is no part."""
    calls = [
        (call.get("function", call)["name"], _parsed(call.get("function", call).get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], _text(message.get("content")), message.get("tool_call_id"), _text(calls or None)


def _parsed(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    return arguments or {}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
