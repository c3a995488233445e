"""Environments, one per conversation, and the policy that they ask for turns."""

from __future__ import annotations

import numbers
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from mt_grpo.concurrency import call
from mt_grpo.envs.protocols import CallProtocol
from mt_grpo.errors import defined_at
from mt_grpo.media import snapshot_parts
from mt_grpo.servers.external import EnvServerPool
from mt_grpo.tools.function import check_data, finite
from mt_grpo.trajectory import Message, Row, StopReason, ToolSchema, Turn

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from mt_grpo.rewards import RewardFunc

_TextOrMessages = str | list[Message]  # messages of an environment; text is one message of the user's


@dataclass
class Outcome:
    """
    What an environment says when its conversation is over.

    Args:
        rewards (`dict[str, float]`): Rewards of the whole conversation, by name; see the reward `env_reward`. The name
            `*` stands for all that are not given.
        stop_reason (`StopReason`, *optional*): Why it ended; `env_done` where it is left out.
        answer (`str`, *optional*): The final answer.
        info (`dict`): What else is worth keeping with the trajectory.
    """

    rewards: dict[str, float] = field(default_factory=dict)
    stop_reason: StopReason | None = None
    answer: str | None = None
    info: dict[str, Any] = field(default_factory=dict)


class ConversationEnded(Exception):
    """
    The policy takes no further turn: a limit is reached. An environment lets it pass, or returns its `Outcome`.

    Args:
        stop_reason (`StopReason`): Which limit.
        says (`str`, *optional*): The same as a sentence, with numbers.
    """

    def __init__(self, stop_reason: StopReason, says: str | None = None) -> None:
        super().__init__(says or f"The conversation is over: {stop_reason.value}.")
        self.stop_reason = stop_reason


async def outcome_at_end(running: Awaitable[Outcome]) -> Outcome:
    """The outcome of a loop; one that a limit ends has that for its stop reason."""
    try:
        return await running
    except ConversationEnded as ended:
        return Outcome(stop_reason=ended.stop_reason)


class Policy(Protocol):
    """
    The model in one conversation. What it samples is recorded: messages as turns, ids in the trajectory's token tree.

    Attributes:
        session (`str`): Identifier of the conversation, unique among those under way.
        exhausted (`StopReason`, *optional*): The limit that cut off the latest turn; `None` where it is whole.
        tokenizer: The model's tokenizer.
        sampled (`tuple[list[int], list[float]]`): Token ids of the latest turn and their log-probabilities, which are
            not to be changed.
    """

    session: str
    exhausted: StopReason | None
    tokenizer: PreTrainedTokenizerBase
    sampled: tuple[list[int], list[float]]

    async def reply(
        self,
        messages: Sequence[Message],
        tools: list[ToolSchema] | None = None,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        continue_last: bool = False,
        protocol: CallProtocol | None = None,
    ) -> Turn:
        """
        Samples the next turn.

        Messages that begin with a conversation sampled before, the assistant's message as `Turn.message` has it,
        continue its ids: nothing sampled is encoded again. Any other messages are rendered, and fork the tree.
        Messages that were given are not to be changed later; give copies.

        Args:
            messages (`Sequence[dict]`): The whole conversation.
            tools (`list[dict]`, *optional*): Tool schemas for the chat template to show.
            stop (`Sequence[str]`, *optional*): Strings that end the turn; they stay part of it.
            max_tokens (`int`, *optional*): Tokens of this turn, within the run's own limits.
            continue_last (`bool`, *optional*, defaults to `False`): Whether the last message is an assistant's that
                the model goes on writing.
            protocol (`CallProtocol`, *optional*): Reads calls and answers of the turn; the chat template's own tool
                calls are read where `tools` are given without it.

        Returns:
            `Turn`: `finish_reason` is `"length"` where a limit cut it off; such a turn is not read.

        Raises:
            ConversationEnded: If a limit leaves no token to sample.
            EngineError: If the engine fails for good.
        """
        ...


@runtime_checkable
class Env(Protocol):
    """One conversation. It is made for a row, runs once, and is closed whatever happens."""

    async def run(self, policy: Policy, row: Row) -> Outcome:
        """Holds the conversation of a row of the dataset, `prompt` included, in which the policy takes the turns."""
        ...

    async def close(self) -> None:
        """Releases what the conversation held. Rewards are scored before."""
        ...


@dataclass
class Step:
    """
    What an environment makes of a turn.

    Args:
        replies (`str` or `list[dict]`): What it answers; text is a message of the user's.
        reward (`float`, *optional*): Reward of the turn; see the reward `step_reward`.
        done (`bool` or `StopReason`): Whether the conversation ends; `True` is `env_done`.
        answer (`str`, *optional*): The final answer.
        rewards (`dict[str, float]`): Rewards of the whole conversation, by name, where it ends.
        info (`dict`): What else is worth keeping, where it ends.
    """

    replies: str | list[Message] = field(default_factory=list)
    reward: float | None = None
    done: bool | StopReason = False
    answer: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


class StepEnv(Env):
    """
    An environment that answers turn by turn. Subclass it with `reset` and `step`; what they keep between turns are
    attributes. Both may be `async`; plain ones are called in a thread, so that they may block.

        class Guess(StepEnv):
            def reset(self, row):
                self.number = row["number"]
                return "Guess my number."

            def step(self, turn):
                if turn.text == str(self.number):
                    return Step(done=True, reward=1.0)
                return "Higher." if turn.text < str(self.number) else "Lower."

    Attributes:
        row (`dict`): The row of this conversation.
        session (`str`): Its identifier, unique among those under way.
        turns (`list[Turn]`): Its turns so far.
        protocol (`CallProtocol`, *optional*): Reads calls and answers before `step` sees a turn; none by default.
        tool_schemas (`list[dict]`, *optional*): Tools for the chat template to show.
        stop (`tuple[str, ...]`): Strings that end a turn and stay in it, such as `("</guess>",)`.
        env_mask (`int`): Completion mask of tokens the environment wrote.
        step_timeout (`float`, *optional*): Seconds `reset` and `step` may take; `None` is no limit. One that takes
            longer ends the conversation with `env_error`.
    """

    row: Row
    session: str
    turns: list[Turn]
    protocol: CallProtocol | None = None
    tool_schemas: list[ToolSchema] | None = None
    stop: tuple[str, ...] = ()
    env_mask: int = 0
    step_timeout: float | None = 60.0

    @abstractmethod
    def reset(self, row: Row) -> _TextOrMessages | Awaitable[_TextOrMessages]:
        """The messages that the conversation begins with; text is the user's message."""

    @abstractmethod
    def step(self, turn: Turn) -> _TextOrMessages | Step | Awaitable[_TextOrMessages | Step]:
        """What follows the turn that the model just took, the last of `turns`."""

    async def run(self, policy: Policy, row: Row) -> Outcome:
        """The loop: `reset`, then turns and steps until one is done or a limit is reached."""
        self.row, self.session, self.turns = row, policy.session, []
        what = f"{type(self).__name__}.reset"
        said = await call(self.reset, row, what=what, timeout=self.step_timeout)
        messages = _messages(said, what, self.reset, "text or a list of messages")
        return await self.resume(policy, messages)

    def fork(self) -> StepEnv | Awaitable[StepEnv]:
        """
        A copy that goes on from here by itself: nothing that either does later is seen by the other. A class that can
        be forked says so by defining this method itself, since what a subclass adds may need a copy of its own. It may
        be `async`. What `copy.deepcopy` copies rightly needs no more than

            def fork(self):
                return copy.deepcopy(self)
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be forked: define `fork`.")

    @property
    def unforkable(self) -> str | None:
        """Why this one cannot be forked although its class can, with the mend."""
        return None

    writes_prompts: ClassVar[bool] = False
    """Whether `reset` writes the prompt, so that rows need none."""

    def check_rows(self, rows: Dataset, name: str) -> None:
        """Raises `ConfigError` if a row of the dataset `name` lacks what it needs."""

    def own_rewards(self) -> list[RewardFunc]:
        """The outcome rewards that it brings itself."""
        return []

    def begin_ahead(self, rows: Sequence[Row]) -> AbstractAsyncContextManager[None]:
        """A block in which the conversations of rows begin in this order: what they need can be made before."""
        return nullcontext()

    async def resume(self, policy: Policy, messages: list[Message]) -> Outcome:
        """The loop from a turn on, `messages` being the conversation so far."""
        name, tools = type(self).__name__, self.tool_schemas
        while True:
            turn = await policy.reply(messages, tools, stop=self.stop, protocol=self.protocol)
            self.turns.append(turn)
            if turn.finish_reason == "length":
                return Outcome(stop_reason=policy.exhausted)
            step = await call(self.step, turn, what=f"{name}.step", timeout=self.step_timeout)
            step = step if isinstance(step, Step) else Step(step)
            turn.replies = _messages(step.replies, f"{name}.step", self.step, "text, a list of messages or a `Step`")
            if step.reward is not None:
                turn.reward = finite(step.reward, f"{name}.step{defined_at(self.step)}: the reward of a step")
            if step.done:
                reason = step.done if isinstance(step.done, StopReason) else StopReason.ENV_DONE
                return Outcome(step.rewards, reason, step.answer, step.info)
            if not turn.replies:
                raise ValueError(
                    f"{name}.step{defined_at(self.step)} neither replied nor ended the conversation: return one of "
                    "the two."
                )
            messages += [turn.message, *turn.replies]

    async def close(self) -> None:
        """Releases what the conversation held, after rewards were scored."""


class ServedEnv(StepEnv):
    """An environment that servers hold, at one address or several."""

    pool: EnvServerPool

    @abstractmethod
    def at(self, urls: str | list[str]) -> ServedEnv:
        """The same environment at other addresses; raises `ConfigError` if one is none."""

    @abstractmethod
    async def check(self) -> dict[str, str]:
        """Connects to each server once; returns why some cannot be reached, by address."""


class RecordedEnv(Env):
    """An environment that keeps records of its own for rewards: messages and infos of each."""

    records: list[tuple[list[Message], dict[str, Any]]]


def _messages(said: str | list[Message], what: str, method: Callable[..., Any], right: str) -> list[Message]:
    """A method's return value as messages; `what` is the method's name, and `right` what it may return."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if not isinstance(said, list):
        kind = "`None`" if said is None else type(said).__name__
        raise TypeError(f"{what}{defined_at(method)} gave {kind} for messages: return {right}{_hint(said)}.")
    try:
        check_messages(said)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}{defined_at(method)}: {error}") from None
    in_parts = [isinstance(message.get("content"), list) for message in said]
    return [
        {**message, "content": snapshot_parts(message["content"])} if parts else message
        for message, parts in zip(said, in_parts, strict=True)
    ]


def _hint(value: object) -> str:
    """Suggests the `Step(...)` that the user probably meant."""
    if isinstance(value, bool):
        return f", as `Step(done={value})`"
    if isinstance(value, numbers.Real):
        return f", as `Step(reward={value}, done=True)`"
    if isinstance(value, dict) and value.keys() <= {each.name for each in fields(Step)}:
        return ", as `Step(**...)`"
    if isinstance(value, tuple):
        return ", or wrap an environment of Gym's in `mt_grpo.integrations.gym.GymEnv`"
    return ""


def check_messages(messages: Sequence[Message]) -> None:
    """Raises `TypeError` or `ValueError` for what is no message, or cannot be written as JSON."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f"A message is {type(message).__name__}, without a text `role`: give a dictionary.")
        _check_characters(message)
        if not all(isinstance(value, (str, type(None))) for value in message.values()):
            check_data(message, f"A message of {message['role']!r}")
            if not isinstance(message.get("content"), (str, list, type(None))):
                kind = type(message["content"]).__name__
                raise TypeError(f"The content of a message of {message['role']!r} is {kind}: give text.")


def _check_characters(message: Message) -> None:
    """Raises `ValueError` for text with half a character (a lone surrogate), which no tokenizer and no file takes."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    for text in [part.get("text") for part in parts if isinstance(part, dict)]:
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"The text of a message of {message['role']!r} has half a character, {text[error.start]!r} at "
                    f"place {error.start}: leave it out, or replace it (`text.encode(errors='replace').decode()`)."
                ) from None


def checked_outcome(outcome: object, env: Env) -> Outcome:
    """The outcome of a conversation, its rewards as floats."""
    method = env.step if isinstance(env, StepEnv) and type(env).run is StepEnv.run else env.run
    name = f"{type(env).__name__}.{method.__name__}{defined_at(method)}"
    if not isinstance(outcome, Outcome):
        raise TypeError(
            f"{type(env).__name__}.run{defined_at(env.run)} returned {type(outcome).__name__}: return an `Outcome`."
        )
    keys = outcome.rewards if isinstance(outcome.rewards, dict) else ()
    parts = [
        ("stop_reason", outcome.stop_reason, StopReason | None, "a `StopReason` or `None`"),
        ("answer", outcome.answer, str | None, "text or `None`"),
        ("rewards", outcome.rewards, dict, "a dictionary"),
        ("info", outcome.info, dict, "a dictionary"),
        *(("rewards", key, str, "text as the name of a reward") for key in keys),
    ]
    for attribute, given, kinds, right in parts:
        if not isinstance(given, kinds):
            raise TypeError(f"{name}: `{attribute}` of the outcome is {type(given).__name__}: give {right}.")
    for key, value in outcome.rewards.items():
        outcome.rewards[key] = finite(value, f"{name}: the reward {key!r}")
    check_data(outcome.info, f"{name}: `info` of the outcome")
    return outcome
