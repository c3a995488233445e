"""Dropout has no place in sampling, nor in what log-probs are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def disable_dropout(model: nn.Module) -> None:
    """
    Sets the dropout rates that layers hold as numbers and apply themselves, as attention does, to 0; TRL's
    `disable_dropout` does so for dropout that is a layer of its own, an adapter's included.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def without_dropout(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Evaluation mode, where it is `wanted`, for as long as the context lasts."""
    training = model.training
    if wanted:
        model.eval()
    try:
        yield
    finally:
        if wanted:
            model.train(training)
