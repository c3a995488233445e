"""What schedulers are given and give back; names and fields are ms-swift's."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.trajectory import Message


@dataclass
class RolloutInferRequest:
    """
    A conversation that asks for the assistant's next words.

    Args:
        messages (`list[dict]`): The conversation. The model goes on with the last message where that is the
            assistant's.
        images, audios, videos (`list`): Empty: conversations are text.
        tools (`list[dict]`, *optional*): Tool schemas for the chat template to show; the row's column `tools`.
        objects (`dict`): Empty.
        data_dict (`dict`): The other columns of the row, copied.
        uuid (`str`): Identifier of the conversation.
    """

    messages: list[Message]
    images: list[Any] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    data_dict: dict[str, Any] = field(default_factory=dict)
    uuid: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class RequestConfig:
    """
    How one response is sampled. How tokens are drawn is the run's: `temperature`, `top_k`, `top_p`,
    `repetition_penalty` and `n` are refused where they are set. `seed`, `logprobs` and `return_details` have no
    effect: seeds are the run's, and a response always has its log-probabilities and token ids.

    Args:
        max_tokens (`int`, *optional*): Tokens of the response, within the run's own limits.
        stop (`list[str]`): Strings that end it; they stay part of it.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    logprobs: bool = False
    n: int = 1
    return_details: bool = False


@dataclass
class ChatMessage:
    """The assistant's words as sampled. `tool_calls` is always `None`: calls stay in `content`."""

    role: str
    content: str
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """
    What was sampled. All of it is the scheduler's own copy.

    Args:
        index (`int`): 0.
        message (`ChatMessage`): The words.
        finish_reason (`str`): `"stop"`, or `"length"` where a limit cut them off.
        logprobs (`dict`): `{"content": [{"token": ..., "logprob": ...}, ...]}`, one for each of `token_ids`.
        messages (`list[dict]`, *optional*): Unused.
        token_ids (`list[int]`): The sampled ids, the one that ended the response included.
    """

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    messages: list[Message] | None = None
    token_ids: list[int] | None = None


@dataclass
class ChatCompletionResponse:
    """A response with one choice; `id` names the turn."""

    choices: list[ChatCompletionResponseChoice]
    id: str = ""
    model: str = ""


@dataclass
class RolloutOutput:
    """
    A record of a conversation. A scheduler returns one, or several that make up one trajectory.

    Args:
        response (`ChatCompletionResponse`): Its last response.
        messages (`list[dict]`, *optional*): The conversation with that response.
        response_token_ids (`list[list[int]]`): Token ids of its responses; a flat list is one response.
        response_loss_mask (`list[list[int]]`): 1 where a token of these is trained.
        rollout_infos (`dict`): What else rewards may want to know.
        rollout_logprobs (`list[list[float]]`): Log-probabilities of the trained tokens.
    """

    response: ChatCompletionResponse
    messages: list[Message] | None = None
    response_token_ids: list[Any] = field(default_factory=list)
    response_loss_mask: list[Any] = field(default_factory=list)
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    rollout_logprobs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("response_token_ids", "response_loss_mask", "rollout_logprobs"):
            value = getattr(self, name) or []
            setattr(self, name, [value] if value and not isinstance(value[0], list) else value)


class Env(ABC):
    """
    An environment of one conversation; its methods may also be plain.

    Args:
        env_config (`dict`): The row's column `env_config`, of which `name` is the environment's in `envs`.
    """

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """What the model is told first: an observation, infos, and a system message, which may be empty."""

    @abstractmethod
    async def step(self, action: list[Message]) -> tuple[str, float, bool, dict[str, Any]]:
        """What follows the conversation so far: an observation, the turn's reward, whether it is over, and infos."""

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Lets go of what the environment holds."""
