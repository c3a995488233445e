"""Reports of xdist's workers travel as UTF-8: half a character in one would end the whole run without it."""

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
