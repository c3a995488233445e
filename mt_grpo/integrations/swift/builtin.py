"""Schedulers that recipes can name without a file of their own."""

from __future__ import annotations

import json
import re
from typing import Any

from mt_grpo.envs.execution import execute_calls
from mt_grpo.integrations.swift.engine import CONVERSATION
from mt_grpo.integrations.swift.gym import GymScheduler
from mt_grpo.integrations.swift.openenv import OpenEnvScheduler
from mt_grpo.integrations.swift.orm import is_right
from mt_grpo.integrations.swift.records import strip_thinking
from mt_grpo.integrations.swift.registry import multi_turns
from mt_grpo.integrations.swift.scheduler import MultiTurnScheduler
from mt_grpo.integrations.swift.types import (
    ChatCompletionResponseChoice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from mt_grpo.tools import load_tools
from mt_grpo.trajectory import ToolCall


class RetryScheduler(MultiTurnScheduler):
    """Tells the model that its answer is not that of the row's column `solution`, and asks again, until it is."""

    feedback = "That answer is not correct. Find the mistake, and answer again."

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the answer is right, or no turn is left."""
        said = str(infer_request.messages[-1]["content"])
        right = is_right(said, str(infer_request.data_dict["solution"]))
        return right or super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The feedback, as the user's message."""
        infer_request.messages.append({"role": "user", "content": self.feedback})
        return {"infer_request": infer_request}


class ThinkingTipsScheduler(RetryScheduler):
    """
    `RetryScheduler` for models that think: of earlier turns the model sees what it said, not what it thought. Each
    response is a record of its own, and all records of a trajectory share its reward.
    """

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> list[RolloutOutput]:
        """Holds one conversation."""
        records: list[RolloutOutput] = []
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice = response.choices[0]
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            infos = {"num_turns": len(records) + 1}
            messages = [dict(message) for message in infer_request.messages]
            records.append(RolloutOutput(response, messages, [choice.token_ids], rollout_infos=infos))
            if self.check_finished(infer_request, choice, len(records)):
                return records
            infer_request.messages = [strip_thinking(message) for message in infer_request.messages]
            infer_request = self.step(infer_request, choice, len(records))["infer_request"]


class ToolCallScheduler(MultiTurnScheduler):
    """
    Tools that are called in the ReAct form, with results inside the assistant's message:

        Action: calculator
        Action Input: 6*7
        Observation: 42

    The input is JSON of the arguments, or the one argument as text. The model writes the first two lines; the third is
    masked. Subclass it with other `tools`, given as to `load_tools`.
    """

    tools: tuple[Any, ...] = ("calculator",)
    stop = ("Observation:",)  # what follows is not the model's to write
    _called = re.compile(r"Action:[ \t]*(.*?)[ \t]*\nAction Input:[ \t]*(.*?)[ \t]*(?:\n|$)")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tools = {tool.name: tool for tool in load_tools(list(self.tools))}

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the response calls no tool, or no turn is left."""
        calls = self._called.search(response_choice.message.content)
        return calls is None or super().check_finished(infer_request, response_choice, current_turn)

    async def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Runs the call, and writes its result behind the model's words."""
        words = response_choice.message.content
        name, given = self._called.findall(words)[-1]
        tool_call = ToolCall(name, self._arguments(name, given))
        await execute_calls([tool_call], self._tools, CONVERSATION.get().timeout)
        lead = "" if words.endswith("Observation:") else "\nObservation:"
        result = f"{lead} {tool_call.result}\n"
        infer_request.messages[-1]["content"] += result
        added = self.tokenizer.encode(result, add_special_tokens=False)
        sampled = response_choice.token_ids
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
