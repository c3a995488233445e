"""The scheduler that plays environments behind OpenEnv's servers, as ms-swift's."""

from __future__ import annotations

import json
from typing import Any

from mt_grpo.envs.threads import call
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.swift.gym import GymScheduler, opening
from mt_grpo.integrations.swift.types import ChatCompletionResponseChoice, RolloutInferRequest


class OpenEnvWrapper:
    """
    A connection to an OpenEnv server. It is opened by the first call, and its methods block.

    Args:
        env_config (`dict`): `base_url` (`http://localhost:8000` without), and `reset_kwargs` for `reset`.
    """

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.base_url = env_config.get("base_url", "http://localhost:8000")
        self.reset_kwargs = env_config.get("reset_kwargs") or {}
        self._client: Any = None

    def _opened(self) -> Any:
        if self._client is None:
            try:
                from openenv.core import GenericEnvClient
            except ImportError as error:
                raise ConfigError(f"OpenEnv is not installed ({error}): `pip install mt-grpo[openenv]`.") from error
            client = GenericEnvClient(base_url=self.base_url).sync()
            client.__enter__()
            self._client = client
        return self._client

    def reset(self) -> tuple[Any, Any]:
        """The first observation as the server gives it, and `None`."""
        return self._opened().reset(**self.reset_kwargs).observation, None

    def step(self, action: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        """What follows an action: observation, reward, whether it is over, and `None`."""
        result = self._opened().step(action)
        return result.observation, float(result.reward or 0.0), bool(result.done), None

    def close(self) -> None:
        """Ends the connection."""
        if self._client is not None:
            self._client.__exit__(None, None, None)
            self._client = None


class OpenEnvScheduler(GymScheduler):
    """
    `GymScheduler` for OpenEnv's servers, which a row's `env_config` tells: `base_url`, `reset_kwargs`,
    `system_message`. Override `parse_action` and `format_observation` for an environment of your own.
    """

    env_config_defaults: dict[str, Any] = {}

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return OpenEnvWrapper(env_config)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Connects, and resets the environment; what is observed is the first message."""
        for request in requests:
            config = {**self.env_config_defaults, **(request.data_dict.get("env_config") or {})}
            env = await call(self._create_env, config, what="the OpenEnv client")
            self._begin(request.uuid, env)
            observation, _ = await call(env.reset, what="reset of the OpenEnv server")
            request.messages = opening(config.get("system_message"), self.format_observation(observation))

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Sends the action that a response stands for."""
        env = self._envs[infer_request.uuid]
        action = self.parse_action(response_choice.message.content)
        observation, reward, done, _ = await call(env.step, action, what="step of the OpenEnv server")
        return self._stepped(
            infer_request.uuid, "" if done else self.format_observation(observation), reward, done, {}
        )

    def parse_action(self, text: str) -> Any:
        """The action: a response that is a JSON object, also in a code block, or `{"message": text}`."""
        text = text.strip()
        if text.startswith("```") and text.endswith("```"):
            text = text.partition("\n")[2].removesuffix("```").strip()
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            action = None
        return action if isinstance(action, dict) else {"message": text}

    def format_observation(self, observation: Any) -> str:
        """What the model reads of an observation: its JSON."""
        return json.dumps(observation, ensure_ascii=False, default=str)
