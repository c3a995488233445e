"""
ms-swift's scheduler, which says who speaks next and when a conversation is over; what it is given and returns, with
ms-swift's names and fields; the engine that it samples from; and how what it returns masks the tokens (`claim`).
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, SupportsFloat, TypeVar

from mt_grpo.concurrency import call, in_thread
from mt_grpo.envs.env import ConversationEnded, Policy
from mt_grpo.envs.protocols import PlainTextProtocol
from mt_grpo.errors import ConfigError
from mt_grpo.imports import check_name
from mt_grpo.media import IMAGE, is_image, is_same, kind_of_part, snapshot_parts
from mt_grpo.token_tree import common_prefix
from mt_grpo.trajectory import Message, StopReason, ToolCall, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class RolloutInferRequest:
    """
    A conversation that asks for the assistant's next words. The model goes on with the last message where that is the
    assistant's. `<image>` stands in the words for each of `images`; what has no place comes before the user's first
    words. A scheduler may add, change and remove some between turns.
    """

    messages: list[Message]
    images: list[object] = field(default_factory=list)
    audios: list[object] = field(default_factory=list)  # empty, as `videos` and `objects`
    videos: list[object] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None  # schemas for the chat template to show; the row's column `tools`
    objects: dict[str, object] = field(default_factory=dict)
    data_dict: dict[str, Any] = field(default_factory=dict)  # the other columns of the row, copied
    uuid: str = field(default_factory=lambda: uuid.uuid4().hex)  # identifier of the conversation


@dataclass
class RequestConfig:
    """
    How one response is sampled. How tokens are drawn is the run's: `temperature`, `top_k`, `top_p`,
    `repetition_penalty` and `n` are refused where they are set. `seed`, `logprobs` and `return_details` have no
    effect: seeds are the run's, and a response always has its log-probabilities and token ids.
    """

    max_tokens: int | None = None  # of the response, within the run's own limits
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    stop: list[str] = field(default_factory=list)  # strings that end it; they stay part of it
    seed: int | None = None
    logprobs: bool = False
    n: int = 1
    return_details: bool = False


@dataclass
class ChatMessage:
    """The assistant's words as sampled. `tool_calls` is always `None`: calls stay in `content`."""

    role: str
    content: str
    tool_calls: list[object] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """What was sampled. All of it is the scheduler's own copy."""

    index: int  # 0
    message: ChatMessage
    finish_reason: str  # `stop`, or `length` where a limit cut them off
    logprobs: dict[str, Any] | None = None  # `{"content": [{"token": ..., "logprob": ...}, ...]}`, one for each id
    messages: list[Message] | None = None  # unused
    token_ids: list[int] | None = None  # the sampled ids, the one that ended the response included


Choice = ChatCompletionResponseChoice


@dataclass
class ChatCompletionResponse:
    """A response with one choice; `id` names the turn."""

    choices: list[ChatCompletionResponseChoice]
    id: str = ""
    model: str = ""


@dataclass
class RolloutOutput:
    """A record of a conversation. A scheduler returns one, or several that make up one trajectory."""

    response: ChatCompletionResponse  # its last
    messages: list[Message] | None = None  # the conversation with that response
    response_token_ids: list[list[int]] = field(default_factory=list)  # of its responses; a flat list is one response
    response_loss_mask: list[list[int]] = field(default_factory=list)  # 1 where a token of these is trained
    rollout_infos: dict[str, Any] = field(default_factory=dict)  # what else rewards may want to know
    rollout_logprobs: list[list[float]] = field(default_factory=list)  # of the trained tokens

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
    position, ids = 0, [] if ids is None else list(ids)  # an array of NumPy's has no truth value
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


def _check_length(where: str, name: str, length: int, of: str, expected: int) -> None:
    if length != expected:
        raise ResponseError(f"{where}: `{name}` has {length} entries and {of} {expected}: make them equal.")


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


def check_infos(where: str, infos: object) -> dict[str, Any]:
    """`rollout_infos`; raises `ResponseError` if they are no dictionary."""
    if not isinstance(infos, dict):
        raise ResponseError(f"{where}: `rollout_infos` is {type(infos).__name__}: return a dictionary.")
    return infos


Kind = TypeVar("Kind")


class Names(dict[str, type[Kind]], Generic[Kind]):
    """Classes by name: `multi_turns["mine"] = Mine`."""

    def __init__(self, what: str, base: type[Kind], added: Callable[[str, type[Kind]], None] | None = None) -> None:
        super().__init__()
        self._what, self._base, self._added = what, base, added

    def __setitem__(self, name: str, value: type[Kind]) -> None:
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


_PLACE = "<image>"  # what stands in the words of messages for an image of the list beside them


def without_images(messages: list[Message]) -> tuple[list[Message], list[object]]:
    """
    Messages whose images are places, and the images in order; the assistant's messages, and those with other media,
    stay as they are.
    """
    images: list[object] = []
    written = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) and message["role"] != "assistant" else []
        kinds = [*map(kind_of_part, parts)]
        if set(kinds) - {0} == {IMAGE}:
            images += [part["image"] for part, kind in zip(parts, kinds, strict=True) if kind]
            words = [_PLACE if kind else part.get("text", "") for part, kind in zip(parts, kinds, strict=True)]
            message = {**message, "content": "".join(words)}
        written.append(message)
    return written, images


def _with_images(messages: list[Message], images: list[object]) -> list[Message]:
    """Messages whose places show images. Images without a place come before the user's first words."""
    if not images:
        return messages
    pieces = [_pieces(message) for message in messages]
    places = sum(each.count(_PLACE) for each in pieces)
    if places > len(images):
        raise ValueError(f"The messages have {places} times {_PLACE}, and the request has {len(images)} images.")
    left = iter([{"type": "image", "image": image} for image in images])
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), 0)
    shown = []
    for index, (message, said) in enumerate(zip(messages, pieces, strict=True)):
        before = [next(left) for _ in range(len(images) - places)] if index == first else []
        if before or _PLACE in said:
            parts = [next(left) if each == _PLACE else {"type": "text", "text": each} for each in said]
            if not parts:
                content = message.get("content") or []
                parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            message = {**message, "content": [*before, *parts]}
        shown.append(message)
    return shown


def _pieces(message: Message) -> list[str]:
    """The words and places of a message in which images have places; what the model wrote has none."""
    content = message.get("content")
    text = content if isinstance(content, str) and message["role"] != "assistant" else ""
    return [piece for piece in re.split(f"({_PLACE})", text) if piece]


def _as_now(images: list[object], shown: list[object]) -> list[object]:
    """Images that no scheduler draws on later: those that were shown before, where they are the same, or copies."""
    known = list(filter(is_image, shown))
    return [
        next((each for each in known if is_image(image) and is_same(image, each, looks=True)), image)
        for image in snapshot_parts(images)
    ]


Returned = dict[str, Any]  # what a scheduler's `step` and `on_turn_end` return

_OF_THE_RUN = ("temperature", "top_k", "top_p", "repetition_penalty", "n")
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
    _shown: list[object] = field(default_factory=list)  # images, as the latest turn with some saw them
    _sampling: int = 0
    _since: float = field(default_factory=time.monotonic)

    def idle(self) -> float:
        """Seconds since the policy was last busy."""
        return 0.0 if self._sampling else time.monotonic() - self._since

    async def sample(self, request: RolloutInferRequest, config: RequestConfig) -> ChatCompletionResponse:
        if request.images:
            look = partial(_as_now, request.images, self._shown)
            self._shown = await in_thread(look, "mt-grpo-images")
        messages = _with_images(copy.deepcopy(request.messages), self._shown if request.images else [])
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

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template_meta = SimpleNamespace(is_thinking="</think>" in (tokenizer.chat_template or ""))

    def _swift_prepare_inputs(self, inputs: RolloutInferRequest) -> None:
        """Strips the thinking from the assistant's messages before the last. ms-swift's files call this name."""
        messages = inputs.messages
        inputs.messages = [*(strip_thinking(message) for message in messages[:-1]), *messages[-1:]]


CONVERSATION: ContextVar[Conversation] = ContextVar("conversation")  # the conversation of the running task


class InferEngine:
    """`MultiTurnScheduler.infer_engine`: one for all conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template = self.default_template = Template(tokenizer)

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: object
    ) -> ChatCompletionResponse:
        config = request_config or RequestConfig()
        for option in fields(RequestConfig):
            if option.name in _OF_THE_RUN and getattr(config, option.name) != option.default:
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
        needs_columns (`tuple[str, ...]`): Columns of the rows without which it cannot run.
    """

    stop: tuple[str, ...] = ()
    needs_columns: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # files differ in whether `infer_engine` or `max_turns` is the first argument
        older = "infer_engine" in kwargs or (args and isinstance(args[0], int))
        names = ("max_turns",) if older else ("infer_engine", "max_turns")
        given = {"infer_engine": None, "max_turns": None, **dict(zip(names, args, strict=False)), **kwargs}
        self.infer_engine: InferEngine = given["infer_engine"]
        self.max_turns: int | None = given["max_turns"]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.infer_engine.tokenizer

    @property
    def engine(self) -> InferEngine:
        """`infer_engine`, by its other name."""
        return self.infer_engine

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Called before the first response with a list of one request, which it may change."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int
    ) -> Returned | None:
        """
        Called after each response, which the messages already contain.

        Returns:
            `dict`, *optional*: `done`, whether the conversation is over; `rollout_infos`; `reward`, `tool_calls` and
            `answer` as in `step`.
        """

    async def on_trajectory_end(self, uuid: str) -> None:
        """Called with `infer_request.uuid` when a conversation is closed, however it ended."""

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: Choice) -> list[float]:
        """The log-probabilities of a response. ms-swift's files call this name."""
        return [item["logprob"] for item in (response_choice.logprobs or {}).get("content", ())]

    def check_finished(self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int) -> bool:
        """Whether the conversation is over: the response was cut off, or `max_turns` is reached."""
        if response_choice.finish_reason == "length":
            return True
        return bool(self.max_turns and current_turn >= self.max_turns)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int
    ) -> Returned | Awaitable[Returned]:
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
        infos: Returned = {}
        response, current_turn = None, 0

        async def ask(method: Callable[..., object]) -> Any:
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


def _number(value: object, what: str) -> float:
    """A reward as a float; text of a number is none."""
    if not isinstance(value, SupportsFloat) or not math.isfinite(value):
        raise ResponseError(f"{what} is {value!r:.80}: return a finite number.")
    return float(value)


def _store(conversation: Conversation, one: Sampled, told: Returned, where: str, infos: Returned) -> None:
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
