"""
Credit rules on the designs of `designs.py`, learnt by the real trainer: the main table of reports/designs.md.

    python benchmarks/designs_train.py            # hours on two cores; goes on where it was interrupted
    python benchmarks/designs_train.py --quick    # one seed of three arms on B and F: minutes; writes nothing
    python benchmarks/designs_train.py --stage second    # the best arms of that table, with other settings: hours
    python benchmarks/designs_train.py --list     # what has not run, of the first stage or of `--stage second`
    python benchmarks/designs_train.py --report   # table and page alone, from committed results

The model and its questions are those of `horizon.py`: a tally is a call of the other tool. A run ends after `steps`,
or when nothing moves (`Settled`). Each leaves a file in `runs/designs`; what benchmarks/results/designs_train.json
(designs_second.json) has already is not run again. For K 32 the model is warm-started on longer conversations.
"""

from __future__ import annotations

import argparse
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
from designs_report import ARMS, BEGIN_SECOND, END_SECOND, finalists, text, text_of_variants, write_page
from horizon_task import Calls, build_trainer, model_of, run_missing
from jobs import finished, keep, missing, rows_of
from transformers import TrainerCallback

from mt_grpo import MTGRPOEnvTrainer
from mt_grpo.app.train import write_json
from mt_grpo.envs.env import Step, StepEnv
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.trajectory import Trajectory, Turn

FOLDER = Path(__file__).parent.parent / "runs" / "designs"
RESULT, SECOND = RESULTS / "designs_train.json", RESULTS / "designs_second.json"
SEEDS, SECOND_SEEDS, LAST = 6, 3, 10
QUICK = (("B", "F"), ("gtpo .5", "lambda_to_go", "one scale .8"))


class Plan(NamedTuple):
    """What all runs of a table have in common."""

    steps: int = 150
    turns: int = 12
    groups: int = 6
    shaping: float = 0.1
    learning_rate: float = 2e-3


VARIANTS = {
    "K 32": Plan(turns=32),
    "24 groups": Plan(groups=24),
    "shaping .02": Plan(shaping=0.02),
    "half the rate": Plan(learning_rate=1e-3),
    "twice the rate": Plan(learning_rate=4e-3),
}
"""What the second stage changes, one at a time."""


class Job(NamedTuple):
    """One run."""

    design: str
    arm: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / f"{self.design}-{self.arm.replace(' ', '_').replace(',', '')}-{self.seed}.json"


class Varied(NamedTuple):
    """A run of the second stage."""

    variant: str
    design: str
    arm: str
    seed: int

    def file(self, folder: Path) -> Path:
        name = "-".join((self.variant, self.design, self.arm, str(self.seed)))
        return folder / f"{name.replace(' ', '_').replace(',', '')}.json"


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


def build(job: Job | Varied, plan: Plan, model: Path, folder: str) -> MTGRPOEnvTrainer:
    """The trainer of a run."""
    arm = ARMS[job.arm]
    env = Designed()
    env.design, env.length = job.design, plan.turns
    return build_trainer(
        model,
        folder,
        env,
        [Shaping(job.design, plan.shaping)],
        [Outcome(job.design), Reached(job.design)],
        turns=plan.turns,
        skills=1,
        groups=plan.groups,
        steps=plan.steps,
        seed=job.seed,
        callbacks=[Settled()],
        learning_rate=plan.learning_rate,
        advantage_estimator=arm.rule,
        scale_rewards=arm.scale_rewards,
    )


def run(job: Job | Varied, plan: Plan, model: Path) -> dict[str, Any]:
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


def quick(folder: Path, workers: int, steps: int = Plan().steps) -> str:
    """Runs one seed of a few arms on B and F, and writes no results; the table, in Markdown."""
    plan, given = Plan(steps=steps), jobs(*QUICK, 1)
    finished(given, folder, plan=plan._asdict())  # refuses a folder of other runs
    run_missing(work, given, plan, folder=folder, workers=workers)
    return text(finished(given, folder, plan=plan._asdict()))


def first_stage(designs: Sequence[str], arms: Sequence[str], seeds: int, folder: Path, workers: int) -> None:
    """Runs what has not run, and writes results and page with it, also where it is interrupted."""
    plan, known = Plan(), rows_of(RESULT)
    whole = jobs(list(DESIGNS), list(ARMS), SEEDS)
    finished(whole, folder, plan=plan._asdict())
    left = missing(jobs(designs, arms, seeds), known)
    try:
        run_missing(work, left, plan, folder=folder, workers=workers)
    finally:
        keep(RESULT, whole, known, finished(whole, folder, plan=plan._asdict()), plan=plan._asdict())
        write(second=False)


def varied(variants: Sequence[str], designs: Sequence[str], arms: Sequence[str], seeds: int) -> list[Varied]:
    """The runs of the second stage: those of the first seed first."""
    return [
        Varied(variant, design, arm, seed)
        for seed, variant, design, arm in product(range(1, seeds + 1), variants, designs, arms)
    ]


def measures_of(given: Sequence[Varied], folder: Path) -> list[dict[str, Any]]:
    """The measures of the runs of the second stage that have a file."""
    return [row for job in given for row in finished([job], folder, plan=VARIANTS[job.variant]._asdict())]


def work_varied(job: Varied, folder: Path) -> Varied:
    """Runs a job of the second stage and keeps its measures."""
    plan = VARIANTS[job.variant]
    write_json(job.file(folder), run(job, plan, model_of(folder, plan.turns)))
    return job


def second_stage(given: Sequence[Varied], folder: Path, workers: int) -> None:
    """Runs what has not run, and writes results and page with it, also where it is interrupted."""
    known = rows_of(SECOND)
    measures_of(given, folder)  # refuses a folder of other runs
    left = missing(given, known)
    try:
        for seed in dict.fromkeys(job.seed for job in left):
            for turns in dict.fromkeys(VARIANTS[job.variant].turns for job in left):
                chosen = [job for job in left if job.seed == seed and VARIANTS[job.variant].turns == turns]
                run_missing(work_varied, chosen, folder=folder, workers=workers, turns=turns)
    finally:
        whole = varied(list(VARIANTS), list(DESIGNS), list(ARMS), SECOND_SEEDS)
        plans = {variant: plan._asdict() for variant, plan in VARIANTS.items()}
        keep(SECOND, whole, known, measures_of(whole, folder), plans=plans)
        write(second=True)


def write(*, second: bool) -> str:
    """Writes the tables of a stage into the page, and returns them."""
    if second:
        write_page(lines := text_of_variants(rows_of(SECOND)), begin=BEGIN_SECOND, end=END_SECOND)
    else:
        write_page(lines := text(rows_of(RESULT)))
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("first", "second"), default="first", help="which table (first)")
    parser.add_argument("--list", action="store_true", help="run nothing, and name what has not run")
    parser.add_argument("--report", action="store_true", help="run nothing, and read committed results")
    parser.add_argument("--quick", action="store_true", help="one seed of a few arms, in minutes; writes no results")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs leave their files (runs/designs)")
    parser.add_argument("--designs", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="of the second stage")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, help="all of the first stage; of the second those named above"
    )
    parser.add_argument("--seeds", type=int, help=f"from 1 to this number ({SEEDS}; second stage: {SECOND_SEEDS})")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one core each (2)")
    options = parser.parse_args(argv)
    if options.quick:
        return print(quick(options.folder, options.workers))
    second = options.stage == "second"
    if not options.report:
        arms = options.arms or (finalists(rows_of(RESULT)) if second else list(ARMS))
        seeds = options.seeds or (SECOND_SEEDS if second else SEEDS)
        given: list[Any] = (
            varied(options.variants, options.designs, arms, seeds) if second else jobs(options.designs, arms, seeds)
        )
        if options.list:
            left = missing(given, rows_of(SECOND if second else RESULT))
            left = [job for job in left if not job.file(options.folder).exists()]
            return print("\n".join([*(" ".join(map(str, job)) for job in left), f"{len(left)} of {len(given)} runs"]))
        if second:
            second_stage(given, options.folder, options.workers)
        else:
            first_stage(options.designs, arms, seeds, options.folder, options.workers)
    print(write(second=second))


if __name__ == "__main__":
    main()
