"""verl's own tools by their paths, and what its tool files import beside the base class."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeVar

from mt_grpo.rewards.gsm8k import find_number
from mt_grpo.tools import BaseTool, MCPBaseTool, OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.tools.function import ToolDefinitionError
from mt_grpo.tools.search import RetrievalSearch

Function = TypeVar("Function", bound=Callable[..., Any])

WORSE = -0.05
"""Step reward of an answer that is no better than the one before, as in verl."""
_FINAL = re.compile(r"####\s*(-?[0-9.,]+)")


def rollout_trace_op(function: Function) -> Function:
    """verl's decorator for its traces: the records have every call anyway."""
    return function


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer in a solution: the number behind `####`, or with `"flexible"` the last number."""
    found = _FINAL.findall(solution_str) if method == "strict" else []
    number = find_number(solution_str) if method == "flexible" else find_number(found[-1]) if found else None
    return None if number is None else str(number)


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, and 0 where there is none."""
    said = extract_solution(solution_str, method)
    if said is None:
        return 0.0
    return score if Decimal(said) == find_number(str(ground_truth)) else format_score


class Gsm8kTool(BaseTool):
    """
    Tells the model whether its answer is right. A row brings `create_kwargs: {ground_truth: ...}`. The conversation is
    given 1.0 where the last answer was right; a call that is no improvement costs 0.05.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._states: dict[str, dict[str, Any]] = {}

    async def create(self, instance_id: str, ground_truth: Any = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        if ground_truth is None:
            raise ValueError("the row's `create_kwargs` of this tool have no `ground_truth`")
        self._states[instance_id] = {"gold": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        state, answer = self._states[instance_id], str(parameters.get("answer", ""))
        before, state["reward"] = state["reward"], compute_score(answer, state["gold"], "flexible")
        step_reward = 0.0 if state["reward"] > before else WORSE
        return ToolResponse(text=f"Current parsed answer={answer!r} reward={state['reward']}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self._states[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._states.pop(instance_id, None)


class SearchTool(BaseTool):
    """
    Asks a retrieval server each query of `query_list`. Of `config` it reads `retrieval_service_url`, `topk` (3),
    `timeout` (30 seconds) and `num_workers` (120, requests at once).
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        url = config.get("retrieval_service_url")
        if not url:
            raise ToolDefinitionError("The tool `SearchTool` has no `retrieval_service_url` in its `config`.")
        self._search = RetrievalSearch(url, config.get("topk", 3), config.get("timeout", 30.0))
        self._most = config.get("num_workers", 120)
        self._places: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            raise ValueError("`query_list` is no list of queries")
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._most))

        async def ask(query: str) -> str:
            async with places:
                found = await asyncio.to_thread(self._search.search, query)
            return found[0] if isinstance(found, tuple) else found

        texts = await asyncio.gather(*map(ask, queries))
        return ToolResponse(text="\n---\n".join(texts)), 0.0, {"query_count": len(queries)}


class MCPSearchTool(MCPBaseTool):
    """A tool of an MCP server that searches; `MCPBaseTool` by verl's name."""
