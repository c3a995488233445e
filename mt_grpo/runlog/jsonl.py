"""Records as JSON that every reader takes."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(record: dict[str, Any], **options: Any) -> str:
    """
    A record as JSON. NaN and infinity become `null`, since JSON lacks them. A value without a JSON form becomes its
    text.

    Args:
        record (`dict`): What to write.
        **options: As for `json.dumps`.
    """
    options = {"default": str, "ensure_ascii": False, **options}
    try:
        return json.dumps(record, allow_nan=False, **options)
    except ValueError:  # what says so; looking at every number of a long record first would cost more
        return json.dumps(_finite(record), allow_nan=False, **options)


def whole(text: str) -> str:
    """Text without half characters, which no encoding has; a question mark stands for each."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
