"""Reads what a tool returned: text for the model, data for rewards."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

from mt_grpo.errors import describe_error
from mt_grpo.media import decode_for_model, has_media, part_text, read_parts, snapshot_parts

MAX_DEPTH = 100
"""Most levels of nested lists and dictionaries in data, since code that handles it is recursive."""


class Result(NamedTuple):
    """What a tool returned."""

    text: str
    """What the model reads; an image or a sound is a word in it."""
    data: dict[str, Any] | None = None
    """Data beside it, for rewards."""
    parts: list[dict[str, Any]] | None = None
    """What the model is shown, where that is more than text: the parts of a content."""
    returned: list[Any] | None = None
    """What TRL's reward functions get in its place."""


def read_result(result: Any, max_size: int | None) -> Result:
    """
    Reads the result of a tool: text, an image or a sound, a list of parts with one, or anything that has a JSON form;
    or a pair of one of the first three and a dictionary of data.
    """
    data = None
    if type(result) is tuple and len(result) == 2 and isinstance(result[1], dict):
        if isinstance(result[0], str) or has_media(result[0]):
            result, data = result
            # so that a reward sees the same in the run and when it reads what the run has written
            data = json.loads(json.dumps(data, default=_plain))
            check_data(data, "the data of the result")
    if not has_media(result):
        return Result(cut(render(result), max_size), data)
    parts = [
        {**part, "text": cut(render(part["text"]), max_size)} if "text" in part else part
        for part in read_parts(snapshot_parts(result if isinstance(result, list) else [result]))
    ]
    decode_for_model(parts)
    return Result("\n".join(map(part_text, parts)), data, parts)


def render(result: Any) -> str:
    """The text of a result: text as it is, bytes as text, everything else as JSON."""
    if isinstance(result, (bytes, bytearray, memoryview)):
        return _decoded(result)
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)
    return text.encode("utf-8", "replace").decode("utf-8")  # tokenizers refuse lone surrogates


def cut(text: str, max_size: int | None) -> str:
    """The text, or its first `max_size` characters and a note of how much is missing."""
    if max_size is None or len(text) <= max_size:
        return text
    return f"{text[:max_size]}\n[{len(text) - max_size:,} of {len(text):,} characters were cut off.]"


def check_data(value: Any, what: str) -> None:
    """Refuses data that a run cannot write."""
    if too_deep(value):
        raise ValueError(f"{what} goes more than {MAX_DEPTH} levels deep, or has no end: give less nested data.")
    try:
        json.dumps(value, default=str)
    except BaseException as error:  # the values are the user's objects, and `__str__` user's code
        raise ValueError(f"{what} cannot be written as JSON ({describe_error(error)}): give plain data.") from error


def too_deep(value: Any) -> bool:
    """Whether lists and dictionaries are nested deeper than `MAX_DEPTH`, or endlessly."""
    level, depth = [value], 0
    while level := [item for container in level for item in _items(container)]:
        depth += 1
        if depth > MAX_DEPTH:
            return True
    return False


def _items(container: Any) -> Iterable[Any]:
    if isinstance(container, dict):
        return container.values()
    return container if isinstance(container, (list, tuple)) else ()


def _decoded(value: bytes | bytearray | memoryview) -> str:
    content = bytes(value)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return f"[{len(content):,} bytes that are not text]"


def _plain(value: Any) -> Any:
    """A JSON form of a value that has none: for `json.dumps(default=...)`."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)  # the order of a set of strings differs from run to run
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _decoded(value)
    for method in ("model_dump", "tolist"):  # pydantic models; numpy arrays and numbers
        if callable(getattr(value, method, None)):
            return getattr(value, method)()
    return str(value)
