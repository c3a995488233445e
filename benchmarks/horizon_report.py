"""The results of `horizon.py` as tables, the decision on the default rule, and the picture of README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import numpy as np
from ablation_report import BEGIN, DOCS, END, REPORTS, Difference, difference, quantile

matplotlib.use("Agg")
from matplotlib import pyplot

GOAL = 0.85
CANDIDATES = ("reward_to_go", "turn_gae", "gtpo")
"""Rules that can become the default, in this order."""
DECIDES = ("one-12", "two-12")
LATER = ("answer_baseline", "lambda_to_go", "one_scale")
"""Arms that were added after results had been seen: they decide nothing."""
SMOOTH = 3
"""Steps over which the share right is averaged before it is held against the goal."""

Row = dict[str, Any]
Plan = dict[str, Any]


def steps_to_goal(right: Sequence[float]) -> int | None:
    """The first step at which the mean of the last three reaches the goal; `None` where none does."""
    means = np.convolve(right, np.ones(SMOOTH) / SMOOTH, mode="valid")
    reached = np.flatnonzero(means >= GOAL)
    return int(reached[0]) + SMOOTH if len(reached) else None


def paired(rows: Sequence[Row], setting: str) -> dict[str, list[Row]]:
    """The runs of a setting by arm, in the order of seeds; only of seeds that every arm has."""
    arms: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["setting"] == setting:
            arms.setdefault(row["arm"], {})[row["seed"]] = row
    if not arms:
        return {}
    seeds = sorted(set.intersection(*(set(runs) for runs in arms.values())))
    return {arm: [runs[seed] for seed in seeds] for arm, runs in arms.items()}


def share(runs: Sequence[Row]) -> list[float]:
    """The share of tasks that were right over all of training, for each seed: the main measure."""
    return [fmean(run["right"]) for run in runs]


def table(rows: Sequence[Row], setting: str, plan: Plan) -> list[str]:
    """The lines of a setting's table, in Markdown."""
    arms = paired([row for row in rows if row["arm"] not in LATER], setting)
    means = {arm: fmean(share(runs)) for arm, runs in arms.items()}
    best = max(means, key=means.__getitem__)
    lines = [
        f"### `{setting}`",
        "",
        f"{len(arms[best])} seeds. Best: `{best}`.",
        "",
        "| arm | right, over training | to the best | right, last 3 steps | thousand turns to .85 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm, runs in arms.items():
        against = "" if arm == best or len(runs) < 2 else str(difference(share(runs), share(arms[best])))
        last = fmean(fmean(run["right"][-SMOOTH:]) for run in runs)
        reached = [steps_to_goal(run["right"]) for run in runs]
        known = [step * plan["turns"] / 1000 for step in reached if step is not None]
        speed = f"{fmean(known):.1f}" if known else "never"
        if known and len(known) < len(reached):
            speed += f" ({len(known)} of {len(reached)})"
        lines.append(f"| `{arm}` | {means[arm]:.3f} | {against} | {last:.3f} | {speed} |")
    return [line.replace("|  |", "| |") for line in lines]


def later(rows: Sequence[Row]) -> list[str]:
    """The lines of the table of arms that were added later, each over its own seeds."""
    lines = [
        "| arm | setting | seeds | right, over training | to `gtpo` | to `reward_to_go` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for arm in LATER:
        for setting in dict.fromkeys(row["setting"] for row in rows):
            own = paired([row for row in rows if row["arm"] in (arm, "gtpo", "reward_to_go")], setting)
            if len(own.get(arm, [])) < 2:
                continue
            gaps = [str(difference(share(own[arm]), share(own[other]))) for other in ("gtpo", "reward_to_go")]
            mean = fmean(share(own[arm]))
            lines.append(f"| `{arm}` | `{setting}` | {len(own[arm])} | {mean:.3f} | {gaps[0]} | {gaps[1]} |")
    return lines


def behind(rows: Sequence[Row], setting: str, rule: str, other: str | None) -> Difference | None:
    """The paired difference of a rule to another, or to the best arm; `None` where the rule is the best."""
    arms = paired(rows, setting)
    means = {arm: fmean(share(runs)) for arm, runs in arms.items()}
    other = other or max(means, key=means.__getitem__)
    return None if other == rule else difference(share(arms[rule]), share(arms[other]))


def decision(rows: Sequence[Row]) -> list[str]:
    """Each candidate against the rule that was fixed beforehand, in the order of the candidates."""
    lines = ["| candidate | setting | against | difference | shown behind |", "| --- | --- | --- | --- | --- |"]
    rows = [row for row in rows if row["arm"] not in LATER]
    trials = [(setting, None) for setting in DECIDES] + [(f"{name}-noisy", "mt_grpo") for name in DECIDES]
    for rule in CANDIDATES:
        for setting, other in trials:
            if len(next(iter(paired(rows, setting).values()), [])) < 2:
                continue
            found = behind(rows, setting, rule, other)
            shown = found is not None and found.mean + found.half < 0
            against = f"`{other}`" if other else "the best"
            lines.append(
                f"| `{rule}` | `{setting}` | {against} | {found or 'is the best'} | {'yes' if shown else 'no'} |"
            )
    return lines


def text(rows: Sequence[Row], plan: Plan) -> str:
    """All that the page says of the results."""
    settings = dict.fromkeys(row["setting"] for row in rows)
    tables = ["\n".join(table(rows, setting, plan)) for setting in settings]
    return "\n\n".join([*tables, *("\n".join(part) for part in (decision(rows), later(rows)) if len(part) > 2)])


def write_page(rows: Sequence[Row], plan: Plan, page: Path = REPORTS / "horizon.md") -> None:
    """Puts the tables into the page, between its two marks."""
    whole = page.read_text()
    before, rest = whole.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text(rows, plan)}\n\n{END}{rest.split(END)[1]}")


def draw(rows: Sequence[Row], plan: Plan, path: Path = DOCS / "images" / "horizon.png") -> None:
    """
    Draws the share right, over all of training, against the number of turns: a line per rule, with 95 % intervals. All
    runs begin alike and sample as many turns, so what is higher was learnt faster.
    """
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    for axes, (name, title) in zip(panels, (("one", "one skill"), ("two", "two skills")), strict=True):
        first = [row for row in rows if row["arm"] not in LATER]
        found = {turns: paired(first, f"{name}-{turns}") for turns in (1, 4, 12)}
        arms = list(next(iter(found.values()), {}))
        for number, arm in enumerate(arms):
            points = [(turns, share(runs[arm])) for turns, runs in found.items() if len(runs.get(arm, [])) > 1]
            if not points:
                continue
            places = [turns + 0.06 * (number - len(arms) / 2) for turns, _ in points]  # beside each other
            means = [fmean(values) for _, values in points]
            halves = [stdev(values) / len(values) ** 0.5 * quantile(0.975, len(values) - 1) for _, values in points]
            axes.errorbar(places, means, halves, label=arm, linewidth=1.6, capsize=2, marker="o", markersize=3)
        axes.set(xlabel="turns of a conversation", title=title, xticks=(1, 4, 12), ylim=(0, 1))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"share right over {plan['steps'] * plan['turns'] / 1000:.0f},000 turns of training")
    panels[1].legend(fontsize="small", frameon=False, ncols=2)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
