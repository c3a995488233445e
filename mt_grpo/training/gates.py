"""
Which turns are distilled (`teacher: {gate: ...}`): those after which a teacher's word tells failures from successes,
or those that a function chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError
from mt_grpo.imports import import_object
from mt_grpo.rewards import RewardFunc
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.ranks import everywhere
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Trajectory

EXPLAINED = "explained"
"""The gate that opens where log-ratios explain outcomes."""

Gate: TypeAlias = str | Callable[[Trajectory], Sequence[bool]]

_ROUNDING = 1e-9


def load_gate(args: MTGRPOConfig, outcomes: Sequence[RewardFunc]) -> Gate | None:
    """
    `EXPLAINED`, or a function that says for each turn of a trajectory whether it is distilled; `None` without a gate.
    """
    path = args.teacher.get("gate") if isinstance(args.teacher, dict) else None
    if path is None:
        return None
    if path != EXPLAINED:
        function: Gate = import_object(path, what="gate")
        if not callable(function):
            raise ConfigError(f"`teacher: {{gate: {path}}}` is no function of a trajectory: it is {function!r:.80}.")
        return function
    if not outcomes:
        raise ConfigError(
            "`teacher: {gate: explained}` asks which turns tell failures from successes, and no outcome reward says "
            "which those are: name one in `outcome_reward_funcs`, with weight 0 if it is not to be learnt from."
        )
    groups = args.generation_batch_size // args.num_generations
    if groups < 3:
        raise ConfigError(
            f"`teacher: {{gate: explained}}` judges each group by two others or more, and a batch has {groups} of "
            f"{args.num_generations} (`generation_batch_size: {args.generation_batch_size}`): raise "
            "`per_device_train_batch_size` or `steps_per_generation`."
        )
    return EXPLAINED


def explained(ratios: Tensor, outcomes: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """
    The squared deviations of outcomes from their group's mean, `(1 + B / G, K)`, that a line through the log-ratios
    leaves, and all of them. Each group's line is that of the others. The first row is of all groups; each further one
    leaves out a group, whose own words have no part in it.

    Args:
        ratios (`Tensor`): `(B, K)`; NaN where a turn was not read.
        outcomes (`Tensor`): `(B,)`; NaN where there is none.
        group_size (`int`): Rows of a group.
    """
    known = ~(ratios + outcomes[:, None]).isnan()
    count = known.view(-1, group_size, known.size(1)).sum(dim=1, keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        values = torch.where(known, values, 0.0).view(-1, group_size, known.size(1))
        away = values - values.sum(dim=1, keepdim=True) / count
        return torch.where(
            known.view_as(away) & (away.abs() > _ROUNDING * values.abs().amax(dim=1, keepdim=True)), away, 0.0
        )

    x, y = centred(ratios), centred(outcomes[:, None].expand_as(ratios))
    xx, xy, yy = ((one * other).sum(dim=1) for one, other in ((x, x), (x, y), (y, y)))
    own = torch.eye(len(xx) + 1, len(xx), dtype=xx.dtype, device=xx.device).roll(1, dims=0)[:, :, None]

    def of_others(sums: Tensor) -> Tensor:
        return sums.sum(dim=0) - (own * sums).sum(dim=1, keepdim=True) - sums

    spread = of_others(xx)
    slope = torch.where(spread > _ROUNDING * xx.sum(dim=0), of_others(xy) / spread, 0.0)
    left = yy - 2 * slope * xy + slope.square() * xx
    return ((1 - own) * left).sum(dim=1), ((1 - own) * yy).sum(dim=1)


def open_turns(trainer: GRPOTrainer, batch: RolloutBatch) -> Tensor | None:
    """
    The turns of this process that are distilled, `(B, K)`; `None` where all are. A collective call.
    """
    gate, mask = trainer.gate, batch.rewards.turn_mask
    if gate is None or batch.mode == "eval":
        return None
    metrics = trainer._metrics["train"]
    of_all = gather_object([each.teacher_log_ratios for each in batch.trajectories])
    ratios = torch.full(mask.shape, torch.nan, dtype=torch.double, device=mask.device)
    for row, values in enumerate(of_all):
        ratios[row, : len(values)] = torch.tensor([torch.nan if each is None else each for each in values])
    if gate == EXPLAINED:
        streams, size = batch.rewards.outcome_streams, batch.rewards.group_size
        assert streams is not None  # see `load_gate`
        left, whole = explained(ratios, streams[0].double(), size)
        opened = (left[1:] < whole[1:]).repeat_interleave(size, dim=0)
        for turn in whole[0].nonzero().flatten().tolist():
            metrics[f"turn_{turn + 1}/explained"].append(1 - (left[0, turn] / whole[0, turn]).item())
        if whole[0].any():
            metrics["teacher/explained"].append(1 - (left[0].sum() / whole[0].sum()).item())
    else:
        chosen = gather_object(everywhere(lambda: [_chosen(gate, each) for each in batch.trajectories]))
        opened = torch.zeros_like(mask)
        for row, values in enumerate(chosen):
            opened[row, : len(values)] = torch.tensor(values, dtype=torch.bool)
    read = ~ratios.isnan()
    if read.any():
        metrics["teacher/gated"].append((read & ~opened).sum().item() / read.sum().item())
    first = trainer.accelerator.process_index * len(batch.rows)
    return opened[first : first + len(batch.rows)]


def _chosen(gate: Callable[[Trajectory], Sequence[bool]], trajectory: Trajectory) -> list[bool]:
    if trajectory.failed:
        return []
    chosen = list(gate(trajectory))
    if len(chosen) != len(trajectory.turns) or not all(isinstance(each, bool) for each in chosen):
        raise ConfigError(
            f"The gate of `teacher` gave {chosen!r:.80} for a conversation of {len(trajectory.turns)} turns: return a "
            "bool for each turn."
        )
    return chosen
