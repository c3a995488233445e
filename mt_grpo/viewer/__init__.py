"""
A trajectory in a terminal: what the model sampled and what the environment wrote, told apart by colour, and the
commands that it ran.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from mt_grpo.media import decoded
from mt_grpo.trajectory import ToolCall, Trajectory, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["render_trajectory", "visible"]

_MODEL, _ENVIRONMENT = "green", "bright_black"
_SHOWN = 2_000  # most characters of a command's output, or of a log, that are shown
_LOGS = ("agent_log", "files_changed", "verifier_log")
"""What an environment may say of a conversation that is shown as it is printed."""


def render_trajectory(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, color: bool = True) -> Text:
    """
    Renders a conversation's tokens, the commands that it ran, its logs and rewards; without `color` the model's words
    are between « and ».
    """
    text = Text()
    for sequence in trajectory.tree.sequences():
        begin, turn = 0, -1
        while begin < len(sequence.tokens):
            end, is_of = begin + 1, (sequence.mask[begin], sequence.turns[begin])
            while end < len(sequence.tokens) and (sequence.mask[end], sequence.turns[end]) == is_of:
                end += 1
            calls = trajectory.turns[turn].tool_calls if 0 <= turn < len(trajectory.turns) else []
            words = visible(decoded(sequence.tokens[begin:end], tokenizer))
            if sequence.mask[begin]:
                text.append(words if color else f"«{words}»", style=_MODEL)
            elif sequence.turns[begin] < 0 and calls and all(map(_is_command, calls)):
                text.append("\n").append(_terminal(calls))
            else:
                text.append(words, style=_ENVIRONMENT)
            begin, turn = end, sequence.turns[begin]
        text.append("\n")
        if 0 <= turn < len(trajectory.turns):  # the tokens end with what it sampled
            text.append(_terminal(trajectory.turns[turn].tool_calls))
    for name in _LOGS:
        if (log := trajectory.info.get(name)) and isinstance(log, str):  # an environment's own may be anything
            text.append(f"{name.replace('_', ' ')}:\n", style="bold").append(f"{_ends(log)}\n", style=_ENVIRONMENT)
    text.append("under way" if trajectory.stop_reason is None else trajectory.stop_reason.value, style="bold")
    if trajectory.error:
        text.append(f": {visible(trajectory.error)}", style="red")
    for why, number in trajectory.refusals.items():
        text.append(f"\n{number} request{'s' * (number > 1)} refused: {visible(why)}", style="red")
    if trajectory.where:
        text.append(f"\n{visible(trajectory.traceback)}", style="red")
    several = trajectory.env_rewards if len(trajectory.env_rewards) > 1 else {}  # of one the sum says all
    for kind, rewards in {**trajectory.rewards, "environment": several}.items():
        for name, value in rewards.items():
            values = value if isinstance(value, list) else [value]
            shown = ", ".join("-" if item is None else f"{item:.3g}" for item in values)
            text.append(f"\n  {kind} reward {visible(name)}: ", style="cyan").append(shown)
    return text.append("\n")


def _is_command(call: ToolCall) -> bool:
    """Whether a call ran a command in a shell: its tool said with what exit code."""
    return isinstance((call.data or {}).get("exit_code"), int) and isinstance(call.arguments.get("command"), str)


def _terminal(calls: list[ToolCall]) -> Text:
    """Commands with what they printed, their exit codes and seconds."""
    text = Text()
    for call in filter(_is_command, calls):
        assert call.data is not None
        code, seconds = call.data["exit_code"], call.data.get("seconds")
        if not isinstance(seconds, (int, float)):  # which a tool of the user's may have left out
            seconds = call.seconds
        text.append(f"$ {visible(call.arguments['command'])}\n", style="bold")
        text.append(f"{_ends(call.result)}\n", style=_ENVIRONMENT)
        text.append(f"exit code {code} · {seconds:.2f} s\n", style="red" if code else "cyan")
    return text


def _ends(words: str) -> str:
    """The beginning and the end of a long text, without control characters."""
    words, half = visible(words.strip("\n")), _SHOWN // 2
    left_out = len(words) - 2 * half
    if left_out <= 0:
        return words
    return f"{words[:half]}\n[{left_out:,} characters left out]\n{words[-half:]}"
