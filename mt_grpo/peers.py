"""ms-swift's and verl's modules by their own names, so that files written for them run as they are."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

SWIFT, VERL, TOOLS = "mt_grpo.integrations.swift", "mt_grpo.integrations.verl", "mt_grpo.tools.stateful"
MODULES: dict[str, dict[str, Sequence[str]]] = {
    "swift.infer_engine": {SWIFT: ("InferRequest", "RequestConfig", "TransformersEngine")},
    "swift.infer_engine.protocol": {
        SWIFT: (
            *("ChatCompletionResponse", "ChatCompletionResponseChoice", "ChatMessage", "RequestConfig"),
            *("RolloutInferRequest", "RolloutOutput"),
        )
    },
    "swift.rewards": {SWIFT: ("ORM", "AsyncORM", "orms", "rm_plugins")},
    "swift.rewards.orm": {SWIFT: ("ORM", "AsyncORM", "MathAccuracy", "orms")},
    "swift.rewards.rm_plugin": {SWIFT: ("DefaultRMPlugin", "rm_plugins")},
    "swift.rollout": {SWIFT: ("Env", "MultiTurnScheduler", "RolloutScheduler", "envs", "multi_turns")},
    "swift.rollout.gym_env": {SWIFT: ("Env", "envs")},
    "swift.rollout.multi_turn": {
        SWIFT: (
            *("GYMScheduler", "Messages", "MultiTurnScheduler", "OpenEnvScheduler", "RolloutScheduler"),
            *("envs", "multi_turns"),
        )
    },
    "swift.rollout.openenv_wrapper": {SWIFT: ("OpenEnvWrapper",)},
    "swift.template": {SWIFT: ("Messages", "Template")},
    "swift.utils": {SWIFT: ("get_logger", "remove_response", "to_device")},
    "verl.interactions.base": {VERL: ("BaseInteraction",)},
    "verl.interactions.gsm8k_interaction": {VERL: ("Gsm8kInteraction",)},
    "verl.tools.base_tool": {TOOLS: ("BaseTool", "OpenAIFunctionToolSchema", "ToolResponse")},
    "verl.tools.gsm8k_tool": {"mt_grpo.integrations.verl": ("Gsm8kTool",)},
    "verl.tools.mcp_base_tool": {"mt_grpo.tools.mcp.tools": ("MCPBaseTool",)},
    "verl.tools.mcp_search_tool": {"mt_grpo.integrations.verl": ("MCPSearchTool",)},
    "verl.tools.schemas": {
        TOOLS: (
            *("OpenAIFunctionParametersSchema", "OpenAIFunctionPropertySchema", "OpenAIFunctionSchema"),
            *("OpenAIFunctionToolSchema", "ToolResponse"),
        )
    },
    "verl.tools.search_tool": {"mt_grpo.integrations.verl": ("SearchTool",)},
    "verl.utils.reward_score.gsm8k": {"mt_grpo.integrations.verl": ("compute_score", "extract_solution")},
    "verl.utils.rollout_trace": {"mt_grpo.integrations.verl": ("rollout_trace_op",)},
}
"""What each module has, by where it comes from."""

PACKAGES = {name.rpartition(".")[0] for name in MODULES} | {"swift", "verl", "verl.utils"}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules. It is asked last, so what is installed or lies in the current folder goes before."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        known = name in MODULES or name in PACKAGES
        return importlib.machinery.ModuleSpec(name, self, is_package=name in PACKAGES) if known else None

    def exec_module(self, module: ModuleType) -> None:
        for source, names in MODULES.get(module.__name__, {}).items():
            found = importlib.import_module(source)
            for name in names:
                setattr(module, name, getattr(found, name))


_FINDER = _Finder()


def stand_in() -> None:
    """Lets files import from the peers that are not installed, from here on."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
