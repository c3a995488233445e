"""
The files of a run's conversations: their names, columns, types and units.

    output_dir/
      rollouts/
        index.jsonl                        the commit log: a line per conversation, credit, update and step
        index.rank{r}.jsonl                the same, of a batch that failed, by the process r > 0
        {mode}-{step}-{k}.rank{r}.parquet          ROLLOUTS: what was sampled and scored
        credit-{mode}-{step}-{k}.rank{r}.parquet   CREDIT: what each turn was credited with
        updates-{step}.rank{r}.parquet             UPDATES: what the trainer computed per token in an optimiser step
      tokenizer/                           the tokenizer, as `save_pretrained` writes it

`mode` is `train`, `eval`, or `discarded` for those in whose place others were sampled. `step` counts optimiser steps
from 0: the number of steps that were taken before. `k` tells batches of one step apart: for `train` the micro-batch of
the step at which it was sampled, for `eval` the batch of the evaluation; for `discarded` that of `train`, plus
`gradient_accumulation_steps` for each earlier attempt. `r` is the process. A batch that is written as its
conversations end, as `mt-grpo eval` does, has a file for each part, `{mode}-{step}-{k}.rank{r}.part{p}.parquet`.

A session, `{mode}-{step:06d}-{k:06d}-{number:06d}`, names a conversation in all of these files; `number` is its row in
the batch of all processes. `number // group_size` is its group, `number % group_size` its place in the group. A
resumed run removes what was recorded after its checkpoint, see `trim`. Where a session occurs again all the same, as
when `trainer.train()` is called twice, the last one counts.

Pages of the Parquet files have checksums, and the index has one of each file and of each of its own lines.

A folder may be damaged, or of another program, so what is read is held against the shapes below first. Fields that no
shape lists may be anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired

import pyarrow as pa
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

FOLDER = "rollouts"
INDEX = "index.jsonl"
METRICS = "metrics.jsonl"
STATE = "state.json"
TOKENIZER = "tokenizer"
TOKENIZER_FILE = "tokenizer/tokenizer.json"
TEMPLATE_FILE = "tokenizer/chat_template.jinja"
MODES = ("train", "eval", "discarded")
VERSION = 1
ROW_GROUP = 16  # rows of a row group: what is read to show one conversation
Row = dict[str, Any]  # a line of JSON, a row of a file, or a row of the index: fields by name


def session_id(mode: str, step: int, k: int, number: int) -> str:
    """The name of a conversation in a run; training names a `Trajectory` in the same way."""
    return f"{mode}-{step:06d}-{k:06d}-{number:06d}"


def session_number(session: str) -> int:
    """The row of a conversation in its batch, by its name."""
    return int(session.rpartition("-")[2])


_SESSION = [
    pa.field("session", pa.string(), nullable=False),
    pa.field("mode", pa.string(), nullable=False),
    pa.field("step", pa.int32(), nullable=False),
    pa.field("k", pa.int32(), nullable=False),
]

ROLLOUTS = pa.schema(
    [
        *_SESSION,
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("member", pa.int32(), nullable=False),
        pa.field("stop", pa.string()),  # why it ended, a `StopReason`
        pa.field("reward", pa.float64()),  # sum of all rewards times their weights; null where none applies
        # the same of turn rewards, per turn; null where none applies to a turn
        pa.field("turn_rewards", pa.list_(pa.float64()), nullable=False),
        pa.field("weights", pa.string(), nullable=False),  # JSON: weight of each reward by name
        pa.field("record", pa.string(), nullable=False),  # JSON: `Trajectory.to_dict()` without `tree` and `messages`
        # token ids of all nodes of the token tree, in the order of the nodes
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        # the engine's log-probs in nats, exact, of the nodes whose `node_turn` is not -1, in their order
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("node_parent", pa.list_(pa.int32()), nullable=False),  # node that each node continues; -1: none
        pa.field("node_turn", pa.list_(pa.int32()), nullable=False),  # turn that sampled each node; -1: context
        pa.field("node_size", pa.list_(pa.int32()), nullable=False),  # tokens of each node
        pa.field("num_turns", pa.int32(), nullable=False),  # turns in the tree; node of the latest token
        pa.field("tip", pa.int32(), nullable=False),
    ]
)
"""
A row per conversation. `record` has the prompt, turns with their calls and replies, rewards by name, the dataset row
and more. Its times are in seconds: `start` of the conversation, of each turn and of each call since 1970 (UTC), and
`seconds` that each took.
"""

_PART = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("values", pa.list_(pa.float64()), nullable=False),
        pa.field("scales", pa.list_(pa.float64())),
    ]
)

CREDIT = pa.schema(
    [*_SESSION, pa.field("advantages", pa.list_(pa.float32()), nullable=False), pa.field("parts", pa.list_(_PART))]
)
"""
A row per conversation: `advantages` per turn, and `parts`, what these are the sum of: each part's `name`, and per turn
`values` and `scales`. A value is divided by its scale already. `scales` is null where no single number divides, an
entry of it where the part does not occur. `parts` is empty where the rule says none.
"""

LATER = ("parts",)  # columns that runs of earlier versions lack

UPDATES = pa.schema(
    [
        *_SESSION,
        pa.field("updated_step", pa.int32(), nullable=False),  # `step` of the update
        # position among the tokens after the prompt, in depth-first order of the token tree
        pa.field("columns", pa.list_(pa.int32()), nullable=False),
        # the trainer's log-prob minus the engine's, before the update, in nats
        pa.field("difference", pa.list_(pa.float16()), nullable=False),
        pa.field("entropies", pa.list_(pa.float16()), nullable=False),  # of the trainer's distribution, in nats
        # probability before the update, divided by the one that the loss compares it with
        pa.field("ratios", pa.list_(pa.float16()), nullable=False),
        # 1 where the loss clips the ratio, so that the token has no gradient
        pa.field("clipped", pa.list_(pa.int8()), nullable=False),
    ]
)
"""
A row per conversation and optimiser step that trains on it. Lists have an entry per trained token. A conversation that
is trained in several passes (`num_iterations`) has a row in several files.
"""

_strict = with_config(ConfigDict(strict=True))

_Whole = Annotated[int, Field(ge=0, lt=2**31)]
_Number = Annotated[float, Field(gt=-1e15, lt=1e15)]
_CRC = Annotated[int, Field(ge=0, lt=2**32)]
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)]

# Lines of `rollouts/index.jsonl`, by their `kind`. What is `NotRequired` is lacking in old indices.


@_strict
class _Rollout(TypedDict):
    """A conversation. Its session is unique in the run; a later line replaces this one and its credit and updates."""

    session: str
    mode: Literal["train", "eval", "discarded"]
    step: _Whole
    k: _Whole
    rank: _Whole
    group: _Whole  # in the batch: unique with `mode`, `step` and `k`
    member: _Whole  # place in the group
    prompt: str  # last user message, the first 80 characters
    stop: str | None  # why it ended
    error: str | None  # the failure behind it, the first 300 characters
    where: NotRequired[str | None]  # where the user's code raised it, as `FILE, line N, in FUNCTION`
    answer: str | None  # final answer, the first 80 characters
    right: bool | None  # whether the first outcome reward is at its maximum; null where it does not apply
    turns: _Whole
    tokens: list[_Whole]  # sampled, per turn
    context: _Whole  # tokens of the longest context that the model was given
    sampled: NotRequired[_CRC | None]  # the same for conversations that sampled the same tokens
    unique: _Whole  # tokens of the tree, each once
    forks: _Whole  # root-to-leaf sequences less one
    reward: _Number | None  # weighted total; null where no reward applies
    rewards: dict[str, _Number | None]  # by name, not weighted; turn rewards summed; null where it does not apply
    turn_rewards: list[_Number | None]  # weighted sum of turn rewards, per turn
    calls: _Whole
    errors: list[_Whole]  # failed attempts at calls, per turn
    raised: NotRequired[_Whole]  # calls that raised in the code of their tool
    first_raised: NotRequired[str | None]  # tool, error and place of the first of them, 300 characters
    failed: NotRequired[_Whole]  # calls that failed otherwise: refused, out of time, or as their tool said
    first_failed: NotRequired[str | None]  # tool and error of the first of them, 300 characters
    refused: NotRequired[_Whole]  # requests of an agent that were refused, limits apart
    first_refused: NotRequired[str | None]  # why the first of them was, 300 characters
    branch_of: NotRequired[str | None]  # of a branch: the session it belongs to
    shared_turns: NotRequired[_Whole]  # turns it shares with that
    start: _Number | None  # seconds since 1970 (UTC)
    seconds: _Number  # wall time of the conversation
    turn_seconds: list[_Number]  # time of the engine, per turn
    tool_seconds: list[_Number]  # longest call, per turn
    file: _FileName  # in `rollouts/`
    row: _Whole  # in the file; its row group is `row // 16`


@_strict
class _Credit(TypedDict):
    session: str
    advantages: list[_Number | None]  # per turn
    file: _FileName
    row: _Whole


@_strict
class _Update(TypedDict):
    session: str
    step: _Whole
    mismatch: _Number | None  # largest absolute difference of the engine's and the trainer's log-prob, in nats
    entropy: _Number | None  # mean over trained tokens, in nats
    clipped: _Number | None  # share of trained tokens that the loss clips
    file: _FileName
    row: _Whole


@_strict
class _Step(TypedDict):
    """An optimiser step; times are in seconds."""

    step: _Whole  # from 0; `metrics.jsonl` logs it as `step + 1`
    start: _Number  # since 1970 (UTC)
    seconds: _Number  # wall time; the others are its parts on the main process
    sampling: _Number
    rewards: _Number
    sync: _Number
    training: _Number  # the rest


@_strict
class _File(TypedDict):
    """A whole file in `rollouts/`, or `tokenizer/tokenizer.json`."""

    file: str
    size: Annotated[int, Field(ge=0)]
    crc32: _CRC


@_strict
class _Reward(TypedDict):
    name: str
    kind: Literal["turn", "outcome"]
    weight: _Number
    maximum: NotRequired[_Number | None]


@_strict
class _Rule(TypedDict):
    name: str


@_strict
class _Run(TypedDict):
    """The run, with `version` of this format and `started` (seconds since 1970); a resumed run adds a line."""

    group_size: NotRequired[_Whole | None]  # conversations of a prompt
    group_size_eval: NotRequired[_Whole | None]
    processes: NotRequired[Annotated[int, Field(gt=0, lt=2**31)]]  # that write files
    rewards: NotRequired[list[_Reward]]
    estimator: NotRequired[str | Row | None]  # the credit rule, as it was given
    rule: NotRequired[_Rule | None]  # with every option that it is called with
    rule_says: NotRequired[str | None]  # the first paragraph of its docstring
    model: NotRequired[str | None]  # name or folder
    tools: NotRequired[list[str] | None]  # that are known at the start
    chat_template_kwargs: NotRequired[Row | None]
    command: NotRequired[str | None]  # what was called
    versions: NotRequired[dict[str, str | None] | None]  # of packages
    options: NotRequired[Row | None]  # those that differ from their defaults


# Other files, and the JSON in the Parquet files


@_strict
class _Metrics(TypedDict):
    step: _Whole
    grad_norm: NotRequired[float | None]
    train_runtime: NotRequired[_Number | None]


@_strict
class _AuditedReward(TypedDict):
    causal: NotRequired[bool | None]  # whether a turn reward stays as it is when later turns are cut off


@_strict
class _Audit(TypedDict):
    step: _Whole
    rewards: dict[str, _AuditedReward]


@_strict
class _UnderWay(TypedDict):
    session: str
    prompt: str
    turns: _Whole
    tokens: _Whole
    start: _Number | None
    waits_for: Literal["tools", "sampling"]


@_strict
class _State(TypedDict):
    state: Literal["running", "finished", "stopped", "failed"]
    reason: str | None
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    host: str
    process_started: _Number
    started: _Number
    beat: _Number
    first: NotRequired[_Whole]  # steps that were taken before this process: it may have resumed
    step: _Whole
    of: _Whole
    waits_for: str
    under_way: list[_UnderWay]


@_strict
class _Note(TypedDict):
    star: bool
    note: str


@_strict
class _Message(TypedDict):
    role: str
    content: NotRequired[str | list[Any] | None]
    tool_call_id: NotRequired[str | None]


@_strict
class _Call(TypedDict):
    id: str | None
    name: str
    arguments: Row
    error: str | None
    seconds: _Number
    start: _Number | None


@_strict
class _Turn(TypedDict):
    index: _Whole
    message: _Message
    tool_calls: list[_Call]
    replies: list[_Message]
    error: str | None
    num_tokens: _Whole
    mask: NotRequired[list[Literal[0, 1]] | None]
    context_length: _Whole
    observation_length: _Whole
    seconds: _Number
    start: _Number | None
    follows: NotRequired[Annotated[int, Field(ge=-1)] | None]
    given: NotRequired[list[_Message]]
    tools: NotRequired[list[Row] | None]


@with_config(ConfigDict(strict=True, extra="forbid"))
class _Rewards(TypedDict):
    turn: NotRequired[dict[str, list[float | None]]]
    outcome: NotRequired[dict[str, float | None]]
    state: NotRequired[dict[str, list[float | None]]]


@_strict
class _Record(TypedDict):
    prompt: list[_Message]
    turns: list[_Turn]
    error: str | None
    row: Row
    rewards: _Rewards
    seconds: _Number
    start: _Number | None
    tools: NotRequired[list[Row] | None]
    branch_of: NotRequired[str | None]


SHAPES = {
    "rollout": _Rollout,
    "credit": _Credit,
    "update": _Update,
    "step": _Step,
    "file": _File,
    "run": _Run,
    "metrics": _Metrics,
    "audit": _Audit,
    "state": _State,
    "note": _Note,
    "notes": dict[str, _Note],
    "record": _Record,
    "weights": dict[str, _Number],
}


def misfit(kind: str, value: object) -> str | None:
    """Why a value does not have a shape, as a clause; `None` if it has, or if there is no such shape."""
    if kind not in SHAPES:
        return None
    try:
        _validator(kind)(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"`{place[:80]}`: {first['msg'][:1].lower()}{first['msg'][1:]}" if place else first["msg"]
    return None


@functools.cache
def _validator(kind: str) -> Callable[[object], object]:
    return TypeAdapter(SHAPES[kind]).validator.validate_python
