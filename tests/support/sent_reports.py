"""
Reports that a worker of xdist sends. They travel as UTF-8, which knows no half of a character, and where a report
cannot be sent the whole run ends without one.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Halves of characters in what a test said are sent as their escapes."""
    return _whole((yield))


def _whole(sent: Any) -> Any:
    if isinstance(sent, str):
        return sent.encode("utf-8", "backslashreplace").decode()
    if isinstance(sent, dict):
        return {_whole(key): _whole(value) for key, value in sent.items()}
    if isinstance(sent, (list, tuple)):
        return type(sent)(map(_whole, sent))
    return sent
