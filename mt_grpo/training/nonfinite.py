"""Ends a run before a number that is not finite reaches a weight or a file."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather, gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.integrations import TensorBoardCallback

from mt_grpo.errors import UserError
from mt_grpo.training.config import MTGRPOConfig

INGREDIENTS = ("advantages", "old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")
"""The inputs of a loss, besides the log-probs of the model that is trained."""


class NonFiniteError(UserError, RuntimeError):
    """A number that would spoil the weights. The message is one sentence: what it was and where it comes from."""


def check_loss(loss: Tensor, inputs: dict[str, Any], model: nn.Module, step: int) -> None:
    """Checks the loss of a micro-batch. This is a collective call."""
    losses = gather(loss.detach().float().reshape(1))
    if not losses.isfinite().all():
        causes = gather_object([_cause(inputs, model)])  # on every process: weights may be sharded
        rank = int((~losses.isfinite()).nonzero()[0])
        raise NonFiniteError(
            f"The loss of step {step + 1} is {losses[rank]}, since {causes[rank]}; no weight was changed by it."
        )


def check_gradient(norm: Any, args: MTGRPOConfig, accelerator: Accelerator, step: int) -> None:
    """
    Checks the norm of a gradient before the optimiser's step. In float16 a gradient may overflow, and the scaler then
    leaves out the step. DeepSpeed steps inside the backward, so a bad gradient is found after its step, but before a
    save. This is a collective call.
    """
    if norm is None or args.fp16:  # DeepSpeed may know none
        return
    norms = gather(torch.tensor([float(norm)], device=accelerator.device))
    if not norms.isfinite().all():
        raise NonFiniteError(
            f"The gradient of step {step + 1} has the norm {norms[~norms.isfinite()][0]}, though its loss is finite, "
            "since a derivative overflowed in the backward pass; it was not stepped: train in bfloat16 or float32, or "
            "lower `learning_rate`."
        )


def _cause(inputs: dict[str, Any], model: nn.Module) -> str:
    name = _spoilt_weight(model)
    if name is not None:
        return f"the weight {name!r} is not finite since an earlier step, or was loaded so: lower `learning_rate`"
    trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    for name in INGREDIENTS:
        value = inputs.get(name)
        if value is not None and not value.masked_select(trained).isfinite().all():
            return f"`{name}` of its batch are not finite"
    return (
        "the model's own log-probabilities, their ratio to the old ones, or its product with an advantage overflowed: "
        "lower `learning_rate` or the rewards, or train in bfloat16 or float32"
    )


def _spoilt_weight(model: nn.Module) -> str | None:
    """The name of a trained weight that is not finite in this process's part."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not _local(parameter).all():
            return name
    return None


def check_weights(model: nn.Module, accelerator: Accelerator, step: int) -> None:
    """Checks every trained weight; each process checks its own shards. This is a collective call."""
    spoilt = _spoilt_weight(model)
    if gather(torch.tensor([int(spoilt is not None)], device=accelerator.device)).sum():
        raise NonFiniteError(
            f"Weights hold NaN or infinity after step {step}{f' ({spoilt})' if spoilt else ''}, so they are not "
            "saved: go back to an earlier checkpoint, with a smaller `learning_rate` or `max_grad_norm`."
        )


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """Whether each element of this process's part is finite. Under ZeRO-3 the parameter itself is empty."""
    value = parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)
    return torch.isfinite(value)


class NumbersToTensorBoard(TensorBoardCallback):
    """Leaves out what has no number, such as the reward of a batch that failed, of which TensorBoard would warn."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        numbers = {name: value for name, value in (logs or {}).items() if value is not None}
        super().on_log(args, state, control, logs=numbers, **kwargs)
