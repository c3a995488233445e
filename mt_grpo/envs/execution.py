"""Runs the tool calls of a turn: concurrently, each within its time, each failure an answer the model can read."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from mt_grpo.concurrency import abandon, begin, in_thread
from mt_grpo.errors import describe_error, find_fault
from mt_grpo.tools import Tool
from mt_grpo.tools.results import cut, read_result, render
from mt_grpo.trajectory import ToolCall, Turn


async def execute_calls(calls: list[ToolCall], tools: dict[str, Tool], timeout: float | None = None) -> None:
    """
    Runs calls concurrently and writes result, data, error and time into each, in place; the order of `calls` is kept.

    Args:
        calls (`list[ToolCall]`): Calls of one turn.
        tools (`dict[str, Tool]`): Tools by name.
        timeout (`float`, *optional*): Seconds one call may take, the wait for a tool's concurrency limit not counted.
            A synchronous tool that exceeds it is abandoned, not killed: Python cannot stop its thread.

    A call that did not finish failed, whatever ended the wait: its own time, or the conversation's.
    """
    free: list[tuple[Tool, ToolCall]] = []
    limited: list[tuple[Tool, ToolCall]] = []
    for call in calls:
        tool = tools.get(call.name)
        if tool is None:
            _fail(call, f"unknown tool {call.name!r}; the tools are: {', '.join(tools) or 'none'}.")
        elif problem := tool.check(call.arguments):
            _fail(call, problem)
        else:
            (limited if tool.limit else free).append((tool, call))
    waiting = [asyncio.ensure_future(_run_in_limit(tool, call, timeout)) for tool, call in limited]
    try:
        if free:
            await _run(free, timeout)
        if waiting:
            await asyncio.wait(waiting)
    finally:
        if unfinished := [task for task in waiting if not task.done()]:
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished)  # they write what became of their calls


async def _run_in_limit(tool: Tool, call: ToolCall, timeout: float | None) -> None:
    assert tool.limit is not None  # others are not brought here
    async with tool.limit:
        await _run([(tool, call)], timeout)


async def _run(calls: list[tuple[Tool, ToolCall]], timeout: float | None) -> None:
    """Runs calls that begin together."""
    start = time.perf_counter()
    running: dict[asyncio.Future[Any], tuple[Tool, ToolCall]] = {}
    ended: dict[asyncio.Future[Any], float] = {}
    unfinished = "did not finish before the conversation ended."
    try:
        for tool, call in calls:
            call.executed, call.start = True, time.time()
            future = _begin(tool, call.arguments)
            future.add_done_callback(lambda done: ended.setdefault(done, time.perf_counter()))
            running[future] = tool, call
        await asyncio.wait(running, timeout=timeout)
        if timeout is not None:
            unfinished = f"took longer than {timeout:g} s."
    finally:
        finished = {future for future in running if future.done()}
        for future in running:
            abandon(future)
        for future, (tool, call) in running.items():
            call.seconds = ended.get(future, time.perf_counter()) - start
            if future in finished:
                _read(tool, call, future)
            else:
                _fail(call, f"{call.name} {unfinished}")


def fail_unanswered(turn: Turn) -> None:
    """Fails the calls of a turn that were never begun, since the conversation ended before."""
    for call in turn.tool_calls:
        if not (turn.replies or call.executed or call.error):
            _fail(call, f"{call.name} was not run: the conversation ended before.")


def _read(tool: Tool, call: ToolCall, future: asyncio.Future[Any]) -> None:
    """Writes what became of a call into it."""
    if future.cancelled():
        _fail(call, f"{call.name} was cancelled.")
    else:
        try:
            call.result, call.data = future.result()
        except Exception as error:  # whatever a user's tool raises is the model's to read
            _fail(call, cut(describe_error(error), tool.max_result_size))
            call.where = find_fault(error).where


def _fail(call: ToolCall, error: str) -> None:
    call.error = render(error)
    call.result = f"Error: {call.error}"


def _begin(tool: Tool, arguments: dict[str, Any]) -> asyncio.Future[Any]:
    """Begins a call: an async tool in a task, any other in a thread."""
    if not tool.is_async:
        return in_thread(partial(_call, tool, arguments), f"tool-{tool.name}")
    return begin(_call_async(tool, arguments), f"tool {tool.name!r}")


def _call(tool: Tool, arguments: dict[str, Any]) -> Any:
    return read_result(tool.function(**arguments), tool.max_result_size)


async def _call_async(tool: Tool, arguments: dict[str, Any]) -> Any:
    return read_result(await tool.function(**arguments), tool.max_result_size)
