"""What a terminal is shown of conversations: text, whatever characters are in it."""

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.models import build_tokenizer

from mt_grpo.app.train import _table, measure, summarise
from mt_grpo.errors import UserError
from mt_grpo.preemption import print_error
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn
from mt_grpo.viewer import render_trajectory, visible

ATTACK = "a\x1b]0;title\x07b\x1b[2J\x1b]52;c;bGlt\x1b\\c\r\x08\x7f\x9b31m\x00\u202ed\u2066\u200f"
HARMLESS = "\tPerú 🙂 北京 [bold]not markup[/bold] [/]\n\u200d"
FAILS = (
    f"from mt_grpo import cli\ndef fail(arguments):\n    raise RuntimeError({ATTACK!r})\ncli._interruptible(fail)([])"
)


def drawn(renderable, **options) -> str:
    console = Console(file=io.StringIO(), soft_wrap=True, **options)
    console.print(renderable)
    return console.file.getvalue()


def controls(text: str) -> list[str]:
    return [c for c in text if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u202e\u2066\u200f")]


def test_control_characters_are_shown_as_text():
    assert visible("\x1b[2J\x07\r\x7f\x9b\u202e") == "\\x1b[2J\\x07\\x0d\\x7f\\x9b\\u202e"
    assert visible(HARMLESS) == HARMLESS
    assert visible([{"content": "\x1b", "n": 1}]) == [{"content": "\\x1b", "n": 1}]
    assert not controls(visible("".join(map(chr, range(0xD800)))).replace("\x1b", ""))


@pytest.mark.parametrize("color", [True, False])
def test_a_conversation_does_nothing_to_the_terminal(color):
    tokenizer, tree = build_tokenizer(), TokenTree()
    action = tokenizer.encode(ATTACK + HARMLESS)
    tree.add_turn(tokenizer.encode(ATTACK), action, [0.0] * len(action))
    trajectory = Trajectory([], tree=tree, stop_reason=StopReason.ENV_ERROR, error=ATTACK)
    trajectory.rewards = {"turn": {f"r{ATTACK}[red]": [1.0, None]}, "outcome": {}}
    trajectory.where = "env.py, line 3, in step"
    trajectory.traceback = "File \"env.py\", line 3, in step\n    return {}['\x1b']"
    shown = drawn(render_trajectory(trajectory, tokenizer, color))
    assert not controls(shown) and shown.count("\\x1b]0;title") == 4
    for words in ("[bold]not markup[/bold]", "[red]: 1, -", 'File "env.py", line 3, in step', "return {}['\\x1b']"):
        assert words in shown
    trajectory.where = None
    assert "env.py" not in drawn(render_trajectory(trajectory, tokenizer, color))


def test_commands_are_shown_as_a_terminal_shows_them():
    tokenizer, tree = build_tokenizer(), TokenTree()
    context, made = tokenizer.encode("Count."), Trajectory([], tree=tree, stop_reason=StopReason.MAX_STEPS)
    for index, (command, output, code) in enumerate([("wc *", f"first\x1b{'x' * 4000}last\n", 0), ("false", "no", 1)]):
        action = tokenizer.encode(f"I run {command}.")
        tree.add_turn(context, action, [0.0] * len(action))
        context = context + action + tokenizer.encode("<result>not shown</result>")
        call = ToolCall("bash", {"command": command}, output, data={"exit_code": code, "seconds": 0.25})
        made.turns.append(Turn(index, {}, tool_calls=[call]))
    made.info, made.env_rewards = {"verifier_log": "2 failed\n"}, {"reward": 0.5, "style": 1.0}
    made.info["files_changed"] = "/a\x1b\n"
    shown = drawn(render_trajectory(made, tokenizer, color=False))
    assert shown.startswith("Count.«I run wc *.»\n$ wc *\nfirst\\x1bxxx") and "not shown" not in shown
    assert "x\n[2,013 characters left out]\nx" in shown and "xlast\nexit code 0 · 0.25 s\n«I run" in shown
    assert "$ false\nno\nexit code 1 · 0.25 s\nfiles changed:\n/a\\x1b\nverifier log:\n2 failed\nmax_steps\n" in shown
    assert "  environment reward reward: 0.5\n  environment reward style: 1\n" in shown


def test_an_error_does_nothing_to_the_terminal(capsys):
    print_error(UserError(f"bad {ATTACK}"))
    printed = capsys.readouterr().err
    assert not controls(printed) and "\\x1b]0;title" in printed
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True)
    assert done.returncode == 1 and "RuntimeError: a\\x1b]0;title" in done.stderr and "Traceback" in done.stderr
    assert not controls(done.stderr)


def test_a_conversation_without_a_score_is_not_counted_as_wrong():
    right = SimpleNamespace(name="right", maximum=1.0)
    scored = [Trajectory([], rewards={"turn": {}, "outcome": {"right": value}}) for value in (1.0, None)]
    before, after = (summarise([measure(each, [right]) for each in some]) for some in (scored[:1], scored))
    assert before["right"] == after["right"] == 1.0 and after["questions"] == 2
    assert "unscored" not in before and after["unscored"] == {"right": 1}
    assert "right (unscored: 0, 1)" in drawn(_table(before, after, "title"), width=100)


def test_names_of_rewards_are_no_markup():
    measures = {"[red]mine[/red] [/]": 0.5, "questions": 2}
    shown = drawn(_table(measures, measures, "title [/x]"), width=100)
    assert "[red]mine[/red] [/]" in shown and "title [/x]" in shown
