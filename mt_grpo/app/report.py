"""The results of a run: the agent's measures before and after, as JSON, a table and a curve."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.table import Table
from rich.text import Text

from mt_grpo.rewards import RewardFunc
from mt_grpo.runlog.files import to_json
from mt_grpo.trajectory import Trajectory

PACKAGES = ("mt-grpo", "trl", "transformers", "accelerate", "torch", "datasets", "peft")


def measure(trajectory: Trajectory, rewards: Sequence[RewardFunc]) -> dict[str, float]:
    """
    One trajectory's measures.

    Returns:
        `dict`: each reward as a share of its `maximum` (turn rewards summed over the turns; 0 where none applies),
        `tool_execution`, the share of attempted calls that succeeded (0 without an attempt), and `turns`.
    """
    measures = {}
    for reward in rewards:
        value = trajectory.rewards["turn"].get(reward.name, trajectory.rewards["outcome"].get(reward.name))
        values = value if isinstance(value, list) else [value]
        total = sum(item for item in values if item is not None)
        measures[reward.name.removesuffix("_func").removesuffix("_reward")] = total / reward.maximum
    attempts = sum(turn.num_attempts for turn in trajectory.turns)
    failures = sum(turn.num_failures for turn in trajectory.turns)
    measures["tool_execution"] = (attempts - failures) / attempts if attempts else 0.0
    measures["turns"] = float(len(trajectory.turns))
    return measures


def summarise(measures: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each measure over trajectories, and their number as `questions`."""
    means = {name: sum(row[name] for row in measures) / len(measures) for name in measures[0]}
    return {**means, "questions": len(measures)}


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON so that a crash leaves the old file or the whole new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(to_json(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def table(before: dict[str, float], after: dict[str, float], title: str) -> Table:
    """The measures before and after, side by side."""
    result = Table(title=Text(title, style="table.title"))
    for column in ("", "before", "after", "change"):
        result.add_column(column, justify="left" if not column else "right")
    for name in before:
        if name != "questions":
            change = f"{after[name] - before[name]:+.3f}"
            result.add_row(Text(_label(name)), f"{before[name]:.3f}", f"{after[name]:.3f}", change)
    return result


def _label(name: str) -> str:
    labels = {
        "tool_execution": "tool-execution rate",
        "exist_answer_in_search_results": "answer in search results",
        "exist_answer": "answer contained",
        "turns": "turns per question",
    }
    return labels.get(name, name.replace("_", " "))


def plot(history: list[dict[str, Any]], path: Path, title: str) -> None:
    """
    Draws the mean of each reward over training steps.

    Args:
        history (`list[dict]`): The trainer's log history.
        path (`Path`): PNG to write.
        title (`str`): Heading.
    """
    rows = [row for row in history if "reward" in row]
    names = [key for key in (rows[0] if rows else {}) if key.startswith("rewards/") and key.endswith("/mean")]
    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    for name in ["reward", *names]:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if not points:  # it applied to no conversation
            continue
        label = "weighted sum" if name == "reward" else name.split("/")[1].removesuffix("_func").replace("_", " ")
        axes.plot(*zip(*points, strict=True), label=label, linewidth=2.2 if name == "reward" else 1.3)
    axes.set(xlabel="optimiser step", ylabel="mean reward in the training batch", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
