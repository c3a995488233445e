"""One daemon thread with one event loop for all that is asynchronous, so that plain calls work in a notebook too."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that cancelled tasks may take to end before they are left behind."""
_LOOK = 0.1  # seconds between looks for Ctrl-C: a signal that another thread took does not wake the one that waits
_WORK: contextvars.ContextVar[Any] = contextvars.ContextVar("tasks of the work that a task belongs to")


def run(work: Coroutine[Any, Any, T]) -> T:
    """
    Runs a coroutine in the background loop and waits for it. If the wait is interrupted (Ctrl-C, a signal handler that
    raises), the coroutine and every task that it began are cancelled. They have `GRACE` seconds to end; a warning
    names those that do not. Then the interruption is raised.

    Args:
        work (`Coroutine`): Runs with the context variables of the caller.

    Returns:
        The result of the coroutine. Its exceptions are raised.

    Raises:
        RuntimeError: If this is called in the background thread, which would wait for itself.
    """
    background = _background()
    if threading.current_thread() is background.thread:
        work.close()
        raise RuntimeError(
            "A call that waits was made inside a coroutine, which would wait for itself: await the coroutine behind "
            "it, or make the call in a plain function."
        )
    root: asyncio.Task[T] | None = None
    ended, tasks = threading.Event(), weakref.WeakSet()

    def begin() -> None:
        nonlocal root
        root = background.loop.create_task(work)
        root.add_done_callback(end)

    def end(done: asyncio.Task[T]) -> None:
        if not done.cancelled():
            done.exception()  # an interrupted caller does not ask for it
        ended.set()

    async def drain() -> list[asyncio.Task[Any]]:
        if root is None:
            work.close()
            return []
        deadline = time.monotonic() + GRACE
        root.cancel()
        await asyncio.wait([root], timeout=GRACE)
        return await _cancel(tasks, deadline - time.monotonic())

    context = contextvars.copy_context()
    context.run(_WORK.set, tasks)
    try:
        background.loop.call_soon_threadsafe(begin, context=context)
        while not ended.wait(_LOOK):
            pass
    except BaseException:
        background.finish(drain())
        raise
    return root.result()


class _Background:
    """The thread and its loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(_note_task)
        self.loop.set_default_executor(_DaemonThreads())
        self.left: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()  # cancelled, waited for, and named
        self.thread = threading.Thread(target=self._serve, daemon=True, name="mt-grpo-background")
        self.thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        stopped = False
        while not stopped:
            # a task that raises one of these keeps it for who waits for the task; the others go on
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
                stopped = True

    def finish(self, draining: Coroutine[Any, Any, list[asyncio.Task[Any]]]) -> None:
        """Waits until cancelled tasks have ended, for little more than `GRACE` seconds."""
        future = asyncio.run_coroutine_threadsafe(draining, self.loop)
        deadline = time.monotonic() + GRACE + 1.0
        while not future.done() and time.monotonic() < deadline:
            concurrent.futures.wait([future], timeout=_LOOK)
        if future.done():
            pending = future.result()
            self.left.update(pending)
            if pending:
                logger.warning(
                    "Cancelled, but not ended within %g s: %s. It is left to itself; let `asyncio.CancelledError` "
                    "pass in it.",
                    GRACE,
                    _called(pending),
                )
            return
        busy = asyncio.current_task(self.loop)
        logger.warning(
            "Code that blocks its thread did not end within %g s: %s. It is left to itself.",
            GRACE,
            "a callback" if busy is None else _called([busy]),
        )
        _forget()


class _DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """Runs the calls of `asyncio.to_thread`. A call that hangs holds up neither other calls nor the process's end."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, daemon=True, name="mt-grpo-to-thread").start()
        return future


_current: _Background | None = None
_lock = threading.Lock()


def _background() -> _Background:
    global _current
    with _lock:
        if _current is None:
            _current = _Background()
        return _current


def _forget() -> None:
    """Makes the next call start another thread. A forked process needs it, since it has no threads of its parent."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


def _note_task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
    task = asyncio.Task(work, loop=loop, **options)
    tasks = _WORK.get(None)
    if tasks is not None:
        tasks.add(task)
    return task


async def _cancel(tasks: Iterable[asyncio.Task[Any]], seconds: float) -> list[asyncio.Task[Any]]:
    """Cancels tasks, and returns those that have not ended after some seconds."""
    tasks = [task for task in tasks if not task.done()]
    for task in tasks:
        task.cancel()
    return list((await asyncio.wait(tasks, timeout=max(seconds, 0.0)))[1]) if tasks else []


def _called(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Names of tasks, as tools, rewards and conversations gave them; for other tasks, their functions."""
    tasks = list(tasks)
    named = {task.get_name() for task in tasks if not task.get_name().startswith("Task-")}
    return ", ".join(sorted(named or {task.get_coro().__qualname__ for task in tasks}))


@atexit.register
def _end() -> None:
    """Lets running tasks end before the process does."""
    if _current is None:
        return
    background = _current

    async def drain() -> list[asyncio.Task[Any]]:
        mine = asyncio.current_task()
        return await _cancel(asyncio.all_tasks() - set(background.left) - {mine}, GRACE)

    background.finish(drain())
    background.loop.call_soon_threadsafe(background.loop.stop)


os.register_at_fork(after_in_child=_forget)
