"""How training states are spread over processes, as an accelerate configuration says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.app.shipped import accelerate_configs, read_accelerate_config
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean

OFFLOADED = ("cpu", "nvme")


@dataclass(frozen=True)
class Sharding:
    """
    Args:
        name (`str`): For messages.
        stage (`int`): What is spread, as ZeRO counts: 0 nothing, 1 the optimiser's states, 2 gradients too, 3 weights
            too, which FSDP's full shard does as well.
        processes (`int`, *optional*): How many the configuration launches.
        offloads_optimizer, offloads_weights (`bool`): Whether these are kept off the GPU.
        checkpoints (`bool`): Whether it turns on checkpointed activations by itself.
    """

    name: str
    stage: int
    processes: int | None = None
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    checkpoints: bool = False


COPIES = Sharding("a copy for each process", 0)
USUAL = (COPIES, Sharding("zero2", 2), Sharding("zero3 or fsdp2", 3))
"""What is compared where no configuration is given, from the fastest to the smallest."""


def read_sharding(named: str) -> Sharding:
    """
    Reads an accelerate configuration.

    Args:
        named (`str`): Name of one in `recipes/accelerate`, or the path of a file.

    Raises:
        ConfigError: If there is none, or it is no mapping.
    """
    known = accelerate_configs()
    if named in known:
        return _sharding(named, yaml.safe_load(known[named].read_text(encoding="utf-8")))
    path = Path(named)
    if not path.is_file():
        raise ConfigError(
            f"The accelerate configuration {named!r} is unknown{did_you_mean(named, known)}: give one of "
            f"{', '.join(known)}, or the path of a file."
        )
    return _sharding(path.name, read_accelerate_config(path))


def _sharding(name: str, content: dict[str, Any]) -> Sharding:
    processes = content.get("num_processes")
    if content.get("distributed_type") == "DEEPSPEED":
        return _deepspeed(name, processes, content.get("deepspeed_config") or {})
    if content.get("distributed_type") == "FSDP":
        return _fsdp(name, processes, content.get("fsdp_config") or {})
    return Sharding(name, 0, processes)


def _deepspeed(name: str, processes: int | None, options: dict[str, Any]) -> Sharding:
    stage = options.get("zero_stage", 2)  # accelerate's default
    optimizer, weights = options.get("offload_optimizer_device"), options.get("offload_param_device")
    if "deepspeed_config_file" in options:
        try:
            content = json.loads(Path(options["deepspeed_config_file"]).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The `deepspeed_config_file` of the accelerate configuration {name!r} cannot be read ({error}): "
                "mend its path or its JSON."
            ) from error
        zero = content.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        optimizer, weights = (zero.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param"))
    return Sharding(name, int(stage), processes, optimizer in OFFLOADED, int(stage) == 3 and weights in OFFLOADED)


def _fsdp(name: str, processes: int | None, options: dict[str, Any]) -> Sharding:
    stages = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}
    if options.get("fsdp_version", 1) == 2:
        stage = 3 if options.get("fsdp_reshard_after_forward", True) else 2
    else:
        stage = stages.get(str(options.get("fsdp_sharding_strategy", "FULL_SHARD")).upper(), 3)
    offloads = bool(options.get("fsdp_offload_params", False))
    checkpoints = bool(options.get("fsdp_activation_checkpointing", False))
    return Sharding(name, stage, processes, offloads, offloads, checkpoints)
