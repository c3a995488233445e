"""How much of its past a model sees: all, without thinking, compacted, or as its template renders it."""

from __future__ import annotations

import copy
import re
from typing import Any

from mt_grpo.option_rules import check_history
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.trajectory import Message, Trajectory

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
            self._pieces = [(self._renderer.marks.decode(ids), ids)]
            self._messages = self._renderer.shielded(messages)
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
        turn, marks = trajectory.turns[-1], self._renderer.marks
        kept = turn.context_length + turn.num_tokens if self._policy == "keep" else 0
        last = action[-1] if action else -1  # a turn may be empty
        room, calls = max(0, most - kept), turn.message.get("tool_calls") or ()
        suffix = self._renderer.reply_ids(turn.replies, last, room, calls)
        if suffix is None:
            return None
        if self._policy == "keep":
            return suffix, None
        self._pieces += [(marks.decode(ids), ids) for ids in (action, suffix)]
        self._messages += [marks.recall(turn.message, action), *self._renderer.shielded(turn.replies)]
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
