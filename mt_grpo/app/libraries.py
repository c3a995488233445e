"""Turns the refusals of libraries into one sentence. Errors of this project keep their traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mt_grpo.errors import ConfigError

LIBRARIES = {"accelerate", "datasets", "huggingface_hub", "peft", "safetensors", "tokenizers", "transformers", "trl"}
"""Packages that check the user's input; the user can mend their errors."""


@contextlib.contextmanager
def libraries_may_refuse(what: str) -> Iterator[None]:
    """
    Turns the errors that libraries raise about a user's input into `ConfigError`.

    Args:
        what (`str`): What was not possible, as the beginning of the sentence.

    Raises:
        ConfigError: If a library raised `ValueError`, `OSError`, `ImportError` or `NotImplementedError`.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        if _raised_in(error) not in LIBRARIES:
            raise
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from error


def _raised_in(error: BaseException) -> str:
    """The package whose code raised the error."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
