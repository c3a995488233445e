"""Environments of verifiers 0.3.1: `load_environment`, rubrics, `run_rollout`. It imports that version at once."""

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
from mt_grpo.integrations.openai_api import AgentClient
from mt_grpo.trajectory import StopReason

REWARD = "reward"
"""Name of an environment's reward if its parts do not add up to it."""
STOPPED = {
    "max_turns_reached": StopReason.MAX_STEPS,
    "timeout_reached": StopReason.TIMEOUT,
    "max_total_completion_tokens_reached": StopReason.TOKEN_BUDGET,
}
"""Stop conditions that are limits. All others are the regular end."""
_UNREACHED: ContextVar[list[str]] = ContextVar("unreached")
"""Errors of reward functions of the running conversation that could not reach a judge."""


class LegacyEnvironment:
    """An environment by its name."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.env = vf.load_environment(name, **config)
        if self.env.requires_group_rollouts:
            raise ConfigError(
                f"The rubric of {name!r} scores conversations of a group together, and here each is scored by itself: "
                "choose an environment whose reward functions take one `completion`."
            )
        _watch(self.env.rubric)

    def rows(self, split: str) -> list[dict[str, Any]]:
        """The examples of `train` or `eval`, each with `prompt` and `answer`."""
        return [{"prompt": item["prompt"], "answer": str(item.get("answer") or "")} for item in self._data(split)]

    def _data(self, split: str) -> Any:
        return self.env.get_dataset() if split == "train" else self.env.get_eval_dataset()

    async def play(self, split: str, number: int, client: AgentClient, relay_key: str) -> Outcome:
        """Runs the conversation of an example in verifiers' loop, and scores it with its rubric."""
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

    def _rewards(self, output: Any) -> tuple[dict[str, float], dict[str, float]]:
        """The weighted reward of each function, and what each function returned."""
        rubric, metrics = self.env.rubric, dict(output["metrics"] or {})
        weights = dict(zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True))
        rewards = {name: weights[name] * value for name, value in metrics.items() if weights.get(name)}
        if not math.isclose(sum(rewards.values()), output["reward"], rel_tol=1e-6, abs_tol=1e-9):
            rewards = {REWARD: output["reward"]}  # the rubric overrides how rewards are combined
        return rewards, metrics


def _watch(rubric: Any) -> None:
    """Records errors of reward functions that cannot reach a judge: verifiers would score them 0."""
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
