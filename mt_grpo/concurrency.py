"""
The one way to run coroutines from threads, and functions in threads from coroutines.

- `run(coroutine)`, from any thread: runs it in the background event loop of this process and waits for it.
- `BackgroundTask(coroutine)`, from any thread: the same in two steps, begun and waited for.
- `call(function, ...)`, in a coroutine: calls a user's function, `async` or not, within its time.
- `in_thread(function, name)`, in a coroutine: begins a blocking call in a daemon thread.
- `ConcurrencyLimit`, `CallClock`: how many calls of a kind run at once, and how long one may take, for all event loops
  of the process. A call that waits for a place takes no time of its own.
- `Conversation`: what the calls of one conversation hold, to be released at its end.
- `LoopThread`: a daemon thread with an event loop, for what outlives the loop of its caller.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import inspect
import logging
import os
import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from mt_grpo.errors import ONLY_MAIN, describe_error

T = TypeVar("T")
Task: TypeAlias = asyncio.Task[Any]
Future: TypeAlias = asyncio.Future[Any]
ThreadFuture: TypeAlias = concurrent.futures.Future[Any]
logger = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that cancelled tasks may take to end before they are left behind."""
_LOOK = 0.1  # seconds between looks at a call, and for Ctrl-C: a signal of another thread does not wake one that waits
_TASKS: contextvars.ContextVar[weakref.WeakSet[Task]] = contextvars.ContextVar(
    "tasks that the coroutine given to `run` has begun"
)


# Places and clocks of calls


class CallClock:
    """Counts the seconds of a call without those in which it waits for a `ConcurrencyLimit`; shared by its threads."""

    def __init__(self) -> None:
        self._outer = _current.get()
        self._lock = threading.Lock()
        self._since = time.perf_counter()
        self._counted = 0.0
        self._stops = 0
        self.over = False  # whether the call was out of time

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[CallClock]:
        """A running clock for the task or thread that is started in the block."""
        clock = cls()
        token = _current.set(clock)
        try:
            yield clock
        finally:
            _current.reset(token)

    @property
    def seconds(self) -> float:
        """So far."""
        with self._lock:
            return self._counted if self._stops else self._counted + time.perf_counter() - self._since

    def left(self, seconds: float) -> float:
        """Seconds to wait for its end before the clock is checked again, for a timeout of `seconds`."""
        return max(seconds - self.seconds, _LOOK if self._stops else 0.0)

    def end(self) -> None:
        """Stops the clock for good."""
        with self._lock:
            if not self._stops:
                self._counted += time.perf_counter() - self._since
            self._stops += 1

    def stop(self) -> None:
        """Stops the clock, and those of the calls that made this one."""
        self.end()
        if self._outer is not None:
            self._outer.stop()

    def resume(self) -> None:
        """Ends what one `stop` began; the clock runs once all have ended."""
        with self._lock:
            self._stops -= 1
            self._since = time.perf_counter()
        if self._outer is not None:
            self._outer.resume()


_current: contextvars.ContextVar[CallClock | None] = contextvars.ContextVar(
    "the clock of the call that this task or thread is", default=None
)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Stops the clock of the current call while the block waits."""
    clock = _current.get()
    if clock is None:
        yield
        return
    clock.stop()
    try:
        yield
    finally:
        clock.resume()


class ConcurrencyLimit:
    """A FIFO semaphore shared by all event loops of the process; waiting counts toward no call's timeout."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> ConcurrencyLimit:
        """The copy of a tool is limited together with it."""
        return self

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            with waiting():
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was this call's turn when it was cancelled
                self._release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        """Wakes the next waiter, or frees the place."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(self._grant, turn)
                    return
                except RuntimeError:  # that loop is closed, and what waited there is gone
                    continue
            self._free += 1

    def _grant(self, turn: asyncio.Future[None]) -> None:
        if turn.done():  # cancelled while it waited
            self._release()
        else:
            turn.set_result(None)


# From a thread: coroutines


def run(work: Coroutine[object, object, T]) -> T:
    """
    Runs a coroutine in the background loop and waits for it; this works inside a running loop (a notebook) too. If the
    wait is interrupted (Ctrl-C, a signal handler that raises), the coroutine and every task that it began are
    cancelled. They have `GRACE` seconds to end; a warning names those that do not. Then the interruption is raised.
    """
    begun = BackgroundTask(work)
    try:
        begun.wait(begun.start)
    except BaseException:
        begun.cancel()
        raise
    return begun.result()


class BackgroundTask(Generic[T]):
    """A coroutine in the background loop; a thread may wait for it later."""

    def __init__(self, work: Coroutine[object, object, T]) -> None:
        self._background = _background.get()
        if threading.current_thread() is self._background.thread:
            work.close()
            raise RuntimeError(
                "A call that waits was made inside a coroutine, which would wait for itself: await the coroutine "
                "behind it, or make the call in a plain function."
            )
        self._work = work
        self._root: asyncio.Task[T] | None = None
        self._tasks: weakref.WeakSet[Task] = weakref.WeakSet()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._context = contextvars.copy_context()
        self._context.run(_TASKS.set, self._tasks)

    def start(self) -> BackgroundTask[T]:
        """Begins it. Returns itself."""
        self._background.loop.call_soon_threadsafe(self._start, context=self._context)
        return self

    def wait(self, first: Callable[[], object] = lambda: None) -> None:
        """Calls `first`, then waits until the task has ended. Interrupting the wait leaves it running."""
        wait = _Wait()

        def begin_to_wait() -> None:
            self._ended.add_done_callback(lambda done: wait.end())
            first()

        wait.until_end(begin_to_wait)

    def result(self) -> T:
        """Waits for its result; its exceptions are raised."""
        self.wait()
        assert self._root is not None  # it has ended
        return self._root.result()

    def cancel(self) -> None:
        """Cancels it and every task that it began; a warning names those that do not end within `GRACE` seconds."""
        self._background.finish(self._drain())

    def _start(self) -> None:
        self._root = self._background.loop.create_task(self._work)
        self._root.add_done_callback(self._end)

    def _end(self, done: asyncio.Task[T]) -> None:
        consume_exception(done)  # an interrupted caller does not ask for its exception
        self._ended.set_result(None)

    async def _drain(self) -> list[Task]:
        if self._root is None:
            self._work.close()
            return []
        deadline = time.monotonic() + GRACE
        self._root.cancel()
        await asyncio.wait([self._root], timeout=GRACE)
        return await _cancel(self._tasks, deadline - time.monotonic())


class _Wait:
    """The wait of a thread for work; the main thread makes calls meanwhile that only it can make (`signal.alarm`)."""

    main: _Wait | None = None
    """That of the main thread, while there is one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[ThreadFuture, Callable[[], Any]]] = queue.SimpleQueue()
        self._end: ThreadFuture = concurrent.futures.Future()

    def end(self) -> None:
        """Ends the wait, from any thread."""
        self._calls.put((self._end, lambda: None))

    def until_end(self, start: Callable[[], object]) -> None:
        """Starts the work and waits: its first call may come before this thread goes on."""
        before, is_main = _Wait.main, threading.current_thread() is threading.main_thread()
        if is_main:
            _Wait.main = self
        try:
            start()
            while not self._end.done():
                try:
                    future, function = self._calls.get(timeout=_LOOK)
                except queue.Empty:
                    continue
                _settle(future, function)
                if not future.cancelled() and isinstance(error := future.exception(), KeyboardInterrupt):
                    raise error
        finally:
            if is_main:  # another thread's wait may outlive the main thread's
                _Wait.main = before
            self._end.cancel()
            while not self._calls.empty():
                self._calls.get()[0].cancel()

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function in the thread that waits. It is cancelled where the wait ends before its turn."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._calls.put((future, function))
        if self._end.done():
            future.cancel()
        return future.result()


def _settle(future: ThreadFuture, function: Callable[[], object]) -> None:
    """Gives a future what a function returns or raises, unless it is cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _anywhere(function: Callable[[], T]) -> T:
    """Calls a function in this thread, or in the main thread if it says that it only works there."""
    try:
        return function()
    except Exception as error:
        reasons = error, error.__cause__
        main = _Wait.main
        kinds = ValueError, RuntimeError  # of `signal.signal`, and of an event loop's `add_signal_handler`
        if main is None or not any(isinstance(one, kinds) and ONLY_MAIN in str(one) for one in reasons):
            raise
    return main.call(function)


async def in_waiting_thread(function: Callable[[], T]) -> T:
    """Calls a function in the main thread where that waits for a coroutine, as `run` does, else in a thread."""
    main = _Wait.main
    work = function if main is None else partial(main.call, function)
    result: T = await in_thread(work, "mt-grpo-waiting")
    return result


class LoopThread:
    """A daemon thread with an event loop."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, daemon=True, name=name)
        self.thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        stopped = False
        while not stopped:
            # a task that raises one of these keeps it for who waits for the task; the others go on
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
                stopped = True

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Runs `work` in the thread, awaited in any loop; cancelled with whoever awaits it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """Runs `work` in the thread and blocks; what interrupts the wait (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            while not future.done():
                concurrent.futures.wait([future], timeout=_LOOK)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Ends the loop, and the thread with it; what still runs there is left as it is."""
        self.loop.call_soon_threadsafe(self.loop.stop)


class OnePerProcess(Generic[T]):
    """A value of which each process makes one on first use; a forked one has none of its parent's threads."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._value: T | None = None

    def get(self, fit: Callable[[T], bool] = lambda value: True) -> T:
        """The one there is; another, from here on, where there is none or it is not `fit`."""
        with self._lock:
            if self._value is None or not fit(self._value):
                self._value = self._make()
            return self._value

    def take(self) -> T | None:
        """The one there is, if any; the next `get` makes another."""
        with self._lock:
            value, self._value = self._value, None
            return value


class _Background(LoopThread):
    """The thread of `run`, which knows the tasks that each coroutine has begun."""

    def __init__(self) -> None:
        super().__init__("mt-grpo-background")
        self.left: weakref.WeakSet[Task] = weakref.WeakSet()  # cancelled, waited for, and named
        self.loop.set_task_factory(_note_task)
        self.loop.set_default_executor(_DaemonThreads())

    def finish(self, draining: Coroutine[object, object, list[Task]]) -> None:
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
                    _names(pending),
                )
            return
        busy = asyncio.current_task(self.loop)
        logger.warning(
            "Code that blocks its thread did not end within %g s: %s. It is left to itself.",
            GRACE,
            "a callback" if busy is None else _names([busy]),
        )
        _background.take()  # the next call starts another thread


_background = OnePerProcess(_Background)


class _DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """Runs the calls of `asyncio.to_thread`. A call that hangs holds up neither other calls nor the process's end."""

    def submit(self, function: Callable[..., object], /, *args: object, **kwargs: object) -> ThreadFuture:
        future: ThreadFuture = concurrent.futures.Future()
        work = partial(_settle, future, partial(function, *args, **kwargs))
        threading.Thread(target=work, daemon=True, name="mt-grpo-to-thread").start()
        return future


def _note_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Task:
    task: Task = asyncio.Task(work, loop=loop, **options)
    tasks = _TASKS.get(None)
    if tasks is not None:
        tasks.add(task)
    return task


async def _cancel(tasks: Iterable[Task], seconds: float) -> list[Task]:
    """Cancels tasks, and returns those that have not ended after some seconds."""
    tasks = [task for task in tasks if not task.done()]
    for task in tasks:
        task.cancel()
    return list((await asyncio.wait(tasks, timeout=max(seconds, 0.0)))[1]) if tasks else []


def _names(tasks: Iterable[Task]) -> str:
    """Names of tasks, as tools, rewards and conversations gave them; for other tasks, their functions."""
    tasks = list(tasks)
    named = {task.get_name() for task in tasks if not task.get_name().startswith("Task-")}
    functions: list[Any] = [task.get_coro() for task in tasks]
    return ", ".join(sorted(named or {function.__qualname__ for function in functions}))


@atexit.register
def _end() -> None:
    """Lets running tasks end before the process does."""
    background = _background.take()
    if background is None:
        return

    async def drain() -> list[Task]:
        mine = asyncio.current_task()
        return await _cancel(asyncio.all_tasks() - set(background.left) - {mine}, GRACE)

    background.finish(drain())
    background.stop()


# From a coroutine: calls of users' code, which neither hold up the event loop nor outlive their time


class OutOfTime(Exception):
    """A call of the user's code took longer than it may."""


class _GivenUp:
    """Counts calls that were out of time and whose threads go on: a process may have so many threads, and no more."""

    step = 100

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._said = 0

    def add(self, name: str) -> None:
        """Counts one; each `step` more are warned of."""
        self._running[name] += 1
        number = self._running.total()
        if number >= self._said + self.step:
            self._said = number
            logger.warning(
                "%d calls that were out of time still run, most of %s, each in a thread, which cannot be stopped and "
                "of which a system allows only so many: let it end by a timeout of its own, or make it `async`. Tools "
                "that are plain functions can be ended in processes (`tool_processes`).",
                number,
                self._running.most_common(1)[0][0],
            )

    def remove(self, name: str) -> None:
        """One has ended."""
        self._running[name] -= 1


_given_up = _GivenUp()


async def call(
    function: Callable[..., object],
    *args: object,
    what: str,
    timeout: float | None = None,
    late: Callable[[Any], object] | None = None,
) -> Any:
    """Calls a user's function: an `async` one in the loop, others in a thread, whose late result goes to `late`."""
    if inspect.iscoroutinefunction(function):
        result = function(*args)
        if timeout is None:
            return await guarded(result)
    else:
        result = await _within(partial(in_thread, partial(function, *args), what, late), what, timeout)
    return await _within(partial(begin, result, what), what, timeout) if inspect.isawaitable(result) else result


def in_thread(function: Callable[[], object], name: str, late: Callable[[Any], object] | None = None) -> Future:
    """
    Runs a blocking function in a daemon thread of its own, so that neither a pool's size nor a function that hangs
    holds up other calls or the end of the process. One that sets the handler of a signal is called again in the main
    thread, one such call after another. For `late` see `call`.
    """
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    context = contextvars.copy_context()

    clock, ended, left = _current.get(), False, False

    def note(done: Future) -> None:
        nonlocal left
        left = done.cancelled() and clock is not None and clock.over and not ended
        if left:
            _given_up.add(name)

    future.add_done_callback(note)

    def settle(result: object, error: BaseException | None) -> None:
        nonlocal ended
        ended = True
        if future.done():  # nobody waits for it any more
            if left:
                _given_up.remove(name)
            if inspect.iscoroutine(result):
                result.close()
            elif late is not None and error is None:
                more = late(result)
                if inspect.isawaitable(more):
                    begin(more, name).add_done_callback(consume_exception)
        elif error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = _anywhere(partial(context.run, function))
        except BaseException as caught:
            if isinstance(caught, Exception) and not isinstance(caught, StopIteration):
                error = caught
            else:  # a future cannot carry it, or it would end the event loop
                error = RuntimeError(describe_error(caught))
                error.__cause__ = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True, name=name).start()
    return future


def begin(work: Awaitable[Any], name: str) -> Task:
    """Starts a task of the user's code; warnings use its name if it ignores cancellation."""
    task = asyncio.create_task(guarded(work), name=name)
    if inspect.iscoroutine(work):  # a task that is cancelled before it begins does not close it
        task.add_done_callback(lambda done: work.close())
    return task


async def guarded(work: Awaitable[Any]) -> Any:
    """Awaits `work`; `SystemExit` and the like, which would end the loop, become `RuntimeError`."""
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as caught:
        raise RuntimeError(describe_error(caught)) from caught


async def _within(start: Callable[[], Future], what: str, timeout: float | None) -> Any:
    with CallClock.running() as clock:
        future = start()
    try:
        in_time = await ended_within({future: clock}, timeout)
    finally:
        abandon(future)
    if not in_time:
        raise OutOfTime(f"{what} took longer than {timeout:g} s.")
    if future.cancelled():  # by itself: for who waits, that is a failure like any other
        raise RuntimeError(f"{what} cancelled itself.")
    return future.result()


async def ended_within(clocks: Mapping[Future, CallClock], timeout: float | None) -> set[Future]:
    """Waits for calls, each with its clock, and abandons those that take longer than `timeout` seconds by it."""
    ended: set[Future] = set()
    running = set(clocks)
    while running:
        left = None if timeout is None else min(clocks[future].left(timeout) for future in running)
        done, running = await asyncio.wait(running, timeout=left)
        ended |= done
        for future in [each for each in running if timeout is not None and clocks[each].seconds >= timeout]:
            running.remove(future)
            clocks[future].end()
            clocks[future].over = True
            abandon(future)
    return ended


def abandon(future: Future) -> None:
    """Cancels a future that nobody awaits any more, and consumes its exception."""
    future.cancel()
    future.add_done_callback(consume_exception)


def consume_exception(future: Future) -> None:
    """Retrieves the exception of a future, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()


class Conversation:
    """What a conversation holds of servers. All calls of it, from tools to rewards, find the same."""

    def __init__(self) -> None:
        self.held: dict[object, Any] = {}
        self.lock = asyncio.Lock()
        self.at_end = contextlib.ExitStack()

    @staticmethod
    def current() -> Conversation | None:
        """The conversation of the running task; `None` outside of conversations."""
        return _conversation.get()

    @staticmethod
    @contextlib.contextmanager
    def begun() -> Iterator[None]:
        """Context manager for one conversation; releases its server slots on exit."""
        mine = Conversation()
        before = _conversation.set(mine)
        try:
            with mine.at_end:
                yield
        finally:
            _conversation.reset(before)


_conversation: contextvars.ContextVar[Conversation | None] = contextvars.ContextVar(
    "the conversation that this task belongs to", default=None
)
