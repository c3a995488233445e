"""Environments of verifiers 0.3.1: `load_environment`, rubrics, `run_rollout`."""

from __future__ import annotations

import functools
import inspect
import math
from contextvars import ContextVar
from typing import Any

import verifiers as vf
from httpx import HTTPError
from openai import OpenAIError
from verifiers.legacy.clients import OpenAIChatCompletionsClient

from mt_grpo.envs import Outcome
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.verifiers import EXAMPLE, REWARD, SPLIT, Client, Row, example_of
from mt_grpo.trajectory import StopReason

STOPPED = {
    "max_turns_reached": StopReason.MAX_STEPS,
    "timeout_reached": StopReason.TIMEOUT,
    "max_total_completion_tokens_reached": StopReason.TOKEN_BUDGET,
}
"""Names of stop conditions that are limits; the others are ends."""


_UNREACHED: ContextVar[list[str]] = ContextVar("unreached")
"""Reward functions of the running conversation that could not reach what they ask."""


class LegacyEnvironment:
    """
    An environment by its name.

    Args:
        name (`str`), config (`dict`): Of `load_environment`.

    Raises:
        ConfigError: If its rubric compares the conversations of a group.
    """

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.env = vf.load_environment(name, **config)
        if self.env.requires_group_rollouts:
            raise ConfigError(
                f"The rubric of {name!r} scores conversations of a group together, and here each is scored by itself: "
                "choose an environment whose reward functions take one `completion`."
            )
        _watch(self.env.rubric)

    @property
    def _has_one_turn(self) -> bool:
        """Whether the first turn is meant to be the last, and is no limit."""
        return isinstance(self.env, vf.MultiTurnEnv) and self.env.max_turns == 1

    def rows(self, split: str) -> list[Row]:
        """The environment's own rows, as it prepares them."""
        return [
            {"prompt": item["prompt"], "answer": str(item.get("answer") or ""), EXAMPLE: index, SPLIT: split}
            for index, item in enumerate(self._data(split))
        ]

    def _data(self, split: str) -> Any:
        return self.env.get_dataset() if split == "train" else self.env.get_eval_dataset()

    async def play(self, row: Row, client: Client, relay_key: str) -> Outcome:
        """
        One rollout of verifiers', scored by its rubric.

        Raises:
            RuntimeError: If verifiers recorded an error, or a reward function could not reach what it asks.
        """
        unreached: list[str] = []
        _UNREACHED.set(unreached)
        split, number = example_of(row)
        output = await self.env.run_rollout(
            self._data(split)[number], OpenAIChatCompletionsClient(client.openai()), "policy", {}
        )
        if output["error"] is not None:
            raise RuntimeError(f"verifiers: {_described(output['error'])}")
        if unreached:
            raise RuntimeError(f"verifiers: {unreached[0]}")
        rewards, metrics = self._rewards(output)
        condition = output["stop_condition"]
        reason = None if self._has_one_turn and condition == "max_turns_reached" else STOPPED.get(condition)
        return Outcome(rewards, reason, info={"stop_condition": condition, "metrics": metrics})

    def _rewards(self, output: Any) -> tuple[dict[str, float], dict[str, float]]:
        """Each function's part of the reward, and what each returned."""
        rubric, metrics = self.env.rubric, dict(output["metrics"] or {})
        weights = dict(zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True))
        rewards = {name: weights[name] * value for name, value in metrics.items() if weights.get(name)}
        if not math.isclose(sum(rewards.values()), output["reward"], rel_tol=1e-6, abs_tol=1e-9):
            rewards = {REWARD: output["reward"]}  # a rubric that scores in its own way
        return rewards, metrics


def _watch(rubric: Any) -> None:
    """verifiers scores a function that raises with 0: those that cannot reach a judge are taken note of before."""
    if isinstance(rubric, vf.RubricGroup):
        for one in rubric.rubrics:
            _watch(one)
        return
    rubric.funcs[:] = [_watched(function) for function in rubric.funcs]


def _watched(function: Any) -> Any:
    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
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


def _described(error: Any) -> str:
    return error["error_chain_repr"] if isinstance(error, dict) and "error_chain_repr" in error else str(error)
