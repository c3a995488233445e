"""Weights that hold NaN or infinity are worth nothing: they are not saved, and end a run."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import gather
from torch import nn
from torch.distributed.tensor import DTensor


class NonFiniteError(RuntimeError):
    """Numbers of the training are NaN or infinite. The message is one sentence fit for the user."""


def check_weights(model: nn.Module, accelerator: Accelerator, step: int) -> None:
    """
    Looks at every trained weight, each process at its own shards; a collective call.

    Raises:
        NonFiniteError: If one is NaN or infinite, in every process.
    """
    spoiled = [name for name, value in model.named_parameters() if value.requires_grad and not _local(value).all()]
    if gather(torch.tensor([len(spoiled)], device=accelerator.device)).sum():
        raise NonFiniteError(
            f"Weights hold NaN or infinity after step {step}{f' ({spoiled[0]})' if spoiled else ''}, so they are not "
            "saved: go back to an earlier checkpoint, with a smaller `learning_rate` or `max_grad_norm`."
        )


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """Which elements of this process's part are finite; ZeRO-3 leaves the parameter itself empty."""
    value = parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)
    return torch.isfinite(value)
