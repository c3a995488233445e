"""
The bias and the noise of every credit rule, exactly, as the table of reports/credit.md. It takes seconds.

    python benchmarks/credit.py
    python benchmarks/credit.py --tried     # also rules that are not in the package, and steps to learn: minutes

Rules are measured without scaling, in groups of 4 (`support.exact_gradients`), times G / (G - 1) where a mean includes
the member itself. `state_baseline` looks at other groups, so it is measured on 20,000 groups that are drawn.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
from support.decision_processes import PROCESSES
from support.exact_gradients import Measurement, measure, sample

from mt_grpo.credit import Rule, rule_label

GROUP_SIZE = 4

RULES: list[tuple[Rule, bool]] = [
    ("leave_one_out", False),
    ("reward_to_go", True),
    ("lambda_to_go", False),
    ({"name": "lambda_to_go", "lam": 0.5}, False),
    ({"name": "turn_gae", "lam": 1.0}, False),
    ("turn_gae", False),
    ({"name": "turn_gae", "lam": 0.5}, False),
    ("gtpo", True),
    ({"name": "gtpo", "gamma": 0.5}, True),
    ({"name": "mt_grpo_discounted", "gamma": 0.9}, True),
    ("gigpo", True),
    ({"name": "state_baseline", "fit": "table"}, False),
    ({"name": "state_baseline", "fit": "table", "lam": 0.9}, False),
    ("mt_grpo", True),
    ("grpo_mr", True),
    ("grpo_or", True),
]
"""Each with whether its means include the member itself. The first is what noise is compared with."""


def measured(rule: Rule, own: bool, process: str) -> Measurement:
    play, parameters = PROCESSES[process]
    options = {
        "group_size": GROUP_SIZE,
        "parameters": parameters,
        "factor": GROUP_SIZE / (GROUP_SIZE - 1) if own else 1.0,
    }
    if isinstance(rule, dict) and rule["name"] == "state_baseline":
        return sample(rule, play, groups=20_000, **options)
    return measure(rule, play, **options)


def entry(result: Measurement, reference: Measurement) -> str:
    """`relative bias / cosine / signal-to-noise`, the last in that of the reference."""
    bias = (result.bias.norm() / result.truth.norm()).item()
    noise = result.signal_to_noise / reference.signal_to_noise
    return f"{bias:.3f} / {result.cosine:.3f} / {noise:.2f}"


def table() -> list[str]:
    """The lines of the table, in Markdown."""
    reference = {process: measured(*RULES[0], process) for process in PROCESSES}
    lines = [
        f"| rule | {' | '.join(f'`{process}`' for process in PROCESSES)} |",
        "| --- " * (len(PROCESSES) + 1) + "|",
    ]
    for rule, own in RULES:
        cells = [entry(measured(rule, own, process), reference[process]) for process in PROCESSES]
        lines.append(f"| {rule_label(rule)} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tried", action="store_true", help="rules that were tried and are not in the package")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one core each (2)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.tried:
        return print("\n".join(table()))
    from credit_tried import tried_table  # registers rules

    with ProcessPoolExecutor(options.workers) as pool:
        for line in tried_table(pool.map):
            print(line, flush=True)


if __name__ == "__main__":
    main()
