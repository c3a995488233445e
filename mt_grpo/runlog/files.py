"""
How files of a run are written and read: whole or absent, as JSON that every reader takes. A folder may be damaged, or
of another program, so what is read is held against the shapes below first. Fields that no shape lists may be anything.
"""

from __future__ import annotations

import functools
import json
import math
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from mt_grpo.errors import UserError

MAX_BYTES = 2**32
"""Bytes of a file that is read as a whole."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def find(folder: Path, name: str) -> Path | None:
    """A regular file of a run's folder."""
    path = folder / name
    try:
        real = path.resolve(strict=True)
        kind = stat.S_IFMT(real.stat().st_mode)
        outside = not real.is_relative_to(folder.resolve())
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        raise UserError(f"{path} is a link to what is not there: bring back what it leads to.") from None
    except NotADirectoryError:
        raise UserError(
            f"{path.parent} is a file, where a run has a folder: name the `output_dir` of a run."
        ) from None
    except (OSError, RuntimeError) as error:  # the latter for links that lead to each other
        raise UserError(f"{path} cannot be read: {_reason(error)}.") from None
    if outside:
        raise UserError(f"{path} leads out of the run's folder, to {real}: replace the link by the file.")
    if kind != stat.S_IFREG:
        raise UserError(
            f"{path} is {_KINDS.get(kind, 'no file')}, where a run has a file: remove it, or bring it back."
        )
    return real


def read(folder: Path, name: str, offset: int = 0, most: int = -1) -> bytes | None:
    """
    The bytes of a file of a run's folder from `offset` on, at most `most` where it is given; `None` where it is not
    there.
    """
    path = find(folder, name)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2) - offset
            if size > MAX_BYTES:
                raise UserError(f"{path} has {size / 1e9:.0f} GB, more than a run writes there: bring the file back.")
            file.seek(offset)
            return file.read(most)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}.") from None


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """
    Gives a path beside `path`, to write a file or a folder at. It is moved to `path` when it is whole, and removed if
    writing fails. Links are not followed.
    """
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")  # a name that nobody can have put a link at
    try:
        yield partial
        partial.replace(path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)


def check_target(path: Path) -> None:
    """Refuses a link as a place to write to: it may lead to any file of the user's."""
    if path.is_symlink():
        raise UserError(
            f"{path} is a link, and what it leads to is not overwritten: remove it, or give another place."
        )


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def to_json(record: dict[str, Any] | list[Any], **options: Any) -> str:
    """
    A record as JSON. NaN and infinity become `null`, since JSON lacks them. A value without a JSON form becomes its
    text.
    """
    options = {"default": str, "ensure_ascii": False, **options}
    try:
        return json.dumps(record, allow_nan=False, **options)
    except ValueError:  # a number is not finite; looking at every number of a long record first would cost more
        return json.dumps(_finite(record), allow_nan=False, **options)


def whole(text: str) -> str:
    """Text with a question mark for each half character (a lone surrogate), which no encoding has."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


SHAPES = {
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
    data = read(folder, file)
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
    return TypeAdapter(SHAPES[kind]).validator.validate_python


NOTES = "notes.json"
MAX_NOTE = 4000
"""Characters of a note."""


def read_notes(folder: Path) -> dict[str, dict[str, Any]]:
    """By session `star` (`bool`) and `note` (`str`), of conversations that have one of them."""
    mend = "bring it back, or remove it to go on without notes"
    return read_shaped(folder, NOTES, "notes", mend) or {}


def write_note(folder: Path, session: str, star: bool, note: str) -> dict[str, dict[str, Any]]:
    """Puts a star and a note on a conversation, or takes them off. Returns all notes of the run."""
    if len(note) > MAX_NOTE:
        raise UserError(f"The note has {len(note)} characters, and may have {MAX_NOTE}: shorten it.")
    notes = read_notes(folder)
    notes.pop(session, None)
    if star or note.strip():
        notes[session] = {"star": star, "note": whole(note.strip())}
    path = folder / NOTES
    check_target(path)
    try:
        with written_whole(path) as partial:
            partial.write_text(to_json(notes, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    return notes
