"""The trajectory that all rooms share: messages, turns and the token tree. Imports the standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from mt_grpo.token_tree import TokenTree

Message = dict[str, Any]
Row = dict[str, Any]
"""A row of a dataset: values by the name of the column."""
ToolSchema = dict[str, Any]
"""A tool as a chat template shows it: a function in OpenAI's form."""
Arguments = dict[str, Any]
"""Arguments of one call of a tool, by name."""


class StopReason(StrEnum):
    """Why a conversation ended."""

    ANSWERED = "answered"
    """The model gave its final answer."""
    MAX_STEPS = "max_steps"
    """The model wanted one more step than the environment allows."""
    LENGTH = "length"
    """A turn reached its own token budget before it was finished."""
    TOKEN_BUDGET = "token_budget"
    """The trajectory's token budget (`max_completion_length`) is used up."""
    CONTEXT_FULL = "context_full"
    """The next context leaves no room in the model's context window for a turn."""
    TIMEOUT = "timeout"
    """The conversation took longer than `rollout_timeout` seconds."""
    ENGINE_ERROR = "engine_error"
    """The engine failed for good; what was sampled before is kept."""
    ENV_ERROR = "env_error"
    """The environment itself (not a tool) raised."""
    ENV_DONE = "env_done"
    """The environment, or a tool that ends the episode, ended it."""

    @property
    def is_truncated(self) -> bool:
        """Whether a limit cut the conversation off."""
        return self in (StopReason.LENGTH, StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL, StopReason.TIMEOUT)


@dataclass
class ToolCall:
    """
    One call of a tool inside a turn.

    Args:
        name (`str`): Name that the model called.
        arguments (`dict`): Arguments as parsed; empty if the call was malformed.
        result (`str`): Text that the model gets: the tool's result, or an error.
        error (`str`, *optional*): What went wrong; `None` for a call that succeeded.
        executed (`bool`): Whether the tool ran; `False` for a malformed call, an unknown tool or bad arguments.
        seconds (`float`): Wall time of the tool; waits for a place among other calls are not counted.
        id (`str`, *optional*): Identifier the model gave the call.
        data (`dict`, *optional*): What the tool returned beside its text, for rewards; JSON, never shown to the model.
        start (`float`, *optional*): When the tool was called, in seconds since 1970 (UTC); `None` if it did not run.
        where (`str`, *optional*): Where the tool's code raised, as `FILE, line N, in FUNCTION`.
        parts (`list[dict]`, *optional*): Parts of a message that the model gets in place of `result`, with images and
            sounds; `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`.
        returned (`list`, *optional*): The list that the tool returned, where reward functions get it as TRL has it.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    result: str = ""
    error: str | None = None
    executed: bool = False
    seconds: float = 0.0
    id: str | None = None
    data: dict[str, Any] | None = None
    start: float | None = None
    where: str | None = None
    parts: list[dict[str, Any]] | None = None
    returned: list[Any] | None = field(default=None, repr=False, compare=False)


@dataclass
class Turn:
    """
    One timestep: the action of the model and the reply of the environment.

    Args:
        index (`int`): Position among the trajectory's turns, from 0. Its tokens in the tree have it as their turn.
        message (`dict`): The assistant message, for people and rewards. Its text is never encoded again.
        tool_calls (`list[ToolCall]`): Calls in the order the model made them.
        replies (`list[dict]`): Messages with which the environment replied.
        finish_reason (`str`): `"stop"` or `"length"`, as the engine said.
        error (`str`, *optional*): Why the turn could not be parsed; `None` if it could.
        num_tokens (`int`): Number of tokens sampled.
        context_length (`int`): Number of tokens that the model was given.
        fork_cause (`str`, *optional*): Why the context does not extend the one before; `None` if it does.
        seconds (`float`): Time the engine took.
        weight_version (`int`, *optional*): Optimiser step of the weights it was sampled with; where they changed
            meanwhile, of the first.
        last_weight_version (`int`, *optional*): Of the last, if they may have changed meanwhile; each token has the
            log-prob of a version between the two.
        observation_length (`int`): Tokens that the environment wrote since the turn before.
        answer (`str`, *optional*): The final answer that the turn gives.
        reward (`float`, *optional*): Reward that the environment or a stateful tool gave for this turn.
        mask (`list[int]`, *optional*): 1 for each sampled token that is trained, else 0; `None` where all are
            trained.
        start (`float`, *optional*): When the engine was asked, in seconds since 1970 (UTC).
        follows (`int`, *optional*): The turn whose message its context goes on from, -1 for one that was begun anew;
            `None` if it goes on from the turn before.
        given (`list[dict]`): Messages of its context after that turn's that are no replies to it; of a context that
            was begun anew, all of them.
        tools (`list[dict]`, *optional*): Schemas of the tools that its context shows; `None` for the trajectory's.
    """

    index: int
    message: Message
    tool_calls: list[ToolCall] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)
    finish_reason: str = "stop"
    error: str | None = None
    num_tokens: int = 0
    context_length: int = 0
    fork_cause: str | None = None
    seconds: float = 0.0
    weight_version: int | None = None
    last_weight_version: int | None = None
    observation_length: int = 0
    answer: str | None = None
    reward: float | None = None
    mask: list[int] | None = None
    start: float | None = None
    follows: int | None = None
    given: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.message.get("content") or ""

    @property
    def has_result(self) -> bool:
        """Whether the reply of a tool that ran follows this turn. Credit rules split credit at the first such turn."""
        return bool(self.replies) and any(call.executed for call in self.tool_calls)

    @property
    def num_attempts(self) -> int:
        """Number of attempted tool calls: the parsed ones, or 1 for a turn that could not be parsed."""
        return len(self.tool_calls) or int(self.error is not None)

    @property
    def num_failures(self) -> int:
        """Number of attempts that did not succeed."""
        return sum(call.error is not None for call in self.tool_calls) or int(self.error is not None)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form. What tools returned is in its JSON form there, as far as it has one."""
        lists = [call.returned for call in self.tool_calls]
        if not any(each is not None for each in lists):
            return asdict(self)
        data = asdict(replace(self, tool_calls=[replace(call, returned=None) for call in self.tool_calls]))
        for call, returned in zip(data["tool_calls"], lists, strict=True):
            if call["parts"] is None:  # these are the list
                call["returned"] = _as_json(returned)
        return data


@dataclass
class Trajectory:
    """
    One conversation.

    Args:
        prompt (`list[dict]`): Messages the conversation began with, system message included.
        turns (`list[Turn]`): The actions of the model and the replies to them.
        tree (`TokenTree`): The same as tokens, exactly as sampled.
        answer (`str`, *optional*): The final answer, if the model gave one.
        stop_reason (`StopReason`, *optional*): Why it ended; `None` while it runs.
        error (`str`, *optional*): The failure behind the stop reason.
        session (`str`): Identifier of the conversation, unique within a run.
        row (`dict`): The dataset row it answers.
        rewards (`dict`): Filled in by the trainer: `{"outcome": {name: value}, "turn": {name: [value per turn]}}`.
        render_mismatch (`str`, *optional*): How the trained ids differ from the conversation rendered as a whole;
            `None` if they do not, or if this was not checked.
        seconds (`float`): Wall time of the whole conversation.
        env_rewards (`dict`): Rewards of the whole conversation that its environment gave, by name.
        info (`dict`): What else the environment tells about it.
        branch_of (`str`, *optional*): Session of the trajectory with which it shares its first turns; one that ended
            before it branched is the same as the other.
        answer_logprobs (`dict`): By reward that asks for it, for each turn the mean log-prob per token of the right
            answer after the turn's context; `None` for a turn without one.
        teacher_log_ratios (`list[float | None]`): For each turn the mean, per sampled token, of the teacher's log-prob
            minus the sampled one; `None` for a turn that it did not read.
        teacher_hint (`str`, *optional*): What only the teacher was shown before each turn.
        start (`float`, *optional*): When it began, in seconds since 1970 (UTC).
        where (`str`, *optional*): Where the user's code raised or stood still, as `FILE, line N, in FUNCTION`.
        traceback (`str`, *optional*): The frames of that code.
        tools (`list[dict]`, *optional*): Schemas of the tools that the chat template showed to the model.
        refusals (`dict[str, int]`): Why requests of an agent were refused, and how many; limits are none.
        environment (*optional*): The environment, while rewards may look at it; it is written nowhere.
        texts (`tuple[str, str]`, *optional*): Prompt and completion as text, for reward functions in TRL's form, where
            the row's prompt is text; written nowhere.
        media (`dict[int, EncodedMedium]`): The media of its contexts by the id of their tokens; they themselves are
            in the messages.
        teacher_logprobs (`list[list[float]]`): The teacher's log-probs of the tokens that each turn sampled, NaN
            for a turn that it did not read; written nowhere.
        teacher_top (`list`): With `distillation_topk`, for each turn its `k` likeliest tokens in the place of each
            sampled one, `(tokens, 2, k)`: ids and log-probs; written nowhere.
    """

    prompt: list[Message]
    turns: list[Turn] = field(default_factory=list)
    tree: TokenTree = field(default_factory=TokenTree)
    answer: str | None = None
    stop_reason: StopReason | None = None
    error: str | None = None
    session: str = ""
    row: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, Any] = field(default_factory=dict)
    render_mismatch: str | None = None
    seconds: float = 0.0
    env_rewards: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    branch_of: str | None = None
    answer_logprobs: dict[str, list[float | None]] = field(default_factory=dict)
    teacher_log_ratios: list[float | None] = field(default_factory=list)
    teacher_hint: str | None = None
    start: float | None = None
    where: str | None = None
    traceback: str | None = None
    tools: list[dict[str, Any]] | None = None
    refusals: dict[str, int] = field(default_factory=dict)
    environment: Any = field(default=None, repr=False, compare=False)
    texts: tuple[str, str] | None = field(default=None, repr=False, compare=False)
    media: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
    teacher_logprobs: list[list[float]] = field(default_factory=list, repr=False, compare=False)
    teacher_top: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def failed(self) -> bool:
        """Whether the engine or the environment ended it. Such a failure says nothing about the policy."""
        return self.stop_reason in (StopReason.ENGINE_ERROR, StopReason.ENV_ERROR)

    @property
    def completion(self) -> list[Message]:
        """The messages after the prompt."""
        return [message for turn in self.turns for message in (turn.message, *turn.replies)]

    @property
    def completion_in_trl(self) -> list[Message]:
        """
        The messages after the prompt, as TRL hands them to a reward function: the content of a tool's message is the
        list that the tool returned, where the model reads its text.
        """
        messages: list[Message] = []
        for turn in self.turns:
            results = iter(turn.tool_calls)
            messages.append(turn.message)
            for message in turn.replies:
                call = next(results, None) if message["role"] == "tool" else None
                returned = None if call is None else call.returned
                messages.append(message if returned is None else {**message, "content": returned})
        return messages

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        return self.prompt + self.completion

    def to_dict(self) -> dict[str, Any]:
        """
        A JSON-serialisable form without loss, as far as `row` and `info` are JSON, and `messages`, the whole
        conversation.
        """
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in UNWRITTEN}
        data["messages"] = self.messages
        data["turns"] = [turn.to_dict() for turn in self.turns]
        data["tree"] = self.tree.to_dict()
        data["stop_reason"] = self.stop_reason.value if self.stop_reason else None
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trajectory:
        """The inverse of `to_dict`. Further fields, such as `messages` (they are in the turns), are passed over."""
        data = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        data["turns"] = [
            Turn(**{**turn, "tool_calls": [ToolCall(**call) for call in turn["tool_calls"]]}) for turn in data["turns"]
        ]
        data["tree"] = TokenTree.from_dict(data["tree"])
        data["stop_reason"] = StopReason(data["stop_reason"]) if data["stop_reason"] else None
        return cls(**data)


def _as_json(value: object) -> Any:
    """A value as it comes back from JSON, objects of users as text; `None` where JSON cannot say it."""
    try:
        return json.loads(json.dumps(value, default=str))
    except Exception:  # keys that are tuples, lists that hold themselves, and users' `__str__`
        return None


UNWRITTEN = ("environment", "texts", "media", "teacher_logprobs", "teacher_top")
"""Fields of a trajectory that are in no record."""

_MARKS = "\u061c\u200e\u200f"
_CONTROLS = [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in [*_CONTROLS, *map(ord, _MARKS)]}


def visible(value: object) -> Any:
    """
    Makes control characters visible, so that the words of a model or a tool cannot control a terminal.

    Line feed and tab stay. Characters that change the direction of writing are made visible too. In lists and
    dictionaries every text is changed.
    """
    if isinstance(value, str):
        return value.translate(_SHOWN)
    if isinstance(value, dict):
        return {visible(key): visible(item) for key, item in value.items()}
    return [visible(item) for item in value] if isinstance(value, list) else value
