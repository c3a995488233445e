"""A tool of an MCP server as a class to subclass, in the form of verl's `MCPBaseTool`."""

from __future__ import annotations

from typing import Any

from mt_grpo.tools.mcp.tools import McpRemote, result_text
from mt_grpo.tools.stateful import BaseTool, OpenAIFunctionToolSchema, ToolResponse


class MCPBaseTool(BaseTool):
    """
    Reads the results of an MCP server in its own way: override `_parse_tool_result`. Name the subclass as the
    `class_name` of an entry of `type: mcp`; one object is made for each tool of its servers.
    """

    remote: McpRemote
    """The tool behind it."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        """Calls the tool of the server; an error of it is raised, and reaches the model as the error of its call."""
        content, _ = await self.remote.call(parameters)
        text, metrics = self._parse_tool_result(content)
        return ToolResponse(text=text), 0.0, metrics

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict]:
        """
        Reads a result.

        Args:
            content (`list`): The parts that the server sent, objects of the `mcp` library with a `type`; a `text`
                part has a `text`.

        Returns:
            What the model reads, and numbers to log.
        """
        return result_text(content), {}
