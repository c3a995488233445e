"""Rules over the options of credit, which need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose

SIGNALLESS = ("keep", "resample", "leave_out")
"""What `groups_without_signal` can say, see `mt_grpo.training.signal`."""


def check_signalless(options: Mapping[str, Any]) -> None:
    """
    Whether `groups_without_signal` is known, and goes together with the other options.

    Raises:
        ConfigError: If not.
    """
    choice = options["groups_without_signal"]
    choose("groups_without_signal", choice, SIGNALLESS)
    for name in ("entropy_coef", "use_adaptive_entropy"):
        if choice != "keep" and options[name]:
            raise ConfigError(
                f"`groups_without_signal: {choice}` takes groups out of the loss, and `{name}: {options[name]}` "
                "learns from all that is sampled: leave one of them out."
            )
