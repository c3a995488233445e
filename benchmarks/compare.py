"""
Holds the results of the latest benchmark runs against the committed ones:

    python benchmarks/packing.py && python benchmarks/compare.py packing

Only figures that a run can be held to are compared: ratios of two things measured in one run (more is better), and
rows with a target (better is what the target asks for). Seconds count only where a target is set for them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

from common import RESULTS
from rich.console import Console
from rich.table import Table


class Figure(NamedTuple):
    """A number that a run is held to."""

    value: float
    more_is_better: bool


class Comparison(NamedTuple):
    """A figure on both sides, `None` where a side lacks it; `quotient` is above 1 where it got better."""

    name: str
    committed: float | None
    measured: float | None
    quotient: float | None
    verdict: str


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """What one results file can be held to, by row and figure: medians."""
    found = {}
    rows = results.get("rows")
    for row in rows if isinstance(rows, list) else []:  # a mapping holds what is no ratio
        key, value = next(iter(row.items()))
        name = value if isinstance(value, str) else f"{key} {value}"
        if "values" in row and "target" in row:
            found[name] = Figure(statistics.median(row["values"]), not row["target"].startswith("<"))
        for key, value in row.items():
            if "ratio" in key and isinstance(value, dict):
                found[f"{name}: {key}"] = Figure(value["median"], True)
    return found


def compare(committed: dict[str, Any], measured: dict[str, Any], tolerance: float) -> list[Comparison]:
    """
    The figures of two results files: one that only the committed file has is gone, one that only the run has is added.

    Args:
        committed, measured (`dict`): Contents of the files.
        tolerance (`float`): Share by which a figure may differ and still count as the same.
    """
    before, after = figures(committed), figures(measured)
    rows = []
    for name in dict.fromkeys([*before, *after]):
        if name not in after:
            rows.append(Comparison(name, before[name].value, None, None, "gone"))
        elif name not in before:
            rows.append(Comparison(name, None, after[name].value, None, "added"))
        else:
            one, other = before[name].value, after[name].value
            quotient = other / one if before[name].more_is_better else one / other
            verdict = "worse" if quotient < 1 - tolerance else "better" if quotient > 1 + tolerance else "the same"
            rows.append(Comparison(name, one, other, quotient, verdict))
    return rows


def read_committed(commit: str, name: str) -> dict[str, Any]:
    """The results file of a commit."""
    command = ["git", "show", f"{commit}:./{name}.json"]
    shown = subprocess.run(command, cwd=RESULTS, capture_output=True, text=True)
    if shown.returncode:
        raise SystemExit(f"{commit} has no results {name!r}: name one of benchmarks/results, or another commit.")
    return json.loads(shown.stdout)


def main(argv: list[str] | None = None) -> int:
    """Prints a table; returns 1 where any figure is worse than the tolerance allows, or has gone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="results to compare, such as `packing`; all where none is named")
    parser.add_argument("--tolerance", type=float, default=0.25, help="share by which a figure may be worse (0.25)")
    parser.add_argument("--base", default="HEAD", help="commit that holds the figures to compare with (HEAD)")
    options = parser.parse_args(argv)
    table = Table(title=f"measured against {options.base}")
    for column in Comparison._fields:
        table.add_column(column, justify="left" if column in ("name", "verdict") else "right")
    failed = False
    for name in options.names or sorted(path.stem for path in RESULTS.glob("*.json")):
        committed = read_committed(options.base, name)
        measured = json.loads((RESULTS / f"{name}.json").read_text())
        for row in compare(committed, measured, options.tolerance):
            numbers = ("-" if number is None else f"{number:.3g}" for number in row[1:4])
            table.add_row(f"{name}: {row.name}", *numbers, row.verdict)
            failed |= row.verdict in ("worse", "gone")
    Console().print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
