"""
The past of a conversation. `History` makes the context of each turn from it: all, without thinking, compacted, or as
the template renders it. `Transcript` tells which messages of a request the policy has seen or sampled before.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from mt_grpo.media import Part, digest_at_hand, is_medium, is_same
from mt_grpo.rollout.chat_template import THOUGHTS
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.trajectory import Message, Trajectory, Turn

_THINKING = re.compile(r"^.*?</think>\s*", re.DOTALL)


class Context(NamedTuple):
    """The context of a turn that follows another."""

    added: list[int]
    """Ids that were added to what the model saw and sampled before."""
    whole: list[int] | None = None
    """All its ids, where the past was rewritten; `None` where ids were only added."""


class History:
    """
    The context of each turn. `"keep"`: as sampled, so each extends the one before. `"strip_thinking"`: without the
    reasoning of earlier turns. `"compact"`: that of all earlier turns is removed every `compact_every` turns.
    `"template"`: the model's template renders all anew. A rendered history keeps the ids that the model has seen as
    far as their text is the same, so one that changes nothing makes no fork. Where a past turn ends in another token,
    as in gpt-oss, every context has that.
    """

    def __init__(self, renderer: ChatRenderer, policy: str, compact_every: int | None) -> None:
        self._renderer, self._policy = renderer, policy
        self._compact_every = compact_every if policy == "compact" else None
        self._pieces: list[tuple[str, list[int]]] = []  # the context as text, and the ids of each piece
        self._messages: list[Message] = []  # the same as messages, escaped
        self._shown: list[Part] = []  # see `ChatRenderer.shown_parts`

    def fork(self) -> History:
        """A copy for a branch of the conversation; the two change apart."""
        twin = copy.copy(self)
        twin._pieces, twin._messages, twin._shown = list(self._pieces), list(self._messages), list(self._shown)
        return twin

    def begin(self, messages: list[Message], most: int) -> list[int] | None:
        """The first context: the prompt; `None` if it is far longer than `most` tokens."""
        ids = self._renderer.prompt_ids_within(messages, most)
        if ids is None:
            return None
        self._shown = self._renderer.shown_parts(messages)
        if self._policy != "keep":
            self._pieces = [(self._renderer.escaped_text(ids), ids)]
            self._messages = self._renderer.escaped(messages)
        return ids

    def extend(self, trajectory: Trajectory, action: list[int], most: int) -> Context | None:
        """The context after the latest turn and its replies; `None` if these alone are far above `most` tokens."""
        renderer, turn = self._renderer, trajectory.turns[-1]
        seen = turn.context_length + turn.num_tokens if self._policy == "keep" else 0
        calls = turn.message.get("tool_calls") or ()
        suffix = renderer.reply_ids_within(turn.replies, max(0, most - seen), calls, self._shown)
        if suffix is None:
            return None
        self._shown += renderer.shown_parts(turn.replies)
        last, kept_action, whole = action[-1] if action else -1, action, None  # a turn may be empty
        if suffix[0] == last:
            suffix = suffix[1:]
        elif last in renderer.end_ids:  # gpt-oss samples <|return|>, and reads <|end|> in the past
            kept_action, whole = action[:-1], trajectory.tree.path()[:-1] + suffix
        appended = Context(suffix, whole)
        if self._policy == "keep":
            return appended
        self._pieces += [(renderer.escaped_text(ids), ids) for ids in (kept_action, suffix)]
        self._messages += [renderer.past_message(turn.message, action), *renderer.escaped(turn.replies)]
        if self._compact_every is not None and len(trajectory.turns) % self._compact_every:
            return appended
        messages = self._messages
        if self._policy != "template":
            messages = [_strip_thinking(message) for message in messages]
            if messages == self._messages:
                return appended
        text = renderer.shown_text(messages)
        kept, position = 0, 0
        while kept < len(self._pieces) and text.startswith(self._pieces[kept][0], position):
            position += len(self._pieces[kept][0])
            kept += 1
        if kept == len(self._pieces) and position == len(text):
            return appended
        self._pieces[kept:] = [(text[position:], renderer.encode(text[position:]))]
        return Context(suffix, [token for _, ids in self._pieces for token in ids])


def _strip_thinking(message: Message) -> Message:
    """An assistant message without its reasoning; any other message as it is."""
    content: Any = message.get("content")
    if message["role"] != "assistant" or (message.keys().isdisjoint(THOUGHTS) and "</think>" not in (content or "")):
        return message
    stripped = {key: value for key, value in message.items() if key not in THOUGHTS}
    if content:
        stripped["content"] = _THINKING.sub("", content)
    return stripped


class _Noted(NamedTuple):
    """A turn that is not hashed yet."""

    goes_on: bool
    """Whether it follows the turn before."""
    added: list[Message]
    """The messages between the two, or all before it."""
    turn: Turn
    message: Message | None
    """The assistant's message, where the turn is a part of it."""


class Transcript:
    """The messages seen and sampled in a conversation; a request that begins with them continues their ids."""

    def __init__(self) -> None:
        self._before: list[Message] = []  # what the latest turn was sampled after
        self._latest: _Noted | None = None
        self._noted: list[_Noted] = []  # turns that `_ends` lacks: most conversations never need it
        self._ends: dict[int, int] = {}  # hash of all messages up to a turn's own -> index of the turn
        self._end = 0  # the latest hash

    def fork(self) -> Transcript:
        """A copy for a branch of the conversation; the two change apart."""
        twin = copy.copy(self)
        twin._before, twin._noted, twin._ends = list(self._before), list(self._noted), dict(self._ends)
        return twin

    def seen_length(self, messages: Sequence[Message], looks: bool = False) -> int:
        """How many messages came before the latest turn, if `messages` begin with them, else 0; see `is_same`."""
        before = self._before[:]
        return len(before) if _alike(messages[: len(before)], before, looks) else 0

    def known_length(self, messages: Sequence[Message]) -> int:
        """How many messages there are up to the latest turn's own, if `messages` go on from them, else 0."""
        size = len(self._before)
        if self._latest is None or len(messages) <= size or not _alike(messages[:size], self._before):
            return 0
        own = _message(self._latest)
        return size + 1 if messages[size] is own or identity(messages[size]) == identity(own) else 0

    def begun_text(self, messages: list[Message]) -> str | None:
        """The text of the assistant's message after `messages`, where the latest turn wrote it; else `None`."""
        if self._latest is None or not _alike(messages, self._before):
            return None
        return _text(_message(self._latest).get("content"))

    def add(self, messages: list[Message], known: int, turn: Turn, whole: Message | None = None) -> None:
        """Notes a turn."""
        self._latest = _Noted(known > 0, messages[known:], turn, whole)
        self._noted.append(self._latest)
        unchanged = max(known - 1, 0)  # all but the turn's own message
        self._before[unchanged:] = messages[unchanged:]

    def longest(self, messages: Sequence[Message]) -> tuple[int, int]:
        """The turn that ends the longest known beginning of `messages`, and its length; `(-1, 0)` if there is none."""
        for noted in self._noted:
            key = self._end if noted.goes_on else 0
            for message in (*noted.added, _message(noted)):
                key = hash((key, identity(message)))
            self._ends[key], self._end = noted.turn.index, key
        self._noted.clear()
        key, found = 0, (-1, 0)
        for index, message in enumerate(messages):
            key = hash((key, identity(message)))
            if key in self._ends:
                found = self._ends[key], index + 1
        return found


def _alike(one: object, other: object, looks: bool = False, depth: int = 5) -> bool:
    """Whether messages are equal, media by digest, which stand at most `depth` deep."""
    if one is other:
        return True
    if is_medium(one) or is_medium(other):
        return is_medium(one) and is_medium(other) and is_same(one, other, looks)
    if depth and isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_alike(*pair, looks, depth - 1) for pair in zip(one, other, strict=True))
    if depth and isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key], looks, depth - 1) for key in one)
    return bool(one == other)


def _message(noted: _Noted) -> Message:
    return noted.turn.message if noted.message is None else noted.message


def identity(message: Message) -> Hashable:
    """A key equal for equal messages: role, content, calls with parsed arguments; reasoning is left out."""
    calls = [
        (call.get("function", call)["name"], _parsed(call.get("function", call).get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], _text(message.get("content")), message.get("tool_call_id"), _text(calls or None)


def _parsed(arguments: object) -> Any:
    """Arguments in which numbers are as JavaScript has them: it writes 2.0 as 2, and rounds large integers."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=_named)
    try:
        return json.loads(text, parse_int=float, parse_constant=lambda name: None) or {}
    except (ValueError, RecursionError):
        return text


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=_named)


def _named(value: object) -> str:
    return digest_at_hand(value) if is_medium(value) else str(value)
