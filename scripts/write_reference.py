"""Writes `docs/reference.md`: the fields that users' code reads and returns, from the docstrings of their classes."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path

from mt_grpo.envs import MultiTurnToolEnv, Outcome, Step, StepEnv
from mt_grpo.integrations.gym import GymEnv
from mt_grpo.rewards import OutcomeReward, StateScore, TurnReward
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
CLASSES = {
    Turn: "Rewards, state scores and `StepEnv.step` get it.",
    ToolCall: "`turn.tool_calls` has them.",
    Trajectory: "Rewards get it, `mt_grpo.runlog` reads it.",
    Step: "`StepEnv.step` returns it.",
    Outcome: "An environment's `run`, or an agent, returns it.",
}
ENVIRONMENTS = {
    StepEnv: ("Attributes", "Subclass it for rules of your own: [how](environments.md)."),
    MultiTurnToolEnv: ("Args", "A `StepEnv` with tools, and what a recipe's `tools` run in."),
    GymEnv: ("Args", "A `StepEnv` over a class in Gym's form: [games](games.md)."),
}
"""Environments to subclass or to make, with the part of the docstring that says what they have."""
METHODS = {StepEnv: ("reset", "step", "fork", "close"), MultiTurnToolEnv: ("start", "reset", "step", "execute")}
"""What a subclass may override, or call."""
HEAD = """# Reference

For your rewards, environments and agents: what these objects hold. The docstrings say more, and that of
`mt_grpo.credit.RewardBatch` what a rule gets.
"""
REWARDS = """## Arguments of rewards

| subclass | method | returns |
| --- | --- | --- |"""


def described(text: str, part: str = "Args") -> dict[str, str]:
    """The first sentence on each argument of a docstring."""
    arguments = text.partition(f"\n{part}:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+) \(.*?\): (.*?)(?=^    \w|\Z)|", arguments, re.DOTALL | re.MULTILINE)
    entries = {name: " ".join(words.split()) for name, words in entries if name}
    return {name: re.split(r"(?<=[.;:]) (?=[A-Z])|; ", words)[0].rstrip(".;:") for name, words in entries.items()}


def fields(cls: type) -> str:
    """The fields of a dataclass with types, defaults and meanings, then its properties."""
    text = inspect.getdoc(cls) or ""
    meanings = described(text)
    lines = []
    for field in dataclasses.fields(cls):
        if field.repr:  # the others are the trainer's own
            kind = str(field.type).replace("|", "or")
            lines.append(f"- `{field.name}: {kind}`: {meanings[field.name]}")
    for name, member in vars(cls).items():
        if isinstance(member, property) and not name.startswith("_"):
            words = (inspect.getdoc(member) or "").split("\n\n")[0].replace("\n", " ")
            lines.append(f"- `{name}`: {re.split(r'[.:;] ', words)[0].rstrip('.')}")
    return "\n".join(lines)


def sentence(text: str) -> str:
    """The first of a docstring."""
    return re.split(r"(?<=[.]) |[:;] ", " ".join(text.split("\n\n")[0].split()))[0].rstrip(".:;")


def environments() -> str:
    """What environments have, what a subclass overrides, and the example of a docstring as code that runs."""
    parts = []
    for cls, (part, where) in ENVIRONMENTS.items():
        text = inspect.getdoc(cls) or ""
        lines = [f"## {cls.__name__}", "", f"`from {home(cls)} import {cls.__name__}`. {where}", ""]
        lines += [f"- `{name}`: {words}" for name, words in described(text, part).items()]
        for name in METHODS.get(cls, ()):
            method = vars(cls)[name]
            words = ", ".join(list(inspect.signature(method).parameters)[1:])
            lines.append(f"- `{name}({words})`: {sentence(inspect.getdoc(method) or '')}")
        example = re.search(r"^    class .*?(?=^\S)", text, re.DOTALL | re.MULTILINE)
        if cls is MultiTurnToolEnv and example:
            code = f"from {home(cls)} import {cls.__name__}\n\n\n{textwrap.dedent(example[0]).strip()}"
            lines += ["", "A reward for turns whose calls all ran, and a countdown:", "", f"```python\n{code}\n```"]
            lines += ["", "One with tools over a row's database: [the example](example.md)."]
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def reference() -> str:
    """The page."""
    parts = [HEAD]
    for cls, where in CLASSES.items():
        first = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
        parts.append(
            f"## {cls.__name__}\n\n`from {home(cls)} import {cls.__name__}`. {where} {first}\n\n{fields(cls)}\n"
        )
    parts.append(environments())
    rewards = "\n".join(
        f"| `{cls.__name__}` | `score({', '.join(arguments(cls))})` | {(inspect.getdoc(cls) or '').split('. ')[0]}; "
        "a number, or `None` where it does not apply |"
        for cls in (TurnReward, OutcomeReward, StateScore)
    ).replace(".;", ";")
    parts.append(
        f"{REWARDS}\n{rewards}\n\n`**row` has the columns of the dataset row. `weight`, `maximum` and `name` "
        "are attributes of the class.\n"
    )
    reasons = ", ".join(f"`{reason.value}`" for reason in StopReason)
    parts.append(f"## StopReason\n\nA text, one of {reasons}. [What they mean](rollouts.md#limits).\n")
    return "\n".join(parts)


def arguments(cls: type) -> list[str]:
    """The arguments of a reward's `score`, as a subclass writes them."""
    signs = {inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(cls.score).parameters.values()
    named = [each for each in parameters if each.kind is not inspect.Parameter.VAR_POSITIONAL]
    return [signs.get(each.kind, "") + each.name for each in named if each.name != "self"]


def home(cls: type) -> str:
    """The module that users import a class from."""
    return re.sub(r"\.(tool_)?env$", "", cls.__module__)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
