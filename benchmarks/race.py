"""
The race: TRL's own `GRPOTrainer` with its tool loop against the trainer of this package, both on the embedded task.

    python benchmarks/race.py              # runs what has not run, then writes results and table
    python benchmarks/race.py --report     # the table in the report alone, from benchmarks/results/race.json
    python benchmarks/race.py --quick      # one step of each arm, to see that it runs; writes no results

Both begin with the same model, which writes its calls in its template's own form, and have the same questions,
rewards, batch, learning rate and loss, and the same search, which takes 50 ms. An arm ends when it answers 85 % of
240 held-out questions exactly, at the first of the measurements that are made after every second step, or when its
steps are used up. The clock stops while it is measured, and seconds for which the process was ready and other
programs ran are taken off. Every run (arm, seed) leaves one file in `runs/race` and is skipped where that is there,
so the command can be interrupted and given again. Runs are one after another, with one thread of torch each, in the
order of seeds, so that what else the machine does disturbs all arms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS
from jobs import PATIENCE, Row, finished, run_all, write_rows
from race_task import (
    MAX_CALLS,
    MAX_TOKENS,
    MAX_TURN_TOKENS,
    OUTCOME_REWARDS,
    TURN_REWARDS,
    HeldOut,
    environment,
    in_trl,
    model_of,
    questions,
    search,
    teach,
    tokenizer_of,
)
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.app.train import write_json
from mt_grpo.rewards import load_rewards

FOLDER = Path(__file__).parent.parent / "runs" / "race"
RESULT = RESULTS / "race.json"
PAGE = Path(__file__).parent / "reports" / "measurements.md"
BEGIN, END = "<!-- race -->", "<!-- end of the race -->"
ARMS = {"trl": "TRL's `GRPOTrainer(tools=...)`", "ours": "ours", "ahead": "ours, `max_staleness: 1`"}
SEEDS = 3


class Plan(NamedTuple):
    """What all runs of a folder have in common."""

    target: float = 0.85
    steps: int = 60
    """The budget."""
    every: int = 2
    """Steps between two measurements."""
    questions: int = 240
    batch: int = 48
    group: int = 8
    learning_rate: float = 3e-4


class Job(NamedTuple):
    """One run."""

    arm: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / f"{self.arm}-{self.seed}.json"


def jobs(seeds: int, arms: Sequence[str] = tuple(ARMS)) -> list[Job]:
    """All runs: those of the first seed first."""
    return [Job(arm, seed) for seed in range(1, seeds + 1) for arm in arms]


def options(job: Job, plan: Plan) -> dict[str, Any]:
    """The options that TRL and our trainer have in common."""
    return {
        "seed": job.seed,
        "max_steps": plan.steps,
        "per_device_train_batch_size": plan.batch,
        "num_generations": plan.group,
        "max_completion_length": MAX_TOKENS,
        "learning_rate": plan.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "max_grad_norm": 0.5,
        "beta": 0.0,
        "loss_type": "dapo",
        "temperature": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def build(job: Job, plan: Plan, model: Path, folder: str) -> Trainer:
    """The trainer of an arm."""
    common = options(job, plan)
    tokenizer, policy, rows = tokenizer_of(model), model_of(model), questions("train")
    if job.arm == "trl":
        rewards = [*load_rewards(TURN_REWARDS, "turn"), *load_rewards(OUTCOME_REWARDS, "outcome")]
        return GRPOTrainer(
            policy,
            [in_trl(reward) for reward in rewards],
            GRPOConfig(folder, max_tool_calling_iterations=MAX_CALLS, **common),
            rows,
            processing_class=tokenizer,
            tools=[search],
        )
    trainer = MTGRPOEnvTrainer(
        policy,
        environment(),
        turn_reward_funcs=TURN_REWARDS,
        outcome_reward_funcs=OUTCOME_REWARDS,
        args=MTGRPOConfig(
            folder,
            advantage_estimator={"name": "gtpo", "gamma": 0.5},  # for turns that are paid at once
            max_turn_length=MAX_TURN_TOKENS,
            max_staleness=int(job.arm == "ahead"),
            **common,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.runner.engine.patience = PATIENCE
    return trainer


class Clock(NamedTuple):
    """
    Seconds by the clock, seconds of CPU of this process, and seconds for which it was ready and other programs ran.
    """

    wall: float = 0.0
    cpu: float = 0.0
    queued: float = 0.0

    @classmethod
    def read(cls, together: bool) -> Clock:
        """`together`: whether several threads work at once, so that only the main thread's queueing delays the run."""
        threads = [Path("/proc/self/schedstat")] if together else Path("/proc/self/task").glob("*/schedstat")
        queued = 0.0
        for thread in threads:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                queued += int(thread.read_text().split()[1]) / 1e9
        return cls(time.perf_counter(), time.process_time(), queued)

    def until(self, later: Clock, before: Clock) -> Clock:
        """`before` and what passed from this moment to a later one."""
        return Clock(*(base + end - begin for base, begin, end in zip(before, self, later, strict=True)))


class Finish(TrainerCallback):
    """
    Measures the agent after every so many steps, with the clock stopped, and ends the run at the target. An arm that
    samples while it trains would go on while the clock stands: it trains all its steps, and is measured at the end.

    Args:
        held_out (`HeldOut`): Measures the model.
        plan (`Plan`): When to measure, and the target.
        later (`bool`): Whether to measure at the end.

    Attributes:
        curve (`list[tuple[int, float, float]]`): Of each measurement the step, the seconds trained and the share
            answered exactly.
        clock (`Clock`): What the latest measurement's training took.
    """

    def __init__(self, held_out: HeldOut, plan: Plan, later: bool = False) -> None:
        self._held_out, self._plan, self._later = held_out, plan, later
        self._trained, self._began = Clock(), Clock()
        self._kept: list[tuple[int, Clock, dict[str, Any]]] = []
        self.curve: list[tuple[int, float, float]] = []
        self.clock = Clock()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measure(0)
        self._began = Clock.read(self._later)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trained = self._began.until(Clock.read(self._later), self._trained)
        if state.global_step % self._plan.every == 0 or state.global_step == self._plan.steps:
            self._measure(state.global_step)
            control.should_training_stop |= not self._later and self.there
        self._began = Clock.read(self._later)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for step, clock, weights in self._kept:
            if not self.there:
                self._held_out.model.load_state_dict(weights)
                self._add(step, clock)

    @property
    def there(self) -> bool:
        """Whether the latest measurement is at the target."""
        return bool(self.curve) and self.curve[-1][2] >= self._plan.target

    def _measure(self, step: int) -> None:
        if self._later:
            weights = {name: tensor.clone() for name, tensor in self._held_out.model.state_dict().items()}
            self._kept.append((step, self._trained, weights))
        else:
            self._add(step, self._trained)

    def _add(self, step: int, clock: Clock) -> None:
        self.clock = clock
        self.curve.append((step, round(clock.wall, 2), round(self._held_out.exact_match(), 5)))


def race(job: Job, plan: Plan, model: Path) -> Row:
    """Trains one arm until it is there, or has used up its steps."""
    torch.manual_seed(job.seed)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(job, plan, model, folder)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        held_out = HeldOut(trainer.model, trainer.processing_class, plan.questions)
        finish = Finish(held_out, plan, later=job.arm == "ahead")
        trainer.add_callback(finish)
        trainer.train()
    steps = finish.curve[-1][0]
    return {
        **job._asdict(),
        "reached": finish.there,
        "seconds": round(finish.clock.wall - finish.clock.queued, 2),
        "by_the_clock": round(finish.clock.wall, 2),
        "of_cpu": round(finish.clock.cpu, 2),
        "steps": steps,
        "conversations": steps * plan.batch,
        "curve": finish.curve,
        "plan": plan._asdict(),
    }


def work(job: Job, plan: Plan, folder: Path) -> Job:
    """Runs a job and keeps its measures."""
    write_json(job.file(folder), race(job, plan, folder / "model"))
    return job


# The report


def medians(rows: list[Row]) -> dict[str, Row]:
    """Of each arm medians over its seeds. A run that did not get there counts with all its steps."""
    names = ("seconds", "of_cpu", "steps", "conversations")
    found = {}
    for arm in ARMS:
        of_arm = [row for row in rows if row["arm"] == arm]
        if of_arm:
            found[arm] = {name: statistics.median(row[name] for row in of_arm) for name in names}
            found[arm] |= {"runs": len(of_arm), "reached": sum(row["reached"] for row in of_arm)}
    return found


def ratios(rows: list[Row], arm: str = "ours") -> list[float]:
    """TRL's seconds over those of an arm, for each seed that both have run."""
    seconds = {(row["arm"], row["seed"]): row["seconds"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    both = [seed for seed in seeds if ("trl", seed) in seconds and (arm, seed) in seconds]
    return [seconds["trl", seed] / seconds[arm, seed] for seed in both]


def text(rows: list[Row]) -> str:
    """The table, in Markdown."""
    lines = [
        "| trainer | got there | seconds | of them CPU | conversations | seconds per step | TRL's seconds / these |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, each in medians(rows).items():
        times = ratios(rows, arm) if arm != "trl" else []
        quotient = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})" if times else ""
        lines.append(
            f"| {ARMS[arm]} | {each['reached']} of {each['runs']} | {each['seconds']:.0f} | {each['of_cpu']:.0f} "
            f"| {each['conversations']:.0f} | {each['seconds'] / each['steps']:.2f} | {quotient} |"
        )
    return "\n".join(lines)


def write_page(rows: list[Row], page: Path = PAGE) -> None:
    """Puts the table into the page, between its two marks."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text(rows)}\n\n{END}{rest.split(END)[1]}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing, and read committed results")
    parser.add_argument("--so-far", action="store_true", help="run nothing, and write the results of what has run")
    parser.add_argument("--quick", action="store_true", help="one step of each arm; writes no results")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs leave their files (runs/race)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"from 1 to this number ({SEEDS})")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    asked = parser.parse_args(argv)
    if asked.report:
        return report(json.loads(RESULT.read_text())["rows"])
    if asked.quick:
        with tempfile.TemporaryDirectory() as folder:
            return run_quickly(Path(folder))
    plan, given = Plan(), jobs(asked.seeds, asked.arms)
    finished(given, asked.folder, plan=plan._asdict())  # refuses a folder of other runs
    left = [job for job in given if not job.file(asked.folder).exists()]
    if left and not asked.so_far:
        make_model(asked.folder)
        run_all(work, left, plan, folder=asked.folder, workers=1)
    rows = finished(given, asked.folder, plan=plan._asdict())
    if asked.arms == list(ARMS):
        write_rows(RESULT, rows, plan=plan._asdict())
        report(rows)


def report(rows: list[Row]) -> None:
    """The table, on the page and here."""
    write_page(rows)
    print(text(rows))


def make_model(folder: Path) -> None:
    if not (folder / "model" / "config.json").exists():
        print("teaching the model native calls, in two minutes", flush=True)
        teach(folder / "model")


def run_quickly(folder: Path) -> None:
    """One step of each arm with few conversations, from a model that was taught next to nothing."""
    plan = Plan(steps=1, questions=1, batch=2, group=2)
    teach(folder / "model", steps=2, size=4)
    print(text([race(job, plan, folder / "model") for job in jobs(1)]))


if __name__ == "__main__":
    main()
