"""What TRL leaves out of a checkpoint, and a resumed run needs: the rollouts that are still to be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mt_grpo.training.config import ConfigError


def save_rollouts(folder: Path, accelerator: Accelerator, step: int, batches: Any) -> None:
    """
    Saves what this process has still to train on; the last that it writes to a checkpoint.

    Args:
        folder (`Path`): The checkpoint.
        accelerator (`Accelerator`): The run's.
        step (`int`): Micro-batches trained so far.
        batches (`list[dict]`): Micro-batches of the latest rollouts.
    """
    state = {"step": step, "buffered_inputs": batches, "processes": accelerator.num_processes}
    folder.mkdir(parents=True, exist_ok=True)  # where only the model is saved, the main process alone has made it
    path = _path(folder, accelerator)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_rollouts(folder: Path, accelerator: Accelerator) -> tuple[int, Any]:
    """
    The step and the micro-batches that `save_rollouts` saved for this process.

    Raises:
        ConfigError: If the checkpoint is of another number of processes, or not of this trainer.
    """
    path = _path(folder, accelerator)
    state = torch.load(path, map_location=accelerator.device, weights_only=True) if path.exists() else None
    if state is None or state["processes"] != accelerator.num_processes:
        count = len(list(folder.glob("rollouts-rank*.pt")))
        raise ConfigError(
            f"The checkpoint {folder} has the rollouts of {count} processes, and this run has "
            f"{accelerator.num_processes}: resume with as many as wrote it, or begin a run with its model "
            "(`model_name_or_path`)."
        )
    return state["step"], state["buffered_inputs"]


def find_checkpoint(wanted: str | bool | None, output_dir: str) -> str | None:
    """
    The folder that `resume_from_checkpoint` means: the latest whole one in `output_dir` where it is `true`.

    Raises:
        ConfigError: If there is none.
    """
    if wanted is None or str(wanted).lower() == "false":
        return None
    if str(wanted).lower() != "true":
        if not Path(str(wanted)).is_dir():
            raise ConfigError(
                f"`resume_from_checkpoint: {wanted}` is no folder: name one, or `true` for the latest in `output_dir`."
            )
        return str(wanted)
    folders = [path.parent for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/rollouts-rank0.pt")]
    folders.sort(key=lambda folder: int(folder.name.rsplit("-", 1)[1]), reverse=True)
    latest = next(filter(_whole, folders), None)
    if latest is None:
        raise ConfigError(
            f"There is no checkpoint in `output_dir: {output_dir}` to resume from; `save_strategy: steps` leaves some."
        )
    return str(latest)


def _whole(folder: Path) -> bool:
    """Whether every process had finished writing."""
    processes = torch.load(folder / "rollouts-rank0.pt", map_location="cpu", weights_only=True)["processes"]
    files = [TRAINER_STATE_NAME, *(f"rollouts-rank{rank}.pt" for rank in range(processes))]
    return all((folder / name).exists() for name in files)


def _path(folder: Path, accelerator: Accelerator) -> Path:
    return folder / f"rollouts-rank{accelerator.process_index}.pt"
