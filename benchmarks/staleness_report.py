"""The results of `staleness.py` as tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from ablation_report import quantile

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parent.parent / "docs"
REPORTS = Path(__file__).parent / "reports"
BEGIN, END = "<!-- learning -->", "<!-- end of learning -->"
START = "start"
NAMES = {
    START: "before training",
    "decoupled": "decoupled, the trainer's",
    "sampled": "sampled log-probs as the old ones",
    "none": "no correction",
}

Row = dict[str, Any]


class Interval(NamedTuple):
    """A mean over seeds, with its 95 % interval (Student's t); one seed has none."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ({self.low:.2f} to {self.high:.2f})" if self.seeds > 1 else "")

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


def interval(values: Sequence[float]) -> Interval:
    """Of a share, so that it ends at 0 and 1."""
    mean, number = fmean(values), len(values)
    half = stdev(values) / number**0.5 * quantile(0.975, number - 1) if number > 1 else 0.0
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half), number)


def arms(rows: Sequence[Row], part: str) -> dict[tuple[str, int], list[Row]]:
    """The runs of a part by objective and staleness."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["part"] == part:
            found.setdefault((row["objective"], row["staleness"]), []).append(row)
    return found


def exact_match(runs: Sequence[Row]) -> Interval:
    """Over held-out questions, after training."""
    return interval([run["exact_match"] for run in runs])


def table(rows: Sequence[Row], part: str) -> list[str]:
    """The lines of a part's table, in Markdown."""
    lines = [
        "| objective | `max_staleness` | exact match | of each seed | mean staleness | least effective sample size |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (objective, staleness), runs in arms(rows, part).items():
        ahead = [run for run in runs if run["mean_staleness"]]
        lag = f"{fmean(fmean(run['mean_staleness']) for run in ahead):.1f}" if ahead else ""
        effective = f"{fmean(min(run['effective']) for run in ahead):.2f}" if ahead else ""
        shown = "" if objective == START else staleness
        each = ", ".join(f"{run['exact_match']:.2f}" for run in runs)
        cells = [NAMES[objective], shown, exact_match(runs), each, lag, effective]
        lines.append(f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |").replace("|  |", "| |"))
    return lines


def text(rows: Sequence[Row], parts: dict[str, Any]) -> str:
    """All that the page says of the results."""
    said = []
    for part, plan in parts.items():
        if arms(rows, part):
            where = "a real vLLM server" if plan["engine"] == "server" else "a copy of the model"
            head = f"**`{part}`**: {plan['steps']} steps of {plan['batch']} conversations with a learning rate of "
            said.append(f"{head}{plan['learning_rate']:g}, sampled from {where}.")
            said.append("\n".join(table(rows, part)))
    return "\n\n".join(said)


def write_page(rows: Sequence[Row], parts: dict[str, Any], page: Path = REPORTS / "staleness.md") -> None:
    """Puts the tables into the page, between its two marks."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text(rows, parts)}\n\n{END}{rest.split(END)[1]}")


def draw(rows: Sequence[Row], parts: dict[str, Any], path: Path = DOCS / "images" / "staleness.png") -> None:
    """
    Draws the exact match of training conversations over the steps, and for the comparison of objectives that after
    training against the staleness.
    """
    figure, panels = pyplot.subplots(1, len(parts), figsize=(4.4 * len(parts), 3.8), layout="constrained")
    for (part, plan), axes in zip(parts.items(), np.atleast_1d(panels), strict=True):
        found = {arm: runs for arm, runs in arms(rows, part).items() if arm[0] != START}
        if part == "objectives":
            _draw_after(axes, found)
        else:
            _draw_curves(axes, found)
        axes.set(ylim=(0, 1), title=f"{part}, learning rate {plan['learning_rate']:g}")
        axes.grid(alpha=0.3)
        if found:
            axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _draw_curves(axes: Any, found: dict[tuple[str, int], list[Row]]) -> None:
    for (objective, staleness), runs in found.items():
        curves = np.array([run["train"] for run in runs])
        steps = range(1, curves.shape[1] + 1)
        label = f"staleness {staleness}" + (", no correction" if objective == "none" and staleness else "")
        (line,) = axes.plot(steps, curves.mean(axis=0), label=label, linewidth=1.8)
        axes.plot(steps, curves.T, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="optimiser step", ylabel="exact match in training, a thin line per seed")


def _draw_after(axes: Any, found: dict[tuple[str, int], list[Row]]) -> None:
    for objective in dict.fromkeys(objective for objective, _ in found):
        points = [(staleness, runs) for (name, staleness), runs in found.items() if name == objective]
        means = [exact_match(runs).mean for _, runs in points]
        (line,) = axes.plot([staleness for staleness, _ in points], means, label=objective, linewidth=1.6)
        for staleness, runs in points:
            values = [run["exact_match"] for run in runs]
            axes.plot([staleness] * len(values), values, "o", color=line.get_color(), markersize=3)
    axes.set(xlabel="max_staleness", ylabel="exact match after training, a point per seed")
