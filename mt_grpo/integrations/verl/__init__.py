"""
verl's interactions and the tools that verl brings, see docs/interactions.md and docs/stateful_tools.md. A file written
for verl runs unchanged, also under verl's own module names (`mt_grpo.imports`); other files import from here.
"""

from mt_grpo.integrations.verl.interactions import (
    BaseInteraction,
    Gsm8kInteraction,
    InteractionEnv,
    InteractionSource,
    WeatherInteraction,
    load_interactions,
)
from mt_grpo.integrations.verl.tools import (
    Geo3kTool,
    Gsm8kTool,
    MCPSearchTool,
    SandboxFusionTool,
    SearchTool,
    compute_score,
    extract_solution,
    rollout_trace_op,
)
from mt_grpo.tools import BaseTool, MCPBaseTool, OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseInteraction", "Gsm8kInteraction", "InteractionEnv", "InteractionSource", "WeatherInteraction"]
__all__ += ["BaseTool", "MCPBaseTool", "OpenAIFunctionToolSchema", "ToolResponse", "load_interactions"]
__all__ += ["Geo3kTool", "Gsm8kTool", "MCPSearchTool", "SandboxFusionTool", "SearchTool"]
__all__ += ["compute_score", "extract_solution", "rollout_trace_op"]
