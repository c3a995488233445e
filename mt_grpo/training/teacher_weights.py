"""The policy as it was, as its own teacher: `teacher: {model: self, teacher_model_kind: base}`, or `ema`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer
from trl.distributed import DistributedBackend

from mt_grpo.errors import ConfigError

TEACHER = "teacher.tensors"
"""The file of a checkpoint with the weights of a teacher that the policy was; named as `REFERENCE` is."""


class TeacherWeights(TrainerCallback):
    """
    The weights with which the policy began, or their exponential mean, `(1 - rate) * mean + rate * policy` after every
    `teacher_sync_steps` steps as in TRL's `SDPOTrainer`: those that are trained, in float32, each spread as the
    policy's is.

    Raises:
        ConfigError: If weights are spread in a way in which they cannot be exchanged.
    """

    def __init__(self, trainer: GRPOTrainer, given: dict[str, Any]) -> None:
        self._kind = given["teacher_model_kind"]
        self._rate, self._every = given.get("teacher_update_rate", 0.05), given.get("teacher_sync_steps", 1)
        self._trainer = trainer
        self.weights: dict[str, Tensor] = {}
        backend = DistributedBackend(trainer.accelerator)
        if backend.is_zero3 or (backend.is_fsdp and not trainer.accelerator.is_fsdp2):
            raise ConfigError(
                f"`teacher: {{teacher_model_kind: {self._kind}}}` lends the policy other weights, which "
                f"{'DeepSpeed ZeRO-3' if backend.is_zero3 else 'FSDP 1'} does not let it: shard with FSDP2 "
                "(`--accelerate_config fsdp2`) or ZeRO-2, or set `teacher_model_kind: live`."
            )

    @classmethod
    def of(cls, trainer: GRPOTrainer) -> TeacherWeights | None:
        """The weights of a run's teacher, where it is the policy as it was."""
        given = trainer.args.teacher or {}
        return None if given.get("teacher_model_kind", "live") == "live" else cls(trainer, given)

    def _trained(self) -> dict[str, nn.Parameter]:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # else a forward without a backward leaves some gathered
                module.reshard()
        return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def begin(self, checkpoint: str | None) -> None:
        """Takes the weights of a policy that is about to be trained, or those of a checkpoint. A collective call."""
        self.weights = {name: _copy(weight) for name, weight in self._trained().items()}
        if checkpoint is None:
            return
        file = Path(checkpoint, TEACHER)
        saved = load_file(file) if file.exists() else {}
        if {name: weight.shape for name, weight in saved.items()} != {
            name: weight.shape for name, weight in self.weights.items()
        }:
            raise ConfigError(
                f"The checkpoint {checkpoint} has no weights of a teacher ({TEACHER}), or those of another policy, so "
                f"`teacher_model_kind: {self._kind}` cannot go on from it: resume one that was saved with it, or "
                "set `teacher_model_kind: live`."
            )
        for name, weight in self.weights.items():
            whole = saved[name].to(weight.device)
            if isinstance(weight, DTensor):
                whole = distribute_tensor(whole, weight.device_mesh, weight.placements)
            weight.copy_(whole)

    @torch.no_grad()
    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if self._kind == "ema" and state.global_step % self._every == 0:
            for name, weight in self._trained().items():
                self.weights[name].mul_(1 - self._rate).add_(weight, alpha=self._rate)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """A context in which the policy has these weights, once there are some."""
        own = {name: weight.detach().clone() for name, weight in self._trained().items() if self.weights}
        self._put(self.weights)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        trained = self._trained()
        for name, weight in weights.items():
            trained[name].copy_(weight)

    def save(self, folder: Path) -> None:
        """Writes the weights as a whole to a checkpoint. This is a collective call."""
        main = self._trainer.accelerator.is_main_process
        whole: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            each = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if main:
                whole[name] = each.cpu().contiguous()
        if main:
            partial = (folder / TEACHER).with_suffix(".partial")
            save_file(whole, partial)
            partial.replace(folder / TEACHER)


def _copy(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.float32, copy=True)
