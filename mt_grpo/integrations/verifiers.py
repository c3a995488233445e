"""Environments of verifiers (0.3.1 and 0.4) by name; `pip install mt-grpo[verifiers]` or `mt-grpo[verifiers-v1]`."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from mt_grpo.envs import Outcome
from mt_grpo.errors import ConfigError
from mt_grpo.option_rules import VERIFIERS

EXAMPLE, SPLIT = "example", "split"
"""Columns of a row: which example of the environment's own data it is, and of which of `SPLITS`."""
SPLITS = ("train", "eval")
REWARD = "reward"
"""Name of an environment's reward where its parts do not add up to it."""

Row = dict[str, Any]


class Client(Protocol):
    """Where a conversation takes place; see `AgentClient`."""

    base_url: str
    api_key: str

    def openai(self, **options: Any) -> Any:
        """An `openai.AsyncOpenAI`."""

    def add_session(self, name: str) -> None:
        """Gives the conversation a further name."""


class Environment(Protocol):
    """An environment of either generation."""

    def rows(self, split: str) -> list[Row]:
        """Its examples as rows: `prompt`, `example`, `split` and, where they have one, `answer`."""

    async def play(self, row: Row, client: Client, relay_key: str) -> Outcome:
        """
        Holds the conversation of a row in its own loop, and scores it with its own rewards.

        Args:
            row (`dict`): The row.
            client (`Client`): Where the conversation takes place.
            relay_key (`str`): A key for every conversation, by the names that `client.add_session` gives.
        """


def load_environment(name: str, config: dict[str, Any]) -> Environment:
    """
    An environment of the verifiers that is installed.

    Args:
        name (`str`): As verifiers' own commands take it.
        config (`dict`): With 0.3.1, arguments of its `load_environment`. With 0.4, verifiers' configuration of the
            environment, with `select` (which tasks are trained) and `eval_select` (which are evaluated) beside it.

    Raises:
        ConfigError: If verifiers is not installed, or cannot load the environment.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            f"`env: {VERIFIERS}{name}` needs verifiers, which is not installed: `pip install mt-grpo[verifiers]` for "
            "environments with `load_environment` (0.3.1), `pip install mt-grpo[verifiers-v1]` for tasksets (0.4)."
        )
    with _loading(name), kept_signals():
        if importlib.util.find_spec("verifiers.legacy") is not None:
            from mt_grpo.integrations.verifiers_legacy import LegacyEnvironment

            return LegacyEnvironment(name, config)
        from mt_grpo.integrations.verifiers_v1 import TasksetEnvironment

        return TasksetEnvironment(name, config)


@contextlib.contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever the environment's code raises
        raise ConfigError(
            f"verifiers cannot load the environment {name!r} ({type(error).__name__}: {error}): install its package, "
            "and look at `env_config`."
        ) from error


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Keeps what a run does when it is interrupted: environments of 0.3.1 put in their own, which ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def example_of(row: Row) -> tuple[str, int]:
    """
    The split and the number of a row's example.

    Raises:
        ValueError: If the row names none.
    """
    split, number = row.get(SPLIT, SPLITS[0]), row.get(EXAMPLE)
    if split not in SPLITS or isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(
            f"The row has {EXAMPLE}={number!r} and {SPLIT}={split!r}: `{EXAMPLE}` is the number of an example of the "
            f"environment's own data, and `{SPLIT}` is one of {', '.join(SPLITS)}."
        )
    return split, number
