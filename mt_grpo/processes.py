"""
Calls functions in processes of their own, for those that compute in Python: in one process only one of them computes
at a time, and holds up the event loop.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from mt_grpo.concurrency import ConcurrencyLimit, in_thread
from mt_grpo.errors import ConfigError, RemoteError, defined_at, describe_error, find_fault

_STARTS_WITHIN = 120.0  # seconds in which a process must have loaded its functions

_SPAWN = multiprocessing.get_context("spawn")  # a fork would have the locks of threads that it has not


class _Raised(NamedTuple):
    """What was raised there. Exceptions themselves lose their frames on the way, and some cannot be sent."""

    said: str
    where: str | None
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> _Raised:
        fault = find_fault(error)
        return cls(describe_error(error), fault.where, fault.traceback)


class Processes:
    """A pool of processes. Each training process has its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._limit = ConcurrencyLimit(size)
        self._workers: dict[int, list[_Worker]] = {}  # by the process that made them: a forked one makes its own

    @property
    def _free(self) -> list[_Worker]:
        return self._workers.setdefault(os.getpid(), [])

    def start(self, functions: Sequence[Callable[..., object]]) -> None:
        """Starts the processes, each with all functions loaded, so that no call waits for that."""
        for function in functions:
            try:
                pickle.dumps(function)
            except (pickle.PicklingError, AttributeError) as error:
                raise ConfigError(
                    f"{function.__name__}{defined_at(function)} cannot be called in a process of its own ({error}): "
                    "write it at the top of a module."
                ) from error
        workers = [_Worker() for _ in range(self.size)]
        try:
            _load_all(workers, functions)
        except BaseException:
            for worker in workers:
                worker.process.kill()
            raise
        self._free.extend(workers)

    async def call(self, function: Callable[..., object], arguments: dict[str, Any]) -> Any:
        """Calls a function in a free process; a call that is cancelled ends its process, which is replaced."""
        async with self._limit:
            free = self._free
            worker = free.pop() if free else _Worker()
            whole = False
            try:
                found = await in_thread(partial(worker.ask, function, arguments), "mt-grpo-process")
                whole = True
                return found
            except RemoteError:
                whole = True
                raise
            except (EOFError, ConnectionError) as error:
                raise RemoteError("The process that ran it ended.", None, "") from error
            finally:
                if whole:
                    free.append(worker)
                else:
                    worker.process.kill()


class _Worker:
    """One of the processes. It ends with its pool, and with the process that made it."""

    def __init__(self) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True, name="mt-grpo-process")
        self.process.start()
        theirs.close()
        weakref.finalize(self, _end, self.process, os.getpid()).atexit = False  # it is a daemon

    def ask(self, function: Callable[..., object], arguments: dict[str, Any]) -> Any:
        self.connection.send((function, arguments))
        return self.answer()

    def answer(self) -> Any:
        found = self.connection.recv()
        if isinstance(found, _Raised):
            raise RemoteError(*found)
        return found


def _end(process: SpawnProcess, maker: int) -> None:
    if os.getpid() == maker:  # a forked process forgets its parent's
        process.kill()


def _load_all(workers: list[_Worker], functions: Sequence[Callable[..., object]]) -> None:
    names = ", ".join(function.__name__ for function in functions)
    script = "It runs the script too: put what that does under `if __name__ == '__main__':`."
    try:
        for worker in workers:
            worker.connection.send((_load, {"functions": tuple(functions)}))
        for worker in workers:
            if not worker.connection.poll(_STARTS_WITHIN):
                raise ConfigError(f"A process for {names} did not start within {_STARTS_WITHIN:g} s. {script}")
            worker.answer()
    except (EOFError, ConnectionError) as error:
        raise ConfigError(
            f"A process for {names} ended while it started; what it said stands above. {script}"
        ) from error
    except RemoteError as error:
        raise ConfigError(
            f"A process cannot load {names} ({error.said}): write them at the top of modules that can be imported."
        ) from error


# In such a process


def _serve(connection: Connection) -> None:
    belong_to_parent()
    # locks that are made here have no name then, which would stay in /dev/shm when the process is killed
    multiprocessing.set_start_method("fork", force=True)
    while True:
        try:
            asked = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(asked)
            found = function(**arguments)
        except BaseException as error:  # an `EOFError` too: of a function that asks for input, which nobody gives
            found = _Raised.of(error)
        try:
            connection.send(found)
        except Exception as error:  # a result of the user's that cannot be pickled
            connection.send(_Raised.of(error))


def belong_to_parent() -> None:
    """Leaves signals to the process that made this one, and ends with it."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True, name="mt-grpo-parent").start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _load(functions: tuple[Callable[..., Any], ...]) -> None:
    """Nothing more is to be done: to receive functions is to load them."""
