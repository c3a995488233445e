"""Calls of users' code that neither hold up the event loop nor outlive their time."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from mt_grpo.tools.results import describe_error


def in_thread(function: Callable[[], Any], name: str) -> asyncio.Future[Any]:
    """
    Runs a blocking function in a daemon thread of its own, so that neither a pool's size nor a function that hangs
    holds up other calls or the end of the process.

    Args:
        function (`Callable`): Called without arguments.
        name (`str`): Name of the thread.

    Returns:
        A future of what it returns or raises. What is no `Exception` (`SystemExit`) is raised as `RuntimeError`, so
        that it cannot end the event loop.
    """
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # nobody waits for it any more
            if inspect.iscoroutine(result):
                result.close()
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function()
        except StopIteration as stop:  # a future cannot carry it
            error = _caused(stop)
        except Exception as caught:
            error = caught
        except BaseException as caught:  # SystemExit must not pass for success
            error = _caused(caught)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True, name=name).start()
    return future


def _caused(caught: BaseException) -> RuntimeError:
    error = RuntimeError(describe_error(caught))
    error.__cause__ = caught
    return error


async def call(function: Callable[..., Any], *args: Any, what: str, timeout: float | None = None) -> Any:
    """
    Calls a function of the user's: an `async` one in the event loop, any other in a thread of its own.

    Args:
        function (`Callable`), *args: What to call.
        what (`str`): Its name in errors and thread names.
        timeout (`float`, *optional*): Seconds it may take. An `async` function is cancelled then; a thread cannot be
            stopped and is left behind. Neither is waited for.

    Raises:
        OutOfTime: If it takes longer.
    """
    if inspect.iscoroutinefunction(function):
        result = function(*args)
        if timeout is None:
            return await result
    else:
        result = await _within(in_thread(partial(function, *args), what), what, timeout)
    if inspect.isawaitable(result):
        task = asyncio.ensure_future(guarded(result))
        task.set_name(what)
        result = await _within(task, what, timeout)
    return result


async def guarded(work: Awaitable[Any]) -> Any:
    """Awaits `work`; what would end the event loop, and the run with it, is raised as `RuntimeError`."""
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as caught:
        raise RuntimeError(describe_error(caught)) from caught


async def _within(future: asyncio.Future[Any], what: str, timeout: float | None) -> Any:
    try:
        done, _ = await asyncio.wait([future], timeout=timeout)
    finally:
        abandon(future)
    if not done:
        raise OutOfTime(f"{what} took longer than {timeout:g} s.")
    if future.cancelled():  # by itself: for who waits, that is a failure like any other
        raise RuntimeError(f"{what} cancelled itself.")
    return future.result()


def abandon(future: asyncio.Future[Any]) -> None:
    """Cancels what nobody waits for any more, and asks for the exception that it may still end with."""
    future.cancel()
    future.add_done_callback(_retrieve)


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class OutOfTime(Exception):
    """A call of the user's code took longer than it may."""
