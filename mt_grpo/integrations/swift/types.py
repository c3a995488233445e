"""
What schedulers are given and return, with ms-swift's names and fields, and how what they return becomes the mask of
each turn (`claim`).
"""

from __future__ import annotations

import inspect
import logging
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import check_name
from mt_grpo.media import IMAGE, kind_of_part
from mt_grpo.token_tree import common_prefix
from mt_grpo.trajectory import Message, Turn


@dataclass
class RolloutInferRequest:
    """
    A conversation that asks for the assistant's next words.

    Args:
        messages (`list[dict]`): The conversation. The model goes on with the last message where that is the
            assistant's.
        images (`list`): The images of the messages, for which `<image>` stands in their words; what has no place comes
            before the user's first words. A scheduler may add, change and remove some between turns.
        audios, videos (`list`): Empty.
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
        """Releases what the environment holds."""


Messages = list[Message]


def get_logger() -> logging.Logger:
    """The logger for plugins."""
    return logging.getLogger("mt_grpo.plugins")


def remove_response(messages: Messages) -> str | None:
    """Removes the last message if it is the assistant's, and returns its content."""
    return messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None


@dataclass(eq=False)
class Sampled:
    """A turn of a scheduler with its sampled token ids."""

    turn: Turn
    ids: list[int]
    continues: bool
    claimed: bool = False


_THINKING = re.compile(r"^.*?</think>\s*", re.DOTALL)


def strip_thinking(message: Message) -> Message:
    """An assistant's message without its thoughts; any other as it is."""
    if message["role"] != "assistant":
        return message
    return {**message, "content": _THINKING.sub("", message["content"])}


class ResponseError(ValueError):
    """A scheduler returned token ids, masks or log-probabilities that contradict each other or the sampled ones."""


def claim(
    where: str,
    sampled: Sequence[Sampled],
    ids: list[int] | None,
    mask: list[int] | None = None,
    logprobs: list[float] | None = None,
) -> None:
    """
    Finds the sampled turns in the ids of a response, and sets their masks.

    - A sampled token in `ids` is trained as `mask` says; without a mask, it is trained.
    - A sampled token that is missing from `ids` is not trained.
    - A token in `ids` that was not sampled is context, which `mask` may not train.
    """
    if mask is not None:
        if ids is None:
            raise ResponseError(f"{where}: `response_loss_mask` came without `response_token_ids`: return both.")
        _check_length(where, "response_loss_mask", len(mask), "`response_token_ids` has", len(ids))
        for position, value in enumerate(mask):
            if value not in (0, 1):
                raise ResponseError(f"{where}: `response_loss_mask` has {value!r} at {position}: set 0 or 1.")
    if logprobs is not None:
        if mask is not None:
            trained, of = sum(mask), "the 1s of `response_loss_mask` are"
        elif ids is not None:
            trained, of = len(ids), "`response_token_ids` has"
        else:
            trained, of = sum(len(one.ids) for one in sampled), "the sampled tokens are"
        _check_length(where, "rollout_logprobs", len(logprobs), of, trained)
    if ids is not None:
        _claim(where, sampled, list(ids), mask)


def _check_length(where: str, name: str, length: int, of: str, expected: int) -> None:
    if length != expected:
        raise ResponseError(f"{where}: `{name}` has {length} entries and {of} {expected}: make them equal.")


def _claim(where: str, sampled: Sequence[Sampled], ids: list[int], mask: list[int] | None) -> None:
    position = 0
    while position < len(ids):
        found, size = _find(sampled, ids, position)
        if found is None:
            if mask is not None and mask[position]:
                raise ResponseError(
                    f"{where}: `response_loss_mask` trains token {position} of the {len(ids)} in "
                    "`response_token_ids`, which was not sampled there: set 0 for what was not sampled."
                )
            position += 1
            continue
        kept = [1] * size if mask is None else [int(value) for value in mask[position : position + size]]
        found.turn.mask = kept + [0] * (len(found.ids) - size)
        found.claimed = True
        position += size


def _find(sampled: Sequence[Sampled], ids: list[int], position: int) -> tuple[Sampled | None, int]:
    """The turn whose ids begin at a position, and how many of them; at position 0 its end may be cut off."""
    best, longest = None, 0
    for one in sampled:
        if one.claimed or not one.ids or one.ids[0] != ids[position]:
            continue
        size = common_prefix(one.ids, ids, position)
        if size == len(one.ids):
            return one, size
        if position == 0 and size > longest:
            best, longest = one, size
    return best, longest


def check_infos(where: str, infos: Any) -> dict[str, Any]:
    """`rollout_infos`; raises `ResponseError` if they are no dictionary."""
    if not isinstance(infos, dict):
        raise ResponseError(f"{where}: `rollout_infos` is {type(infos).__name__}: return a dictionary.")
    return infos


def plain(value: Any, depth: int = 8) -> Any:
    """A copy that JSON can hold: other objects become text, and what is nested deeper than `depth` is left out."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item, depth - 1) for key, item in value.items()} if depth else "..."
    if isinstance(value, list | tuple | set):
        return [plain(item, depth - 1) for item in value] if depth else "..."
    return str(value)


class Names(dict[str, Any]):
    """Classes by name: `multi_turns["mine"] = Mine`."""

    def __init__(self, what: str, base: type, added: Callable[[str, type], None] | None = None) -> None:
        super().__init__()
        self._what, self._base, self._added = what, base, added

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name, self._what)
        if not (inspect.isclass(value) and issubclass(value, self._base)):
            raise ConfigError(
                f"The {self._what} {name!r} is {value!r}, which is no subclass of {self._base.__name__}: subclass it, "
                "and import that from `mt_grpo.integrations.swift`."
            )
        if self._added is not None:
            self._added(name, value)
        super().__setitem__(name, value)


envs = Names("environment of the gym scheduler", Env)


PLACE = "<image>"
"""What stands in the words of messages for an image of the list beside them."""


def without_images(messages: list[Message]) -> tuple[list[Message], list[Any]]:
    """Messages whose images are places, and the images in order. Messages with other media stay as they are."""
    images: list[Any] = []
    written = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        kinds = [*map(kind_of_part, parts)]
        if set(kinds) - {0} == {IMAGE}:
            images += [part["image"] for part, kind in zip(parts, kinds, strict=True) if kind]
            words = [PLACE if kind else part.get("text", "") for part, kind in zip(parts, kinds, strict=True)]
            message = {**message, "content": "".join(words)}
        written.append(message)
    return written, images


def with_images(messages: list[Message], images: list[Any]) -> list[Message]:
    """Messages whose places show images. Images without a place come before the user's first words."""
    if not images:
        return messages
    places = sum(str(message.get("content")).count(PLACE) for message in messages)
    if places > len(images):
        raise ValueError(f"The messages have {places} times {PLACE}, and the request has {len(images)} images.")
    left = iter([{"type": "image", "image": image} for image in images])
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), 0)
    shown = []
    for index, message in enumerate(messages):
        before = [next(left) for _ in range(len(images) - places)] if index == first else []
        content = message.get("content")
        if before or (isinstance(content, str) and PLACE in content):
            message = {**message, "content": [*before, *_with_places(content or "", left)]}
        shown.append(message)
    return shown


def _with_places(text: str, images: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, words in enumerate(text.split(PLACE)):
        if number:
            yield next(images)
        if words:
            yield {"type": "text", "text": words}
