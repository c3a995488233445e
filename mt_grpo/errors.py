"""Errors that users can mend, refusals of libraries among them, and where the code of users failed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


class UserError(Exception):
    """Ends a command with one sentence: what is wrong, where, and how to mend it. Every other error is a bug."""

    told = False
    """Whether the user has read the sentence already: of several processes one says it for all."""


class UnsupportedModelError(UserError, ValueError):
    """The model cannot run over packed trees."""


class ConfigError(UserError, ValueError):
    """An option is wrong. The message is one sentence fit for the user."""


def refuse_first(*faults: tuple[object, str], error: type[Exception] = ConfigError) -> None:
    """Raises an error with the sentence of the first fault that is there."""
    for is_there, sentence in faults:
        if is_there:
            raise error(sentence)


class EngineError(UserError, RuntimeError):
    """The engine could not serve a request, and a repeat would not help. It ends one conversation, not the run."""


class ServerSetupError(UserError, ValueError):
    """A server is up but cannot serve this run: wrong model, missing flag, refused key. The message has the mend."""


class ServerGoneError(UserError, ConnectionError):
    """No server could be reached for `server_timeout` seconds. It ends the run, not one conversation."""


class WeightSyncError(UserError, RuntimeError):
    """The server's weights could not be updated. Ends the run."""


class RemoteError(Exception):
    """What a function raised in another process."""

    def __init__(self, said: str, where: str | None, traceback: str) -> None:
        super().__init__(said)
        self.said, self.fault = said, _Fault(where, traceback)


MOST_FRAMES = 20
"""Frames that are kept: the innermost ones."""

_OURS = f"{Path(__file__).parent}{os.sep}"
_PYTHON = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"  # also of another environment


@dataclass(frozen=True)
class _Fault:
    """Where users' code failed."""

    where: str | None
    traceback: str


def find_fault(error: BaseException) -> _Fault:
    """
    Where an exception comes from. Frames of mt_grpo and of Python's own library are left out, and those of installed
    packages where any other is there. An exception without a frame of the user's is asked for its cause, and a group
    of exceptions for its members.
    """
    if isinstance(error, RemoteError):
        return error.fault
    frames, where = _theirs([])
    for one in _causes(error):
        frames, where = _theirs(traceback.extract_tb(one.__traceback__))
        if frames:
            error = one
            break
    shown = frames or traceback.extract_tb(error.__traceback__)[-1:]
    of_frames = textwrap.dedent("".join(traceback.StackSummary.from_list(shown[-MOST_FRAMES:]).format()))
    text = of_frames + "".join(traceback.format_exception_only(error))
    return _Fault(where, text.strip())


def find_standing(thread: int, work: object) -> str | None:
    """Where users' code stands in a coroutine that waits or, where it runs or has not begun, in its thread."""
    frame = sys._current_frames().get(thread)
    stack = [] if frame is None else [*traceback.extract_stack(frame)]
    while inspect.iscoroutine(work) and work.cr_frame is not None:
        stack += traceback.extract_stack(work.cr_frame, limit=1)
        work = work.cr_await
    return _theirs(stack)[1]


def _theirs(frames: list[traceback.FrameSummary]) -> tuple[list[traceback.FrameSummary], str | None]:
    """Frames of users' code, and the place of the innermost."""
    theirs = [frame for frame in frames if not _is_ours_or_python(frame.filename)]
    theirs = [frame for frame in theirs if not any(each in frame.filename for each in _INSTALLED)] or theirs
    return theirs, f"{theirs[-1].filename}, line {theirs[-1].lineno}, in {theirs[-1].name}" if theirs else None


def _is_ours_or_python(file: str) -> bool:
    installed = any(each in file for each in _INSTALLED)
    return file.startswith((_OURS, "<frozen")) or (file.startswith(_PYTHON) and not installed)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, and what it was raised from; each once."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        hidden = one.__suppress_context__  # by `raise ... from None`: what it hides may hold a secret
        waiting += [before for before in (one.__cause__, None if hidden else one.__context__) if before is not None]


def defined_at(function: Callable[..., object]) -> str:
    """Where a user's function is written, as ` (FILE, line N)`; nothing for one of mt_grpo or not of Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename.startswith(_OURS):
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno})"


ONLY_MAIN = "only works in main thread"
"""What Python says of what sets the handler of a signal, elsewhere."""


def describe_error(error: BaseException) -> str:
    """The kind of an exception and what it says, of a group also its first member's; with a mend, if it has one."""
    if isinstance(error, RemoteError):
        return error.said
    try:
        said = f"{type(error).__name__}: {error}"
        if ONLY_MAIN in said and isinstance(error, (ValueError, RuntimeError)):
            said += (
                " (what needs the main thread must be a plain function, with `max_staleness: 0`; a tool may be one in "
                "a process of its own instead, with `tool_processes: 1`)"
            )
        return f"{said}: {describe_error(error.exceptions[0])}" if isinstance(error, BaseExceptionGroup) else said
    except BaseException:  # the exception is the user's class, and its `__str__` user's code
        return type(error).__name__


_LIBRARIES = {"accelerate", "datasets", "huggingface_hub", "peft", "safetensors", "tokenizers", "transformers", "trl"}
"""Packages that check the user's input; the user can mend their errors."""


MISREAD = (TypeError, AttributeError, LookupError)
"""What libraries raise further where a file of a model holds what they do not look for."""
_MODEL_CODE = "transformers_modules"
"""The package in which transformers has the code that comes with models."""


@contextlib.contextmanager
def libraries_may_refuse(what: str, *also: type[Exception]) -> Iterator[None]:
    """Turns the errors that libraries raise about a user's input into `ConfigError`; `also` those of further kinds."""
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, NotImplementedError, *also)
    try:
        yield
    except kinds as error:
        if _package_of(error) not in _LIBRARIES:
            raise
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def users_code(what: str, error: type[Exception] = ConfigError, mend: str = "") -> Iterator[None]:
    """Turns what the user's code raises in the block into an error that begins with `what`; a sentence passes."""
    try:
        yield
    except UserError:
        raise
    except Exception as failure:
        raise error(f"{what} ({describe_error(failure)}){mend}.") from failure


def _package_of(error: BaseException) -> str:
    """The package whose code raised the error, or had JSON read that is none."""
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [module.partition(".")[0] for module in modules]
    if isinstance(error, MISREAD) and _MODEL_CODE in packages:  # a fault of that code: its file and line are shown
        return _MODEL_CODE
    return next(package for package in reversed(packages) if package != "json")
