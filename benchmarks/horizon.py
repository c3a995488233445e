"""
Credit rules compared by the number of turns of a conversation; see reports/ablation.md.

    python benchmarks/horizon.py              # runs what has not run, then writes results, tables and the picture
    python benchmarks/horizon.py --quick      # one seed of a few arms at 1 and 12 turns, and on the designs B and F of
                                              # `designs.py`: minutes; writes nothing
    python benchmarks/horizon.py --report     # tables and the picture alone, from benchmarks/results/horizon.json

Every run (setting, arm, seed) leaves one file in `runs/horizon`. It is skipped where that, or its row in the results,
is there, so the command can be interrupted and given again. Runs are in the order of seeds: after any of them, what
has run is a paired comparison.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import designs_train
from common import RESULTS
from horizon_report import draw, text, write_page
from horizon_task import ARMS, GROUP, SCORES, SETTINGS, ShareRight, build_trainer, environment, run_missing
from jobs import finished, keep, missing, rows_of

from mt_grpo import MTGRPOEnvTrainer
from mt_grpo.app.train import write_json

FOLDER = Path(__file__).parent.parent / "runs" / "horizon"
RESULT = RESULTS / "horizon.json"
SEEDS = 6
QUICK = (["two-1", "two-12"], ["grpo_or", "mt_grpo", "reward_to_go", "gtpo"])


class Plan(NamedTuple):
    """What all runs of a folder have in common."""

    steps: int = 60
    turns: int = 384
    """Turns sampled in a step, whatever the length of a conversation: arms and settings sample equal numbers."""
    learning_rate: float = 2e-3


class Job(NamedTuple):
    """One run."""

    setting: str
    arm: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / f"{self.setting}-{self.arm}-{self.seed}.json"


def jobs(settings: Sequence[str], arms: Sequence[str], seeds: int) -> list[Job]:
    """All runs: those of the first seed first."""
    return [Job(setting, arm, seed) for seed, setting, arm in product(range(1, seeds + 1), settings, arms)]


def build(job: Job, plan: Plan, model: Path, folder: str) -> MTGRPOEnvTrainer:
    """The trainer of a run."""
    setting = SETTINGS[job.setting]
    return build_trainer(
        model,
        folder,
        environment(setting),
        ["step_reward"],
        ["env_reward", ShareRight()],
        turns=setting.turns,
        skills=setting.skills,
        groups=plan.turns // setting.turns // GROUP,
        steps=plan.steps,
        seed=job.seed,
        learning_rate=plan.learning_rate,
        advantage_estimator=ARMS[job.arm],
        state_score=SCORES.get(job.arm),
    )


def run(job: Job, plan: Plan, model: Path) -> dict[str, Any]:
    """Trains one arm; the share of tasks that were right in each step."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(job, plan, model, folder)
        trainer.train()
        history = [row for row in trainer.state.log_history if "reward" in row]
    return {
        **job._asdict(),
        "right": [round(row["rewards/ShareRight/mean"] or 0.0, 5) for row in history],
        "tokens": history[-1]["num_tokens"],
        "plan": plan._asdict(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def work(job: Job, plan: Plan, folder: Path) -> Job:
    """Runs a job and keeps its measures."""
    write_json(job.file(folder), run(job, plan, folder / "model"))
    return job


def report(plan: Plan) -> None:
    """Tables and the picture of the committed results."""
    rows = rows_of(RESULT)
    write_page(rows, plan._asdict())
    draw(rows, plan._asdict())
    print(text(rows, plan._asdict()))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing, and read committed results")
    parser.add_argument("--quick", action="store_true", help="one seed of a few arms, in minutes; writes no results")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs leave their files (runs/horizon)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"from 1 to this number ({SEEDS})")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one core each (2)")
    options = parser.parse_args(argv)
    plan = Plan()
    if options.report:
        return report(plan)
    given = jobs(*QUICK, 1) if options.quick else jobs(options.settings, options.arms, options.seeds)
    finished(given, options.folder, plan=plan._asdict())  # refuses a folder of other runs
    if options.quick:
        run_missing(work, given, plan, folder=options.folder, workers=options.workers)
        print(text(finished(given, options.folder, plan=plan._asdict()), plan._asdict()))
        print(f"\nDesigns of reports/designs.md, {plan.steps} steps.\n")
        return print(designs_train.quick(options.folder, options.workers, steps=plan.steps))
    known = rows_of(RESULT)
    try:
        run_missing(work, missing(given, known), plan, folder=options.folder, workers=options.workers)
    finally:
        whole = jobs(list(SETTINGS), list(ARMS), SEEDS)
        keep(RESULT, whole, known, finished(whole, options.folder, plan=plan._asdict()), plan=plan._asdict())
        report(plan)


if __name__ == "__main__":
    main()
