"""
What the lines of an index and the records of conversations must look like, since a folder may be damaged, or of
another program. Fields that are not listed may be anything.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

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
class _Metrics(TypedDict):
    step: Whole
    grad_norm: NotRequired[float | None]
    train_runtime: NotRequired[Number | None]


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


@with_config(STRICT)
class _Record(TypedDict):
    prompt: list[_Message]
    turns: list[_Turn]
    error: str | None
    row: dict[str, Any]
    rewards: dict[str, dict[str, Any]]
    seconds: Number
    start: Number | None


LINES = {
    "rollout": _Rollout,
    "credit": _Credit,
    "update": _Update,
    "step": _Step,
    "file": _File,
    "run": dict[str, Any],
    "metrics": _Metrics,
    "record": _Record,
    "weights": dict[str, Number],
}


def misfit(kind: str, value: Any) -> str | None:
    """
    What does not fit the shape of a kind of `LINES`, as a clause; `None` where all fits.

    Args:
        kind (`str`): The kind.
        value: What was read.
    """
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
