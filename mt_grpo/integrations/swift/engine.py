"""The engine as schedulers see it: it asks the policy of the conversation in whose context it is called."""

from __future__ import annotations

import asyncio
import copy
import time
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

from mt_grpo.envs.env import ConversationEnded, Policy
from mt_grpo.envs.protocols import ParsedTurn
from mt_grpo.integrations.swift.records import Sampled, strip_thinking
from mt_grpo.integrations.swift.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
)
from mt_grpo.trajectory import StopReason, Turn

OF_THE_RUN = ("temperature", "top_k", "top_p", "repetition_penalty", "n")


class Words:
    """
    A call protocol that reads nothing: schedulers look for calls themselves.

    Args:
        tags (`tuple[str, ...]`): Added tokens that messages may hold.
    """

    stop: tuple[str, ...] = ()
    native_tools = False

    def __init__(self, tags: tuple[str, ...]) -> None:
        self.tags = tags

    def parse(self, text: str, tokenizer: Any, context: Any = ()) -> ParsedTurn:
        """The words as they are."""
        return ParsedTurn({"role": "assistant", "content": text})


@dataclass
class Conversation:
    """
    What is known about a conversation that a scheduler holds.

    Args:
        policy (`Policy`): Takes the turns, in the loop that `loop` is.
        protocol (`Words`): Of its messages.
        timeout (`float`, *optional*): Seconds that one method of the scheduler may take.
        sampled (`list[Sampled]`): Its turns so far.
        masked (`bool`): Whether the scheduler gave a `response_loss_mask`.
        reason (`StopReason`, *optional*): The limit that cut off the latest turn, or that left no room for another.
        answer (`str`, *optional*): The final answer, where the scheduler told one.
        rewards (`dict[str, float]`): Rewards of the whole conversation, by name.
    """

    policy: Policy
    protocol: Words
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
        """Takes the next turn."""
        self._sampling += 1
        try:
            turn, ids, logprobs = await self._reply(request, config)
        except ConversationEnded as ended:
            self.reason = ended.stop_reason
            raise
        finally:
            self._sampling -= 1
            self._since = time.monotonic()
        self.reason = self.policy.exhausted
        names = self.policy.tokenizer.convert_ids_to_tokens(ids)
        content = [{"token": name, "logprob": value} for name, value in zip(names, logprobs, strict=True)]
        choice = ChatCompletionResponseChoice(
            0, ChatMessage("assistant", turn.text), turn.finish_reason, {"content": content}, None, ids
        )
        return ChatCompletionResponse([choice], str(turn.index))

    async def _reply(self, request: RolloutInferRequest, config: RequestConfig) -> tuple[Turn, list[int], list[float]]:
        messages = copy.deepcopy(request.messages)
        if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
            messages.pop()  # a place for the words to come
        goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        turn = await self.policy.reply(
            messages,
            request.tools,
            stop=tuple(config.stop),
            max_tokens=config.max_tokens,
            continue_last=goes_on,
            protocol=self.protocol,
        )
        ids, logprobs = map(list, self.policy.sampled)
        self.sampled.append(Sampled(turn, list(ids), goes_on))
        return turn, ids, logprobs


class Template:
    """
    `InferEngine.template`, as far as schedulers ask for it.

    Args:
        tokenizer: The model's.

    Attributes:
        template_meta: `is_thinking`, whether the model's chat template knows thoughts.
    """

    mode = "vllm"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template_meta = SimpleNamespace(is_thinking="</think>" in (tokenizer.chat_template or ""))

    def _swift_prepare_inputs(self, inputs: Any) -> None:
        """Takes the thoughts out of all of the assistant's messages but the last; ms-swift's files call it so."""
        messages = inputs.messages
        inputs.messages = [*(strip_thinking(message) for message in messages[:-1]), *messages[-1:]]


CONVERSATION: ContextVar[Conversation] = ContextVar("conversation")
"""The one that the running task belongs to."""


class InferEngine:
    """
    `MultiTurnScheduler.infer_engine`: one for all conversations.

    Args:
        tokenizer: The model's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = self.default_template = Template(tokenizer)

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> ChatCompletionResponse:
        """
        Samples the assistant's next words.

        Args:
            infer_request (`RolloutInferRequest`): The conversation.
            request_config (`RequestConfig`, *optional*): How; see there for what is refused.

        Raises:
            ConversationEnded: If a limit leaves no token to sample.
            ValueError: If `request_config` asks for another distribution than the run's.
        """
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
