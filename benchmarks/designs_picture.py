"""
The picture of README and reports/designs.md: designs x rules, with the regret at the end in colours and numbers.

    python benchmarks/designs_picture.py

It is drawn from what `designs_train.py` has measured; as long as that is nothing, from what `designs_toy.py` has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from ablation_report import DOCS
from common import RESULTS
from designs import DESIGNS
from designs_report import ARMS

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import LinearSegmentedColormap

Row = dict[str, Any]

TRAINER, TABLES = "in the real trainer", "in tables of logits"
WORST = 0.6
"""Regrets from here on have the same red."""
COLOURS = LinearSegmentedColormap.from_list("regret", ["#8fd19e", "#f7f3c8", "#f4a582", "#e06666"])
"""Green, yellow, red; all light enough for black numbers."""
HEADS = {
    "A": "paid\nat once",
    "B": "turn 2\ndecides",
    "C": "paid\nlate",
    "D": "half\npaid",
    "F": "paid calls\ncost",
    "H": "longer\npays",
    "P": "3 calls\nhelp",
    "N": "outcome\nnoisy",
}
"""What stands under the letter of a design."""
LABELS = {
    "gtpo .5": "gtpo, γ .5",
    "gtpo .9": "gtpo, γ .9",
    "lambda_to_go": "lambda_to_go, a scale each",
    "one scale .7": "one scale, λ .7",
    "one scale .8": "one scale, λ .8",
    "one scale .9": "one scale, λ .9",
    "one scale .8, batch": "one scale, λ .8, of the batch",
}
"""Arms whose name needs a word more."""


def regrets(trained: Sequence[Row], tables: Sequence[Row]) -> tuple[np.ndarray, str]:
    """Mean regrets at the end, (arm, design), NaN where nothing has run; and where they were measured."""
    rows, where = (trained, TRAINER) if trained else (tables, TABLES)
    ends: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        ends.setdefault((row["arm"], row["design"]), []).extend(np.atleast_1d(row["end"]).tolist())
    found = [[1 - fmean(ends.get((arm, design), [np.nan])) for design in DESIGNS] for arm in ARMS]
    return np.array(found), where


def draw(values: np.ndarray, where: str, path: Path = DOCS / "images" / "designs.png") -> None:
    """Draws regrets, (arm, design), with the worst of each arm beside them."""
    rules = [LABELS.get(arm, arm) for arm in ARMS]
    complete = ~np.isnan(values).any(axis=1)
    worst = np.where(complete, np.nan_to_num(values).max(axis=1), np.nan)
    places = [*range(len(DESIGNS)), len(DESIGNS) + 0.3]
    figure, axes = pyplot.subplots(figsize=(8, 4.3), layout="constrained")
    for row, regret in enumerate(np.column_stack([values, worst])):
        for place, value in zip(places, regret, strict=True):
            colour = "white" if np.isnan(value) else COLOURS(min(value / WORST, 1.0))
            axes.add_patch(pyplot.Rectangle((place - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            if not np.isnan(value):
                weight = "bold" if place == places[-1] else "normal"
                axes.text(place, row, f"{value:.2f}", ha="center", va="center", fontsize=10, weight=weight)
    axes.set_xlim(-0.5, places[-1] + 0.5)
    axes.set_ylim(len(rules) - 0.5, -0.5)
    axes.set_xticks(places, [*(f"{design}\n{HEADS[design]}" for design in DESIGNS), "the\nworst"], fontsize=9)
    axes.set_yticks(range(len(rules)), rules, fontsize=10)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(f"Regret after training, {where}: 0 is all that is possible", fontsize=11)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def rows_of(name: str) -> list[Row]:
    path = RESULTS / name
    return json.loads(path.read_text())["rows"] if path.exists() else []


def main() -> None:
    draw(*regrets(rows_of("designs_train.json"), rows_of("designs_toy.json")))


if __name__ == "__main__":
    main()
