"""
Shapes of a run's files. A folder may be damaged, or of another program, so what is read is held against them first.
Fields that no shape lists may be anything.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from mt_grpo.errors import UserError
from mt_grpo.runlog import files

STRICT = ConfigDict(strict=True)

Whole = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(gt=-1e15, lt=1e15)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)]


@with_config(STRICT)
class _Rollout(TypedDict):
    session: str
    mode: Literal["train", "eval", "discarded"]
    step: Whole
    k: Whole
    rank: Whole
    group: Whole
    member: Whole
    prompt: str
    stop: str | None
    error: str | None
    answer: str | None
    right: bool | None
    turns: Whole
    tokens: list[Whole]
    context: Whole
    unique: Whole
    forks: Whole
    reward: Number | None
    rewards: dict[str, Number | None]
    turn_rewards: list[Number | None]
    calls: Whole
    errors: list[Whole]
    start: Number | None
    seconds: Number
    turn_seconds: list[Number]
    tool_seconds: list[Number]
    file: FileName
    row: Whole
    sampled: NotRequired[Annotated[int, Field(ge=0, lt=2**32)] | None]
    raised: NotRequired[Whole]
    first_raised: NotRequired[str | None]
    failed: NotRequired[Whole]
    first_failed: NotRequired[str | None]
    refused: NotRequired[Whole]
    first_refused: NotRequired[str | None]
    where: NotRequired[str | None]
    branch_of: NotRequired[str | None]
    shared_turns: NotRequired[Whole]


@with_config(STRICT)
class _Credit(TypedDict):
    session: str
    advantages: list[Number | None]
    file: FileName
    row: Whole


@with_config(STRICT)
class _Update(TypedDict):
    session: str
    step: Whole
    mismatch: Number | None
    entropy: Number | None
    clipped: Number | None
    file: FileName
    row: Whole


@with_config(STRICT)
class _Step(TypedDict):
    step: Whole
    start: Number
    seconds: Number
    sampling: Number
    rewards: Number
    sync: Number
    training: Number


@with_config(STRICT)
class _File(TypedDict):
    file: str
    size: Annotated[int, Field(ge=0)]
    crc32: Annotated[int, Field(ge=0, lt=2**32)]


@with_config(STRICT)
class _Reward(TypedDict):
    name: str
    kind: Literal["turn", "outcome"]
    weight: Number
    maximum: NotRequired[Number | None]


@with_config(STRICT)
class _Rule(TypedDict):
    name: str


@with_config(STRICT)
class _Run(TypedDict):
    group_size: NotRequired[Whole | None]
    group_size_eval: NotRequired[Whole | None]
    processes: NotRequired[Annotated[int, Field(gt=0, lt=2**31)]]
    rewards: NotRequired[list[_Reward]]
    estimator: NotRequired[str | dict[str, Any] | None]
    rule: NotRequired[_Rule | None]
    rule_says: NotRequired[str | None]
    model: NotRequired[str | None]
    tools: NotRequired[list[str] | None]
    chat_template_kwargs: NotRequired[dict[str, Any] | None]
    command: NotRequired[str | None]
    versions: NotRequired[dict[str, str | None] | None]
    options: NotRequired[dict[str, Any] | None]


@with_config(STRICT)
class _Metrics(TypedDict):
    step: Whole
    grad_norm: NotRequired[float | None]
    train_runtime: NotRequired[Number | None]


@with_config(STRICT)
class _UnderWay(TypedDict):
    session: str
    prompt: str
    turns: Whole
    tokens: Whole
    start: Number | None
    waits_for: Literal["tools", "sampling"]


@with_config(STRICT)
class _State(TypedDict):
    state: Literal["running", "finished", "stopped", "failed"]
    reason: str | None
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    host: str
    process_started: Number
    started: Number
    beat: Number
    step: Whole
    of: Whole
    waits_for: str
    under_way: list[_UnderWay]


@with_config(STRICT)
class _Note(TypedDict):
    star: bool
    note: str


@with_config(STRICT)
class _Message(TypedDict):
    role: str
    content: NotRequired[str | list[Any] | None]
    tool_call_id: NotRequired[str | None]


@with_config(STRICT)
class _Call(TypedDict):
    id: str | None
    name: str
    arguments: dict[str, Any]
    error: str | None
    seconds: Number
    start: Number | None


@with_config(STRICT)
class _Turn(TypedDict):
    index: Whole
    message: _Message
    tool_calls: list[_Call]
    replies: list[_Message]
    error: str | None
    num_tokens: Whole
    context_length: Whole
    observation_length: Whole
    seconds: Number
    start: Number | None
    follows: NotRequired[Annotated[int, Field(ge=-1)] | None]
    given: NotRequired[list[_Message]]
    tools: NotRequired[list[dict[str, Any]] | None]


@with_config(STRICT)
class _Record(TypedDict):
    prompt: list[_Message]
    turns: list[_Turn]
    error: str | None
    row: dict[str, Any]
    rewards: dict[str, dict[str, Any]]
    seconds: Number
    start: Number | None
    tools: NotRequired[list[dict[str, Any]] | None]
    branch_of: NotRequired[str | None]


LINES = {
    "rollout": _Rollout,
    "credit": _Credit,
    "update": _Update,
    "step": _Step,
    "file": _File,
    "run": _Run,
    "metrics": _Metrics,
    "state": _State,
    "notes": dict[str, _Note],
    "record": _Record,
    "weights": dict[str, Number],
}


def read_shaped(folder: Path, file: str, kind: str, mend: str) -> Any:
    """What a JSON file of a run holds; `None` where there is none."""
    data = files.read(folder, file)
    if data is None:
        return None
    try:
        value = orjson.loads(data)
        wrong = misfit(kind, value)
    except orjson.JSONDecodeError as error:
        wrong = str(error)
    if wrong is not None:
        raise UserError(f"{folder / file} is damaged ({wrong}): {mend}.")
    return value


def misfit(kind: str, value: Any) -> str | None:
    """Why a value does not have a shape, as a clause; `None` if it has."""
    try:
        _validator(kind)(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"`{place[:80]}`: {first['msg'][:1].lower()}{first['msg'][1:]}" if place else first["msg"]
    return None


@functools.cache
def _validator(kind: str) -> Any:
    return TypeAdapter(LINES[kind]).validator.validate_python
