"""
Environments of verifiers by name: their own loops talk to the policy over HTTP, and their rewards are the
conversation's. `pip install mt-grpo[verifiers]` is 0.3.1 (`verifiers_legacy`), `mt-grpo[verifiers-v1]` is 0.4
(`verifiers_v1`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from mt_grpo.data import with_contents_of_one_kind
from mt_grpo.envs.env import Outcome
from mt_grpo.envs.protocols import CallProtocol
from mt_grpo.envs.registry import environment
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.openai_api.agent import AgentClient, AgentSource, protocol_of
from mt_grpo.options.values import VERIFIERS, parse_env_config

if TYPE_CHECKING:
    from mt_grpo.integrations.verifiers_legacy import LegacyEnvironment
    from mt_grpo.integrations.verifiers_v1 import TasksetEnvironment

EXAMPLE, SPLIT = "example", "split"
"""Columns of a row: the number of an example in the environment's own data, and its split, one of `SPLITS`."""
SPLITS = ("train", "eval")


class VerifiersSource(AgentSource):
    """Makes the environments of conversations from one of verifiers', which brings its own rows."""

    def __init__(self, name: str, config: dict[str, Any] | None = None, protocol: CallProtocol | None = None) -> None:
        self.environment = _load(name, config or {})
        super().__init__(self._play, protocol)

    async def _play(self, row: dict[str, Any], client: AgentClient) -> Outcome:
        split, number = example_of(row)
        return await self.environment.play(split, number, client, self.endpoint.relay_key)

    def rows(self, split: str = "train") -> Dataset:
        """The environment's own data, `train` or `eval`: `prompt`, `answer`, `example` and `split`."""
        rows = with_contents_of_one_kind(self.environment.rows(split))
        return Dataset.from_list([{**row, EXAMPLE: number, SPLIT: split} for number, row in enumerate(rows)])


@environment("verifiers")
def verifiers_of_options(options: Mapping[str, Any]) -> VerifiersSource:
    """The environment of a run's option `env: verifiers:NAME`."""
    config = parse_env_config(options["env_config"] or {})
    return VerifiersSource(options["env"].removeprefix(VERIFIERS).strip(), config, protocol_of(options))


def example_of(row: dict[str, Any]) -> tuple[str, int]:
    """The split and the number of a row's example."""
    split, number = row.get(SPLIT, SPLITS[0]), row.get(EXAMPLE)
    if split not in SPLITS or isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(
            f"The row has {EXAMPLE}={number!r} and {SPLIT}={split!r}: `{EXAMPLE}` is the number of an example of the "
            f"environment's own data, and `{SPLIT}` is one of {', '.join(SPLITS)}."
        )
    return split, number


def _load(name: str, config: dict[str, Any]) -> LegacyEnvironment | TasksetEnvironment:
    """The environment, by the version of verifiers that is installed."""
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            f"`env: {VERIFIERS}{name}` needs verifiers, which is not installed: `pip install mt-grpo[verifiers]` for "
            "environments with `load_environment` (0.3.1), `pip install mt-grpo[verifiers-v1]` for tasksets (0.4)."
        )
    try:
        with kept_signals():
            if importlib.util.find_spec("verifiers.legacy") is not None:
                from mt_grpo.integrations.verifiers_legacy import LegacyEnvironment

                return LegacyEnvironment(name, config)
            from mt_grpo.integrations.verifiers_v1 import TasksetEnvironment

            return TasksetEnvironment(name, config)
    except ConfigError:
        raise
    except Exception as error:  # whatever the environment's code raises
        raise ConfigError(
            f"verifiers cannot load the environment {name!r} ({type(error).__name__}: {error}): install its package, "
            "and look at `env_config`."
        ) from error


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM: environments of 0.3.1 set their own, which end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
