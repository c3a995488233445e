"""
The results of a run: the agent's measures before and after, a curve, the files, and commands to go on with. Apart from
`train`, which says in which order things happen, not how they are shown.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from mt_grpo.app.recipe_file import asks_for_trust
from mt_grpo.rewards import RewardFunc
from mt_grpo.runlog.files import to_json
from mt_grpo.training.checkpoint import latest_checkpoint
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.folder import LOCK
from mt_grpo.trajectory import Trajectory

PACKAGES = ("mt-grpo", "trl", "transformers", "accelerate", "torch", "datasets", "peft")


def measure(trajectory: Trajectory, rewards: Sequence[RewardFunc]) -> dict[str, float]:
    """
    One trajectory's measures.

    Returns:
        `dict`: each reward as a share of its `maximum` (turn rewards summed over the turns; 0 where none applies),
        `tool_execution`, the share of attempted calls that succeeded (0 without an attempt), and `turns`.
    """
    measures = {}
    for reward in rewards:
        value = trajectory.rewards["turn"].get(reward.name, trajectory.rewards["outcome"].get(reward.name))
        values = value if isinstance(value, list) else [value]
        total = sum(item for item in values if item is not None)
        measures[reward.name.removesuffix("_func").removesuffix("_reward")] = total / reward.maximum
    attempts = sum(turn.num_attempts for turn in trajectory.turns)
    failures = sum(turn.num_failures for turn in trajectory.turns)
    measures["tool_execution"] = (attempts - failures) / attempts if attempts else 0.0
    measures["turns"] = float(len(trajectory.turns))
    return measures


def summarise(measures: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each measure over trajectories, and their number as `questions`."""
    means = {name: sum(row[name] for row in measures) / len(measures) for name in measures[0]}
    return {**means, "questions": len(measures)}


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON so that a crash leaves the old file or the whole new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(to_json(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def table(before: dict[str, float], after: dict[str, float], title: str) -> Table:
    """The measures before and after, side by side."""
    result = Table(title=Text(title, style="table.title"))
    for column in ("", "before", "after", "change"):
        result.add_column(column, justify="left" if not column else "right")
    for name in before:
        if name != "questions":
            change = f"{after[name] - before[name]:+.3f}"
            result.add_row(Text(_label(name)), f"{before[name]:.3f}", f"{after[name]:.3f}", change)
    return result


def _label(name: str) -> str:
    labels = {
        "tool_execution": "tool-execution rate",
        "exist_answer_in_search_results": "answer in search results",
        "exist_answer": "answer contained",
        "turns": "turns per question",
    }
    return labels.get(name, name.replace("_", " "))


def plot(history: list[dict[str, Any]], path: Path, title: str) -> None:
    """
    Draws the mean of each reward over training steps.

    Args:
        history (`list[dict]`): The trainer's log history.
        path (`Path`): PNG to write.
        title (`str`): Heading.
    """
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


CONTENTS = {
    "config.yaml": "every option with its value; a recipe",
    "metrics.jsonl": "the metrics of each log step",
    "audit.jsonl": "what rewards say in their groups",
    "rollouts": "every conversation",
    "learning_curve.png": "mean rewards over training",
    "summary.json": "the agent before and after training",
    "completions": "what `log_completions` writes",
    "checkpoint-*": "to resume from",
    "*model*.safetensors": "the trained weights",
    "tokenizer": "to show the tokens of conversations",
    "runs": "for TensorBoard",
}
MERGE = (
    "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; "
    "M.from_pretrained({0!r}).merge_and_unload().save_pretrained({1!r}); "
    "T.from_pretrained({0!r}).save_pretrained({1!r})"
)
"""An adapter and its model as one model."""


def files_left(folder: Path) -> list[str]:
    """The files of a run, those with a name that says little also in words."""
    lines = []
    for path in sorted(path for path in folder.iterdir() if path.name != LOCK):
        words = [text for pattern, text in CONTENTS.items() if fnmatch(path.name, pattern)]
        lines.append(f"{path}  ({words[0]})" if words else str(path))
    return lines


def next_steps(args: MTGRPOConfig, adapter: bool) -> list[tuple[str, str]]:
    """
    What can be done with a finished run.

    Args:
        args (`MTGRPOConfig`): Its options.
        adapter (`bool`): Whether it trained an adapter.

    Returns:
        `list[tuple[str, str]]`: What a command does, and the command.
    """
    folder, python = args.output_dir, _relative(sys.executable)
    trained, options, steps = folder, [], []
    if adapter:
        trained, options = str(Path(folder) / "merged"), ["--use_peft", "false"]
        steps.append(("put the adapter into its model", _shell(python, "-c", MERGE.format(folder, trained))))
    if args.weight_sync == "lora":
        options += ["--weight_sync", "auto"]
    arguments = [*_config(args), "--model_name_or_path", trained, *options]
    if args.use_vllm:
        steps.append(("end the run's vLLM server, and start one of the trained model", _command("serve", *arguments)))
    steps.append(("see what the agent did, and the credit it got", _command("view", folder)))
    steps.append(("see what the trained agent does", _command("rollout", *arguments)))
    checkpoint = latest_checkpoint(folder)
    if checkpoint is not None:
        more = ["--max_steps", str(2 * args.max_steps)] if args.max_steps > 0 else []
        more = more or ["--num_train_epochs", f"{2 * args.num_train_epochs:g}"]
        steps.append(("train on", resume_command(args, checkpoint, *more)))
    if "tensorboard" in args.report_to:
        steps.append(("see metrics and conversations", _shell("tensorboard", "--logdir", folder)))
    if "trackio" in args.report_to:
        steps.append(("see metrics and conversations", _shell("trackio", "show", "--project", args.project)))
    return steps


def what_is_kept(args: MTGRPOConfig, step: int, model_saved: bool) -> str:
    """
    What an interrupted run has left and how to go on, in sentences.

    Args:
        args (`MTGRPOConfig`): Its options.
        step (`int`): Steps that it had taken.
        model_saved (`bool`): Whether the trained model is in its folder.
    """
    folder = args.output_dir
    if model_saved:
        return f"Training had ended: the model, its metrics and its conversations are in {folder}."
    checkpoint = latest_checkpoint(folder)
    if not step and checkpoint is None:
        return "No step was taken."
    records = f"Metrics and conversations so far are in {folder}."
    if checkpoint is None:
        keeps = "`save_strategy: steps` keeps some"
        if args.save_strategy == "steps":
            keeps = f"a `save_steps` below {args.save_steps:g} keeps one sooner"
        return f"{_steps(step)}, and no checkpoint was kept ({keeps}). {records}"
    saved = checkpoint.name.rsplit("-", 1)[1]
    return (
        f"{_steps(step)}, and what was learnt up to step {saved} is in {checkpoint}. {records} "
        f"Go on with: {resume_command(args, checkpoint)}"
    )


def resume_command(args: MTGRPOConfig, checkpoint: Path, *options: str) -> str:
    """The command that resumes from a checkpoint. Of several processes it is not known how they were launched."""
    resume = ["--resume_from_checkpoint", str(checkpoint), *options]
    if args.world_size > 1:
        return f"the command that began this run, with {_shell(*resume)}"
    return _command("train", *_config(args), *resume)


def _steps(number: int) -> str:
    return "1 step was taken" if number == 1 else f"{number} steps were taken"


def _config(args: MTGRPOConfig) -> list[str]:
    """The options that name the run's own configuration, whose code has just run."""
    path = str(Path(args.output_dir) / "config.yaml")
    return ["--config", path, *(["--trust"] if Path(path).is_file() and asks_for_trust(path) else [])]


def _command(*words: str) -> str:
    program = [_relative(sys.executable), "-m", "mt_grpo"]
    if shutil.which("mt-grpo"):
        program = ["mt-grpo"]
    elif Path(sys.argv[0]).name == "mt-grpo":  # an environment that is not activated
        program = [_relative(str(Path(sys.argv[0]).absolute()))]
    return _shell(*program, *words)


def _shell(*words: str) -> str:
    return shlex.join(words)


def _relative(path: str) -> str:
    """As it may be written in this folder."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path
