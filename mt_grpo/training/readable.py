"""Conversations as text for people: turn by turn, with tool results, bounded in length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mt_grpo.training.jsonl import to_json
from mt_grpo.trajectory import Message, Trajectory, visible

MOST_CHARACTERS = 2000
"""Of one message; the middle of a longer one is left out."""
MOST_MESSAGES = 24
"""Of one conversation, headings included and the prompt excluded; the middle of a longer one is left out."""

Piece = tuple[str, str]
"""Who wrote a message (`assistant`, `tool`, `user`, ...; `turn` for a heading) and its text."""


def prompt_pieces(trajectory: Trajectory) -> list[Piece]:
    """What a conversation began with."""
    return [_piece(message) for message in trajectory.prompt]


def turn_pieces(trajectory: Trajectory) -> list[Piece]:
    """The turns of a conversation: a heading, the words and the calls of the model, and what it was answered."""
    pieces = []
    for number, turn in enumerate(trajectory.turns, 1):
        pieces.append(("turn", f"turn {number}"))
        pieces += [_piece(message) for message in (turn.message, *turn.replies)]
    if len(pieces) <= MOST_MESSAGES:
        return pieces
    half = MOST_MESSAGES // 2
    left = sum(author != "turn" for author, _ in pieces[half:-half])
    return [*pieces[:half], ("turn", f"{left} messages left out"), *pieces[-half:]]


def plain(pieces: Sequence[Piece]) -> str:
    """Pieces as one text; who wrote a message stands before it, except before the model's."""
    shown = []
    for author, text in pieces:
        prefix = {"turn": "", "assistant": ""}.get(author, f"[{author}] ")
        shown.append(f"--- {text} ---" if author == "turn" else prefix + text)
    return "\n".join(shown)


def numbers(values: Sequence[float | None]) -> str:
    """One number per turn, `-` where there is none."""
    return ", ".join("-" if value is None else f"{value:.3g}" for value in values)


def table_row(step: int, trajectory: Trajectory, advantages: Sequence[float], extra: dict[str, Any]) -> dict[str, Any]:
    """
    A conversation as a row of a table: numbers, text and `None`.

    Args:
        step (`int`): The optimiser step.
        trajectory (`Trajectory`): A scored conversation.
        advantages (`Sequence[float]`): One per turn.
        extra (`dict`): What reward functions logged for it, by name.
    """
    rewards = trajectory.rewards
    return {
        "step": step,
        "prompt": plain(prompt_pieces(trajectory)),
        "conversation": plain(turn_pieces(trajectory)),
        **{visible(name): numbers(values) for name, values in rewards.get("turn", {}).items()},
        **{visible(name): value for name, value in rewards.get("outcome", {}).items()},
        "advantages": numbers(advantages),
        "stop_reason": trajectory.stop_reason.value,
        "error": shorten(visible(trajectory.error or "")),
        **{visible(name): None if value is None else shorten(visible(str(value))) for name, value in extra.items()},
    }


def as_markdown(row: dict[str, Any]) -> str:
    """A row as Markdown: its text as a block in which nothing is markup, all else as a list."""
    blocks = ("prompt", "conversation")
    facts = [f"- {name}: `{value}`" for name, value in row.items() if name not in blocks and value not in (None, "")]
    text = "\n".join(row[name] for name in blocks)
    return "\n".join(["    " + line for line in text.splitlines()] + ["", *facts, ""])


def shorten(text: str) -> str:
    """A text without its middle where it is longer than `MOST_CHARACTERS`."""
    left = len(text) - MOST_CHARACTERS
    if left <= 0:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} … {left} characters left out … {text[-half:]}"


def _piece(message: Message) -> Piece:
    parts = [message.get("reasoning_content"), message.get("content"), *map(_call, message.get("tool_calls") or [])]
    texts = [part if isinstance(part, str) else to_json(part) for part in parts if part]
    return visible(message["role"]), shorten(visible("\n".join(texts).strip()))


def _call(call: dict[str, Any]) -> str:
    function = call.get("function", call)
    return f"{function['name']}({to_json(function.get('arguments', {}))})"
