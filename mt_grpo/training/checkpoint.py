"""Adds to TRL's checkpoints what a resumed run also needs: the rollouts that are still to be trained on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ADAPTER_CONFIG_NAME

from mt_grpo.errors import ConfigError
from mt_grpo.training.config import MTGRPOConfig

logger = logging.getLogger(__name__)

BATCH_OPTIONS = (
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "use_vllm",
)
"""Options that decide the shape of the rollouts in a checkpoint, and how many rows of the dataset were used."""


def batch_options(args: MTGRPOConfig) -> dict[str, Any]:
    """The options that must be the same for a run to resume from a checkpoint."""
    return {**{name: getattr(args, name) for name in BATCH_OPTIONS}, "beta": args.beta}


def save_rollouts(folder: Path, accelerator: Accelerator, step: int, batches: Any, options: dict[str, Any]) -> None:
    """
    Saves the rollouts that this process has still to train on. It is the last write to a checkpoint.

    Args:
        folder (`Path`): The checkpoint.
        accelerator (`Accelerator`): The run's accelerator.
        step (`int`): Micro-batches trained so far.
        batches (`list[dict]`): Micro-batches of the latest rollouts.
        options (`dict`): The run's `batch_options`.
    """
    state = {"step": step, "buffered_inputs": batches, "processes": accelerator.num_processes, "options": options}
    folder.mkdir(parents=True, exist_ok=True)  # where only the model is saved, the main process alone has made it
    path = _path(folder, accelerator.process_index)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_rollouts(folder: Path, accelerator: Accelerator) -> tuple[int, Any]:
    """The step and the micro-batches that `save_rollouts` saved for this process. Call `check_checkpoint` first."""
    path = _path(folder, accelerator.process_index)
    state = torch.load(path, map_location=accelerator.device, weights_only=True)
    for batch in state["buffered_inputs"] or []:
        if "parents" in batch:  # as older checkpoints name the column
            batch["parent"] = batch.pop("parents")
    return state["step"], state["buffered_inputs"]


def check_checkpoint(folder: Path, options: dict[str, Any], rank: int, processes: int) -> None:
    """
    Checks that a run can resume from a checkpoint.

    Args:
        folder (`Path`): The checkpoint.
        options (`dict`): The run's `batch_options`.
        rank, processes (`int`): This process, and the number of processes.

    Raises:
        ConfigError: If another number of processes, other options or another trainer wrote the checkpoint.
    """
    path = _path(folder, rank)
    state = torch.load(path, mmap=True, map_location="cpu", weights_only=True) if path.exists() else None
    if state is None or state["processes"] != processes:
        count = len(list(folder.glob("rollouts-rank*.pt")))
        raise ConfigError(
            f"The checkpoint {folder} has the rollouts of {count} processes, and this run has {processes}: resume "
            "with as many as wrote it, or begin a run with its model (`model_name_or_path`)."
        )
    if "options" not in state:
        logger.warning(
            "The checkpoint %s does not say with which batch sizes it was made, so nobody checks that this run has "
            "the same.",
            folder,
        )
        return
    saved = state["options"]
    other = [name for name in BATCH_OPTIONS if saved[name] != options[name]]
    if bool(saved["beta"]) != bool(options["beta"]):  # whether there are log-probs of the reference model
        other.append("beta")
    if other:
        made, here = (", ".join(f"`{name}: {values[name]}`" for name in other) for values in (saved, options))
        raise ConfigError(
            f"The checkpoint {folder} was made with {made}, and this run has {here}: resume with what it was made "
            "with, or begin a run with its model (`model_name_or_path`)."
        )


def check_adapter(folder: Path, adapter: dict[str, Any] | None) -> None:
    """
    Whether a checkpoint has the adapter, or the whole model, that a run trains.

    Args:
        folder (`Path`): The checkpoint.
        adapter (`dict`, *optional*): Settings of the adapter that is trained, as peft writes them; `None` where the
            whole model is.

    Raises:
        ConfigError: If it has the other, or an adapter of another rank.
    """
    saved = adapter_settings(folder)
    if saved is not None and adapter is None:
        raise ConfigError(
            f"The checkpoint {folder} is of an adapter, and this run trains the whole model: resume with `use_peft: "
            "true` and the options of the adapter that it was made with."
        )
    if adapter is None:
        return
    if saved is None and any(folder.glob("model*.safetensors")):
        raise ConfigError(
            f"The checkpoint {folder} is of a whole model, and this run trains an adapter: resume without `use_peft`, "
            "or begin a run with its model (`model_name_or_path`)."
        )
    if saved is not None and saved.get("r") != adapter.get("r"):
        raise ConfigError(
            f"The checkpoint {folder} is of an adapter of rank {saved.get('r')}, and this run's has "
            f"{adapter.get('r')}: resume with what it was made with (`lora_r`)."
        )


def adapter_settings(folder: str | Path) -> dict[str, Any] | None:
    """What peft saved with the adapter in a folder; `None` where there is no adapter."""
    path = Path(folder) / ADAPTER_CONFIG_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def find_checkpoint(wanted: str | bool | None, output_dir: str) -> str | None:
    """
    The folder that `resume_from_checkpoint` names. `true` is the latest whole checkpoint in `output_dir`.

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
    latest = latest_checkpoint(output_dir)
    if latest is None:
        raise ConfigError(
            f"There is no checkpoint in `output_dir: {output_dir}` to resume from; `save_strategy: steps` leaves some."
        )
    return str(latest)


def latest_checkpoint(output_dir: str) -> Path | None:
    """The folder of the latest whole checkpoint in an output folder, where there is one."""
    folders = [path.parent for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/rollouts-rank0.pt")]
    folders.sort(key=lambda folder: int(folder.name.rsplit("-", 1)[1]), reverse=True)
    return next(filter(is_whole, folders), None)


def is_whole(folder: Path) -> bool:
    """Whether every process had finished writing a checkpoint."""
    first = _path(folder, 0)
    if not first.exists():
        return False
    processes = torch.load(first, mmap=True, map_location="cpu", weights_only=True)["processes"]
    paths = [folder / TRAINER_STATE_NAME, *(_path(folder, rank) for rank in range(processes))]
    return all(path.exists() for path in paths)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rollouts-rank{rank}.pt"
