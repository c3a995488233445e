"""
Holds the results of the latest benchmark runs against the committed ones:

    python benchmarks/packing.py && python benchmarks/compare.py packing

Only figures that a run can be held to are compared: ratios of two things measured in one run (more is better), and
rows with a target (better is what the target asks for). Seconds of another machine mean nothing here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from common import RESULTS
from rich.console import Console
from rich.table import Table


def figures(results: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """What one results file can be held to: by row and figure, the median and whether more is better."""
    found = {}
    for row in results.get("rows", []) if isinstance(results.get("rows"), list) else []:
        name = str(next(iter(row.values())))
        if "values" in row:
            found[name] = (statistics.median(row["values"]), not row["target"].startswith("<"))
        for key, value in row.items():
            if "ratio" in key and isinstance(value, dict):
                found[f"{name}: {key}"] = (value["median"], True)
    return found


def compare(committed: dict[str, Any], measured: dict[str, Any], tolerance: float) -> list[tuple[Any, ...]]:
    """
    Rows of name, committed, measured, their quotient (above 1 is better) and a verdict. A figure that only one side
    has is a row as well.
    """
    before, after = figures(committed), figures(measured)
    rows: list[tuple[Any, ...]] = []
    for name in dict.fromkeys([*before, *after]):
        if name not in before or name not in after:
            rows.append((name, before.get(name, (None,))[0], after.get(name, (None,))[0], None, "on one side only"))
            continue
        (one, more), (other, _) = before[name], after[name]
        quotient = other / one if more else one / other
        verdict = "worse" if quotient < 1 - tolerance else "better" if quotient > 1 + tolerance else "within noise"
        rows.append((name, one, other, quotient, verdict))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Prints a table; returns 1 where any figure is worse than the tolerance allows, or has gone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="results to compare, such as `packing`; all where none is named")
    parser.add_argument("--tolerance", type=float, default=0.25, help="share by which a figure may be worse (0.25)")
    parser.add_argument("--base", default="HEAD", help="commit that holds the figures to compare with (HEAD)")
    options = parser.parse_args(argv)
    table = Table(title=f"measured against {options.base}")
    for column in ("figure", "committed", "measured", "quotient", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    worse = 0
    for name in options.names or sorted(path.stem for path in RESULTS.glob("*.json")):
        file = f"{options.base}:./{name}.json"
        shown = subprocess.run(["git", "show", file], cwd=RESULTS, capture_output=True, text=True)
        if shown.returncode or not (RESULTS / f"{name}.json").exists():
            print(f"There are no results of {name!r} in {options.base} and here: run benchmarks/{name}.py first.")
            return 1
        measured = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for row in compare(json.loads(shown.stdout), measured, options.tolerance):
            figure, *numbers, verdict = row
            table.add_row(f"{name}: {figure}", *("-" if n is None else f"{n:.3g}" for n in numbers), verdict)
            worse += verdict == "worse" or numbers[1] is None
    Console().print(table)
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
