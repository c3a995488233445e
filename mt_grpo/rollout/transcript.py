"""How much of its past a model sees: all, without thinking, compacted, or as its template renders it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Hashable, Sequence
from typing import Any

from mt_grpo.option_rules import check_history
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.trajectory import Message, Trajectory, Turn

_THINKING = re.compile(r"^.*?</think>\s*", re.DOTALL)


class History:
    """
    The context of each turn of one conversation.

    - `"keep"`: everything stays as it was sampled, so each context extends the one before.
    - `"strip_thinking"`: the reasoning of every earlier turn is removed, as production does for models that think.
    - `"compact"`: as `"keep"`, but every `compact_every` turns the reasoning of all earlier turns is removed at once.
    - `"template"`: the model's own template renders the whole conversation anew for each turn.

    As far as the text of a rendered history is the same, the ids that the model has seen are kept. Only the rest is
    encoded. So a policy that changes nothing makes no fork in the token tree.

    Args:
        renderer (`ChatRenderer`): Renders the conversation.
        policy (`str`, *optional*, defaults to `"keep"`): One of the above.
        compact_every (`int`, *optional*): Turns between two compactions, for `"compact"`.

    Raises:
        ValueError: For an unknown policy, or `"compact"` without `compact_every`.
    """

    def __init__(self, renderer: ChatRenderer, policy: str = "keep", compact_every: int | None = None) -> None:
        check_history(policy, compact_every)
        self._renderer = renderer
        self._policy = policy
        self._compact_every = compact_every
        self._pieces: list[tuple[str, list[int]]] = []
        self._messages: list[Message] = []

    def fork(self) -> History:
        """One of the same conversation, which goes on by itself."""
        twin = copy.copy(self)
        twin._pieces, twin._messages = list(self._pieces), list(self._messages)
        return twin

    def begin(self, messages: list[Message], most: int | None = None) -> list[int] | None:
        """The first context: the prompt; `None` if it is far longer than `most` tokens."""
        ids = self._renderer.prompt_ids(messages, most)
        if ids is None:
            return None
        if self._policy != "keep":
            self._pieces = [(self._renderer.special_tokens.decode(ids), ids)]
            self._messages = self._renderer.escaped(messages)
        return ids

    def extend(
        self, trajectory: Trajectory, action: list[int], most: int
    ) -> tuple[list[int], list[int] | None] | None:
        """
        The context after the latest turn, whose action is `action`, and its replies; `None` if the replies alone make
        it far longer than `most` tokens.

        Returns:
            The ids that the environment wrote; and `None` if they are appended to what the model saw and sampled, or
            the whole context if it was rewritten.
        """
        turn, marks = trajectory.turns[-1], self._renderer.special_tokens
        kept = turn.context_length + turn.num_tokens if self._policy == "keep" else 0
        last = action[-1] if action else -1  # a turn may be empty
        room, calls = max(0, most - kept), turn.message.get("tool_calls") or ()
        suffix = self._renderer.reply_ids(turn.replies, last, room, calls)
        if suffix is None:
            return None
        if self._policy == "keep":
            return suffix, None
        self._pieces += [(marks.decode(ids), ids) for ids in (action, suffix)]
        self._messages += [marks.escape_sampled(turn.message, action), *self._renderer.escaped(turn.replies)]
        if self._policy == "compact" and len(trajectory.turns) % self._compact_every:
            return suffix, None
        messages = self._messages
        if self._policy != "template":
            messages = [strip_thinking(message) for message in messages]
            if messages == self._messages:
                return suffix, None
        text = self._renderer.shown_text(messages)
        kept, position = 0, 0
        while kept < len(self._pieces) and text.startswith(self._pieces[kept][0], position):
            position += len(self._pieces[kept][0])
            kept += 1
        if kept == len(self._pieces) and position == len(text):
            return suffix, None
        pieces = self._pieces[:kept] + [(text[position:], self._renderer.encode(text[position:]))]
        self._pieces = pieces
        return suffix, [token for _, ids in pieces for token in ids]


def strip_thinking(message: Message) -> Message:
    """An assistant message without its reasoning; any other message as it is."""
    content: Any = message.get("content")
    if message["role"] != "assistant" or ("reasoning_content" not in message and "</think>" not in (content or "")):
        return message
    stripped = {key: value for key, value in message.items() if key != "reasoning_content"}
    if content:
        stripped["content"] = _THINKING.sub("", content)
    return stripped


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
