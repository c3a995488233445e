"""The results of `ablation.py` as tables and curves: paired differences and their intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parent.parent / "docs"
REPORTS = Path(__file__).parent / "reports"
BEGIN, END = "<!-- measured -->", "<!-- end of what is measured -->"

BASELINE, PLACED, PLACED_BASELINE = "mt_grpo", ("shuffled", "at_the_end"), "reward_to_go"
LATER = ("turn_gae", "gtpo", "one_scale")
"""Arms that were added for later comparisons, each over its own seeds."""
LEVEL, COMPARISONS = 0.05, 7
"""Level of an interval, and how many comparisons a measure has: five arms to one, and two to another."""

Row = dict[str, Any]


class Difference(NamedTuple):
    """A paired difference: its mean over seeds, half the width of its interval, and what it counts as."""

    mean: float
    half: float
    verdict: str

    def __str__(self) -> str:
        text = f"{self.mean:+.3f} ± {self.half:.3f}"
        return {"shown": f"**{text}**", "hint": f"*{text}*", "none": text}[self.verdict]


def measures(row: Row) -> dict[str, float]:
    """The three measures of a run."""
    middle, last = sorted(row["held_out"], key=int)
    return {
        "run mean": fmean(row["train"]["exact_match"]),
        f"step {middle}": row["held_out"][middle]["exact_match"],
        f"step {last}": row["held_out"][last]["exact_match"],
    }


def paired(rows: Iterable[Row], variant: str) -> dict[str, list[Row]]:
    """The runs of a variant by arm, in the order of seeds; only of seeds that every arm has."""
    arms: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["variant"] == variant and row["train"]["exact_match"]:
            arms.setdefault(row["arm"], {})[row["seed"]] = row
    seeds = sorted(set.intersection(*(set(runs) for runs in arms.values())))
    return {arm: [runs[seed] for seed in seeds] for arm, runs in arms.items()}


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """The paired difference of two arms over the same seeds, two at least."""
    values = [one - other for one, other in zip(ours, theirs, strict=True)]
    mean, error = fmean(values), stdev(values) / math.sqrt(len(values))
    half, strict = (error * quantile(1 - level / 2, len(values) - 1) for level in (LEVEL, LEVEL / COMPARISONS))
    verdict = "shown" if abs(mean) > strict else "hint" if abs(mean) > half else "none"
    return Difference(mean, half, verdict)


@cache
def quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t above its median, by bisection of an integral over the angle atan(t / √freedom)."""
    whole = math.sqrt(math.pi) * math.gamma(freedom / 2) / math.gamma((freedom + 1) / 2)
    centres = (np.arange(4000) + 0.5) / 4000
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 + middle * np.mean(np.cos(middle * centres) ** (freedom - 1)) / whole
        low, high = (middle, high) if below < probability else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def table(rows: Sequence[Row], variant: str) -> list[str]:
    """The lines of a variant's tables, in Markdown."""
    arms = paired([row for row in rows if row["arm"] not in LATER], variant)
    found = {arm: [measures(row) for row in runs] for arm, runs in arms.items()}
    names = list(next(iter(found.values()))[0])

    def series(arm: str, name: str) -> list[float]:
        return [each[name] for each in found[arm]]

    def against(arm: str, other: str, name: str) -> str:
        return "" if arm == other else str(difference(series(arm, name), series(other, name)))

    start = [row for row in rows if row["variant"] == variant and not row["train"]["exact_match"]]
    before = f", {start[0]['held_out']['0']['exact_match']:.3f} before training" if start else ""
    lines = [
        f"### `{variant}`",
        "",
        f"{len(next(iter(found.values())))} seeds{before}.",
        "",
        "| arm |" + "".join(f" {name} | to `{BASELINE}` |" for name in names),
        "| --- |" + " --- | --- |" * len(names),
    ]
    for arm in found:
        cells = (f" {fmean(series(arm, name)):.3f} | {against(arm, BASELINE, name)} |" for name in names)
        lines.append(f"| `{arm}` |" + "".join(cells))
    lines += [
        "",
        f"| arm, to `{PLACED_BASELINE}` |" + "".join(f" {name} |" for name in names),
        "| --- |" + " --- |" * len(names),
    ]
    for arm in PLACED:
        if arm in found:
            lines.append(f"| `{arm}` |" + "".join(f" {against(arm, PLACED_BASELINE, name)} |" for name in names))
    for arm in LATER:
        own = paired([row for row in rows if row["arm"] in (arm, BASELINE)], variant)
        if len(own.get(arm, [])) < 2:
            continue
        ours, theirs = ([measures(row) for row in own[name]] for name in (arm, BASELINE))
        pairs = ([[each[name] for each in side] for side in (ours, theirs)] for name in names)
        cells = "".join(f" {fmean(one):.3f} | {difference(one, other)} |" for one, other in pairs)
        if arm == next((name for name in LATER if any(row["arm"] == name for row in rows)), None):
            heads = "".join(f" {name} | to `{BASELINE}` |" for name in names)
            lines += ["", f"| added later | seeds |{heads}", "| --- | --- |" + " --- | --- |" * len(names)]
        lines.append(f"| `{arm}` | {len(ours)} |{cells}")
    return [line.replace("|  |", "| |") for line in lines]


def text(rows: Sequence[Row]) -> str:
    """All that the page says of the results."""
    variants = dict.fromkeys(row["variant"] for row in rows)
    return "\n\n".join("\n".join(table(rows, variant)) for variant in variants)


def write_page(rows: Sequence[Row], page: Path = REPORTS / "ablation.md") -> None:
    """Puts the tables into the page, between its two marks."""
    whole = page.read_text()
    before, rest = whole.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text(rows)}\n\n{END}{rest.split(END)[1]}")


def draw(rows: Sequence[Row], path: Path = DOCS / "images" / "ablation.png") -> None:
    """Draws the exact match of training conversations over the steps: the mean over seeds of each arm."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    figure, panels = pyplot.subplots(1, len(variants), figsize=(5 * len(variants), 3.8), layout="constrained")
    for variant, axes in zip(variants, np.atleast_1d(panels), strict=True):
        for arm, runs in paired([row for row in rows if row["arm"] not in LATER], variant).items():
            curve = np.mean([row["train"]["exact_match"] for row in runs], axis=0)
            style = "--" if arm in PLACED else "-"
            axes.plot(range(1, len(curve) + 1), curve, style, label=arm, linewidth=1.6)
        axes.set(xlabel="optimiser step", ylabel="exact match in training", title=variant)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
