"""
Environments of verifiers by name: their own loops talk to the policy over HTTP, and their rewards are the
conversation's. `pip install mt-grpo[verifiers]` is 0.3.1, `mt-grpo[verifiers-v1]` is 0.4 (`verifiers_v1`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from httpx import HTTPError

from mt_grpo.data import with_contents_of_one_kind
from mt_grpo.envs.env import Outcome
from mt_grpo.envs.protocols import CallProtocol
from mt_grpo.envs.source import environment
from mt_grpo.errors import ConfigError, users_code
from mt_grpo.integrations.openai_api import AgentClient, AgentSource, protocol_of
from mt_grpo.options.table import Values
from mt_grpo.options.values import VERIFIERS, parse_env_config
from mt_grpo.trajectory import Row, StopReason

if TYPE_CHECKING:
    import verifiers as vf

    from mt_grpo.integrations.verifiers_v1 import TasksetEnvironment

EXAMPLE, SPLIT = "example", "split"
"""Columns of a row: the number of an example in the environment's own data, and its split, one of `SPLITS`."""
SPLITS = ("train", "eval")


class VerifiersSource(AgentSource):
    """Makes the environments of conversations from one of verifiers', which brings its own rows."""

    def __init__(self, name: str, config: dict[str, Any] | None = None, protocol: CallProtocol | None = None) -> None:
        self.environment = _load(name, config or {})
        super().__init__(self._play, protocol)

    async def _play(self, row: Mapping[str, object], client: AgentClient) -> Outcome:
        split, number = _example_of(row)
        return await self.environment.play(split, number, client, self.endpoint.relay_key)

    def rows(self, split: str = "train") -> Dataset:
        """The environment's own data, `train` or `eval`: `prompt`, `answer`, `example` and `split`."""
        rows = with_contents_of_one_kind(self.environment.rows(split))
        return Dataset.from_list([{**row, EXAMPLE: number, SPLIT: split} for number, row in enumerate(rows)])


@environment("verifiers")
def _verifiers_of_options(options: Values) -> VerifiersSource:
    """The environment of a run's option `env: verifiers:NAME`."""
    config = parse_env_config(options["env_config"] or {})
    return VerifiersSource(options["env"].removeprefix(VERIFIERS).strip(), config, protocol_of(options))


def _example_of(row: Mapping[str, object]) -> tuple[str, int]:
    """The split and the number of a row's example."""
    split, number = row.get(SPLIT, SPLITS[0]), row.get(EXAMPLE)
    if split not in SPLITS or isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(
            f"The row has {EXAMPLE}={number!r} and {SPLIT}={split!r}: `{EXAMPLE}` is the number of an example of the "
            f"environment's own data, and `{SPLIT}` is one of {', '.join(SPLITS)}."
        )
    return split, number


def _load(name: str, config: dict[str, Any]) -> _LegacyEnvironment | TasksetEnvironment:
    """The environment, by the version of verifiers that is installed."""
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            f"`env: {VERIFIERS}{name}` needs verifiers, which is not installed: `pip install mt-grpo[verifiers]` for "
            "environments with `load_environment` (0.3.1), `pip install mt-grpo[verifiers-v1]` for tasksets (0.4)."
        )
    mend = ": install its package, and look at `env_config`"
    with users_code(f"verifiers cannot load the environment {name!r}", mend=mend), _kept_signals():
        if importlib.util.find_spec("verifiers.legacy") is not None:
            return _LegacyEnvironment(name, config)
        from mt_grpo.integrations.verifiers_v1 import TasksetEnvironment

        return TasksetEnvironment(name, config)


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
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


STOPPED = {
    "max_turns_reached": StopReason.MAX_STEPS,
    "timeout_reached": StopReason.TIMEOUT,
    "max_total_completion_tokens_reached": StopReason.TOKEN_BUDGET,
}
"""Stop conditions that are limits. All others are the regular end."""
_UNREACHED: ContextVar[list[str]] = ContextVar("unreached")
"""Errors of reward functions of the running conversation that could not reach a judge."""


class _LegacyEnvironment:
    """An environment of verifiers 0.3.1 by its name: `load_environment`, rubrics, `run_rollout`."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        import verifiers as vf

        self.env = vf.load_environment(name, **config)
        if self.env.requires_group_rollouts:
            raise ConfigError(
                f"The rubric of {name!r} scores conversations of a group together, and here each is scored by itself: "
                "choose an environment whose reward functions take one `completion`."
            )
        _watch(self.env.rubric)

    def rows(self, split: str) -> list[Row]:
        """The examples of `train` or `eval`, each with `prompt` and `answer`."""
        return [{"prompt": item["prompt"], "answer": str(item.get("answer") or "")} for item in self._data(split)]

    def _data(self, split: str) -> Any:
        return self.env.get_dataset() if split == "train" else self.env.get_eval_dataset()

    async def play(self, split: str, number: int, client: AgentClient, relay_key: str) -> Outcome:
        """Runs the conversation of an example in verifiers' loop, and scores it with its rubric."""
        import verifiers as vf
        from verifiers.legacy.clients import OpenAIChatCompletionsClient

        unreached: list[str] = []
        _UNREACHED.set(unreached)
        output = await self.env.run_rollout(
            self._data(split)[number], OpenAIChatCompletionsClient(client.openai()), "policy", {}
        )
        if output["error"] is not None:
            error = output["error"]
            described = error.get("error_chain_repr", error) if isinstance(error, dict) else error
            raise RuntimeError(f"verifiers: {described}")
        if unreached:
            raise RuntimeError(f"verifiers: {unreached[0]}")
        rewards, metrics = self._rewards(output)
        condition = output["stop_condition"]
        single = isinstance(self.env, vf.MultiTurnEnv) and self.env.max_turns == 1  # its only turn is no limit
        reason = None if single and condition == "max_turns_reached" else STOPPED.get(condition)
        return Outcome(rewards, reason, info={"stop_condition": condition, "metrics": metrics})

    def _rewards(self, output: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
        """The weighted reward of each function, and what each function returned."""
        rubric, metrics = self.env.rubric, dict(output["metrics"] or {})
        weights = dict(zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True))
        rewards = {name: weights[name] * value for name, value in metrics.items() if weights.get(name)}
        if not math.isclose(sum(rewards.values()), output["reward"], rel_tol=1e-6, abs_tol=1e-9):
            rewards = {"reward": output["reward"]}  # the rubric overrides how rewards are combined
        return rewards, metrics


def _watch(rubric: vf.Rubric) -> None:
    """Records errors of reward functions that cannot reach a judge: verifiers would score them 0."""
    import verifiers as vf

    if isinstance(rubric, vf.RubricGroup):
        for one in rubric.rubrics:
            _watch(one)
        return
    rubric.funcs[:] = [_watched(function) for function in rubric.funcs]


def _watched(function: Callable[..., object]) -> Callable[..., Awaitable[object]]:
    from openai import OpenAIError

    @functools.wraps(function)
    async def watched(*args: object, **kwargs: object) -> object:
        try:
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            causes: BaseException | None = error
            while causes is not None:
                if isinstance(causes, (OpenAIError, HTTPError, OSError)):
                    _UNREACHED.get().append(f"the reward function {function.__name__} failed: {error}")
                    break
                causes = causes.__cause__ or causes.__context__
            raise

    return watched
