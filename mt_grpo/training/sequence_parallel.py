"""
`sp_size`: processes that compute micro-batches together. Each samples, scores and credits rows of its own, as without
it. Where a loss is computed, the processes of a group exchange their micro-batches and compute one after the other, so
that activations of one at a time are kept, and of its tokens each process has a share.

accelerate's `ParallelismConfig` has the name, but its sequence parallelism is DeepSpeed's, for rows that are cut
before the model has sampled them; TRL's trainer refuses it for that reason. So the group is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError, UnsupportedModelError
from mt_grpo.forward.model import check_sequence_parallel
from mt_grpo.forward.sequence_parallel import SequenceGroup
from mt_grpo.options.rules import check_sharing
from mt_grpo.training.microbatches import exchange


def sequence_group(trainer: GRPOTrainer) -> SequenceGroup | None:
    """
    The processes that compute rows together with this one; `None` where each computes its own, and where there is only
    one, which may sample. This is a collective call.
    """
    size, accelerator = trainer.args.sp_size, trainer.accelerator
    config = accelerator.parallelism_config
    if config is not None and max(config.sp_size, config.cp_size, config.tp_size) > 1:
        raise ConfigError(
            "accelerate is configured to split sequences or layers (`parallelism_config`), which training has no use "
            "for: leave it out, and set `sp_size` in the recipe."
        )
    if size == 1 or accelerator.num_processes == 1:
        return None
    check_sharing(size, accelerator.num_processes)
    spread = accelerator.distributed_type
    if spread == DistributedType.DEEPSPEED or (spread == DistributedType.FSDP and not accelerator.is_fsdp2):
        name = "DeepSpeed" if spread == DistributedType.DEEPSPEED else "FSDP 1"
        raise ConfigError(
            f"`sp_size: {size}` takes a backward for each micro-batch of its group before a step, which {name} does "
            "not: shard with FSDP2 (`--accelerate_config fsdp2`), or leave `sp_size` out."
        )
    if trainer.aux_loss_enabled:
        raise ConfigError(
            f"`sp_size: {size}` has no loss that balances experts, since that depends on every token of a row: set "
            "`router_aux_loss_coef: 0.0`, or leave `sp_size` out."
        )
    for model in filter(None, (trainer.model, trainer.ref_model)):
        try:
            check_sequence_parallel(accelerator.unwrap_model(model), size)
        except UnsupportedModelError as error:
            raise ConfigError(str(error)) from error
    return SequenceGroup.of_neighbours(size, accelerator.device)


def loss_of_group(
    trainer: GRPOTrainer, model: nn.Module, inputs: dict[str, Any], loss_of: Callable[[dict[str, Any]], Tensor]
) -> Tensor:
    """
    The loss of this process's micro-batch, after the backward of all but the last micro-batch of its group. Its own
    backward is that of the last one. Summed over processes, gradients are those of all micro-batches, as if each
    process had computed its own.
    """
    sequence: SequenceGroup = trainer.sequence
    parts = exchange([inputs] * sequence.size, inputs["completion_ids"].device, sequence.group)
    for part in parts:
        part.pop("row_ids", None)  # the process that has a row takes note of it
    parts[sequence.rank] = inputs
    losses = []
    for number, part in enumerate(parts, start=1):
        with _unsynced(model) if number < sequence.size else nullcontext():
            loss = loss_of(part)
            losses.append(loss.detach())
            if number < sequence.size:
                trainer.accelerator.backward(loss)  # TRL's loss is divided by the steps of accumulation already
    return loss + (losses[sequence.rank] - loss.detach())


def _unsynced(model: nn.Module) -> AbstractContextManager[None]:
    """DDP sums gradients once, FSDP2 after each backward, so that whole gradients are not kept."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
