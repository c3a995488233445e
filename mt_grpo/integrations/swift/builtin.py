"""The schedulers that recipes can name without a file of their own."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from mt_grpo.concurrency import call
from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.imports import did_you_mean
from mt_grpo.integrations.openenv import generic_client
from mt_grpo.integrations.swift.rewards import is_right
from mt_grpo.integrations.swift.scheduler import (
    CONVERSATION,
    Choice,
    MultiTurnScheduler,
    RequestConfig,
    Returned,
    RolloutInferRequest,
    RolloutOutput,
    envs,
    multi_turns,
    strip_thinking,
)
from mt_grpo.tools import load_tools
from mt_grpo.trajectory import ToolCall


class GymScheduler(MultiTurnScheduler):
    """
    Plays the environment of `envs` that a row's `env_config` names. The reward of a step is the turn's reward. The sum
    of them is the conversation's reward `total_reward`, which `env_reward` reads. Private names are ms-swift's:
    subclasses in users' files rely on them.
    """

    env_config_defaults: dict[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # by `infer_request.uuid`
        self._envs: dict[str, Any] = {}
        self._total_rewards: dict[str, float] = {}
        self._step_rewards: dict[str, list[float]] = {}
        self._pending_obs: dict[str, str | None] = {}

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Makes and resets the environment; its system message and observation are the first messages."""
        for request in requests:
            config, uuid = {**self.env_config_defaults, **(request.data_dict.get("env_config") or {})}, request.uuid
            env = await call(self._create_env, config, what="the environment of a row", late=_close)
            self._envs[uuid], self._pending_obs[uuid] = env, None
            self._total_rewards[uuid], self._step_rewards[uuid] = 0.0, []
            observation, system = await self._reset_env(env, config, request)
            first = [{"role": "system", "content": system}] if system else []
            request.messages = [*first, {"role": "user", "content": observation}]

    async def _reset_env(
        self, env: Any, config: dict[str, Any], request: RolloutInferRequest
    ) -> tuple[str, str | None]:
        what = f"{type(env).__name__}.reset"
        observation, _, system = await call(env.reset, copy.deepcopy(request), what=what)
        return observation, system

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        name = str(env_config.get("name"))
        if name not in envs:
            raise KeyError(
                f"The row's `env_config` names the environment {name!r}{did_you_mean(name, envs)}: name one "
                f"of {', '.join(envs) or '`envs`, which is empty'}."
            )
        return envs[name](env_config)

    async def _step_env(self, env: Any, infer_request: RolloutInferRequest, said: str) -> tuple[Any, float, bool, Any]:
        return await call(env.step, copy.deepcopy(infer_request.messages), what=f"{type(env).__name__}.step")

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int
    ) -> Returned:
        uuid = infer_request.uuid
        played = await self._step_env(self._envs[uuid], infer_request, response_choice.message.content)
        observation, reward, done, info = played
        self._total_rewards[uuid] += float(reward)
        self._step_rewards[uuid].append(float(reward))
        self._pending_obs[uuid] = None if done else observation
        infos = {"total_reward": self._total_rewards[uuid], "step_rewards": list(self._step_rewards[uuid])}
        return {"done": done, "rollout_infos": {**infos, "gym_done": done, **(info or {})}}

    def step(self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int) -> Returned:
        """The observation, as the user's message."""
        observation = self._pending_obs.get(infer_request.uuid)
        if observation is not None:
            infer_request.messages.append({"role": "user", "content": observation})
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, uuid: str) -> None:
        await self._close_and_remove(uuid)

    async def _close_and_remove(self, uuid: str) -> None:
        env = self._envs.pop(uuid, None)
        for kept in (self._total_rewards, self._step_rewards, self._pending_obs):
            kept.pop(uuid, None)
        if env is not None:
            await _close(env)


async def _close(env: Any) -> None:
    await call(env.close, what=f"{type(env).__name__}.close")


class OpenEnvWrapper:
    """A connection to the OpenEnv server of `env_config`; the first call opens it. The methods block."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.base_url = env_config.get("base_url", "http://localhost:8000")
        self.reset_kwargs = env_config.get("reset_kwargs") or {}
        self._client: Any = None

    def _opened(self) -> Any:
        if self._client is None:
            client = generic_client()(base_url=self.base_url).sync()
            client.__enter__()
            self._client = client
        return self._client

    def reset(self) -> tuple[object, None]:
        """The first observation as the server gives it, and `None`."""
        return self._opened().reset(**self.reset_kwargs).observation, None

    def step(self, action: object) -> tuple[object, float, bool, None]:
        """Sends an action; returns the observation, the reward, whether the episode is over, and `None`."""
        result = self._opened().step(action)
        return result.observation, float(result.reward or 0.0), bool(result.done), None

    def close(self) -> None:
        if self._client is not None:
            self._client.__exit__(None, None, None)
            self._client = None


class OpenEnvScheduler(GymScheduler):
    """
    `GymScheduler` for OpenEnv servers. A row's `env_config` has `base_url`, `reset_kwargs` and `system_message`.
    Override `parse_action` and `format_observation` for an environment of your own.
    """

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return OpenEnvWrapper(env_config)

    async def _reset_env(
        self, env: Any, config: dict[str, Any], request: RolloutInferRequest
    ) -> tuple[str, str | None]:
        observation, _ = await call(env.reset, what="reset of the OpenEnv server")
        return self.format_observation(observation), config.get("system_message")

    async def _step_env(self, env: Any, infer_request: RolloutInferRequest, said: str) -> tuple[Any, float, bool, Any]:
        observation, *rest = await call(env.step, self.parse_action(said), what="step of the OpenEnv server")
        return "" if rest[1] else self.format_observation(observation), *rest

    def parse_action(self, text: str) -> object:
        """The action: the response's JSON object, which may be in a code block, or else `{"message": text}`."""
        text = text.strip()
        if text.startswith("```") and text.endswith("```"):
            text = text.partition("\n")[2].removesuffix("```").strip()
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            action = None
        return action if isinstance(action, dict) else {"message": text}

    def format_observation(self, observation: object) -> str:
        """The text of an observation: its JSON."""
        return json.dumps(observation, ensure_ascii=False, default=str)


class RetryScheduler(MultiTurnScheduler):
    """Asks the model again until its answer is that of the row's column `solution`."""

    needs_columns: tuple[str, ...] = ("solution",)
    feedback = "That answer is not correct. Find the mistake, and answer again."

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "check_finished" in vars(cls) and "needs_columns" not in vars(cls):  # it asks something else
            cls.needs_columns = ()

    def check_finished(self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int) -> bool:
        """Whether the answer is right, or no turn is left."""
        said = str(infer_request.messages[-1]["content"])
        right = is_right(said, str(infer_request.data_dict["solution"]))
        return right or super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int) -> Returned:
        """The feedback, as the user's message."""
        infer_request.messages.append({"role": "user", "content": self.feedback})
        return {"infer_request": infer_request}


class ThinkingTipsScheduler(RetryScheduler):
    """
    `RetryScheduler` for models that think: the thinking of earlier turns is stripped. So each response is a record of
    its own, and all records of a trajectory share its reward.
    """

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: object
    ) -> list[RolloutOutput]:
        records: list[RolloutOutput] = []
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice = response.choices[0]
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            infos = {"num_turns": len(records) + 1}
            messages = [dict(message) for message in infer_request.messages]
            records.append(RolloutOutput(response, messages, [choice.token_ids or []], rollout_infos=infos))
            if self.check_finished(infer_request, choice, len(records)):
                return records
            infer_request.messages = [strip_thinking(message) for message in infer_request.messages]
            infer_request = self.step(infer_request, choice, len(records))["infer_request"]


class ToolCallScheduler(MultiTurnScheduler):
    """
    Tools that are called in the ReAct form, with the results inside the assistant's message:

        Action: calculator
        Action Input: 6*7
        Observation: 42

    The input is a JSON object of the arguments, or the only argument as text. The model writes the first two lines;
    the third is masked. Subclass it with other `tools`, in the form that `load_tools` takes.
    """

    tools: tuple[Any, ...] = ("calculator",)
    stop = ("Observation:",)  # the result is not the model's to write
    _called = re.compile(r"Action:[ \t]*(.*?)[ \t]*\nAction Input:[ \t]*(.*?)[ \t]*(?:\n|$)")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tools = {tool.name: tool for tool in load_tools(list(self.tools))}

    def check_finished(self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int) -> bool:
        """Whether the response calls no tool, or no turn is left."""
        calls = self._called.search(response_choice.message.content)
        return calls is None or super().check_finished(infer_request, response_choice, current_turn)

    async def step(self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int) -> Returned:
        """Runs the call, and appends its result to the model's message."""
        words = response_choice.message.content
        name, given = self._called.findall(words)[-1]
        tool_call = ToolCall(name, self._arguments(name, given))
        await execute_calls([tool_call], self._tools, CONVERSATION.get().timeout)
        lead = "" if words.endswith("Observation:") else "\nObservation:"
        result = f"{lead} {tool_call.result}\n"
        infer_request.messages[-1]["content"] += result
        added = self.tokenizer.encode(result, add_special_tokens=False)
        sampled = response_choice.token_ids or []
        return {
            "infer_request": infer_request,
            "response_token_ids": sampled + added,
            "response_loss_mask": [1] * len(sampled) + [0] * len(added),
            "rollout_infos": {"tool_results": tool_call.result},
            "tool_calls": [tool_call],
        }

    def _arguments(self, name: str, given: str) -> dict[str, Any]:
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            return arguments
        parameters = self._tools[name].schema["function"]["parameters"]["properties"] if name in self._tools else {}
        return {next(iter(parameters), "input"): given}


multi_turns["retry_scheduler"] = RetryScheduler
multi_turns["thinking_tips_scheduler"] = ThinkingTipsScheduler
multi_turns["tool_call_scheduler"] = ToolCallScheduler
multi_turns["gym_scheduler"] = GymScheduler
multi_turns["openenv_scheduler"] = OpenEnvScheduler
