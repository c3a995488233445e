"""
Which rule `mt-grpo credit` names on the designs of `designs.py`, and how that rule ended in the grid of
`designs_toy.py`; see reports/designs.md.

    python benchmarks/designs_advice.py               # minutes of one core
    python benchmarks/designs_advice.py --held-out    # designs and settings that it was not made on; trains them first

In each cell (design, K, shaping) it draws 48 groups of 8 conversations of the first policy, as the command does with
the model before training, ten times. A name counts as right if the rule ended within .05 of the best arm of the cell.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import NamedTuple

import torch
from common import RESULTS, machine
from designs import DESIGNS, earn
from designs_report import ARMS, write_page
from designs_toy import (
    GROUP,
    NAMED,
    RESULT,
    SEARCHES,
    SHAPINGS,
    TURNS,
    Cell,
    batch_of,
    calls_of,
    first_policy,
    train,
)

from mt_grpo.advisor.measure import compare
from mt_grpo.credit.rule import Scale

GROUPS, DRAWS, NEAR, STEP = 48, 10, 0.05, 6
SEEDS, HELD_OUT_DRAWS = 4, 4
"""Of what is held out."""
HELD_OUT_RESULT = RESULTS / "designs_held_out.json"


class Setting(NamedTuple):
    """Conversations of a first policy: `searches` and `named` are the shares of searches and of right names."""

    design: str
    turns: int
    shaping: float
    group: int = GROUP
    groups: int = GROUPS
    searches: float = SEARCHES
    named: float = NAMED


SEEN = (
    Setting("A", 12, 0.05),
    Setting("A", 24, 0.3, group=4),
    Setting("A", 12, 0.1, groups=16, named=0.7),
    Setting("B", 12, 0.3),
    Setting("B", 24, 0.05, searches=0.9, named=0.2),
    Setting("C", 12, 0.05, groups=16),
    Setting("D", 24, 0.3, group=4),
    Setting("F", 12, 0.3, groups=96),
    Setting("F", 24, 0.05, group=4),
    Setting("H", 12, 0.3, groups=16),
    Setting("P", 24, 0.05, groups=16),
    Setting("P", 12, 0.3, group=4, groups=96, searches=0.5),
    Setting("N", 12, 0.05, groups=96),
    Setting("N", 24, 0.3, group=4, groups=16),
    Setting("T", 12, 0.1),
    Setting("T", 24, 0.3, groups=16),
    Setting("M", 12, 0.1),
    Setting("M", 24, 0.05, named=0.6),
    Setting("W", 12, 0.1),
    Setting("W", 24, 0.05, group=4),
    Setting("Q", 12, 0.1),
    Setting("Q", 24, 0.3, groups=96, searches=0.5),
)
"""Held out when steps were first judged as they are. They were known when `compare._NEAR` was set."""
UNSEEN = (
    Setting("B", 16, 0.05, group=4, groups=16, searches=0.5, named=0.5),
    Setting("D", 12, 0.05, groups=16),
    Setting("M", 12, 0.3, group=4, groups=16),
    Setting("N", 16, 0.05, group=4, named=0.6),
    Setting("T", 16, 0.3, group=4, searches=0.6, named=0.6),
    Setting("W", 16, 0.3, groups=96),
)
"""Chosen after that. They were known when `Judgement.preferred` was added."""


def named(setting: Setting, seed: int) -> str | None:
    """The arm that is named from a draw; `None` where the groups do not tell."""
    draw = torch.Generator().manual_seed(1000 + seed)
    likely = first_policy(setting.searches, setting.named)
    number, turns = setting.groups * setting.group, setting.turns
    actions = torch.multinomial(likely, number * turns, replacement=True, generator=draw).view(1, number, turns)
    calls = calls_of(setting.design, actions, torch.rand(1, number, generator=draw, dtype=torch.double))
    batch = batch_of(calls, earn(setting.design, calls, setting.shaping), setting.group)
    hit = torch.nn.functional.one_hot(actions[0], 4).double() - likely
    gradients = torch.zeros(number, turns, turns, 4, dtype=torch.double)
    gradients[:, range(turns), range(turns)] = hit * calls.exists[..., None]
    rules = {arm: each.rule for arm, each in ARMS.items()}
    scales: dict[str, Scale] = {arm: "batch" for arm, each in ARMS.items() if each.scale_rewards == "batch"}
    judged, _ = compare(gradients.flatten(2), batch, rules, STEP, scale_rewards="group", scales=scales)
    return judged.best if judged.known else None


class Count(NamedTuple):
    """
    What was named in draws of a setting.

    Args:
        names (`dict[str, int]`): How often which arm.
        right (`int`): How often one within `NEAR` of the best.
        silent (`int`): How often none.
    """

    names: dict[str, int]
    right: int
    silent: int


def count(settings: Sequence[Setting], ends: Sequence[Mapping[str, float]], draws: int = DRAWS) -> Count:
    """What is named in draws of each setting, of which the arms ended so."""
    names: dict[str, int] = {}
    right = silent = 0
    for setting, found in zip(settings, ends, strict=True):
        for seed in range(draws):
            arm = named(setting, seed)
            if arm is None:
                silent += 1
                continue
            names[arm] = names.get(arm, 0) + 1
            right += found[arm] >= max(found.values()) - NEAR
    return Count(names, right, silent)


def line(counted: Count) -> str:
    """Three columns of a table."""
    ordered = sorted(counted.names, key=lambda arm: -counted.names[arm])
    said = ", ".join(f"`{arm}` {counted.names[arm]}" for arm in ordered)
    return f"{said} | {counted.right} of {sum(counted.names.values())} | {counted.silent} |".removeprefix(" ")


def total(counts: Sequence[Count]) -> str:
    told = sum(sum(each.names.values()) for each in counts)
    silent = sum(each.silent for each in counts)
    return f"Right in {sum(each.right for each in counts)} of {told} draws that tell anything; {silent} do not."


def of_designs() -> str:
    """The table of the eight designs."""
    ends: dict[tuple[str, int, float], dict[str, list[float]]] = {}
    for row in json.loads(RESULT.read_text())["rows"]:
        cell = ends.setdefault((row["design"], row["turns"], row["shaping"]), {})
        cell.setdefault(row["arm"], []).append(fmean(row["end"]))
    lines = ["| design | named | right | not enough evidence |", "| --- | --- | --- | --- |"]
    counts = []
    for design in DESIGNS:
        settings = [Setting(design, *each) for each in product(TURNS, SHAPINGS) if (design, *each) in ends]
        found = [{arm: fmean(each) for arm, each in ends[setting[:3]].items()} for setting in settings]
        counts.append(count(settings, found))
        lines.append(f"| {design} | {line(counts[-1])}")
        print(lines[-1], flush=True)
    return "\n".join([*lines, "", total(counts)])


def of_held_out() -> str:
    """The table of what is held out; trains what has no result."""
    rows = json.loads(HELD_OUT_RESULT.read_text())["rows"] if HELD_OUT_RESULT.exists() else []
    ends = {Setting(**{name: row[name] for name in Setting._fields}): row["end"] for row in rows}
    for setting in [setting for setting in (*SEEN, *UNSEEN) if setting not in ends]:
        policy, cell = (setting.searches, setting.named), (setting.design, setting.turns, setting.shaping, STEP)
        ends[setting] = {
            name: round(
                fmean(
                    fmean(row["end"])
                    for row in train(Cell(*cell, name), arm, SEEDS, policy=policy, group=setting.group)
                ),
                4,
            )
            for name, arm in ARMS.items()
        }
        lines = ",\n".join("    " + json.dumps({**each._asdict(), "end": end}) for each, end in ends.items())
        head = json.dumps({"machine": machine(), "seeds": SEEDS}, indent=2)
        HELD_OUT_RESULT.write_text(f'{head[:-2]},\n  "rows": [\n{lines}\n  ]\n}}\n')
    text = []
    for settings, title in ((SEEN, "Known when the margin was set"), (UNSEEN, "Not known")):
        lines = [
            f"{title}:",
            "",
            "| design | K | s | members | groups | searches, right names | named | right | not enough evidence |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        counts = []
        for each in settings:
            counts.append(count([each], [ends[each]], HELD_OUT_DRAWS))
            lines.append(
                f"| {each.design} | {each.turns} | {each.shaping} | {each.group} | {each.groups} | "
                f"{each.searches}, {each.named} | {line(counts[-1])}"
            )
            print(lines[-1], flush=True)
        text += [*lines, "", total(counts), ""]
    return "\n".join(text[:-1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", action="store_true", help="designs and settings that it was not made on")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.held_out:
        lines, begin, end = of_held_out(), "<!-- held out -->", "<!-- end of what is held out -->"
    else:
        lines, begin, end = of_designs(), "<!-- advice -->", "<!-- end of the advice -->"
    write_page(lines, begin=begin, end=end)
    print(lines)


if __name__ == "__main__":
    main()
