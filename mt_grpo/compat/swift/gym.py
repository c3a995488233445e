"""The scheduler that plays environments as ms-swift's."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from mt_grpo.compat.swift.engine import CONVERSATION
from mt_grpo.compat.swift.registry import envs
from mt_grpo.compat.swift.scheduler import MultiTurnScheduler
from mt_grpo.compat.swift.types import ChatCompletionResponseChoice, Env, RolloutInferRequest
from mt_grpo.envs.threads import call
from mt_grpo.imports import did_you_mean


class GymScheduler(MultiTurnScheduler):
    """
    Plays the environment that a row's `env_config` names in `envs`. The rewards of its steps are those of the turns;
    their sum is the reward `total_reward` of the conversation, which the reward `env_reward` reads.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._playing: dict[str, tuple[Env, str]] = {}

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Makes and resets the environment; its words are the first messages."""
        for request in requests:
            config = request.data_dict.get("env_config") or {}
            name = config.get("name")
            if name not in envs:
                raise KeyError(
                    f"The row's `env_config` names the environment {name!r}{did_you_mean(str(name), envs)}: name one "
                    f"of {', '.join(envs) or '`envs`, which is empty'}."
                )
            env = await call(envs[name], config, what=name)
            conversation = CONVERSATION.get()
            conversation.closes += [partial(self._playing.pop, request.uuid, None), env.close]
            conversation.rewards["total_reward"] = 0.0
            observation, _, system = await call(env.reset, copy.deepcopy(request), what=f"{name}.reset")
            self._playing[request.uuid] = env, observation
            request.messages = [{"role": "system", "content": system}] if system else []
            request.messages.append({"role": "user", "content": observation})

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Takes a step of the environment."""
        env, _ = self._playing[infer_request.uuid]
        what = f"{type(env).__name__}.step"
        observation, reward, done, info = await call(env.step, copy.deepcopy(infer_request.messages), what=what)
        self._playing[infer_request.uuid] = env, observation
        conversation = CONVERSATION.get()
        conversation.rewards["total_reward"] += float(reward)
        steps = [one.turn.reward for one in conversation.sampled[:-1]]
        infos = {"total_reward": conversation.rewards["total_reward"], "step_rewards": [*steps, float(reward)], **info}
        return {"done": done, "reward": reward, "rollout_infos": infos}

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The observation, as the user's message."""
        _, observation = self._playing[infer_request.uuid]
        infer_request.messages.append({"role": "user", "content": observation})
        return {"infer_request": infer_request}
