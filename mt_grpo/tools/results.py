"""Reads what a tool returned: text for the model, data for rewards."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from typing import Any

from mt_grpo.errors import describe_error

MAX_DEPTH = 100
"""Most levels of nested lists and dictionaries in data, since code that handles it is recursive."""


def read_result(result: Any, max_size: int | None) -> tuple[str, dict[str, Any] | None]:
    """
    The text of a result, and the data beside it where the result is a pair of text and a dictionary.

    Args:
        result: What the tool returned.
        max_size (`int`, *optional*): Characters of the text; `None` is no limit.

    Raises:
        TypeError, ValueError: If the result or the data has no JSON form (keys that are not text or numbers, cycles).
    """
    data = None
    if type(result) is tuple and len(result) == 2 and isinstance(result[0], str) and isinstance(result[1], dict):
        result, data = result
        # so that a reward sees the same in the run and when it reads what the run has written
        data = json.loads(json.dumps(data, default=_plain))
        check_data(data, "the data of the result")
    return cut(render(result), max_size), data


def render(result: Any) -> str:
    """
    The text of a result: text as it is, bytes as text, everything else as JSON.

    Raises:
        TypeError, ValueError: If the result has no JSON form (keys that are not text or numbers, cycles).
    """
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
    """
    Refuses data that a run cannot write.

    Args:
        value: The data. Values without a JSON form are written as text.
        what (`str`): Its name in errors.

    Raises:
        ValueError: If it has keys that are no text or numbers, cycles, more than `MAX_DEPTH` levels, or values that
            cannot be written as text.
    """
    if too_deep(value):
        raise ValueError(f"{what} goes more than {MAX_DEPTH} levels deep, or has no end: give less nested data.")
    try:
        json.dumps(value, default=str)
    except BaseException as error:  # the values are the user's objects, and `__str__` user's code
        raise ValueError(f"{what} cannot be written as JSON ({describe_error(error)}): give plain data.") from error


def too_deep(value: Any) -> bool:
    """Whether lists and dictionaries are nested more than `MAX_DEPTH` levels deep, or without end."""
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
