"""Which messages of a conversation were said before, so that its ids go on where its words do."""

from __future__ import annotations

import copy
import json
from collections.abc import Hashable, Sequence
from typing import Any

from mt_grpo.trajectory import Message, Turn


class Said:
    """The messages that the policy has seen and sampled in one conversation, rewritten pasts included."""

    def __init__(self) -> None:
        self._before: list[Message] = []  # what the latest turn was sampled after
        self._turn: Turn | None = None
        self._whole: Message | None = None
        self._noted: list[tuple[bool, list[Message], Turn, Message | None]] = []  # not yet among the ends
        self._ends: dict[int, int] = {}  # the messages up to a turn's own, hashed one by one, and that turn's index
        self._end = 0  # the latest of them

    def fork(self) -> Said:
        """One that knows the same, and goes on by itself."""
        twin = copy.copy(self)
        twin._before, twin._noted, twin._ends = list(self._before), list(self._noted), dict(self._ends)
        return twin

    def latest(self, messages: Sequence[Message]) -> int:
        """How many messages the latest turn's conversation has, its own included, where `messages` go on from it."""
        size = len(self._before)
        if self._turn is None or len(messages) <= size or messages[:size] != self._before:
            return 0
        said = self._message
        return size + 1 if messages[size] is said or identity(messages[size]) == identity(said) else 0

    def written(self, messages: list[Message]) -> str | None:
        """What the assistant's message after `messages` says so far, where the latest turn wrote it; else `None`."""
        return _text(self._message.get("content")) if self._turn and messages == self._before else None

    def add(self, messages: list[Message], known: int, turn: Turn, whole: Message | None = None) -> None:
        """
        Takes note of a turn.

        Args:
            messages (`list[dict]`): What it was sampled after.
            known (`int`): How many of them are the latest turn's conversation; 0 where they do not go on from it.
            turn (`Turn`): The turn; its message may still be changed until the next is added.
            whole (`dict`, *optional*): The assistant's message, where the turn is a part of it.
        """
        self._noted.append((known > 0, messages[known:], turn, whole))
        unchanged = max(known - 1, 0)  # all but the turn's own message
        self._before[unchanged:] = messages[unchanged:]
        self._turn, self._whole = turn, whole

    def longest(self, messages: Sequence[Message]) -> tuple[int, int]:
        """The turn with which the longest known beginning of `messages` ends, and its messages; `(-1, 0)` if none."""
        for goes_on, added, turn, whole in self._noted:
            key = self._end if goes_on else 0
            for message in (*added, turn.message if whole is None else whole):
                key = hash((key, identity(message)))
            self._ends[key], self._end = turn.index, key
        self._noted.clear()
        key, found = 0, (-1, 0)
        for index, message in enumerate(messages):
            key = hash((key, identity(message)))
            if key in self._ends:
                found = self._ends[key], index + 1
        return found

    @property
    def _message(self) -> Message:
        return self._turn.message if self._whole is None else self._whole


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
