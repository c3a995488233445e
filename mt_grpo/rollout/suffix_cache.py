"""Caches what a chat template writes around the environment's replies, once per kind of reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jinja2 import Environment

from mt_grpo.rollout.chat_template import TemplateError
from mt_grpo.trajectory import Message

_FIELDS = {"role", "content", "name", "tool_call_id"}
# Whatever a template escapes, cuts or folds, it does so to something in here.
_HARD = "\"double\" 'single' \\back\\ <b>&amp;</b> {curly} UPPER lower\n\n\ttab Perú 北京 🙂 " + "long " * 400
_MOST_PATTERNS = 1024


class SuffixCache:
    """
    Renders the environment's replies of a turn, most of them without running the template.

    A template can treat two contents differently because of string constants that it compares them with, outer white
    space, emptiness or length. So replies are of one kind if they agree in role and name, in the magnitude of their
    length, in the template's constants that their content contains, and in those that it begins and ends with; and in
    the names of the functions that they answer.

    The first replies of a kind are rendered. So is a probe of the same kind, which is made of the same contents and
    everything that templates escape, and is longer than any reply of the kind. If the rendered probe contains the
    contents unchanged, and the text around them is that of the first rendering, this text is the pattern of the kind.

    Replies of no kind (with white space around them, or whose content is not a string) are rendered each time, and so
    are kinds that fail the probe.

    Args:
        template (`str`): The chat template.
        render (`Callable[[list[dict], Sequence[str]], str]`): Renders replies through it, given the names of the
            functions that they answer. What it raises for the replies is raised.
    """

    def __init__(self, template: str, render: Callable[[list[Message], Sequence[str]], str]) -> None:
        tokens = Environment().lexer.tokenize(template)
        self._constants = sorted({""} | {token.value for token in tokens if token.type == "string"})
        self._render = render
        self._patterns: dict[tuple, list[str] | None] = {}

    def text(self, replies: list[Message], called: Sequence[str] = ()) -> str:
        """The text that the template writes for replies, letter for letter."""
        kinds = tuple(map(self._kind, replies))
        if None in kinds:
            return self._render(replies, called)
        kind = (tuple(called), *kinds)
        if kind not in self._patterns:
            return self._learn(kind, replies, called)
        pattern = self._patterns[kind]
        return self._render(replies, called) if pattern is None else _fill(pattern, replies)

    def _kind(self, reply: Message) -> tuple | None:
        content = reply.get("content")
        if not isinstance(content, str) or content != content.strip() or reply.keys() - _FIELDS:
            return None
        if content in self._constants:
            return None
        found = [constant for constant in self._constants if constant in content]
        edges = ((constant, content.startswith(constant), content.endswith(constant)) for constant in found)
        return (reply["role"], reply.get("name"), reply.get("tool_call_id"), len(content).bit_length(), *edges)

    def _learn(self, kind: tuple, replies: list[Message], called: Sequence[str]) -> str:
        text = self._render(replies, called)
        if len(self._patterns) < _MOST_PATTERNS:  # names and ids may differ without end
            probes = [
                {**reply, "content": f"{reply['content']}{_HARD}{number}{reply['content']}"}
                for number, reply in enumerate(replies)
            ]
            try:
                pattern = _cut(self._render(probes, called), probes)
            except TemplateError:
                pattern = None
            self._patterns[kind] = pattern if pattern and _fill(pattern, replies) == text else None
        return text


def _cut(text: str, replies: list[Message]) -> list[str] | None:
    """The text before, between and after the contents; `None` if they are not all found in order."""
    pattern = []
    for reply in replies:
        piece, found, text = text.partition(reply["content"])
        if not found:
            return None
        pattern.append(piece)
    return [*pattern, text]


def _fill(pattern: list[str], replies: list[Message]) -> str:
    return pattern[0] + "".join(reply["content"] + piece for reply, piece in zip(replies, pattern[1:], strict=True))
