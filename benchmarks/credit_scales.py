"""
What one scale for outcome and turn rewards changes: the bias of rules with `scales` each and one, and what is learnt
in design F. Writes two tables into reports/credit.md, and its picture.

    python benchmarks/credit_scales.py             # about a minute of one core
    python benchmarks/credit_scales.py --tables    # the tables alone, in seconds

Groups of 4 are enumerated as in `credit.py`. With `scale_rewards: batch` a batch of many groups is drawn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from ablation_report import DOCS, quantile
from credit import GROUP_SIZE, PROCESSES
from designs_report import ARMS, write_page
from designs_toy import Cell, curves
from support.decision_processes import logit, nearly_noise, paid_searches
from support.exact_gradients import Measurement, Process, measure, sample
from torch import Tensor

from mt_grpo.credit import Rule, rule_label
from mt_grpo.credit.rule import Scale

matplotlib.use("Agg")
from matplotlib import pyplot

BEGIN, END = "<!-- scales -->", "<!-- end of scales -->"
RULES: list[tuple[dict[str, str | float], bool]] = [
    ({"name": "reward_to_go"}, True),
    ({"name": "lambda_to_go", "lam": 1.0}, False),
    ({"name": "lambda_to_go", "lam": 0.8}, False),
    ({"name": "gdpo"}, True),
    ({"name": "mt_grpo"}, True),
]
"""Each with whether its means include the member itself."""
SCALES = ("each", "one")
DRAWN = 20_000
"""Groups of the batch whose deviation divides."""
SEARCHES, RIGHT = (0.7, 0.5, 0.3, 0.1), 0.28
"""How likely a search is in F, from the start to nearly learnt, and a right call in N."""

SHOWN = {
    "gtpo .5": ("tab:blue", "gtpo, γ .5"),
    "one scale .8, batch": ("tab:green", "one scale, of the batch"),
    "one scale .8": ("tab:orange", "one scale, of the group"),
    "lambda_to_go": ("tab:red", "a scale each, of the group"),
}
"""Arms of the picture, from the top; all but the first are `lambda_to_go`."""
APART = 0.07
"""Between two labels."""
CELL = ("F", 16, 0.1, 6)
"""Design, turns, shaping and groups of the picture."""


def measured(rule: Rule, own: bool, process: Process, parameters: tuple[float, ...], scale: Scale) -> Measurement:
    factor = GROUP_SIZE / (GROUP_SIZE - 1) if own else 1.0
    if scale == "batch":
        options = {"group_size": GROUP_SIZE, "parameters": parameters, "factor": factor}
        return sample(rule, process, groups=DRAWN, scale_rewards=scale, **options)
    return measure(rule, process, group_size=GROUP_SIZE, parameters=parameters, factor=factor, scale_rewards=scale)


def relative_bias(result: Measurement, scale: Scale) -> float:
    """
    Of the expected gradient, in lengths of the true one. A deviation changes the length of a gradient, so that one
    which is divided is first given the length that fits best: 0 if it points away.
    """
    if scale == "none":
        return (result.bias.norm() / result.truth.norm()).item()
    return math.sqrt(max(0.0, 1 - max(0.0, result.cosine) ** 2))


def bias_table(names: Sequence[str] = tuple(PROCESSES)) -> list[str]:
    """Relative biases, unscaled / scaled by group / by batch: lines in Markdown."""
    lines = [f"| rule | `scales` | {' | '.join(f'`{name}`' for name in names)} |", "| --- " * (len(names) + 2) + "|"]
    scalings: tuple[Scale, ...] = ("none", "group", "batch")
    for rule, own in RULES:
        for scales in SCALES:
            cells = []
            for name in names:
                found = [
                    (measured({**rule, "scales": scales}, own, *PROCESSES[name], each), each) for each in scalings
                ]
                cells.append(" / ".join(f"{relative_bias(result, each):.3f}" for result, each in found))
            lines.append(f"| {rule_label(rule)} | {scales} | {' | '.join(cells)} |")
    return lines


def designs_table() -> list[str]:
    """Cosines in F and N, and the noise in N, scaled by group / by batch: lines in Markdown."""
    heads = [f"F, searches {likely}" for likely in SEARCHES] + ["N", "N, signal-to-noise"]
    lines = [f"| rule | `scales` | {' | '.join(heads)} |", "| --- " * (len(heads) + 2) + "|"]
    scalings: tuple[Scale, ...] = ("group", "batch")
    for rule, own in RULES:
        for scales in SCALES:
            named = {**rule, "scales": scales}
            in_f = [
                [measured(named, own, paid_searches(4), (logit(likely),) * 4, each) for each in scalings]
                for likely in SEARCHES
            ]
            in_n = [measured(named, own, nearly_noise(3), (logit(RIGHT),) * 3, each) for each in scalings]
            cells = [" / ".join(f"{round(each.cosine, 2) + 0:.2f}" for each in found) for found in (*in_f, in_n)]
            cells.append(" / ".join(f"{each.signal_to_noise:.2f}" for each in in_n))
            lines.append(f"| {rule_label(rule)} | {scales} | {' | '.join(cells)} |")
    return lines


def draw(curves: dict[str, Tensor], path: Path = DOCS / "images" / "scales.png") -> None:
    """Draws what is reached in F over the steps, (steps, seeds) by arm: means and 95 % intervals over seeds."""
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    above = 1.1
    for arm, curve in curves.items():
        colour, label = SHOWN[arm]
        seeds = curve.shape[1]
        half = curve.std(dim=1) / seeds**0.5 * quantile(0.975, seeds - 1)
        mean, steps = curve.mean(dim=1), range(1, len(curve) + 1)
        axes.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, mean, color=colour, linewidth=1.6)
        above = min(above - APART, mean[-1].item())
        axes.annotate(label, (len(curve), above), xytext=(4, 0), textcoords="offset points", color=colour, va="center")
    axes.set(xlabel="optimiser step", ylabel="chance of a right answer", ylim=(0, 1.05), xlim=(1, len(curve)))
    axes.set_title("Searches are paid .02 each, and make the answer, worth 1, right less often")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="draw no picture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [*bias_table(), "", *designs_table()]
    print("\n".join(lines))
    write_page("\n".join(lines), page="credit.md", begin=BEGIN, end=END)
    if not options.tables:
        draw({arm: curves(Cell(*CELL, arm), ARMS[arm], rates=(0.05,))[:, 0] for arm in SHOWN})


if __name__ == "__main__":
    main()
