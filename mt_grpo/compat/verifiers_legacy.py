"""Environments of verifiers 0.3.1: `load_environment`, rubrics, `run_rollout`."""

from __future__ import annotations

import math
from typing import Any

import verifiers as vf
from verifiers.legacy.clients import OpenAIChatCompletionsClient

from mt_grpo.compat.verifiers import EXAMPLE, REWARD, SPLIT, Client, Row, example_of
from mt_grpo.envs import Outcome
from mt_grpo.errors import ConfigError
from mt_grpo.trajectory import StopReason

STOPPED = {
    "max_turns_reached": StopReason.MAX_STEPS,
    "timeout_reached": StopReason.TIMEOUT,
    "max_total_completion_tokens_reached": StopReason.TOKEN_BUDGET,
}
"""Names of stop conditions that are limits; the others are ends."""


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
            RuntimeError: If verifiers recorded an error.
        """
        split, number = example_of(row)
        output = await self.env.run_rollout(
            self._data(split)[number], OpenAIChatCompletionsClient(client.openai()), "policy", {}
        )
        if output["error"] is not None:
            raise RuntimeError(f"verifiers: {_described(output['error'])}")
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


def _described(error: Any) -> str:
    return error["error_chain_repr"] if isinstance(error, dict) and "error_chain_repr" in error else str(error)
