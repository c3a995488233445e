"""The tools that verl brings, by its names, written anew: what `config` means is verl's, the walls are ours."""

from __future__ import annotations

import asyncio
import importlib
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from decimal import Decimal
from types import ModuleType
from typing import Any, TypeVar

from mt_grpo.rewards.gsm8k import find_number
from mt_grpo.tools import BaseTool, MCPBaseTool, OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.tools.function import ToolDefinitionError
from mt_grpo.tools.python_sandbox import RemotePython
from mt_grpo.tools.search import RetrievalSearch

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

WORSE = -0.05
"""Step reward of an answer that is no better than the one before, as in verl."""


def rollout_trace_op(function: Function) -> Function:
    """verl's decorator for traces. It does nothing here: the records have every call."""
    return function


_FINAL = re.compile(r"####\s*(-?[0-9.,]+)")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer of a solution: the number after `####`, or with `"flexible"` the last number."""
    found = _FINAL.findall(solution_str) if method == "strict" else []
    number = find_number(solution_str) if method == "flexible" else find_number(found[-1]) if found else None
    return None if number is None else str(number)


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, 0 without an answer."""
    said = extract_solution(solution_str, method)
    if said is None:
        return 0.0
    return score if Decimal(said) == find_number(str(ground_truth)) else format_score


_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def find_grader() -> ModuleType:
    """The module that grades answers."""
    try:
        return importlib.import_module("mathruler.grader")
    except ModuleNotFoundError as error:
        raise ToolDefinitionError(
            f"Answers to Geometry3K are graded by `mathruler`, and {error.name!r} is not installed: `pip install "
            "mathruler pylatexenc`."
        ) from error


def format_reward(predict_str: str) -> float:
    """1.0 for thoughts in `<think>` and an answer in a box after them, else 0.0."""
    return float(_FORMAT.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1.0 if the answer, by default that in the box, equals `ground_truth` as an expression, else 0.0."""
    grader = find_grader()
    answer = grader.extract_boxed_content(predict_str) if use_boxed else predict_str
    return float(grader.grade_answer(answer, ground_truth))


def geo3k_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """The mean of `acc_reward` and `format_reward`; the second has the weight `format_score`."""
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * format_reward(predict_str)


class AnswerTool(BaseTool, ABC):
    """
    Tells the model whether its answer is right. A row has `create_kwargs: {ground_truth: ...}`. The conversation's
    reward is that of the last answer. A call that does not improve on the one before costs 0.05.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._states: dict[str, dict[str, Any]] = {}

    @abstractmethod
    def score(self, answer: str, gold: Any) -> float:
        """How good an answer is, 0 to 1."""

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if ground_truth is None:
            raise ValueError("the row's `create_kwargs` of this tool have no `ground_truth`")
        instance_id = instance_id or uuid.uuid4().hex
        self._states[instance_id] = {"gold": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        state, answer = self._states[instance_id], str(parameters.get("answer", ""))
        before, state["reward"] = state["reward"], self.score(answer, state["gold"])
        step_reward = 0.0 if state["reward"] > before else WORSE
        return ToolResponse(text=f"Current parsed answer={answer!r} reward={state['reward']}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self._states[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._states.pop(instance_id, None)


class Gsm8kTool(AnswerTool):
    """An `AnswerTool` that compares numbers."""

    def score(self, answer: str, gold: Any) -> float:
        return compute_score(answer, gold, "flexible")


class Geo3kTool(AnswerTool):
    """An `AnswerTool` that compares expressions, as `mathruler` does."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        find_grader()

    def score(self, answer: str, gold: Any) -> float:
        return acc_reward(answer, str(gold), use_boxed=False)


class ExecutionPool:
    """
    verl's pool of workers, as subclasses of its tools use it: `await pool.execute.remote(function, *args)` runs a
    function in a thread, `num_workers` at once.
    """

    def __init__(self, num_workers: int) -> None:
        self.execute = self
        self._most = num_workers
        self._places: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def remote(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._most))
        async with places:
            return await asyncio.to_thread(function, *args, **kwargs)


class SandboxFusionTool(BaseTool):
    """
    Runs the code of a call on a server, as `RemotePython` does. `config` has `sandbox_fusion_url`, `default_timeout`
    (defaults to 30 seconds), `default_language` (`"python"`), `memory_limit_mb` (1024), `num_workers` (10) and
    `rate_limit` (10), both of them bounds of concurrent requests. A call may bring `timeout` and `language`. Code that
    fails is a failed call, whose error the model reads.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        url = config.get("sandbox_fusion_url")
        if not url:
            raise ToolDefinitionError("The tool `SandboxFusionTool` has no `sandbox_fusion_url` in its `config`.")
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        bounds = [config.get("num_workers", 10)]
        if config.get("enable_global_rate_limit", True):
            bounds.append(config.get("rate_limit", 10))
        self.execution_pool = ExecutionPool(min(bounds))
        self._server = RemotePython(url, self.default_timeout, config.get("memory_limit_mb", 1024))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, None]:
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        code = str(parameters.get("code", ""))
        response = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return response, None, None

    def execute_code(
        self, instance_id: str, code: str, timeout: float | None = None, language: str = "python"
    ) -> ToolResponse:
        """
        What the code prints; raises `CodeError` if it fails or reaches a limit, `RuntimeError` if the server does.
        """
        text, _ = self._server.run(code, language, timeout)
        return ToolResponse(text=text)


class SearchTool(BaseTool):
    """
    Sends each query of `query_list` to a retrieval server. `config` has `retrieval_service_url`, `topk` (defaults to
    3), `timeout` (30 seconds) and `num_workers` (largest number of concurrent requests, 120).
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        url = config.get("retrieval_service_url")
        if not url:
            raise ToolDefinitionError("The tool `SearchTool` has no `retrieval_service_url` in its `config`.")
        self._search = RetrievalSearch(url, config.get("topk", 3), config.get("timeout", 30.0))
        self.execution_pool = ExecutionPool(config.get("num_workers", 120))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            raise ValueError("`query_list` is no list of queries")

        async def ask(query: str) -> str:
            found = await self.execution_pool.execute.remote(self._search.search, query)
            return found[0] if isinstance(found, tuple) else found

        texts = await asyncio.gather(*map(ask, queries))
        return ToolResponse(text="\n---\n".join(texts)), 0.0, {"query_count": len(queries)}


class MCPSearchTool(MCPBaseTool):
    """A tool of an MCP server that searches; `MCPBaseTool` by verl's name."""
