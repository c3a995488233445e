"""Tools at the top of a module, which processes load."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path


class NoNumber(Exception):
    """An exception that cannot be made again from its message."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code}: {why}")


def where() -> str:
    """Names the process that calls it."""
    return str(os.getpid())


def fail(code: int) -> str:
    """
    Raises.

    Args:
        code: A number.
    """
    raise NoNumber(code, "odd")


def end(code: int) -> str:
    """
    Ends its process.

    Args:
        code: Its exit code.
    """
    os._exit(code)


def leave() -> str:
    """Raises what ends a program."""
    raise SystemExit("done")


def ask() -> str:
    """Asks for input, of which there is none."""
    return input()


def spin(file: str) -> str:
    """
    Computes for ever.

    Args:
        file: Where it writes its process.
    """
    Path(file).write_text(str(os.getpid()))
    while True:
        pass


def unsendable() -> object:
    """Returns what cannot be pickled."""
    return threading.Lock()


def lock() -> str:
    """Makes a lock of processes, as tqdm does, and names its file."""
    return str(multiprocessing.RLock()._semlock.name)
