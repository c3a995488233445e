"""
The paper's comparison of credit rules on the embedded task, and on its two-hop questions alone;
see reports/ablation.md.

    python benchmarks/ablation.py              # runs what has not run, then writes results, table and curves
    python benchmarks/ablation.py --report     # tables and curves alone, from benchmarks/results/ablation.json

Every run (variant, arm, seed) leaves one file in `runs/ablation`. It is skipped where that, or its row in the results,
is there, so the command can be interrupted and given again. Runs are in the order of seeds: after any of them, what
has run is a paired comparison. Other settings write no results.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ablation_arms import ARMS, RECIPE, VARIANTS
from ablation_report import draw, text, write_page
from common import RESULTS
from jobs import PATIENCE, finished, keep, missing, prepare, rows_of, run_all
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from mt_grpo.app.build import build_recipe
from mt_grpo.app.request import read_request
from mt_grpo.app.train import measure, summarise, write_json
from mt_grpo.data.embedded.tool import search
from mt_grpo.training.trainer import MTGRPOEnvTrainer

FOLDER = Path(__file__).parent.parent / "runs" / "ablation"
RESULT = RESULTS / "ablation.json"
SEEDS = 12
START = "start"
"""The arm that is measured without training."""


class Settings(NamedTuple):
    """What all runs of a folder have in common."""

    steps: int = 20
    batch: int = 48
    questions: int = 240


class Job(NamedTuple):
    """One run."""

    variant: str
    arm: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / f"{self.variant}-{self.arm}-{self.seed}.json"


def jobs(variants: list[str], arms: list[str], seeds: int) -> list[Job]:
    """All runs: those of the first seed first."""
    start = [Job(variant, START, 1) for variant in variants]
    return start + [Job(variant, arm, seed) for seed, variant, arm in product(range(1, seeds + 1), variants, arms)]


class HeldOut(TrainerCallback):
    """Measures the agent on held-out questions half-way and at the end, without a loss, which an evaluation has."""

    def __init__(self, trainer: MTGRPOEnvTrainer, questions: int) -> None:
        self._trainer, self._questions = trainer, questions
        self.measures: dict[int, dict[str, float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (args.max_steps // 2, args.max_steps):
            self.measure()

    def measure(self) -> None:
        trainer = self._trainer
        rewards = [*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs]
        means = summarise([measure(each, rewards) for each in trainer.rollout(self._questions)])
        self.measures[trainer.state.global_step] = {name: round(value, 5) for name, value in means.items()}


def run(job: Job, settings: Settings) -> dict[str, Any]:
    """Trains one arm; its measures."""
    began = time.perf_counter()
    variant = VARIANTS[job.variant]
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder,
            "seed": job.seed,
            "max_steps": settings.steps,
            "per_device_train_batch_size": settings.batch,
            "disable_tqdm": True,
        }
        given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        args = build_recipe(read_request([str(RECIPE), *given])).training
        args.advantage_estimator = ARMS.get(job.arm, args.advantage_estimator)
        trainer = MTGRPOEnvTrainer(
            "embedded",
            turn_reward_funcs=None if variant.turn_rewards is None else list(variant.turn_rewards),
            args=args,
            train_dataset=variant.rows("train"),
            eval_dataset=variant.rows("validation"),
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.runner.engine.patience = PATIENCE
        held_out = HeldOut(trainer, settings.questions)
        trainer.add_callback(held_out)
        if job.arm == START:
            held_out.measure()
        else:
            trainer.train()
        history = [row for row in trainer.state.log_history if "reward" in row]
    return {
        "variant": job.variant,
        "arm": job.arm,
        "seed": job.seed,
        "held_out": held_out.measures,
        "train": {
            "exact_match": [round(row["rewards/exact_match_reward_func/mean"], 5) for row in history],
            "reward": [round(row["reward"], 5) for row in history],
        },
        "settings": settings._asdict(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def begin() -> None:
    """What a process of runs needs once."""
    prepare()
    search("Peru")  # builds the index: else the first batch would not wait for it


def work(job: Job, settings: Settings, folder: Path) -> Job:
    """Runs a job and keeps its measures."""
    write_json(job.file(folder), run(job, settings))
    return job


def report() -> None:
    """Tables and curves of the committed results."""
    rows = rows_of(RESULT)
    write_page(rows)
    draw(rows)
    print(text(rows))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing, and read committed results")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs leave their files (runs/ablation)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"from 1 to this number ({SEEDS})")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one core each (2)")
    for name, value in Settings._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"of every run ({value})")
    options = parser.parse_args(argv)
    if options.report:
        return report()
    settings = Settings(*(getattr(options, name) for name in Settings._fields))
    given = jobs(options.variants, options.arms, options.seeds)
    made_with = {"settings": settings._asdict()}
    finished(given, options.folder, **made_with)  # refuses a folder of other runs
    known = rows_of(RESULT) if settings == Settings() else []
    left = [job for job in missing(given, known) if not job.file(options.folder).exists()]
    try:
        if left:
            run_all(work, left, settings, folder=options.folder, workers=options.workers, prepare=begin)
    finally:
        if settings == Settings():
            whole = jobs(list(VARIANTS), list(ARMS), SEEDS)
            keep(RESULT, whole, known, finished(whole, options.folder, **made_with), **made_with)
            report()


if __name__ == "__main__":
    main()
