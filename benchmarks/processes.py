"""Processes that a benchmark starts, and that end with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """
    SIGTERM ends the context as an exception does, so that what was started in it is ended too. By itself it would end
    this process at once.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: to the process, and to its group
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process as long as the context lasts, with a pipe from its output."""
    with ended_by_sigterm(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
