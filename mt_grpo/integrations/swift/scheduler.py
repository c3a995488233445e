"""
The scheduler that people subclass, which says who speaks next and when a conversation is over, and the engine that it
samples from.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, SupportsFloat

from mt_grpo.concurrency import call
from mt_grpo.envs.dialogue import PlainTextProtocol
from mt_grpo.envs.env import ConversationEnded, Policy
from mt_grpo.integrations.swift.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Names,
    RequestConfig,
    ResponseError,
    RolloutInferRequest,
    RolloutOutput,
    Sampled,
    check_infos,
    claim,
    strip_thinking,
    with_images,
)
from mt_grpo.trajectory import StopReason, ToolCall

OF_THE_RUN = ("temperature", "top_k", "top_p", "repetition_penalty", "n")
"""Fields of `RequestConfig` that the options of the run decide."""


@dataclass
class Conversation:
    """The state of one conversation of a scheduler."""

    policy: Policy
    protocol: PlainTextProtocol
    timeout: float | None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    sampled: list[Sampled] = field(default_factory=list)
    masked: bool = False
    reason: StopReason | None = None
    answer: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    _sampling: int = 0
    _since: float = field(default_factory=time.monotonic)

    def idle(self) -> float:
        """Seconds since the policy was last busy."""
        return 0.0 if self._sampling else time.monotonic() - self._since

    async def sample(self, request: RolloutInferRequest, config: RequestConfig) -> ChatCompletionResponse:
        """Samples the next turn."""
        messages = with_images(copy.deepcopy(request.messages), request.images)
        if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
            messages.pop()  # an empty message, where the response is to go
        continues = bool(messages) and messages[-1]["role"] == "assistant"
        self._sampling += 1
        try:
            turn = await self.policy.reply(
                messages,
                request.tools,
                stop=tuple(config.stop),
                max_tokens=config.max_tokens,
                continue_last=continues,
                protocol=self.protocol,
            )
        except ConversationEnded as ended:
            self.reason = ended.stop_reason
            raise
        finally:
            self._sampling -= 1
            self._since = time.monotonic()
        self.reason = self.policy.exhausted
        ids, logprobs = list(self.policy.sampled[0]), list(self.policy.sampled[1])
        self.sampled.append(Sampled(turn, list(ids), continues))
        tokens = self.policy.tokenizer.convert_ids_to_tokens(ids)
        content = [{"token": token, "logprob": value} for token, value in zip(tokens, logprobs, strict=True)]
        choice = ChatCompletionResponseChoice(
            0, ChatMessage("assistant", turn.text), turn.finish_reason, {"content": content}, None, ids
        )
        return ChatCompletionResponse([choice], str(turn.index))


class Template:
    """`InferEngine.template`, as far as schedulers ask for it."""

    mode = "vllm"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template_meta = SimpleNamespace(is_thinking="</think>" in (tokenizer.chat_template or ""))

    def _swift_prepare_inputs(self, inputs: Any) -> None:
        """Strips the thinking from the assistant's messages before the last. ms-swift's files call this name."""
        messages = inputs.messages
        inputs.messages = [*(strip_thinking(message) for message in messages[:-1]), *messages[-1:]]


CONVERSATION: ContextVar[Conversation] = ContextVar("conversation")
"""The conversation of the running task."""


class InferEngine:
    """`MultiTurnScheduler.infer_engine`: one for all conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = self.default_template = Template(tokenizer)

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> ChatCompletionResponse:
        """Samples a response."""
        config = request_config or RequestConfig()
        for option in fields(RequestConfig):
            if option.name in OF_THE_RUN and getattr(config, option.name) != option.default:
                raise ValueError(
                    f"`RequestConfig.{option.name}` is {getattr(config, option.name)}, but how tokens are "
                    "drawn is the run's: leave it out, and set it in the recipe where there is such an option."
                )
        conversation = CONVERSATION.get()
        sampling = conversation.sample(infer_request, config)
        if asyncio.get_running_loop() is conversation.loop:
            return await sampling
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sampling, conversation.loop))


class MultiTurnScheduler:
    """
    ms-swift's class of this name. One scheduler serves all conversations of a run: keep state by
    `infer_request.uuid`. Override `step`, and other methods as needed; methods that are not `async` run in threads.

    Args:
        infer_engine (`InferEngine`, *optional*): Samples responses; `infer_engine.tokenizer` is the model's.
        max_turns (`int`, *optional*): Largest number of responses in a conversation; unlimited by default.

    Attributes:
        stop (`tuple[str, ...]`): Strings that end a response, unless `request_config` has others.
    """

    stop: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # files differ in whether `infer_engine` or `max_turns` is the first argument
        older = "infer_engine" in kwargs or (args and isinstance(args[0], int))
        names = ("max_turns",) if older else ("infer_engine", "max_turns")
        given = {"infer_engine": None, "max_turns": None, **dict(zip(names, args, strict=False)), **kwargs}
        self.infer_engine: InferEngine = given["infer_engine"]
        self.max_turns: int | None = given["max_turns"]

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.infer_engine.tokenizer

    @property
    def engine(self) -> InferEngine:
        """`infer_engine`, by its other name."""
        return self.infer_engine

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Called before the first response with a list of one request, which it may change."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any] | None:
        """
        Called after each response, which the messages already contain.

        Returns:
            `dict`, *optional*: `done`, whether the conversation is over; `rollout_infos`; `reward`, `tool_calls` and
            `answer` as in `step`.
        """

    async def on_trajectory_end(self, uuid: str) -> None:
        """Called with `infer_request.uuid` when a conversation is closed, however it ended."""

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
        """The log-probabilities of a response. ms-swift's files call this name."""
        return [item["logprob"] for item in (response_choice.logprobs or {}).get("content", ())]

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the conversation is over: the response was cut off, or `max_turns` is reached."""
        if response_choice.finish_reason == "length":
            return True
        return bool(self.max_turns and current_turn >= self.max_turns)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """
        Prepares the next request after a response.

        Args:
            infer_request (`RolloutInferRequest`): The conversation, with the response as its last message.
            response_choice (`ChatCompletionResponseChoice`): The response.
            current_turn (`int`): From 1.

        Returns:
            `dict`: `infer_request`, the next request: it may append messages or extend the assistant's last one.
            Optional are `response_token_ids`, `response_loss_mask` and `rollout_logprobs` of the response, see
            `claim`; `rollout_infos`, which are merged over the turns; and for rewards and credit the turn's `reward`,
            its `tool_calls` (`list[ToolCall]`, with `executed` set on those that ran) and the final `answer`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `step`.")

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """
        Runs one conversation. Override it for a loop of your own over `self.infer_engine.infer_async`. Your loop runs
        outside the trainer's event loop, so it may block.

        Returns:
            `RolloutOutput`, or a list of them that make up one trajectory and share its reward.
        """
        conversation = CONVERSATION.get()
        infos: dict[str, Any] = {}
        response, current_turn = None, 0

        async def ask(method: Callable[..., Any]) -> Any:
            what = method.__qualname__
            return await call(method, infer_request, choice, current_turn, what=what, timeout=conversation.timeout)

        while True:
            try:
                response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            except ConversationEnded:
                if response is None:
                    raise
                break
            choice, one = response.choices[0], conversation.sampled[int(response.id)]
            current_turn += 1
            where = f"Turn {current_turn}"
            _append(infer_request, choice.message.content)
            told = await ask(self.on_turn_end) or {}
            _store(conversation, one, told, where, infos)
            if told.get("done"):
                break
            over = await ask(self.check_finished)
            if self.max_turns and current_turn >= self.max_turns:
                conversation.reason = conversation.reason or StopReason.MAX_STEPS
                break
            if over:
                break
            told = await ask(self.step)
            if not isinstance(told, dict) or not isinstance(told.get("infer_request"), RolloutInferRequest):
                raise ResponseError(f"{where}: `step` returned no `infer_request`: return a dictionary that has it.")
            ids, mask = told.get("response_token_ids"), told.get("response_loss_mask")
            claim(where, [one], ids, mask, told.get("rollout_logprobs"))
            conversation.masked |= mask is not None
            _store(conversation, one, told, where, infos)
            infer_request = told["infer_request"]
        infos["num_turns"] = current_turn
        return RolloutOutput(response, infer_request.messages, rollout_infos=infos)


def _number(value: Any, what: str) -> float:
    """A reward as a float; text of a number is none."""
    if not isinstance(value, SupportsFloat) or not math.isfinite(value):
        raise ResponseError(f"{what} is {value!r:.80}: return a finite number.")
    return float(value)


def _store(conversation: Conversation, one: Sampled, told: dict[str, Any], where: str, infos: dict[str, Any]) -> None:
    """Stores the infos, reward, answer and tool calls that a scheduler returned for a turn."""
    added = check_infos(where, told["rollout_infos"]) if "rollout_infos" in told else {}
    infos.update(added)
    reward = told.get("reward")
    if "total_reward" in added and "step_rewards" in added:  # as ms-swift's gym schedulers return them
        conversation.rewards["total_reward"] = _number(added["total_reward"], f"{where}: `total_reward`")
        reward = added["step_rewards"][-1] if reward is None and added["step_rewards"] else reward
    if reward is not None:
        one.turn.reward = _number(reward, f"{where}: `reward`")
    if told.get("answer") is not None:
        conversation.answer = str(told["answer"])
    for tool_call in told.get("tool_calls") or ():
        if not isinstance(tool_call, ToolCall):
            raise ResponseError(
                f"{where}: `tool_calls` has a {type(tool_call).__name__}: give `mt_grpo.trajectory.ToolCall`."
            )
        one.turn.tool_calls.append(tool_call)


def _append(infer_request: RolloutInferRequest, words: str) -> None:
    """Adds a response to the messages: to the assistant's last message if it continues that, else as a message."""
    messages = infer_request.messages
    if messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
        messages.pop()
    if messages[-1]["role"] == "assistant":
        messages[-1]["content"] += words
    else:
        messages.append({"role": "assistant", "content": words})


multi_turns = Names("scheduler", MultiTurnScheduler)
