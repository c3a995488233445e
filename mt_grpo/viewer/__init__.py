"""A trajectory in a terminal: what the model sampled and what the environment wrote, told apart by colour."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from mt_grpo.media import decoded
from mt_grpo.trajectory import Trajectory, visible

__all__ = ["render_trajectory", "visible"]

_MODEL, _ENVIRONMENT = "green", "bright_black"


def render_trajectory(trajectory: Trajectory, tokenizer: Any, color: bool = True) -> Text:
    """Renders a conversation's tokens, then its rewards; without `color` the model's words are between « and »."""
    text = Text()
    for sequence in trajectory.tree.sequences():
        begin = 0
        while begin < len(sequence.tokens):
            end = begin + 1
            while end < len(sequence.tokens) and sequence.mask[end] == sequence.mask[begin]:
                end += 1
            words = visible(decoded(sequence.tokens[begin:end], tokenizer))
            if sequence.mask[begin]:
                text.append(words if color else f"«{words}»", style=_MODEL)
            else:
                text.append(words, style=_ENVIRONMENT)
            begin = end
        text.append("\n")
    text.append("under way" if trajectory.stop_reason is None else trajectory.stop_reason.value, style="bold")
    if trajectory.error:
        text.append(f": {visible(trajectory.error)}", style="red")
    for why, number in trajectory.refusals.items():
        text.append(f"\n{number} request{'s' * (number > 1)} refused: {visible(why)}", style="red")
    if trajectory.where:
        text.append(f"\n{visible(trajectory.traceback)}", style="red")
    for kind, rewards in trajectory.rewards.items():
        for name, value in rewards.items():
            values = value if isinstance(value, list) else [value]
            shown = ", ".join("-" if item is None else f"{item:.3g}" for item in values)
            text.append(f"\n  {kind} reward {visible(name)}: ", style="cyan").append(shown)
    return text.append("\n")
