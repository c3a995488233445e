"""A trajectory in a terminal: what the model sampled and what the environment wrote, told apart by colour."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from mt_grpo.trajectory import Trajectory

_MARKS = "\u061c\u200e\u200f"
_CONTROLS = [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in [*_CONTROLS, *map(ord, _MARKS)]}

MODEL, ENVIRONMENT = "green", "bright_black"


def visible(value: Any) -> Any:
    """
    Text with control characters as text, so that what a model or a tool writes does nothing to a terminal: all but
    line feed and tab, and those that turn the direction of writing. Of lists and dictionaries every text in them.
    """
    if isinstance(value, str):
        return value.translate(_SHOWN)
    if isinstance(value, dict):
        return {visible(key): visible(item) for key, item in value.items()}
    return [visible(item) for item in value] if isinstance(value, list) else value


def render_trajectory(trajectory: Trajectory, tokenizer: Any, color: bool = True) -> Text:
    """
    Renders the tokens of a conversation, then its rewards.

    Args:
        trajectory (`Trajectory`): The conversation.
        tokenizer: Decodes its tokens, special ones shown.
        color (`bool`, *optional*, defaults to `True`): Colours; without them the model's words stand between « and ».
    """
    text = Text()
    for sequence in trajectory.tree.sequences():
        begin = 0
        while begin < len(sequence.tokens):
            end = begin + 1
            while end < len(sequence.tokens) and sequence.mask[end] == sequence.mask[begin]:
                end += 1
            words = visible(tokenizer.decode(sequence.tokens[begin:end], skip_special_tokens=False))
            if sequence.mask[begin]:
                text.append(words if color else f"«{words}»", style=MODEL)
            else:
                text.append(words, style=ENVIRONMENT)
            begin = end
        text.append("\n")
    text.append(f"{trajectory.stop_reason.value}", style="bold")
    if trajectory.error:
        text.append(f": {visible(trajectory.error)}", style="red")
    for kind, rewards in trajectory.rewards.items():
        for name, value in rewards.items():
            values = value if isinstance(value, list) else [value]
            shown = ", ".join("-" if item is None else f"{item:.3g}" for item in values)
            text.append(f"\n  {kind} reward {visible(name)}: ", style="cyan").append(shown)
    return text.append("\n")
