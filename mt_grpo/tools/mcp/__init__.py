"""
The tools of MCP servers as tools of a conversation, and `MCPBaseTool`, verl's class to subclass for them. The `mcp`
library is imported when a server is started, no sooner.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mt_grpo.concurrency import OutOfTime, call, in_thread, waiting
from mt_grpo.imports import did_you_mean
from mt_grpo.media import Part, read_parts
from mt_grpo.sounds import decoded, is_wav
from mt_grpo.tools.function import Tool, ToolDefinitionError
from mt_grpo.tools.mcp.server import McpPool, McpServer, McpToolError, shared_server
from mt_grpo.tools.mcp.session import Listed, McpServerConfig, read_servers
from mt_grpo.tools.stateful import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.trajectory import Arguments, ToolSchema

__all__ = ["MCPBaseTool", "McpServer", "McpServerConfig", "McpToolError", "mcp_tools", "read_servers", "result_text"]


@dataclass(frozen=True)
class McpRemote:
    """One tool of one server."""

    server: McpServer | McpPool
    listed: Listed
    timeout: float | None = None
    pace: Pace | None = None

    @property
    def schema(self) -> ToolSchema:
        """The description in OpenAI's form."""
        function = {
            "name": self.listed["name"],
            "description": self.listed.get("description") or "",
            "parameters": self.listed["inputSchema"],
        }
        return {"type": "function", "function": function}

    @property
    def only_reads(self) -> bool:
        """Whether the server says that a call of it changes nothing (`readOnlyHint`)."""
        return (self.listed.get("annotations") or {}).get("readOnlyHint") is True

    async def call(self, arguments: Arguments) -> tuple[list[Any], dict[str, Any] | None]:
        """Calls the tool."""
        if self.pace is not None:
            await self.pace.wait()
        name = self.listed["name"]
        try:
            result = await call(self.server.call, name, arguments, what=name, timeout=self.timeout)
        except OutOfTime as error:
            raise McpToolError(str(error)) from error
        rest = result.model_dump(by_alias=True, mode="json", exclude={"content"})
        if rest.get("isError"):
            raise McpToolError(result_text(result.content) or f"{self.listed['name']} failed.")
        data = rest.get("structuredContent")
        if not result.content and data is not None:
            return [_Text(json.dumps(data, ensure_ascii=False))], data
        return result.content, data


@dataclass
class McpTool(Tool):
    """A tool of an MCP server as the model sees it."""

    remote: McpRemote = field(kw_only=True)


@dataclass(frozen=True)
class _Text:
    """Data that came without text, in the form of the text that servers should add."""

    text: str
    type: str = "text"


class Pace:
    """Spaces calls, with a burst of one second's worth."""

    def __init__(self, per_second: float) -> None:
        self._interval = 1.0 / per_second
        self._burst = max(1.0, self._interval)
        self._due = 0.0

    async def wait(self) -> None:
        """Waits for the caller's turn."""
        now = time.monotonic()
        self._due = max(self._due, now) + self._interval
        with waiting():
            await asyncio.sleep(max(0.0, self._due - now - self._burst))


def remote_tools(
    path: str, selected: list[str] | None = None, timeout: float | None = None, rate_limit: float | None = None
) -> list[McpRemote]:
    """Starts the servers of a file and lists their tools."""
    pace = None if rate_limit is None else Pace(rate_limit)
    tools = [
        McpRemote(server, listed, timeout, pace)
        for server in [shared_server(config) for config in read_servers(path)]
        for listed in server.list_tools()
    ]
    names = [tool.listed["name"] for tool in tools]
    for name in selected or []:
        if name not in names:
            raise ToolDefinitionError(
                f"The MCP servers of {path} have no tool {name!r} (`tool_selected_list`){did_you_mean(name, names)}: "
                f"they have {', '.join(names) or 'none'}."
            )
    if not names:
        raise ToolDefinitionError(f"The MCP servers of {path} have no tools.")
    return [tool for tool in tools if not selected or tool.listed["name"] in selected]


def mcp_tools(
    path: str, selected: list[str] | None = None, timeout: float | None = None, rate_limit: float | None = None
) -> list[Tool]:
    """The tools of the MCP servers of a file; see `remote_tools` for arguments and errors."""
    return [_as_tool(remote) for remote in remote_tools(path, selected, timeout, rate_limit)]


def _as_tool(remote: McpRemote) -> Tool:
    async def call(**arguments: object) -> object:
        content, data = await remote.call(arguments)
        shown: Any = result_text(content)
        if any(part.type in ("image", "audio") for part in content):
            shown = await in_thread(partial(result_parts, content), "mt-grpo-mcp-result") or shown
        # the library wraps a plain value as `{"result": value}`, which says nothing beyond the text
        return shown if data is None or data.keys() == {"result"} else (shown, data)

    return McpTool(**remote.schema["function"], function=call, remote=remote, keeps_state=True)


def result_parts(content: list[Any]) -> list[Part] | None:
    """The parts of a result that shows images or plays sounds; `None` if none does."""
    parts = [_part(part) for part in content]
    return read_parts(parts) if any(part["type"] != "text" for part in parts) else None


def _part(part: Any) -> Part:
    words = _part_text(part)
    if part.type == "image" and importlib.util.find_spec("PIL") is not None:
        return {"type": "image", "image": decoded(part.data, "An image of an MCP server"), "alt": words}
    data = decoded(part.data, "A sound of an MCP server") if part.type == "audio" else b""
    if data and (is_wav(data) or importlib.util.find_spec("soundfile") is not None):
        return {"type": "audio", "audio": data, "alt": words}
    return {"type": "text", "text": words}


def result_text(content: list[Any]) -> str:
    """The text of a result's content, one part per line. A part that is not text is named by its kind."""
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if part.type == "text":
        return part.text
    if part.type == "resource" and "text" in (resource := part.resource.model_dump()):
        return resource["text"]
    return f"[{part.type}: not text]"


class MCPBaseTool(BaseTool):
    """
    Reads the results of an MCP server in its own way: override `_parse_tool_result`. Name the subclass as the
    `class_name` of an entry of `type: mcp`; one object is made for each tool of its servers.
    """

    remote: McpRemote
    """The tool behind it."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)

    async def execute(self, instance_id: str, parameters: Arguments, **kwargs: object) -> tuple[Any, float, dict]:
        """Calls the tool of the server; an error of it is raised, and reaches the model as the error of its call."""
        content, _ = await self.remote.call(parameters)
        text, metrics = self._parse_tool_result(content)
        return ToolResponse(text=text), 0.0, metrics

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict]:
        """Reads a result."""
        return result_text(content), {}
