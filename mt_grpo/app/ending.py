"""What a run leaves behind, and how to go on from there, as commands to copy."""

from __future__ import annotations

import shlex
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

from mt_grpo.app.recipe_file import asks_for_trust
from mt_grpo.training.checkpoint import latest_checkpoint
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.folder import LOCK

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
    """The command that goes on from a checkpoint; how several processes were launched, nobody knows here."""
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
