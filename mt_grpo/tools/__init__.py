"""Tools that a model can call."""

from mt_grpo.tools.calculator import calculator
from mt_grpo.tools.function import Tool, ToolDefinitionError
from mt_grpo.tools.loading import in_processes, load_tools, load_tools_file, tool
from mt_grpo.tools.mcp.tools import MCPBaseTool
from mt_grpo.tools.stateful import BaseTool, OpenAIFunctionToolSchema, ToolResponse, ToolSession

__all__ = [
    "BaseTool",
    "MCPBaseTool",
    "OpenAIFunctionToolSchema",
    "Tool",
    "ToolDefinitionError",
    "ToolResponse",
    "ToolSession",
    "calculator",
    "in_processes",
    "load_tools",
    "load_tools_file",
    "tool",
]
