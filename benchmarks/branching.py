"""
What branches are worth, exactly, as the table of benchmarks/reports/measurements.md. It takes seconds.

    python benchmarks/branching.py

Four conversations of four branches each (`branch_to_go`) are compared with four conversations (`reward_to_go`),
without scaling and at the same number of sampled turns: signal-to-noise grows with the square root of that number.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.decision_processes import PROCESSES, settled
from support.exact_gradients import measure, measure_branching, sampled_turns

TRUNKS = BRANCHES = 4

CASES = [("stopper", 1), ("stopper", 2), ("one_search", 1), ("late", 1), ("late", 2), ("settled", 3)]
"""A process each, with the turns that branches share."""


def row(name: str, branch_at: int) -> str:
    """A line of the table, in Markdown."""
    process, parameters = {**PROCESSES, "settled": (settled, (3.0, 0.0))}[name]
    options = {"branch_at": branch_at, "num_branches": BRANCHES, "parameters": parameters}
    branched = measure_branching("branch_to_go", process, num_trunks=TRUNKS, **options)
    factor = TRUNKS / (TRUNKS - 1)
    plain = measure("reward_to_go", process, group_size=TRUNKS, parameters=parameters, factor=factor)
    more = sampled_turns(process, branch_at, BRANCHES, parameters) / sampled_turns(process, branch_at, 1, parameters)
    noise = branched.signal_to_noise / plain.signal_to_noise / math.sqrt(more)
    bias = (branched.bias.norm() / branched.truth.norm()).item()
    return f"| `{name}` | {branch_at} | {bias:.3f} | {more:.2f} | {noise:.2f} |"


def table() -> list[str]:
    """The lines of the table, in Markdown."""
    head = ["| process | `branch_at` | relative bias | turns sampled | signal-to-noise at equal turns |"]
    return [*head, "| --- " * 5 + "|", *(row(*case) for case in CASES)]


if __name__ == "__main__":
    print("\n".join(table()))
