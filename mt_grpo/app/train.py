"""
A whole run: evaluates, trains, evaluates again, and writes the results; and what it shows of itself: progress, the
agent's measures before and after, a curve, the files, and commands to go on with.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from matplotlib.figure import Figure
from peft import PeftModel
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState

from mt_grpo.app.recipe_file import needs_trust_confirmation
from mt_grpo.credit import CreditError, rule_label
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.source import source_of
from mt_grpo.errors import ConfigError, ServerGoneError, WeightSyncError
from mt_grpo.options.values import HAS_A_USER, env_type
from mt_grpo.preemption import PreemptedError, print_error
from mt_grpo.rewards import RewardError, RewardFunc
from mt_grpo.rollout import RolloutError
from mt_grpo.rollout.token_row import examine_template
from mt_grpo.runlog import open_run
from mt_grpo.runlog.files import Silence, to_json, written_whole
from mt_grpo.runlog.findings import Counts, find_in_run
from mt_grpo.training.checkpoint import latest_checkpoint, says_what_cannot_be_written
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import NonFiniteError
from mt_grpo.training.preflight import LOCK, clear_folder, locked
from mt_grpo.training.step_log import FewerPrinter, FewerProgress
from mt_grpo.training.step_log.records import read_audit, versions
from mt_grpo.training.trainer import MTGRPOEnvTrainer
from mt_grpo.trajectory import Row, Trajectory

_EXAMPLES = 3
_FAILURES = (ServerGoneError, WeightSyncError, RolloutError, CreditError, NonFiniteError, RewardError)
"""What ends a run with one sentence for the user instead of a traceback."""


def leave_group(accelerator: Accelerator) -> None:
    """Leaves the group of processes, once no trainer refers to it: torch would deadlock if the last one did."""
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
    folder = Path(args.output_dir).absolute()
    main = trainer.accelerator.is_main_process
    for host in (main, args.local_process_index == 0):  # of a shared folder nothing is left to the second
        if host:
            clear_folder(args)
        trainer.accelerator.wait_for_everyone()
    earlier: Row = {}
    summary_path = folder / "summary.json"
    if main and args.resume_from_checkpoint and summary_path.exists():
        earlier = _read_summary(summary_path)
    if trainer.accelerator.num_processes > 1:  # others may not see the file, and must measure, or not, with the first
        earlier = broadcast_object_list([earlier])[0]

    def write_config() -> None:
        if main:
            (folder / "config.yaml").write_text(yaml.safe_dump(resolved, sort_keys=True), encoding="utf-8")

    if earlier.get("seconds") is None:
        write_config()
    trainer.accelerator.wait_for_everyone()
    trainer.remove_callback(FewerProgress)
    trainer.remove_callback(FewerPrinter)
    trainer.step_log.table.console = console
    console.print(examine_template(trainer.runner.renderer), highlight=False, markup=False)
    start = time.perf_counter()
    evaluates = trainer.eval_dataset is not None
    summary = {
        "advantage_estimator": trainer.credit_rule,
        "seed": args.seed,
        **({"before": {}, "after": {}} if evaluates else {}),
        "seconds": None,
        "steps": 0,
        "versions": versions(),
    }
    examples: list[Trajectory] = []
    model_saved = had_finished = False
    if evaluates:
        summary["before"] = earlier.get("before", {})
    progress = _RunProgress(trainer, console)

    def measure_before() -> None:
        nonlocal had_finished
        trainer.end_if_preempted()
        taken = earlier.get("steps") == trainer.state.global_step >= trainer.state.max_steps
        had_finished = taken and earlier.get("seconds") is not None  # which is written last
        if had_finished:
            args.eval_on_start = False
            return
        write_config()
        if evaluates and not summary["before"]:
            summary["before"] = _measure(trainer, progress, "before")
            examples.extend(trainer.eval_trajectories[:_EXAMPLES])
            args.eval_on_start = False  # this was it
        if main:
            write_json(summary_path, summary)

    def save_and_measure() -> None:
        nonlocal model_saved
        if not trainer.state.global_step or had_finished:  # the dataset had no row: the trainer says so
            return
        with says_what_cannot_be_written(folder, folder):
            trainer.save_model(args.output_dir)
        model_saved = True
        trainer.end_if_preempted()
        if evaluates:
            summary["after"] = _measure(trainer, progress, "after")
        if evaluates and args.push_to_hub:
            trainer.push_to_hub("The last evaluation, in the card too")
        elif not args.push_to_hub:
            trainer.create_model_card()

    trainer.add_callback(_Measures(before=measure_before))
    trainer.add_callback(progress)
    # before the trackers that end with training: the last measure is theirs too
    trainer.callback_handler.callbacks.insert(0, _Measures(after=save_and_measure))
    try:
        progress.begin()
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except _FAILURES as error:  # in every process
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
        kept = _what_is_kept(args, trainer.state.global_step, model_saved)
        raise KeyboardInterrupt(number, kept) from None
    finally:  # whatever ended the training
        progress.end()  # gives the terminal back
        if trainer.weight_sync is not None:
            trainer.weight_sync.close()
    summary["seconds"] = round(time.perf_counter() - start, 1)
    summary["steps"] = trainer.state.global_step
    if not main:
        return
    if had_finished:
        console.print(f"The run had finished, and its folder is as it was: {args.output_dir}", markup=False)
        return
    run = open_run(folder)
    summary["findings"] = [finding.sentence for finding in find_in_run(run.rows, run.about)]
    audit = read_audit(folder)
    write_json(summary_path, summary if audit is None else {**summary, "audit": audit})
    title = f"{rule_label(trainer.credit_rule)}, {summary['steps']} steps"
    _plot(trainer.state.log_history, folder / "learning_curve.png", title)
    if evaluates:
        from mt_grpo.viewer import render_trajectory  # an extra

        questions = summary["after"]["questions"]
        for label, trajectories in (("before", examples), ("after", trainer.eval_trajectories[:_EXAMPLES])):
            for number, trajectory in enumerate(trajectories):
                console.print(Rule(f"{label}: example {number + 1}"))
                console.print(render_trajectory(trajectory, trainer.processing_class, console.is_terminal))
        console.print(_table(summary["before"], summary["after"], f"{questions} held-out questions, {title}"))
    console.print(
        f"{summary['seconds']:.0f} s of training and evaluation. Written to {args.output_dir}:", markup=False
    )
    latest = latest_checkpoint(str(folder))
    earlier = {path for path in folder.glob("checkpoint-*") if latest is not None and path != latest}
    for path in sorted(path for path in folder.iterdir() if path.name != LOCK and path not in earlier):
        words = [text for pattern, text in _CONTENTS.items() if fnmatch(path.name, pattern)]
        if earlier and path == latest:
            words = [f"the latest of {len(earlier) + 1} to resume from"]
        shown = Path(args.output_dir, path.name)
        console.print(f"  {shown}  ({words[0]})" if words else f"  {shown}", highlight=False, markup=False)
    counts = Counts().add_table(run.rows, np.arange(len(run.rows)))
    if counts.failed and not counts.held:  # the trainer ends a run of two batches or more sooner
        raise RolloutError(f"Every conversation of the run failed, the first with: {counts.first_failure}")
    console.print("What to do next:", highlight=False)
    adapter = isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel)
    talks = any(isinstance(each, MultiTurnToolEnv) for each in source_of(trainer.env).prototypes())
    for what, command in _next_steps(args, adapter, talks):
        console.print(f"  # {what}\n  {command}", highlight=False, markup=False, soft_wrap=True)


class _Measures(TrainerCallback):
    """Measures before training, once the model is wrapped, before which no sharded one can be evaluated; and after."""

    def __init__(self, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None) -> None:
        self._before, self._after = before, after

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self._before()

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        self._after()


def _measure(trainer: MTGRPOEnvTrainer, progress: _RunProgress, label: str) -> Row:
    if trainer.evaluated_step != trainer.state.global_step:
        with progress.measuring(label):
            trainer.evaluate()
    rewards = [*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs]
    measures = gather_object([measure(item, rewards) for item in trainer.eval_trajectories])
    return summarise(measures, trainer.num_generations_eval)


def measure(trajectory: Trajectory, rewards: Sequence[RewardFunc]) -> dict[str, float]:
    """One trajectory's measures, without those of rewards that say nothing of it."""
    measures = {}
    for reward in rewards:
        value = trajectory.rewards["turn"].get(reward.name, trajectory.rewards["outcome"].get(reward.name))
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        total = sum(item for item in values if item is not None)
        measures[reward.name.removesuffix("_func").removesuffix("_reward")] = total / reward.maximum
    attempts = sum(turn.num_attempts for turn in trajectory.turns)
    failures = sum(turn.num_failures for turn in trajectory.turns)
    measures["tool_execution"] = (attempts - failures) / attempts if attempts else 0.0
    measures["turns"] = float(len(trajectory.turns))
    return measures


def summarise(measures: list[dict[str, float]], generations: int = 1) -> Row:
    """
    The mean of each measure over the trajectories that have it, how many `questions` have so many of them each, and
    how many trajectories were left `unscored`, by measure, if any were.
    """
    found = {name: [row[name] for row in measures if name in row] for row in measures for name in row}
    unscored = {name: len(measures) - len(values) for name, values in found.items() if len(values) < len(measures)}
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return {**means, "questions": len(measures) // generations, **({"unscored": unscored} if unscored else {})}


def _read_summary(path: Path) -> Row:
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(path.read_text(encoding="utf-8")), dict):
            return found
    raise ConfigError(f"{path} cannot be read as the summary of the run to resume: remove it, or put it back.")


def write_json(path: Path, content: Row) -> None:
    """Writes JSON so that a crash leaves the old file or the whole new one."""
    with written_whole(path) as partial:
        partial.write_text(to_json(content, indent=2) + "\n", encoding="utf-8")


def _table(before: Row, after: Row, title: str) -> Table:
    """The measures before and after, side by side."""
    result = Table(title=Text(title, style="table.title"))
    for column in ("", "before", "after", "change"):
        result.add_column(column, justify="left" if not column else "right")
    for name in before | after:
        if name in ("questions", "unscored"):
            continue
        label = _LABELS.get(name, name.replace("_", " "))
        unscored = [each.get("unscored", {}).get(name, 0) for each in (before, after)]
        if any(unscored):
            label += f" (unscored: {unscored[0]}, {unscored[1]})"
        values = [each.get(name, math.nan) for each in (before, after)]
        result.add_row(Text(label), *(f"{value:.3f}" for value in values), f"{values[1] - values[0]:+.3f}")
    return result


_LABELS = {
    "tool_execution": "tool-execution rate",
    "exist_answer_in_search_results": "answer in search results",
    "exist_answer": "answer contained",
    "turns": "turns per question",
}


def _plot(history: list[Row], path: Path, title: str) -> None:
    """Draws the mean of each reward over training steps."""
    rows = [row for row in history if "reward" in row]
    names = [key for key in (rows[0] if rows else {}) if key.startswith("rewards/") and key.endswith("/mean")]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in ["reward", *names]:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if not points:  # it applied to no conversation
            continue
        label = "weighted sum" if name == "reward" else name.split("/")[1].removesuffix("_func").replace("_", " ")
        axes.plot(*zip(*points, strict=True), label=label, linewidth=2.2 if name == "reward" else 1.3)
    axes.set(xlabel="optimiser step", ylabel="mean reward in the training batch", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=120)


_CONTENTS = {
    "config.yaml": "every option with its value; a recipe",
    "metrics.jsonl": "the metrics of each log step",
    "audit.jsonl": "what rewards say in their groups",
    "rollouts": "every conversation",
    "learning_curve.png": "mean rewards over training",
    "summary.json": "the agent before and after training",
    "completions": "what `log_completions` writes",
    "checkpoint-*": "to resume from",
    "abandoned-checkpoint-*": "left when the run went back",
    "*model*.safetensors": "the trained weights",
    "tokenizer": "to show the tokens of conversations",
    "README.md": "the model's card",
    "runs": "for TensorBoard",
}


def _next_steps(args: MTGRPOConfig, adapter: bool, talks: bool = True) -> list[tuple[str, str]]:
    """What can be done with a finished run; of its environment, whether the model answers in it."""
    folder = args.output_dir
    trained, options, steps = folder, [], []
    if adapter:
        trained, options = str(Path(folder) / "merged"), ["--use_peft", "false"]
        steps.append(("put the adapter into its model", _command("merge", folder)))
    if args.use_vllm:
        from mt_grpo.training.servers import transport_of  # loaded for runs that have servers

        options += ["--weight_sync", "auto"] if transport_of(args).sends_adapter else []
    arguments = [*_config(args), "--model_name_or_path", trained, *options]
    if args.use_vllm and args.vllm_mode == "server":
        steps.append(("end the run's vLLM server, and start one of the trained model", _command("serve", *arguments)))
    steps.append(("see what the agent did, and the credit it got", _command("view", folder)))
    steps.append(("see what the trained agent does", _command("rollout", *arguments)))
    if talks and args.environments is None and env_type(vars(args)) in HAS_A_USER:
        steps.append(("ask it something", _command("chat", folder, *_config(args)[2:])))
    checkpoint = latest_checkpoint(folder)
    if checkpoint is not None:
        more = ["--max_steps", str(2 * args.max_steps)] if args.max_steps > 0 else []
        more = more or ["--num_train_epochs", f"{2 * args.num_train_epochs:g}"]
        steps.append(("train on", _resume_command(args, checkpoint, *more)))
    if "tensorboard" in args.report_to:
        steps.append(("see metrics and conversations", shlex.join(["tensorboard", "--logdir", folder])))
    if "trackio" in args.report_to:
        steps.append(("see metrics and conversations", shlex.join(["trackio", "show", "--project", args.project])))
    return steps


def _what_is_kept(args: MTGRPOConfig, step: int, model_saved: bool) -> str:
    """What an interrupted run has left and how to go on, in sentences."""
    folder = args.output_dir
    if model_saved:
        return f"Training had ended: the model, its metrics and its conversations are in {folder}."
    checkpoint = latest_checkpoint(folder)
    if not step and checkpoint is None:
        return "No step was taken."
    records = f"Metrics and conversations so far are in {folder}."
    taken = "1 step was taken" if step == 1 else f"{step} steps were taken"
    if checkpoint is None:
        keeps = "`save_strategy: steps` keeps some"
        if args.save_strategy == "steps":
            keeps = f"a `save_steps` below {args.save_steps:g} keeps one sooner"
        return f"{taken}, and no checkpoint was kept ({keeps}). {records}"
    saved = checkpoint.name.rsplit("-", 1)[1]
    return (
        f"{taken}, and what was learnt up to step {saved} is in {checkpoint}. {records} "
        f"Go on with: {_resume_command(args, checkpoint)}"
    )


def _resume_command(args: MTGRPOConfig, checkpoint: Path, *options: str) -> str:
    """The command that resumes from a checkpoint. Of several processes it is not known how they were launched."""
    resume = ["--resume_from_checkpoint", str(checkpoint), *options]
    if args.world_size > 1:
        return f"the command that began this run, with {shlex.join(resume)}"
    return _command("train", *_config(args), *resume)


def _config(args: MTGRPOConfig) -> list[str]:
    """The options that name the run's own configuration, whose code has just run."""
    path = str(Path(args.output_dir) / "config.yaml")
    return ["--config", path, *(["--trust"] if Path(path).is_file() and needs_trust_confirmation(path) else [])]


def _command(*words: str) -> str:
    program = [_relative(sys.executable), "-m", "mt_grpo"]
    if shutil.which("mt-grpo"):
        program = ["mt-grpo"]
    elif Path(sys.argv[0]).name == "mt-grpo":  # an environment that is not activated
        program = [_relative(str(Path(sys.argv[0]).absolute()))]
    return shlex.join([*program, *words])


def _relative(path: str) -> str:
    """As it may be written in this folder."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


_REFRESHES = 4  # of the bar, per second


class _RunProgress(TrainerCallback):
    """Shows step, reward, loss, turns, seconds and time left; in a terminal also what the step waits for."""

    def __init__(self, trainer: MTGRPOEnvTrainer, console: Console) -> None:
        self._console = console
        self._shows = trainer.accelerator.is_main_process
        self._bar = _Bar(trainer, console) if console.is_terminal and self._shows else None
        self._step_log = trainer.step_log
        self._begun = time.monotonic()
        self._first_step = 0
        tell = functools.partial(console.print, highlight=False, markup=False)
        self._silence = Silence(lambda: tell(trainer.describe_progress()))
        self._doing = ExitStack()

    def begin(self) -> None:
        """Takes the terminal. In a log it says from here on how far the work is, where nothing else does."""
        if self._bar is not None:
            self._bar.start()
        elif self._shows:
            self._doing.enter_context(self._silence)

    def end(self) -> None:
        """Gives the terminal back."""
        if self._bar is not None:
            self._bar.stop()
        self._doing.close()

    @contextmanager
    def measuring(self, label: str) -> Iterator[None]:
        """The agent is measured in the block."""
        if self._bar is None:
            yield
            return
        task = self._bar.add_task(f"measuring the agent {label} training", total=None, count="")
        try:
            yield
        finally:
            self._bar.remove_task(task)

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._begun, self._first_step = time.monotonic(), state.global_step
        if self._bar is not None:
            self._bar.follow(state.global_step, state.max_steps)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._bar is not None:
            self._bar.follow(state.global_step, state.max_steps, self._left(state))
        elif self._shows and not control.should_log:
            self._print(state, [f"{self._step_log.latest.seconds:.1f} s"])

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, float], **kwargs: object
    ) -> None:
        if not self._shows:
            return
        evaluated = next((name for name in logs if re.fullmatch(r"eval_(\w+_)?turns/mean", name)), None)
        prefix = "" if evaluated is None else evaluated.removesuffix("turns/mean")
        # a teacher alone gives no reward
        earned = [_number("reward", logs[f"{prefix}reward"])] if f"{prefix}reward" in logs else []
        if evaluated is not None:
            of_set = f" of {prefix[5:-1]}" if len(prefix) > 5 else ""
            seconds = next(value for name, value in logs.items() if name.endswith("_runtime"))
            words = [*earned, _number("turns", logs[evaluated], 2)]
            self._print(state, [*words, f"{seconds:.1f} s"], f"evaluation{of_set} at ")
        elif "turns/mean" in logs:
            loss = [_number("loss", logs["loss"], 4)] if "loss" in logs else []
            words = [*earned, *loss, _number("turns", logs["turns/mean"], 2)]
            if self._bar is not None:
                self._bar.show("  ".join(words))
            else:
                self._print(state, [*words, *([f"{self._step_log.latest.seconds:.1f} s"] if loss else [])])

    def _print(self, state: TrainerState, words: list[str], prefix: str = "") -> None:
        width = len(str(state.max_steps))
        left = [] if prefix else [self._left(state)]
        line = "  ".join([f"{prefix}step {state.global_step:>{width}}/{state.max_steps}", *words, *filter(None, left)])
        self._console.print(line, highlight=False, markup=False)
        self._silence.broken()

    def _left(self, state: TrainerState) -> str:
        """The time that the remaining steps take, at the pace of the steps that this process did."""
        done, left = state.global_step - self._first_step, state.max_steps - state.global_step
        if not done or not left:
            return ""
        return f"{timedelta(seconds=round((time.monotonic() - self._begun) / done * left))} left"


class _Bar(Progress):
    """A bar of steps, below it the latest metrics, and what the step waits for, looked up whenever it is drawn."""

    def __init__(self, trainer: MTGRPOEnvTrainer, console: Console) -> None:
        self._activity = trainer.step_log.activity
        processes = trainer.accelerator.num_processes
        self._whose = f" (process 1 of {processes})" if processes > 1 else ""
        self._training: TaskID | None = None
        self._metrics = ""
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}", style="green"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=_REFRESHES,
        )

    def follow(self, step: int, steps: int, left: str = "") -> None:
        """Training has come to a step; `left` is the time that is left, in words."""
        if self._training is None:
            self._training = self.add_task("training", total=steps, count="")
        description = f"training, {left}" if left else "training"
        self.update(self._training, completed=step, description=description, count=f"{step}/{steps}")

    def show(self, metrics: str) -> None:
        """Shows metrics below the bar."""
        self._metrics = metrics
        self.refresh()

    def get_renderables(self) -> Iterable[RenderableType]:
        """What rich draws: the bar, and the lines below it, none wider than a terminal of 80 columns shows."""
        yield self.make_tasks_table(self.tasks)
        if self._metrics:
            yield Text(f"  {self._metrics}", no_wrap=True, overflow="ellipsis")
        if self.tasks:
            activity = f"  {self._activity.describe()}{self._whose}"
            yield Text(activity, style="bright_black", no_wrap=True, overflow="ellipsis")


def _number(name: str, value: float | None, digits: int = 3) -> str:
    """A metric in words; of a batch to which it does not apply there is no number."""
    return f"{name} {'-' if value is None else format(value, f'.{digits}f')}"
