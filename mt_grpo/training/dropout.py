"""Turns dropout off for sampling, and for the log-probs that the loss compares with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def disable_dropout(model: nn.Module) -> None:
    """
    Sets dropout rates to 0 that layers hold as numbers and apply themselves, as attention does. TRL's
    `disable_dropout` does the same for dropout that is a layer of its own, an adapter's included.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def without_dropout(model: nn.Module, wanted: bool) -> Iterator[None]:
    """A context in evaluation mode, if `wanted`."""
    training = model.training
    if wanted:
        model.eval()
    try:
        yield
    finally:
        if wanted:
            model.train(training)
