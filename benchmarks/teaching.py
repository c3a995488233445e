"""
Does a teacher on every token help where only the outcome pays? See reports/teaching.md.

    python benchmarks/teaching.py            # hours of one core; goes on where it was interrupted
    python benchmarks/teaching.py --quick    # one seed of few steps; writes nothing
    python benchmarks/teaching.py --report   # the tables alone, from benchmarks/results/teaching.json

Every run (task, arm, seed) leaves a file in `runs/teaching`. What the results have is not run again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ablation import RECIPE, begin
from ablation_report import difference
from common import RESULTS
from designs_report import write_page
from jobs import PATIENCE, finished, keep, missing, rows_of, run_all
from success_task import Chance, Succeeded
from teaching_task import Attempt, hinted_rows, warm_start
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.app.build import build_recipe
from mt_grpo.app.request import read_request
from mt_grpo.app.train import write_json
from mt_grpo.data import load_rows
from mt_grpo.rewards import OutcomeReward
from mt_grpo.trajectory import Trajectory

FOLDER = Path(__file__).parent.parent / "runs" / "teaching"
RESULT = RESULTS / "teaching.json"
GROUP, SEEDS, LAST = 8, 6, 10
ALONE = "rewards alone"


@dataclass(frozen=True)
class Arm:
    """What a run has beside rewards: a teacher, its coefficient, and whether rewards count at all."""

    coef: float = 0.0
    sees: tuple[str, ...] = ()
    rewards: bool = True
    wrong: float = 0.0
    """Share of rows whose column `answer` is wrong."""
    options: dict[str, Any] = field(default_factory=dict)
    """More of `teacher`."""

    def teacher(self, other: Path) -> dict[str, Any]:
        """Options of a run."""
        if not self.coef:
            return {}
        if not self.sees:
            return {"teacher": {"model": str(other)}, "distillation_coef": self.coef}
        policy = {"model": "self", "sees": list(self.sees), "teacher_model_kind": "live"}
        return {"teacher": policy | self.options, "distillation_coef": self.coef}


_SEES = ("sibling", "answer")
TASKS: dict[str, dict[str, Arm]] = {
    "decisions": {
        ALONE: Arm(),
        **{f"{what} {coef}": Arm(coef, (what,)) for what, coef in product(_SEES, (0.1, 0.3, 1.0))},
        **{
            f"{what} 0.1, {kind}": Arm(0.1, (what,), options={"teacher_model_kind": kind})
            for what, kind in product(_SEES, ("ema", "base"))
        },
        **{
            f"sibling 1.0, {kind}": Arm(1.0, ("sibling",), options={"teacher_model_kind": kind})
            for kind in ("ema", "base")
        },
        **{f"{what} 0.1, gated": Arm(0.1, (what,), options={"gate": "explained"}) for what in _SEES},
        **{f"{what} without rewards": Arm(1.0, (what,), rewards=False) for what in _SEES},
        **{f"answer {coef}, 30 % wrong": Arm(coef, ("answer",), wrong=0.3) for coef in (0.1, 1.0)},
    },
    "embedded": {
        ALONE: Arm(),
        "teacher without rewards": Arm(1.0, rewards=False),
        **{f"teacher {coef}": Arm(coef) for coef in (0.1, 0.3, 1.0)},
        **{f"{what} 0.1": Arm(0.1, (what,)) for what in _SEES},
        **{f"{what} 0.1, gated": Arm(0.1, (what,), options={"gate": "explained"}) for what in _SEES},
    },
}
"""The arms of each task."""


@dataclass(frozen=True)
class Plan:
    """What all runs have in common."""

    steps: dict[str, int] = field(default_factory=lambda: {"decisions": 60, "embedded": 40})
    groups: int = 6
    teacher_steps: int = 60


class Job(NamedTuple):
    """One run."""

    task: str
    arm: str
    seed: int

    def file(self, folder: Path) -> Path:
        name = self.arm.replace(" ", "_").replace("%", "percent").replace(",", "")
        return folder / f"{self.task}-{name}-{self.seed}.json"


class Sampled(OutcomeReward):
    """How many tokens the policy sampled: measured, and worth nothing."""

    weight = 0.0

    def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        return float(sum(turn.num_tokens for turn in trajectory.turns))


def of_decisions(arm: Arm, seed: int, plan: Plan, folder: Path, output: str) -> MTGRPOEnvTrainer:
    """A trainer on twelve decisions, of which two are heavy."""
    steps = plan.steps["decisions"]
    args = MTGRPOConfig(
        output,
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=plan.groups * GROUP,
        num_generations=GROUP,
        learning_rate=2e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        max_grad_norm=0.5,
        beta=0.0,
        advantage_estimator="grpo_or",
        max_turn_length=4,
        max_completion_length=300,
        tokenization_sanity_check_mode="disable",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        reward_weights=[float(arm.rewards), 0.0, 0.0],
        **arm.teacher(folder),
    )
    model = folder / "model"
    return MTGRPOEnvTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        Attempt(),
        outcome_reward_funcs=[Succeeded(), Chance(), Sampled()],
        args=args,
        train_dataset=hinted_rows(steps * plan.groups, seed, arm.wrong),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def of_questions(arm: Arm, seed: int, plan: Plan, folder: Path, output: str) -> MTGRPOEnvTrainer:
    """A trainer of the embedded agent on its outcome alone."""
    options = {
        "output_dir": output,
        "seed": seed,
        "max_steps": plan.steps["embedded"],
        "per_device_train_batch_size": plan.groups * GROUP,
        "disable_tqdm": True,
    }
    args = _recipe("self_distillation.yaml", options).training
    args.teacher, args.distillation_coef = None, 0.0
    for name, value in arm.teacher(folder / "teacher").items():
        setattr(args, name, value)
    args.reward_weights = [float(arm.rewards), 0.0]
    return MTGRPOEnvTrainer(
        "embedded",
        outcome_reward_funcs=["exact_match_reward_func", Sampled()],
        args=args,
        train_dataset=load_rows("embedded", "train"),
    )


def _recipe(name: str, options: dict[str, Any]) -> Any:
    given = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    return build_recipe(read_request([str(RECIPE.parent / name), *given]))


MEASURED = {"decisions": (of_decisions, "Chance"), "embedded": (of_questions, "exact_match_reward_func")}
"""Of each task what makes its trainers, and the reward that is measured."""


def run(job: Job, plan: Plan, folder: Path) -> dict[str, Any]:
    """Trains one arm; the measured reward of each step, and the tokens that were sampled until then."""
    began = time.perf_counter()
    build, measured = MEASURED[job.task]
    with tempfile.TemporaryDirectory() as output:
        trainer = _quiet(build(TASKS[job.task][job.arm], job.seed, plan, folder, output), plan)
        trainer.train()
        history = [row for row in trainer.state.log_history if "reward" in row]
    curve = [round(row[f"rewards/{measured}/mean"] or 0.0, 4) for row in history]
    return {
        **job._asdict(),
        "curve": curve,
        "tokens": [round(row["rewards/Sampled/mean"] * plan.groups * GROUP) for row in history],
        "seconds": round(time.perf_counter() - began, 1),
        "plan": _settings(plan),
    }


def _quiet(trainer: MTGRPOEnvTrainer, plan: Plan) -> MTGRPOEnvTrainer:
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.runner.engine.patience = PATIENCE
    trainer.runner.engine.max_batch_size = plan.groups * GROUP
    return trainer


def _settings(plan: Plan) -> dict[str, Any]:
    return {"steps": plan.steps, "groups": plan.groups, "teacher_steps": plan.teacher_steps}


def make_teacher(folder: Path, plan: Plan) -> None:
    """Trains the embedded agent by the quickstart's recipe, for longer, and saves it."""
    with tempfile.TemporaryDirectory() as output:
        options = {"output_dir": output, "max_steps": plan.teacher_steps, "disable_tqdm": True}
        args = _recipe("quickstart.yaml", options).training
        rows = load_rows("embedded", "train")
        trainer = _quiet(MTGRPOEnvTrainer("embedded", args=args, train_dataset=rows), plan)
        trainer.train()
        trainer.save_model(str(folder))


def work(job: Job, plan: Plan, folder: Path) -> Job:
    """Runs a job and keeps its measures."""
    write_json(job.file(folder), run(job, plan, folder))
    return job


def jobs(tasks: Sequence[str], seeds: int) -> list[Job]:
    """All runs: those of the first seed first."""
    return [Job(task, arm, seed) for seed, task in product(range(1, seeds + 1), tasks) for arm in TASKS[task]]


def results(
    given: Sequence[Job], plan: Plan, folder: Path, workers: int, warm_steps: int | None = None
) -> list[dict[str, Any]]:
    """Runs what has not run, and returns the measures of all."""
    finished(given, folder, plan=_settings(plan))  # refuses a folder of other runs
    left = [job for job in given if not job.file(folder).exists()]
    tasks = {job.task for job in left}
    if "decisions" in tasks and not (folder / "model" / "config.json").exists():
        print("warm-starting the model, in minutes", flush=True)
        warm_start(folder / "model", *filter(None, [warm_steps]))
    if "embedded" in tasks and not (folder / "teacher" / "config.json").exists():
        print("training a teacher, in minutes", flush=True)
        make_teacher(folder / "teacher", plan)
    if left:
        run_all(work, left, plan, folder=folder, workers=workers, prepare=begin)
    return finished(given, folder, plan=_settings(plan))


BAR = 0.85
"""What the embedded agent is to reach, in the mean of five steps."""


def reached(row: dict[str, Any]) -> tuple[int, int] | None:
    """The steps, and the thousands of sampled tokens, until the mean of the last five steps is `BAR`."""
    for step in range(5, len(row["curve"]) + 1):
        if fmean(row["curve"][step - 5 : step]) >= BAR:
            return step, round(sum(row["tokens"][:step]) / 1000)
    return None


def text(given: Sequence[dict[str, Any]]) -> str:
    """The tables of the page, in Markdown."""
    tables = []
    for task, arms in TASKS.items():
        if not any(row["task"] == task for row in given):
            continue
        lines = [
            f"**{task}**",
            "",
            "| arm | first step | last ten steps | over training | above rewards alone, over training "
            f"| steps, and thousands of sampled tokens, to {BAR} | seeds |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        by_arm = {arm: {row["seed"]: row for row in given if (row["task"], row["arm"]) == (task, arm)} for arm in arms}
        for arm, ours in by_arm.items():
            if not ours:
                continue
            curves = [row["curve"] for row in ours.values()]
            start, end, over = (
                fmean(fmean(part) for part in each)
                for each in ([c[:1] for c in curves], [c[-LAST:] for c in curves], curves)
            )
            both = sorted(set(ours) & set(by_arm[ALONE]))
            gap = ""
            if arm != ALONE and len(both) > 1:
                of = [[fmean(rows[seed]["curve"]) for seed in both] for rows in (ours, by_arm[ALONE])]
                found = difference(*of)
                gap = f"{found.mean:+.3f} ± {found.half:.3f}"
            there = [reached(row) for row in ours.values()]
            known = [each for each in there if each is not None]
            bar = f"{fmean(s for s, _ in known):.0f}, {fmean(t for _, t in known):.0f}" if known else "never"
            if known and len(known) < len(there):
                bar += f" ({len(known)} of {len(there)})"
            cells = (arm, f"{start:.2f}", f"{end:.2f}", f"{over:.3f}", gap, bar, str(len(ours)))
            lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing, and read committed results")
    parser.add_argument("--quick", action="store_true", help="one seed of few steps; writes no results")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS], help="(both)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs leave files (runs/teaching)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"from 1 to this number ({SEEDS})")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one core each (1)")
    options = parser.parse_args(argv)
    if options.quick:
        plan = Plan({"decisions": 2, "embedded": 1}, 2, 1)
        given = [job for job in jobs(options.tasks, 1) if job.arm in ("sibling 0.1", "teacher 0.3")]
        with tempfile.TemporaryDirectory() as folder:
            return print(text(results(given, plan, Path(folder), workers=0, warm_steps=2)))
    if not options.report:
        plan, whole, known = _settings(Plan()), jobs([*TASKS], SEEDS), rows_of(RESULT)
        try:
            results(missing(jobs(options.tasks, options.seeds), known), Plan(), options.folder, options.workers)
        finally:
            keep(RESULT, whole, known, finished(whole, options.folder, plan=plan), plan=plan)
    found = rows_of(RESULT)
    write_page(text(found), "teaching.md")
    print(text(found))


if __name__ == "__main__":
    main()
