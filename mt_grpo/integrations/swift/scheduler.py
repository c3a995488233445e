"""The scheduler that people subclass: who speaks next, and when a conversation is over."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mt_grpo.envs.env import ConversationEnded
from mt_grpo.envs.threads import call
from mt_grpo.integrations.swift.engine import CONVERSATION, Conversation, InferEngine
from mt_grpo.integrations.swift.records import ResponseError, Sampled, check_infos, claim
from mt_grpo.integrations.swift.types import (
    ChatCompletionResponseChoice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from mt_grpo.trajectory import StopReason, ToolCall


class MultiTurnScheduler:
    """
    Holds conversations, as ms-swift's class of this name. One is made for a run, so what belongs to a conversation is
    kept under `infer_request.uuid`. Override `step`, and what else differs; plain methods are called in threads.

    Args:
        infer_engine (`InferEngine`, *optional*): Samples; `infer_engine.tokenizer` is the model's.
        max_turns (`int`, *optional*): Responses of one conversation; no bound of its own where unset.

    Attributes:
        stop (`tuple[str, ...]`): Strings that end a response, where `request_config` does not say others.
    """

    stop: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # files differ in whether `infer_engine` or `max_turns` is the first argument
        older = "infer_engine" in kwargs or (args and isinstance(args[0], int))
        names = ("max_turns",) if older else ("infer_engine", "max_turns")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.infer_engine: InferEngine = given.get("infer_engine")
        self.max_turns: int | None = given.get("max_turns")

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.infer_engine.tokenizer

    @property
    def engine(self) -> InferEngine:
        """`infer_engine`, by its other name."""
        return self.infer_engine

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Called once before the first response, with the one request; what it changes there counts."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any] | None:
        """
        Called after every response, its words already among the messages.

        Returns:
            `dict`, *optional*: `done`, whether the conversation is over; `rollout_infos`; `reward`, `tool_calls` and
            `answer` as in `step`.
        """

    async def on_trajectory_end(self, uuid: str) -> None:
        """Called when a conversation is closed, whatever became of it, with its `infer_request.uuid`."""

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
        """The log-probabilities of a response; ms-swift's files call it by this name."""
        return [item["logprob"] for item in (response_choice.logprobs or {}).get("content", ())]

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the conversation is over: a response that was cut off, or as many turns as there may be."""
        if response_choice.finish_reason == "length":
            return True
        return bool(self.max_turns) and current_turn >= self.max_turns

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """
        What follows a response.

        Args:
            infer_request (`RolloutInferRequest`): The conversation, the response among its messages.
            response_choice (`ChatCompletionResponseChoice`): The response.
            current_turn (`int`): From 1.

        Returns:
            `dict`: `infer_request`, the next one, may append messages or extend the assistant's last. Optional are
            `response_token_ids`, `response_loss_mask` and `rollout_logprobs` of the response, see `claim`;
            `rollout_infos`, which are merged over the turns; and what our rewards and credit read: `reward` of the
            turn, its `tool_calls` (`list[ToolCall]`, those that were run as `executed`), and the final `answer`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `step`.")

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """
        Holds one conversation. Override it for a loop of your own over `self.infer_engine.infer_async`; that runs
        outside the trainer's event loop, and may block.

        Returns:
            `RolloutOutput`, or several that make up one trajectory and share its reward.
        """
        conversation = CONVERSATION.get()
        infos: dict[str, Any] = {}
        response, current_turn = None, 0
        while True:
            try:
                response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            except ConversationEnded:
                if response is None:
                    raise
                break
            choice, one = response.choices[0], conversation.sampled[int(response.id)]
            current_turn += 1
            _append(infer_request, choice.message.content)
            if await self._is_over(conversation, one, infer_request, choice, current_turn, infos):
                break
            given = await self._call(conversation, self.step, infer_request, choice, current_turn)
            where = f"Turn {current_turn}"
            if not isinstance(given, dict) or not isinstance(given.get("infer_request"), RolloutInferRequest):
                raise ResponseError(f"{where}: `step` returned no `infer_request`: return a dictionary that has it.")
            ids, mask = given.get("response_token_ids"), given.get("response_loss_mask")
            claim(where, [one], ids, mask, given.get("rollout_logprobs"))
            conversation.masked |= mask is not None
            take_note(conversation, one, given, where, infos)
            infer_request = given["infer_request"]
        infos["num_turns"] = current_turn
        return RolloutOutput(response, infer_request.messages, rollout_infos=infos)

    async def _is_over(
        self,
        conversation: Conversation,
        one: Sampled,
        infer_request: RolloutInferRequest,
        choice: ChatCompletionResponseChoice,
        current_turn: int,
        infos: dict[str, Any],
    ) -> bool:
        given = await self._call(conversation, self.on_turn_end, infer_request, choice, current_turn) or {}
        take_note(conversation, one, given, f"Turn {current_turn}", infos)
        if given.get("done"):
            return True
        over = await self._call(conversation, self.check_finished, infer_request, choice, current_turn)
        if self.max_turns and current_turn >= self.max_turns:
            conversation.reason = conversation.reason or StopReason.MAX_STEPS
            return True
        return bool(over)

    async def _call(self, conversation: Conversation, method: Callable[..., Any], *args: Any) -> Any:
        return await call(method, *args, what=method.__qualname__, timeout=conversation.timeout)


def take_note(
    conversation: Conversation, one: Sampled, given: dict[str, Any], where: str, infos: dict[str, Any]
) -> None:
    """Keeps what a scheduler tells about a turn."""
    told = check_infos(where, given["rollout_infos"]) if "rollout_infos" in given else {}
    infos.update(told)
    reward = given.get("reward")
    if "total_reward" in told and "step_rewards" in told:  # as schedulers of gym environments tell them
        conversation.rewards["total_reward"] = float(told["total_reward"])
        reward = told["step_rewards"][-1] if reward is None and told["step_rewards"] else reward
    if reward is not None:
        one.turn.reward = float(reward)
        if not math.isfinite(one.turn.reward):
            raise ResponseError(f"{where}: `reward` is {one.turn.reward}: return a finite number.")
    if given.get("answer") is not None:
        conversation.answer = str(given["answer"])
    for tool_call in given.get("tool_calls") or ():
        if not isinstance(tool_call, ToolCall):
            raise ResponseError(
                f"{where}: `tool_calls` has a {type(tool_call).__name__}: give `mt_grpo.trajectory.ToolCall`."
            )
        one.turn.tool_calls.append(tool_call)


def _append(infer_request: RolloutInferRequest, words: str) -> None:
    """Writes a response where the engine took it up: behind the assistant's last words, or as a message."""
    messages = infer_request.messages
    if messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
        messages.pop()
    if messages[-1]["role"] == "assistant":
        messages[-1]["content"] += words
    else:
        messages.append({"role": "assistant", "content": words})
