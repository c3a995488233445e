"""
A success probe as a baseline where only the outcome pays: does asking the policy help? See reports/success_probe.md.

    python benchmarks/success_probe.py            # about twenty minutes of one core; goes on where it was interrupted
    python benchmarks/success_probe.py --quick    # one seed of few steps; writes nothing
    python benchmarks/success_probe.py --report   # the table alone, from benchmarks/results/success_probe.json

Every run (arm, seed) leaves a file in `runs/success_probe` and is skipped where that is there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ablation_report import difference
from common import RESULTS
from designs_report import write_page
from jobs import PATIENCE, finished, run_all, write_rows
from success_task import (
    TURNS,
    Attempt,
    Chance,
    Succeeded,
    SuccessProbe,
    Value,
    explained,
    rows,
    used,
    warm_start,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.app.train import write_json

FOLDER = Path(__file__).parent.parent / "runs" / "success_probe"
RESULT = RESULTS / "success_probe.json"
GROUP, SEEDS, LAST = 8, 6, 10
RULE = "state_baseline_where_it_explains"
ARMS = {"grpo_or": "grpo_or", "success probe": RULE, "exact value": RULE}
"""The credit rule of each arm."""


class Plan(NamedTuple):
    """What all runs have in common."""

    steps: int = 60
    groups: int = 6
    learning_rate: float = 2e-3


class Job(NamedTuple):
    """One run."""

    arm: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / f"{self.arm.replace(' ', '_')}-{self.seed}.json"


class Watched(MTGRPOEnvTrainer):
    """Says in each step what the state score explains in groups that it is not fitted on, and where it is used."""

    def _judge(self, batch: Any) -> None:
        super()._judge(batch)
        if self.state_scores:
            found = {"explained": explained(batch.rewards), "used": used(batch.rewards).double().mean().item()}
            for name, each in found.items():
                self._metrics[batch.mode][f"credit/state_score_{name}"].append(each)


def build(job: Job, plan: Plan, model: Path, folder: str) -> Watched:
    """The trainer of a run."""
    conversations = plan.groups * GROUP
    args = MTGRPOConfig(
        folder,
        seed=job.seed,
        max_steps=plan.steps,
        per_device_train_batch_size=conversations,
        num_generations=GROUP,
        learning_rate=plan.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        max_grad_norm=0.5,
        beta=0.0,
        advantage_estimator=ARMS[job.arm],
        max_turn_length=4,
        max_completion_length=24 * TURNS,
        tokenization_sanity_check_mode="disable",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer, probe = AutoTokenizer.from_pretrained(model), SuccessProbe()
    probe.check(tokenizer)
    trainer = Watched(
        AutoModelForCausalLM.from_pretrained(model),
        Attempt(),
        outcome_reward_funcs=[Succeeded(), Chance()],
        args=args,
        train_dataset=rows(plan.steps * plan.groups, job.seed),
        processing_class=tokenizer,
    )
    trainer.state_scores = {"success probe": probe.both, "exact value": [Value()]}.get(job.arm, [])
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.runner.engine.patience = PATIENCE
    trainer.runner.engine.max_batch_size = conversations
    return trainer


def run(job: Job, plan: Plan, model: Path) -> dict[str, Any]:
    """Trains one arm; the chance of success in each step, and what the score explained."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(job, plan, model, folder)
        trainer.train()
        history = [row for row in trainer.state.log_history if "reward" in row]
    curve = [round(row["rewards/Chance/mean"] or 0.0, 4) for row in history]
    watched = {
        name: [round(row[f"credit/state_score_{name}"], 4) for row in history]
        for name in ("explained", "used")
        if trainer.state_scores
    }
    return {
        **job._asdict(),
        "start": curve[0],
        "end": round(fmean(curve[-LAST:]), 4),
        "over": round(fmean(curve), 4),
        "curve": curve,
        **watched,
        "plan": plan._asdict(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def work(job: Job, plan: Plan, folder: Path) -> Job:
    """Runs a job and keeps its measures."""
    write_json(job.file(folder), run(job, plan, folder / "model"))
    return job


def jobs(arms: Sequence[str], seeds: int) -> list[Job]:
    """All runs: those of the first seed first."""
    return [Job(arm, seed) for seed, arm in product(range(1, seeds + 1), arms)]


def text(given: Sequence[dict[str, Any]]) -> str:
    """The table of the page, and what it decides, in Markdown."""
    lines = [
        "| arm | first step | last ten steps | over training | above `grpo_or` over training "
        "| explained, by thirds of training | groups that used it | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    verdict = ""
    theirs = {row["seed"]: row for row in given if row["arm"] == "grpo_or"}
    for arm in ARMS:
        ours = {row["seed"]: row for row in given if row["arm"] == arm}
        if not ours:
            continue
        start, end, over = (fmean(row[name] for row in ours.values()) for name in ("start", "end", "over"))
        both = sorted(set(ours) & set(theirs))
        gap = ""
        if arm != "grpo_or" and len(both) > 1:
            found = difference([ours[seed]["over"] for seed in both], [theirs[seed]["over"] for seed in both])
            gap = f"{found.mean:+.3f} ± {found.half:.3f}"
            if arm == "success probe" and len(both) >= SEEDS:
                stays = found.mean - found.half > 0
                verdict = f"By the rule above the probe {'stays' if stays else 'is left out'}."
        shown, share = "", ""
        if arm != "grpo_or":
            thirds = [[value for row in ours.values() for value in third(row["explained"], part)] for part in range(3)]
            shown = ", ".join(f"{fmean(each):.2f}" for each in thirds)
            share = f"{fmean(value for row in ours.values() for value in row['used']):.2f}"
        cells = (f"`{arm}`" if arm == "grpo_or" else arm, f"{start:.2f}", f"{end:.2f}", f"{over:.3f}", gap)
        lines.append(f"| {' | '.join((*cells, shown, share, str(len(ours))))} |".replace("|  |", "| |"))
    verdict = verdict or f"So far {len(given)} of {len(ARMS) * SEEDS} runs: nothing is decided."
    return "\n".join(line.replace("|  |", "| |") for line in lines) + f"\n\n{verdict}"


def third(values: Sequence[float], part: int) -> Sequence[float]:
    size = -(-len(values) // 3)
    return values[part * size : (part + 1) * size]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing, and read committed results")
    parser.add_argument("--quick", action="store_true", help="one seed of few steps; writes no results")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs leave files (runs/success_probe)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"from 1 to this number ({SEEDS})")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one core each (1)")
    options = parser.parse_args(argv)
    if options.report:
        found = json.loads(RESULT.read_text())["rows"]
        write_page(text(found), "success_probe.md")
        return print(text(found))
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan(steps=3, groups=2)
            return print(text(results(jobs(list(ARMS), 1), plan, Path(folder), workers=0, warm_steps=(2, 1))))
    found = results(jobs(list(ARMS), options.seeds), Plan(), options.folder, options.workers)
    write_rows(RESULT, found, plan=Plan()._asdict())
    write_page(text(found), "success_probe.md")
    print(text(found))


def results(
    given: Sequence[Job], plan: Plan, folder: Path, workers: int, warm_steps: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """Runs what has not run, and returns the measures of all."""
    finished(given, folder, plan=plan._asdict())  # refuses a folder of other runs
    left = [job for job in given if not job.file(folder).exists()]
    if left:
        if not (folder / "model" / "config.json").exists():
            print("warm-starting the model, in minutes", flush=True)
            warm_start(folder / "model", *warm_steps)
        run_all(work, left, plan, folder=folder, workers=workers)
    return finished(given, folder, plan=plan._asdict())


if __name__ == "__main__":
    main()
