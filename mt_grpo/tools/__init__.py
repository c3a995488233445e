"""Tools that a model can call."""

from mt_grpo.tools.calculator import calculator
from mt_grpo.tools.function import Tool, ToolDefinitionError
from mt_grpo.tools.loading import load_tools, tool

__all__ = ["Tool", "ToolDefinitionError", "calculator", "load_tools", "tool"]
