"""A whole run: evaluates, trains, evaluates again, and writes the results."""

from __future__ import annotations

import gc
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from peft import PeftModel
from rich.console import Console
from rich.rule import Rule
from transformers import TrainerCallback

from mt_grpo.app import report
from mt_grpo.app.interrupt import print_error
from mt_grpo.app.report import RunProgress
from mt_grpo.credit import CreditError, rule_label
from mt_grpo.errors import ServerGoneError, WeightSyncError
from mt_grpo.preemption import PreemptedError
from mt_grpo.rewards import RewardError
from mt_grpo.rollout import RolloutError
from mt_grpo.rollout.token_check import examine_template
from mt_grpo.runlog import open_run
from mt_grpo.runlog.findings import Counts, find_in_run
from mt_grpo.training.checkpoint import says_what_cannot_be_written
from mt_grpo.training.nonfinite import NonFiniteError
from mt_grpo.training.preflight import clear_folder, locked
from mt_grpo.training.step_log.display import FewerPrinter, FewerProgress
from mt_grpo.training.step_log.records import read_audit, versions
from mt_grpo.training.trainer import MTGRPOEnvTrainer
from mt_grpo.trajectory import Trajectory
from mt_grpo.viewer import render_trajectory

EXAMPLES = 3
FAILURES = (ServerGoneError, WeightSyncError, RolloutError, CreditError, NonFiniteError, RewardError)
"""What ends a run with one sentence for the user instead of a traceback."""


def leave_group(accelerator: Accelerator) -> None:
    """
    Leaves the group of processes. Call it when nothing refers to the trainer any more. A model that is wrapped for
    several processes refers to the group. If it were the last reference, torch would wait for gloo's threads while it
    holds the interpreter's lock, for which they may be waiting.
    """
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


def run_training(trainer: MTGRPOEnvTrainer, resolved: dict[str, object], console: Console) -> None:
    """
    Trains, and writes to the output folder `config.yaml` (the resolved options), `metrics.jsonl`, `audit.jsonl`,
    conversations (`rollouts/`), `tokenizer/`, `learning_curve.png`, the model, and `summary.json`.
    """
    with locked(trainer.args, trainer.model.config.name_or_path):
        try:
            _run(trainer, resolved, console)
        except PreemptedError:
            trainer.accelerator.wait_for_everyone()  # once one process ends, a launcher ends the others
            raise


def _run(trainer: MTGRPOEnvTrainer, resolved: dict[str, object], console: Console) -> None:
    args = trainer.args
    folder = Path(args.output_dir)
    main = trainer.accelerator.is_main_process
    for host in (main, args.local_process_index == 0):  # of a shared folder nothing is left to the second
        if host:
            clear_folder(args)
        trainer.accelerator.wait_for_everyone()
    if main:
        (folder / "config.yaml").write_text(yaml.safe_dump(resolved, sort_keys=True), encoding="utf-8")
    trainer.accelerator.wait_for_everyone()
    trainer.remove_callback(FewerProgress)
    trainer.remove_callback(FewerPrinter)
    trainer.step_log.table.console = console
    console.print(examine_template(trainer.runner.renderer), highlight=False, markup=False)
    start = time.perf_counter()
    evaluates = trainer.eval_dataset is not None
    summary_path = folder / "summary.json"
    summary = {
        "advantage_estimator": trainer.credit_rule,
        "seed": args.seed,
        **({"before": {}, "after": {}} if evaluates else {}),
        "seconds": None,
        "steps": 0,
        "versions": versions(),
    }
    examples: list[Trajectory] = []
    model_saved = False
    if main and evaluates and args.resume_from_checkpoint and summary_path.exists():
        summary["before"] = json.loads(summary_path.read_text(encoding="utf-8")).get("before", {})
    if trainer.accelerator.num_processes > 1:  # others may not see the file, and must measure, or not, with the first
        summary = broadcast_object_list([summary])[0]
    progress = RunProgress(trainer, console)

    def measure_before() -> None:
        trainer.end_if_preempted()
        if evaluates and not summary["before"]:
            summary["before"] = _measure(trainer, progress, "before")
            examples.extend(trainer.eval_trajectories[:EXAMPLES])
            args.eval_on_start = False  # this was it
        if main:
            report.write_json(summary_path, summary)

    def save_and_measure() -> None:
        nonlocal model_saved
        if not trainer.state.global_step:  # the dataset had no row: the trainer says so
            return
        with says_what_cannot_be_written(folder, folder):
            trainer.save_model(args.output_dir)
        model_saved = True
        trainer.end_if_preempted()
        if evaluates:
            summary["after"] = _measure(trainer, progress, "after")

    trainer.add_callback(_AtTheBeginning(measure_before))
    trainer.add_callback(progress)
    # before the trackers that end with training: the last measure is theirs too
    trainer.callback_handler.callbacks.insert(0, _AtTheEnd(save_and_measure))
    try:
        progress.begin()
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except FAILURES as error:  # in every process
        words = str(error)
        if trainer.state.global_step:
            checkpoint = trainer.save_checkpoint()
            words += (
                f" What was learnt up to step {trainer.state.global_step} is in {checkpoint}: go on with "
                f"`--resume_from_checkpoint {checkpoint}`."
            )
        failure = type(error)(words)
        if trainer.accelerator.num_processes > 1:
            progress.end()
            if main:
                print_error(failure)
            failure.told = True
            trainer.accelerator.wait_for_everyone()  # once one process ends, a launcher ends the others
        raise failure from error
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args else signal.SIGINT
        kept = report.what_is_kept(args, trainer.state.global_step, model_saved)
        raise KeyboardInterrupt(number, kept) from None
    finally:  # whatever ended the training
        progress.end()  # gives the terminal back
        if trainer.weight_sync is not None:
            trainer.weight_sync.close()
    summary["seconds"] = round(time.perf_counter() - start, 1)
    summary["steps"] = trainer.state.global_step
    if not main:
        return
    run = open_run(folder)
    summary["findings"] = [finding.sentence for finding in find_in_run(run.rows, run.about)]
    audit = read_audit(folder)
    report.write_json(summary_path, summary if audit is None else {**summary, "audit": audit})
    title = f"{rule_label(trainer.credit_rule)}, {summary['steps']} steps"
    report.plot(trainer.state.log_history, folder / "learning_curve.png", title)
    if evaluates:
        questions = summary["after"]["questions"]
        for label, trajectories in (("before", examples), ("after", trainer.eval_trajectories[:EXAMPLES])):
            for number, trajectory in enumerate(trajectories):
                console.print(Rule(f"{label}: example {number + 1}"))
                console.print(render_trajectory(trajectory, trainer.processing_class, console.is_terminal))
        console.print(report.table(summary["before"], summary["after"], f"{questions} held-out questions, {title}"))
    console.print(f"{summary['seconds']:.0f} s of training and evaluation. Written to {folder}:", markup=False)
    for line in report.files_left(folder):
        console.print(f"  {line}", highlight=False, markup=False)
    counts = Counts().add_table(run.rows, np.arange(len(run.rows)))
    if counts.failed and not counts.held:  # the trainer ends a run of two batches or more sooner
        raise RolloutError(f"Every conversation of the run failed, the first with: {counts.first_failure}")
    console.print("What to do next:", highlight=False)
    adapter = isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel)
    for what, command in report.next_steps(args, adapter):
        console.print(f"  # {what}\n  {command}", highlight=False, markup=False, soft_wrap=True)


class _AtTheBeginning(TrainerCallback):
    """
    Calls `action` when the model is wrapped for training. FSDP and DeepSpeed wrap it once, together with its
    optimiser, so an evaluation must not come before.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self._action()


class _AtTheEnd(TrainerCallback):
    """Calls `action` once the last step is taken."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        self._action()


def _measure(trainer: MTGRPOEnvTrainer, progress: RunProgress, label: str) -> dict[str, float]:
    if trainer.evaluated_step != trainer.state.global_step:
        with progress.measuring(label):
            trainer.evaluate()
    rewards = [*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs]
    return report.summarise(gather_object([report.measure(item, rewards) for item in trainer.eval_trajectories]))
