"""Runs the tool calls of a turn: concurrently, each within its time, each failure an answer the model can read."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from mt_grpo.envs.threads import guarded, in_thread
from mt_grpo.tools import Tool
from mt_grpo.trajectory import ToolCall, Turn


async def execute_calls(calls: list[ToolCall], tools: dict[str, Tool], timeout: float | None = None) -> None:
    """
    Runs calls concurrently and writes result, error and time into each, in place; the order of `calls` is kept.

    Args:
        calls (`list[ToolCall]`): Calls of one turn.
        tools (`dict[str, Tool]`): Tools by name.
        timeout (`float`, *optional*): Seconds one call may take. A synchronous tool that exceeds it is abandoned, not
            killed: Python cannot stop its thread.

    A call that did not finish failed, whatever ended the wait: its own time, or the conversation's.
    """
    start = time.perf_counter()
    running: dict[asyncio.Future[Any], ToolCall] = {}
    ended: dict[asyncio.Future[Any], float] = {}
    unfinished = "did not finish before the conversation ended."
    try:
        for call in calls:
            tool = tools.get(call.name)
            if tool is None:
                problem = f"unknown tool {call.name!r}; the tools are: {', '.join(tools) or 'none'}."
            else:
                problem = tool.check(call.arguments)
            if problem:
                _fail(call, problem)
                continue
            call.executed = True
            future = _begin(tool, call.arguments)
            future.add_done_callback(lambda done: ended.setdefault(done, time.perf_counter()))
            running[future] = call
        if running:
            await asyncio.wait(running, timeout=timeout)
        if timeout is not None:
            unfinished = f"took longer than {timeout:g} s."
    finally:
        finished = {future for future in running if future.done()}
        for future in running:
            future.cancel()
        for future, call in running.items():
            call.seconds = ended.get(future, time.perf_counter()) - start
            if future in finished:
                _read(call, future)
            else:
                _fail(call, f"{call.name} {unfinished}")


def fail_unanswered(turn: Turn) -> None:
    """Fails the calls of a turn that were never begun, since the conversation ended before."""
    for call in turn.tool_calls:
        if not (turn.replies or call.executed or call.error):
            _fail(call, f"{call.name} was not run: the conversation ended before.")


def _read(call: ToolCall, future: asyncio.Future[Any]) -> None:
    """Writes what became of a call into it."""
    if future.cancelled():
        _fail(call, f"{call.name} was cancelled.")
    else:
        try:
            call.result = Tool.render(future.result())
        except Exception as error:  # whatever a user's tool raises is the model's to read
            _fail(call, f"{type(error).__name__}: {error}")


def _fail(call: ToolCall, error: str) -> None:
    call.error = Tool.render(error)
    call.result = f"Error: {call.error}"


def _begin(tool: Tool, arguments: dict[str, Any]) -> asyncio.Future[Any]:
    """An async tool runs in a task that bears its name, by which it is known where it does not let itself be ended."""
    if not tool.is_async:
        return in_thread(partial(tool.function, **arguments), f"tool-{tool.name}")
    task = asyncio.ensure_future(guarded(tool.function(**arguments)))
    task.set_name(f"tool {tool.name!r}")
    return task
