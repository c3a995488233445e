"""Tools that a model can call."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mt_grpo.tools.calculator import calculator
from mt_grpo.tools.function import Tool, ToolDefinitionError
from mt_grpo.tools.loading import in_processes, load_tools, load_tools_file, tool
from mt_grpo.tools.stateful import BaseTool, OpenAIFunctionToolSchema, ToolResponse, ToolSession

if TYPE_CHECKING:
    from mt_grpo.tools.mcp import MCPBaseTool

__all__ = ["BaseTool", "MCPBaseTool", "OpenAIFunctionToolSchema", "Tool", "ToolDefinitionError", "ToolResponse"]
__all__ += ["ToolSession", "calculator", "in_processes", "load_tools", "load_tools_file", "tool"]


def __getattr__(name: str) -> object:
    """Loads what belongs to MCP servers where it is asked for."""
    if name != "MCPBaseTool":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("mt_grpo.tools.mcp").MCPBaseTool
