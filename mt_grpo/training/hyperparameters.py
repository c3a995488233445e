"""Options of the optimizer and of its schedule in a run that is resumed: those that are given count."""

from __future__ import annotations

import inspect
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import LambdaLR

RATES = ("lr", "initial_lr")
OPTIONS = {
    "initial_lr": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
}
"""The options of a group's entries."""


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """
    The options of an optimizer's groups: what its class takes, and the rates. Groups of some optimizers also hold what
    these count, such as the steps of those without a schedule.
    """
    plain = optimizer
    while hasattr(plain, "optimizer"):  # accelerate and DeepSpeed wrap it
        plain = plain.optimizer
    names = {*RATES, *OPTIONS, *inspect.signature(type(plain)).parameters} - {"params"}
    return [{name: value for name, value in group.items() if name in names} for group in optimizer.param_groups]


def take_given(optimizer: Any, scheduler: Any, given: list[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """
    Gives an optimizer and its schedule back what a checkpoint replaced. The step that the schedule is
    at, and what the optimizer remembers of gradients, stay the checkpoint's. A schedule that is no function of the
    step keeps the rate too.
    """
    if isinstance(scheduler, AcceleratedScheduler):  # DeepSpeed's
        scheduler = scheduler.scheduler
    changed: dict[str, tuple[Any, Any]] = {}
    for group, values in zip(optimizer.param_groups, given, strict=True):
        for name, options in OPTIONS.items():
            if name in group and name in values:
                before, here = (each if len(options) > 1 else (each,) for each in (group[name], values[name]))
                pairs = zip(options, before, here, strict=True)
                changed |= {option: (old, new) for option, old, new in pairs if old != new}
    by_step = isinstance(scheduler, LambdaLR)
    for group, values in zip(optimizer.param_groups, given, strict=True):
        group.update({name: value for name, value in values.items() if by_step or name not in RATES})
    if isinstance(scheduler, LambdaLR):
        bases = [values["initial_lr"] for values in given]
        rates = [base * of(scheduler.last_epoch) for base, of in zip(bases, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.load_state_dict(scheduler.state_dict() | {"base_lrs": bases, "_last_lr": rates})
    return changed
