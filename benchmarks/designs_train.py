"""
Credit rules on the designs of `designs.py`, learnt by the real trainer: the main table of docs/designs.md.

    python benchmarks/designs_train.py            # hours on two cores; goes on where it was interrupted
    python benchmarks/designs_train.py --quick    # one seed of three arms on B and F: minutes; writes nothing
    python benchmarks/designs_train.py --report   # tables and page alone, from benchmarks/results/designs_train.json

The model and its questions are those of `horizon.py`: a tally is a call of the other tool. A run ends after `steps`,
or when nothing moves (`Settled`). Each leaves a file in `runs/designs`; what benchmarks/results/designs_train.json
has already is not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from common import RESULTS
from designs import DESIGNS, ENDING, Earned, earn
from designs import Calls as Made
from designs_report import ARMS, text, write_page
from horizon_task import Calls, Setting, rows, warm_start
from jobs import PATIENCE, finished, run_all, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback, TrainerCallback

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.app.report import write_json
from mt_grpo.envs.env import Step, StepEnv
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.trajectory import Trajectory, Turn

FOLDER = Path(__file__).parent.parent / "runs" / "designs"
RESULT = RESULTS / "designs_train.json"
GROUP, SEEDS, LAST = 8, 6, 10
QUICK = (("B", "F"), ("gtpo .5", "lambda_to_go", "one scale .8"))


class Plan(NamedTuple):
    """What all runs of a table have in common."""

    steps: int = 150
    turns: int = 12
    groups: int = 6
    shaping: float = 0.1
    learning_rate: float = 2e-3


class Job(NamedTuple):
    """One run."""

    design: str
    arm: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / f"{self.design}-{self.arm.replace(' ', '_').replace(',', '')}-{self.seed}.json"


class Designed(StepEnv):
    """Questions of which each is answered with a result and the next one; a tally ends some designs."""

    design: str
    length: int
    protocol = Calls()
    step_timeout = None

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._searches: list[bool] = []
        self._named: list[bool] = []
        self._luck = random.Random(self.session).random()  # the same whenever the conversation is repeated
        return list(row["prompt"])

    async def step(self, turn: Turn) -> Step:
        number = len(self._searches)
        tool, name = (turn.tool_calls[0].name, turn.tool_calls[0].arguments["name"]) if turn.tool_calls else ("", "")
        for call in turn.tool_calls:
            call.executed, call.result = True, "r0"
        self._searches.append(tool == "search")
        self._named.append(name == self.row["right"][number].split()[1])
        info = {"searches": list(self._searches), "named": list(self._named), "luck": self._luck, "turns": self.length}
        ended = self.design in ENDING and tool == "tally"
        if ended or number + 1 == self.length:
            return Step(done=True, info=info)
        return Step(f"r0 . {self.row['questions'][number + 1]}", info=info)


def earned_by(design: str, shaping: float, info: Mapping[str, Any]) -> Earned:
    """What one conversation earned."""
    return _earned(design, shaping, tuple(info["searches"]), tuple(info["named"]), info["luck"], info["turns"])


@lru_cache(maxsize=4096)  # asked for each turn
def _earned(
    design: str, shaping: float, searches: tuple[bool, ...], named: tuple[bool, ...], luck: float, turns: int
) -> Earned:
    def widened(values: Sequence[bool]) -> torch.Tensor:
        return torch.tensor([[*values, *[False] * (turns - len(values))]])

    exists = [True] * len(searches)
    return earn(design, Made(widened(searches), widened(named), widened(exists), torch.tensor([luck])), shaping)


class Shaping(TurnReward):
    """The turn rewards of a design."""

    def __init__(self, design: str, shaping: float) -> None:
        self.design, self.shaping = design, shaping

    def score(self, turn: Turn, trajectory: Trajectory, **row: Any) -> float | None:
        if "searches" not in trajectory.info:
            return None
        return float(earned_by(self.design, self.shaping, trajectory.info).turns[0, turn.index])


class Outcome(OutcomeReward):
    """The outcome of a design."""

    def __init__(self, design: str) -> None:
        self.design = design

    def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        return float(earned_by(self.design, 0.0, trajectory.info).outcomes[0]) if trajectory.info else None


class Reached(OutcomeReward):
    """What is measured, worth nothing."""

    weight = 0.0

    def __init__(self, design: str) -> None:
        self.design = design

    def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        return float(earned_by(self.design, 0.0, trajectory.info).reached[0]) if trajectory.info else None


class Settled(TrainerCallback):
    """Ends a run in which nothing moves: three times `WINDOW` steps whose means of what is reached lie within .01."""

    EARLIEST, WINDOW, WITHIN = 75, 15, 0.01

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        curve = [row["rewards/Reached/mean"] or 0.0 for row in state.log_history if "reward" in row]
        if len(curve) >= self.EARLIEST:
            last = curve[-3 * self.WINDOW :]
            means = [fmean(last[start : start + self.WINDOW]) for start in range(0, len(last), self.WINDOW)]
            control.should_training_stop = max(means) - min(means) < self.WITHIN


def build(job: Job, plan: Plan, model: Path, folder: str) -> MTGRPOEnvTrainer:
    """The trainer of a run."""
    arm, conversations = ARMS[job.arm], plan.groups * GROUP
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
        advantage_estimator=arm.rule,
        scale_rewards=arm.scale_rewards,
        max_turn_length=4,
        max_completion_length=24 * plan.turns,
        tokenization_sanity_check_mode="disable",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    env = Designed()
    env.design, env.length = job.design, plan.turns
    trainer = MTGRPOEnvTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        env,
        turn_reward_funcs=[Shaping(job.design, plan.shaping)],
        outcome_reward_funcs=[Outcome(job.design), Reached(job.design)],
        args=args,
        train_dataset=rows(Setting(plan.turns, 1), plan.steps * plan.groups, job.seed),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Settled()],
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.runner.engine.patience = PATIENCE
    trainer.runner.engine.max_batch_size = conversations
    return trainer


def run(job: Job, plan: Plan, model: Path) -> dict[str, Any]:
    """Trains one arm; what was reached at first, at the end and over all steps, as if it had gone on as it ended."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(job, plan, model, folder)
        trainer.train()
        history = [row for row in trainer.state.log_history if "reward" in row]
    curve = [round(row["rewards/Reached/mean"] or 0.0, 4) for row in history]
    end = fmean(curve[-LAST:])
    whole = curve + [end] * (plan.steps - len(curve))
    return {
        **job._asdict(),
        "start": curve[0],
        "end": round(end, 4),
        "over": round(fmean(whole), 4),
        "curve": curve,
        "plan": plan._asdict(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def work(job: Job, plan: Plan, folder: Path) -> Job:
    """Runs a job and keeps its measures."""
    write_json(job.file(folder), run(job, plan, folder / "model"))
    return job


def jobs(designs: Sequence[str], arms: Sequence[str], seeds: int) -> list[Job]:
    """All runs: those of the first seed first."""
    return [Job(design, arm, seed) for seed, design, arm in product(range(1, seeds + 1), designs, arms)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing, and read committed results")
    parser.add_argument("--quick", action="store_true", help="one seed of a few arms, in minutes; writes no results")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs leave their files (runs/designs)")
    parser.add_argument("--designs", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"from 1 to this number ({SEEDS})")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one core each (2)")
    options = parser.parse_args(argv)
    plan = Plan()
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    if not options.report:
        given = jobs(*QUICK, 1) if options.quick else jobs(options.designs, options.arms, options.seeds)
        committed = set() if options.quick else {(row["design"], row["arm"], row["seed"]) for row in known}
        finished(given, options.folder, plan=plan._asdict())  # refuses a folder of other runs
        left = [job for job in given if tuple(job) not in committed and not job.file(options.folder).exists()]
        if left:
            if not (options.folder / "model" / "config.json").exists():
                print("warm-starting the model, in a minute or two", flush=True)
                warm_start(options.folder / "model")
            try:
                run_all(work, left, plan, folder=options.folder, workers=options.workers)
            finally:
                known = keep(given, known, options.folder, plan, write=not options.quick)
        else:
            known = keep(given, known, options.folder, plan, write=not options.quick)
    print(text(known))


def keep(
    given: Sequence[Job], known: list[dict[str, Any]], folder: Path, plan: Plan, write: bool
) -> list[dict[str, Any]]:
    """The results with what has run since, which they and the page are written with."""
    if not write:
        return finished(given, folder, plan=plan._asdict())
    found = {(row["design"], row["arm"], row["seed"]): row for row in known}
    found |= {
        (row["design"], row["arm"], row["seed"]): row
        for row in finished(jobs(list(DESIGNS), list(ARMS), SEEDS), folder, plan=plan._asdict())
    }
    ordered = [found[job] for job in jobs(list(DESIGNS), list(ARMS), SEEDS) if job in found]
    write_rows(RESULT, ordered, plan=plan._asdict())
    write_page(text(ordered))
    return ordered


if __name__ == "__main__":
    main()
