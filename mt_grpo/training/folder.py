"""Protects the output folder: files of an earlier run are neither mixed with another run nor removed unasked."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from accelerate.utils import broadcast_object_list
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from mt_grpo.errors import ConfigError
from mt_grpo.runlog.schema import FOLDER
from mt_grpo.training.checkpoint import is_whole
from mt_grpo.training.config import MTGRPOConfig

RECORDS = ("metrics.jsonl", "trajectories*.jsonl", "summary.json", "learning_curve.png")
MODEL = ("model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors", "adapter_config.json")
ROLLOUTS = ("index*.jsonl", "*.rank*.parquet", "*.rank*.partial")
"""What a run leaves in its folder of conversations."""
CHECKPOINT = re.compile(r"checkpoint-\d+")


def left_by_runs(output_dir: str) -> list[Path]:
    """Records, checkpoints and models in a folder."""
    folder = Path(output_dir)
    records, models = ([path for name in names for path in sorted(folder.glob(name))] for names in (RECORDS, MODEL))
    conversations = [folder / FOLDER] if _conversations(folder / FOLDER) else []
    checkpoints = [path for path in sorted(folder.glob("checkpoint-*")) if _is_checkpoint(path)]
    return [*records, *conversations, *models, *checkpoints]


def _conversations(folder: Path) -> list[Path]:
    return [path for pattern in ROLLOUTS for path in folder.glob(pattern)]


def _is_checkpoint(path: Path) -> bool:
    """Whether this trainer wrote the checkpoint, wholly or partly."""
    marks = [path / TRAINER_STATE_NAME, *path.glob("rollouts-rank*.pt")]
    return CHECKPOINT.fullmatch(path.name) is not None and any(mark.exists() for mark in marks)


def check_folder(args: MTGRPOConfig, model: str) -> None:
    """
    Checks that a run can begin in its `output_dir`. This is a collective call, in which the main process looks.

    Args:
        args (`MTGRPOConfig`): The options; a run that goes on from a checkpoint in the folder may.
        model (`str`): Name or folder of the model it begins with.

    Raises:
        ConfigError: If an earlier run is there that is neither resumed nor to be overwritten, or if overwriting would
            remove the model that the run begins with.
    """
    message = [_refusal(args, model) if args.process_index == 0 else None]
    if args.world_size > 1:
        broadcast_object_list(message)
    if message[0] is not None:
        raise ConfigError(message[0])


def _refusal(args: MTGRPOConfig, model: str) -> str | None:
    found = [] if _resumes_here(args) else left_by_runs(args.output_dir)
    if not found:
        return None
    if args.overwrite_output_dir:
        if not Path(model).resolve().is_relative_to(Path(args.output_dir).resolve()):
            return None
        return (
            f"The model {model} is in `output_dir: {args.output_dir}`, which `overwrite_output_dir: true` clears: "
            "choose another `output_dir`."
        )
    names = ", ".join(path.name for path in found[:3]) + (", ..." if len(found) > 3 else "")
    resume = "go on with it (`--resume_from_checkpoint true`), " if any(map(is_whole, found)) else ""
    return (
        f"`output_dir: {args.output_dir}` holds an earlier run ({names}): {resume}remove it and begin anew "
        "(`--overwrite_output_dir true`), or choose another `output_dir`."
    )


def _resumes_here(args: MTGRPOConfig) -> bool:
    checkpoint = args.resume_from_checkpoint
    return checkpoint is not None and Path(checkpoint).resolve().parent == Path(args.output_dir).resolve()


def clear_folder(args: MTGRPOConfig) -> None:
    """
    Removes the records and checkpoints of earlier runs, and a model that a trainer saved, unless a run is resumed. All
    other files stay.
    """
    if _resumes_here(args):
        return
    saved = Path(args.output_dir, TRAINING_ARGS_NAME).exists()
    for path in left_by_runs(args.output_dir):
        if path.name == FOLDER:
            for file in _conversations(path):
                file.unlink()
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif saved or not any(path.match(pattern) for pattern in MODEL):
            path.unlink()
