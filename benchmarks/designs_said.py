"""
What the first steps of a run say of its rule's proportions, on the designs of `designs.py`; see reports/designs.md.

    python benchmarks/designs_said.py    # minutes; writes the table of the page

Each run is one of `designs_train.py`, of 24 steps: rules that fail in a design, and the default.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import jobs
from designs_report import write_page
from designs_train import FOLDER, Job, Plan, build
from horizon_task import warm_start

STEPS = 24
RUNS = [
    *[(design, "gtpo .5") for design in "BHP"],
    *[(design, "lambda_to_go") for design in "FPN"],
    *[(design, "one scale .8, batch") for design in "ABCDFHPN"],
]
KINDS = {
    "gives the first turn": "the outcome is lost at the first turn",
    "by a deviation each": "turn rewards are out of proportion",
    "one at the cost of the other": "one is learnt at the cost of the other",
}
"""What is in a sentence, and what it says."""


class Heard(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def heard(design: str, arm: str, model: Path) -> list[str]:
    """The kinds of sentences that a run says, in their order."""
    handler = Heard()
    logger = logging.getLogger("mt_grpo.training.step_log.warnings")
    logger.addHandler(handler)
    try:
        with tempfile.TemporaryDirectory() as folder:
            build(Job(design, arm, 1), Plan(steps=STEPS), model, folder).train()
    finally:
        logger.removeHandler(handler)
    return [kind for sentence in handler.said for part, kind in KINDS.items() if part in sentence]


def main() -> None:
    jobs.prepare()
    logging.disable(logging.NOTSET)
    logging.getLogger("mt_grpo").propagate = False
    model = FOLDER / "model"
    if not (model / "config.json").exists():
        warm_start(model)
    lines = [f"| design | rule | said in {STEPS} steps |", "| --- | --- | --- |"]
    for design, arm in RUNS:
        lines.append(f"| {design} | {arm} | {'; '.join(heard(design, arm, model)) or 'nothing'} |")
        print(lines[-1], flush=True)
    write_page("\n".join(lines), begin="<!-- said -->", end="<!-- end of what is said -->")


if __name__ == "__main__":
    main()
