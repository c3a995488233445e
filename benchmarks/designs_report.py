"""The arms of the comparison of reports/designs.md, its tables, and the decision on its results."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from ablation_report import BEGIN, END, REPORTS, difference
from designs import DESIGNS

from mt_grpo.credit import Rule

MARGIN, TIE = 0.05, 0.02

Row = dict[str, Any]


class Arm(NamedTuple):
    """A rule, and whose deviation divides."""

    rule: Rule
    scale_rewards: str = "group"


def one_scale(lam: float) -> Rule:
    return {"name": "lambda_to_go", "lam": lam, "scales": "one"}


ARMS = {
    "gtpo .5": Arm({"name": "gtpo", "gamma": 0.5}),
    "gtpo .9": Arm({"name": "gtpo", "gamma": 0.9}),
    "turn_gae": Arm("turn_gae"),
    "lambda_to_go": Arm("lambda_to_go"),
    "one scale .7": Arm(one_scale(0.7)),
    "one scale .8": Arm(one_scale(0.8)),
    "one scale .9": Arm(one_scale(0.9)),
    "one scale .8, batch": Arm(one_scale(0.8), "batch"),
    "mt_grpo": Arm("mt_grpo"),
    "grpo_or": Arm("grpo_or"),
}
TODAY = "gtpo .5"
"""The default when the comparison was planned."""
FINALISTS = 3
"""The best arms of the main table, which the second stage takes on."""
BEGIN_SECOND, END_SECOND = "<!-- second -->", "<!-- end of second -->"


def by_seed(rows: Sequence[Row], design: str, arm: str, measure: str) -> dict[int, float]:
    return {row["seed"]: row[measure] for row in rows if row["design"] == design and row["arm"] == arm}


def shown_below(rows: Sequence[Row], design: str, arm: str) -> str | None:
    """What an arm is shown to end more than `MARGIN` below: its `start`, or `grpo_or`; `None` if neither is shown."""
    end = by_seed(rows, design, arm, "end")
    for name, other in (
        ("its start", by_seed(rows, design, arm, "start")),
        ("`grpo_or`", by_seed(rows, design, "grpo_or", "end")),
    ):
        seeds = sorted(set(end) & set(other))
        if len(seeds) > 1:
            gap = difference([end[seed] for seed in seeds], [other[seed] for seed in seeds])
            if gap.mean + gap.half < -MARGIN:
                return name
    return None


def regret(rows: Sequence[Row], design: str, arm: str, measure: str) -> tuple[float, float] | None:
    """The mean regret of an arm and the upper end of its 95 % interval; `None` without two seeds."""
    values = [1 - value for value in by_seed(rows, design, arm, measure).values()]
    if len(values) < 2:
        return None
    gap = difference(values, [0.0] * len(values))
    return gap.mean, gap.mean + gap.half


class Verdict(NamedTuple):
    """
    What is decided of an arm.

    Args:
        arm (`str`): Its name.
        out (`str`, *optional*): Why it cannot be the default.
        upper (`float`): The largest upper end of its regret at the end, over designs.
        mean (`float`): Its mean regret at the end.
        over (`float`): Its mean regret over training.
    """

    arm: str
    out: str | None
    upper: float
    mean: float
    over: float


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Of each arm that has all designs, the best one first."""
    designs = [design for design in DESIGNS if any(row["design"] == design for row in rows)]
    found = []
    for arm in ARMS:
        ends = [regret(rows, design, arm, "end") for design in designs]
        overs = [regret(rows, design, arm, "over") for design in designs]
        known = [each for each in ends if each is not None]
        if not designs or len(known) < len(designs):
            continue
        below = {design: why for design in designs if (why := shown_below(rows, design, arm)) is not None}
        out = ", ".join(f"{design}: below {why}" for design, why in below.items()) or None
        over = fmean(each[0] for each in overs if each is not None)
        found.append(Verdict(arm, out, max(upper for _, upper in known), fmean(mean for mean, _ in known), over))
    return sorted(found, key=lambda each: (each.out is not None, each.upper))


def decide(rows: Sequence[Row]) -> str | None:
    """The arm that becomes the default; `None` where every arm is out."""
    left = [each for each in verdicts(rows) if each.out is None]
    if not left:
        return None
    near = [each for each in left if each.upper - left[0].upper <= TIE]
    return min(near, key=lambda each: each.mean).arm


def finalists(rows: Sequence[Row]) -> list[str]:
    """
    The arms of the second stage: the best ones of the main table, the one that it decides on first, and the default of
    today.

    Raises:
        SystemExit: If the main table is not complete.
    """
    ordered = [each.arm for each in verdicts(rows)]
    if len(ordered) < len(ARMS) or any(not by_seed(rows, design, TODAY, "end") for design in DESIGNS):
        raise SystemExit("The main table is not complete: run `python benchmarks/designs_train.py`, or name --arms.")
    first = [arm for arm in (decide(rows),) if arm is not None]
    return list(dict.fromkeys([*[*first, *(arm for arm in ordered if arm not in first)][:FINALISTS], TODAY]))


def text_of_variants(rows: Sequence[Row]) -> str:
    """The tables of the second stage, one for each variant, in Markdown."""
    parts = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        designs = [design for design in DESIGNS if any(row["design"] == design for row in own)]
        seeds = len({row["seed"] for row in own})
        lines = [
            f"**{variant}.** Regret at the end, with the half of its 95 % interval; seeds: {seeds}.",
            "",
            f"| arm | {' | '.join(designs)} | mean | mean over training |",
            f"| --- |{' --- |' * (len(designs) + 2)}",
        ]
        for arm in dict.fromkeys(row["arm"] for row in own):
            cells = [cell_of(own, design, arm, "end") for design in designs]
            ends, overs = (
                [1 - fmean(values) for design in designs if (values := by_seed(own, design, arm, measure).values())]
                for measure in ("end", "over")
            )
            lines.append(f"| {arm} | {' | '.join(cells)} | {fmean(ends):.3f} | {fmean(overs):.3f} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts).replace("|  |", "| |") or "Not run."


def cell_of(rows: Sequence[Row], design: str, arm: str, measure: str) -> str:
    """The regret of an arm, with the half of its interval; of a single seed alone."""
    found = regret(rows, design, arm, measure)
    if found:
        return f"{found[0]:.2f} ± {found[1] - found[0]:.2f}"
    return " ".join(f"{1 - value:.2f}" for value in by_seed(rows, design, arm, measure).values())


def text(rows: Sequence[Row]) -> str:
    """The tables of the page, in Markdown."""
    designs = [design for design in DESIGNS if any(row["design"] == design for row in rows)]
    head = f"| arm | {' | '.join(designs)} |\n| --- |{' --- |' * len(designs)}"
    parts = []
    for measure, title in (("end", "Regret at the end"), ("over", "Regret over training")):
        lines = [f"{title}, with the half of its 95 % interval; 0 is all that is possible.", "", head]
        for arm in ARMS:
            cells = [cell_of(rows, design, arm, measure) for design in designs]
            if any(cells):
                lines.append(f"| {arm} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    lines = [
        "| arm | out, since it ends | largest upper end | mean regret | over training |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.arm} | {each.out or ''} | {each.upper:.3f} | {each.mean:.3f} | {each.over:.3f} |"
        for each in verdicts(rows)
    ]
    if len(lines) > 2:
        parts.append("\n".join(lines))
        parts.append(f"By the rule above: `{decide(rows) or 'none'}`.")
    return "\n\n".join(parts).replace("|  |", "| |")


def write_page(lines: str, page: str = "designs.md", begin: str = BEGIN, end: str = END) -> None:
    """Puts tables into a page, between its two marks."""
    path = REPORTS / page
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n\n{lines}\n\n{end}{rest.split(end)[1]}")
