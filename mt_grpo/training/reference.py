"""Saves and loads the reference model of `sync_ref_model`, which changes with the policy."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from trl.distributed import DistributedBackend

from mt_grpo.errors import ConfigError
from mt_grpo.training.config import MTGRPOConfig

NAME = "reference.safetensors"


def check_reference(args: MTGRPOConfig, accelerator: Accelerator) -> None:
    """
    Refuses a run that could be trained but not resumed.

    Raises:
        ConfigError: If the run saves checkpoints, and its reference is synced and sharded by ZeRO-3.
    """
    if args.sync_ref_model and args.save_strategy != "no" and DistributedBackend(accelerator).is_zero3:
        raise ConfigError(
            "A synced reference (`sync_ref_model: true`) cannot be saved under DeepSpeed ZeRO-3, so a run could not "
            'be resumed: shard with FSDP or ZeRO-2, or set `save_strategy: "no"`.'
        )


def save_reference(folder: Path, args: MTGRPOConfig, accelerator: Accelerator, reference: nn.Module | None) -> None:
    """Writes a synced reference as a whole to a checkpoint. This is a collective call if it is sharded."""
    if not args.sync_ref_model or DistributedBackend(accelerator).is_zero3:
        return
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(accelerator.unwrap_model(reference), options=options)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        partial = (folder / NAME).with_suffix(".partial")
        save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, partial)
        partial.replace(folder / NAME)


def load_reference(folder: Path, args: MTGRPOConfig, accelerator: Accelerator, reference: nn.Module | None) -> None:
    """
    Loads what `save_reference` wrote into the reference.

    Raises:
        ConfigError: If the checkpoint has none.
    """
    if not args.sync_ref_model:
        return
    if not (folder / NAME).exists():
        raise ConfigError(
            f"The checkpoint {folder} has no synced reference ({NAME}), so `sync_ref_model: true` cannot go on from "
            "it: resume one that was saved with it, or leave `sync_ref_model` out."
        )
    set_model_state_dict(
        accelerator.unwrap_model(reference), load_file(folder / NAME), options=StateDictOptions(full_state_dict=True)
    )
