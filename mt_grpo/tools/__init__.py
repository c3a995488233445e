"""Tools that a model can call."""

from mt_grpo.tools.calculator import calculator
from mt_grpo.tools.function import Tool, ToolDefinitionError
from mt_grpo.tools.loading import load_tools, tool
from mt_grpo.tools.mcp.base import MCPBaseTool
from mt_grpo.tools.session import ToolSession
from mt_grpo.tools.stateful import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.tools.tool_file import load_tools_file

__all__ = [
    "BaseTool",
    "MCPBaseTool",
    "OpenAIFunctionToolSchema",
    "Tool",
    "ToolDefinitionError",
    "ToolResponse",
    "ToolSession",
    "calculator",
    "load_tools",
    "load_tools_file",
    "tool",
]
