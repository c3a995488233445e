"""What is otherwise for a while: entries of dictionaries, context variables, and the mode of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


@contextmanager
def replaced(values: dict[str, Any], name: str, value: object) -> Iterator[None]:
    """A context in which a dictionary, such as the attributes of a module, has another value under a name."""
    missing = name not in values
    usual = values.get(name)
    values[name] = value
    try:
        yield
    finally:
        if missing:
            del values[name]
        else:
            values[name] = usual


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A context in which a variable has a value; it decorates functions too."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in evaluation mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
