"""Each tool called once, with arguments made from its schema and the first row."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from mt_grpo.app.doctor.case import Case
from mt_grpo.app.doctor.findings import FAIL, OK, WARN, NotKnown
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.execution import execute_calls
from mt_grpo.errors import ConfigError
from mt_grpo.rollout.background import run
from mt_grpo.tools import Tool
from mt_grpo.tools.mcp.base import MCPBaseTool
from mt_grpo.tools.mcp.tools import McpRemote, McpTool
from mt_grpo.tools.session import ToolSession, ToolStateError
from mt_grpo.tools.stateful import StatefulTool
from mt_grpo.trajectory import ToolCall, visible

WORDS = 80
"""Characters of a result, or of an error, that are shown."""
EXAMPLES = {"expression": "1 + 1", "code": "print(1)"}
"""Arguments by name for which the words of a prompt would not do."""
LIMIT = 60.0
"""Seconds a call may take where the recipe has no `tool_timeout`."""


def tools(case: Case) -> Iterator[tuple[str, str, str]]:
    """Calls each tool once; one of an MCP server only where the server says that it changes nothing."""
    rows: Any = []
    try:
        rows = list(case.train_rows.take(1))
    except NotKnown:  # a tool is called with made-up words then
        pass
    row = rows[0] if rows else {}
    environments = [one for one in case.environments if isinstance(one, MultiTurnToolEnv)]
    offered = {tool.name: tool for one in environments for tool in one.tools.values()}
    if not offered:
        words = "the recipe names none" if environments else "those of its environments belong to a conversation"
        yield OK, f"no tool is called: {words}", ""
    for tool in offered.values():
        remote = remote_of(tool)
        if remote is not None and not remote.only_reads:
            yield OK, f"{tool.name} is offered by its MCP server, and not called, since it may change something", ""
            continue
        call = ToolCall(tool.name, made_arguments(tool.parameters, row))
        limit = LIMIT if case.args.tool_timeout is None else case.args.tool_timeout
        try:
            run(_call(tool, call, row, limit))
        except ToolStateError as error:
            raise ConfigError(str(error)) from error
        yield _outcome(call, limit)
        if call.error is None:
            case.tool_seconds[tool.name] = call.seconds


def _outcome(call: ToolCall, limit: float) -> tuple[str, str, str]:
    asked = f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
    if call.error is None:
        return OK, f"{asked} answered in {call.seconds:.2f} s: {_cut(call.result)!r}", ""
    if call.executed and call.seconds >= limit:
        mend = "see why it hangs, or raise `tool_timeout`"
        return FAIL, f"{asked} did not answer in {limit:g} s", mend
    mend = "arguments were made up: see whether it works with those that the model will give"
    return WARN, f"{asked} answered with an error after {call.seconds:.2f} s: {_cut(call.error)!r}", mend


def remote_of(tool: Tool) -> McpRemote | None:
    """The tool of an MCP server behind a tool."""
    if isinstance(tool, McpTool):
        return tool.remote
    if isinstance(tool, StatefulTool) and isinstance(tool.base, MCPBaseTool):
        return tool.base.remote
    return None


async def _call(tool: Tool, call: ToolCall, row: dict[str, Any], limit: float) -> None:
    session = ToolSession([tool], row, limit)
    try:
        await session.create()
        await execute_calls([call], session.tools, limit)
    finally:
        await asyncio.shield(session.release())
    if session.failures:
        raise ToolStateError(" ".join(session.failures))


def made_arguments(schema: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """
    Arguments for a call: those that the schema requires, each the row's column of the same name, or else what its
    schema gives as an example, and for text the words of the row's prompt.
    """
    properties = schema.get("properties", {})
    return {
        name: row[name] if isinstance(row.get(name), str | int | float) else _made(properties.get(name, {}), row, name)
        for name in schema.get("required", [])
    }


def _made(schema: Any, row: dict[str, Any], name: str = "") -> Any:
    schema = schema if isinstance(schema, dict) else {}  # `true` takes anything
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum", "anyOf", "oneOf"):
        if schema.get(key):
            first = schema[key][0]
            return _made(first, row) if key in ("anyOf", "oneOf") else first
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    if kind == "array":
        return [_made(schema.get("items", {}), row)] * schema.get("minItems", 1)
    if kind == "object":
        return made_arguments(schema, row)
    return {"boolean": False, "null": None}.get(kind, EXAMPLES.get(name) or _words(row))


def _words(row: dict[str, Any]) -> str:
    """The last words of the row's prompt that somebody says."""
    prompt = row.get("prompt") or "test"
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "test")


def _cut(text: str) -> str:
    text = visible(" ".join(text.split()))
    return text if len(text) <= WORDS else f"{text[:WORDS]}…"
