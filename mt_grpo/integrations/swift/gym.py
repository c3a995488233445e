"""The scheduler that plays environments as ms-swift's."""

from __future__ import annotations

import copy
from typing import Any

from mt_grpo.envs.threads import call
from mt_grpo.imports import did_you_mean
from mt_grpo.integrations.swift.registry import envs
from mt_grpo.integrations.swift.scheduler import MultiTurnScheduler
from mt_grpo.integrations.swift.types import ChatCompletionResponseChoice, RolloutInferRequest


class GymScheduler(MultiTurnScheduler):
    """
    Plays the environment that a row's `env_config` names in `envs`. The rewards of its steps are those of the turns;
    their sum is the reward `total_reward` of the conversation, which the reward `env_reward` reads. Its private names
    are ms-swift's, whose subclasses write to them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # of each conversation, by `infer_request.uuid`
        self._envs: dict[str, Any] = {}
        self._total_rewards: dict[str, float] = {}
        self._step_rewards: dict[str, list[float]] = {}
        self._pending_obs: dict[str, str | None] = {}

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Makes and resets the environment; its words are the first messages."""
        for request in requests:
            config = request.data_dict.get("env_config") or {}
            env = await call(self._create_env, config, what=str(config.get("name")))
            self._begin(request.uuid, env)
            what = f"{type(env).__name__}.reset"
            observation, _, system = await call(env.reset, copy.deepcopy(request), what=what)
            request.messages = opening(system, observation)

    def _begin(self, uuid: str, env: Any) -> None:
        self._envs[uuid], self._pending_obs[uuid] = env, None
        self._total_rewards[uuid], self._step_rewards[uuid] = 0.0, []

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        name = env_config.get("name")
        if name not in envs:
            raise KeyError(
                f"The row's `env_config` names the environment {name!r}{did_you_mean(str(name), envs)}: name one "
                f"of {', '.join(envs) or '`envs`, which is empty'}."
            )
        return envs[name](env_config)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Takes a step of the environment."""
        env = self._envs[infer_request.uuid]
        what = f"{type(env).__name__}.step"
        observation, reward, done, info = await call(env.step, copy.deepcopy(infer_request.messages), what=what)
        return self._stepped(infer_request.uuid, observation, reward, done, info)

    def _stepped(
        self, uuid: str, observation: str, reward: float, done: bool, info: dict[str, Any] | None
    ) -> dict[str, Any]:
        self._total_rewards[uuid] += float(reward)
        self._step_rewards[uuid].append(float(reward))
        self._pending_obs[uuid] = None if done else observation
        infos = {"total_reward": self._total_rewards[uuid], "step_rewards": list(self._step_rewards[uuid])}
        return {"done": done, "rollout_infos": {**infos, "gym_done": done, **(info or {})}}

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The observation, as the user's message."""
        observation = self._pending_obs.get(infer_request.uuid)
        if observation is not None:
            infer_request.messages.append({"role": "user", "content": observation})
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, uuid: str) -> None:
        """Closes the environment."""
        await self._close_and_remove(uuid)

    async def _close_and_remove(self, uuid: str) -> None:
        env = self._envs.pop(uuid, None)
        for kept in (self._total_rewards, self._step_rewards, self._pending_obs):
            kept.pop(uuid, None)
        if env is not None:
            await call(env.close, what=f"{type(env).__name__}.close")


def opening(system: str | None, observation: str) -> list[dict[str, Any]]:
    """The first messages: a system message, where there is one, and what is observed."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": observation}]
