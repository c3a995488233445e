"""
verl's interactions and the tools that verl brings, see docs/interactions.md and docs/stateful_tools.md. A file written
for verl runs unchanged, also under verl's own module names (`mt_grpo.imports`); other files import from here. The code
is ours: the names, and what `config` means, are verl's.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, ParamSpec, TypeVar

from datasets import Dataset

from mt_grpo.concurrency import call
from mt_grpo.envs.env import Outcome, Policy, Step, outcome_at_end
from mt_grpo.envs.source import environment, tool_arguments
from mt_grpo.envs.tool_env import DialogueEnv
from mt_grpo.errors import ConfigError, users_code
from mt_grpo.imports import did_you_mean, import_object
from mt_grpo.options.table import Values
from mt_grpo.options.values import read_yaml
from mt_grpo.rewards.builtin import find_number
from mt_grpo.tools import BaseTool, MCPBaseTool, OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.tools.function import ToolDefinitionError, finite
from mt_grpo.tools.python_sandbox import RemotePython
from mt_grpo.tools.search import RetrievalSearch
from mt_grpo.trajectory import Arguments, Message, Row, Turn

__all__ = ["BaseInteraction", "Gsm8kInteraction", "InteractionEnv", "WeatherInteraction"]
__all__ += ["BaseTool", "MCPBaseTool", "OpenAIFunctionToolSchema", "ToolResponse", "load_interactions"]
__all__ += ["Geo3kTool", "Gsm8kTool", "MCPSearchTool", "SandboxFusionTool", "SearchTool"]
__all__ += ["compute_score", "extract_solution", "rollout_trace_op"]

# Interactions


class BaseInteraction(ABC):
    """
    Answers the model's turns. One object serves all conversations: keep state by `instance_id`. Methods that are not
    `async` run in threads. `**kwargs` are the row's `extra_info["interaction_kwargs"]`, with `name`.

    Args:
        config (`dict`): The entry's `config`, and its `name`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Called before the first turn of a conversation."""
        return uuid.uuid4().hex if instance_id is None else instance_id

    @abstractmethod
    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """
        Answers the last of `messages`, the assistant's.

        Returns:
            `(should_terminate, response, score, additional_data)`: whether the conversation ends, the user's words,
            the turn's reward or `None`, and data to keep in the trajectory's `info`.
        """

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the whole conversation, or `None`. Called when it is over."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Releases a conversation. Called after the rewards were computed, however the conversation ended."""
        return None


class _ScoredInteraction(BaseInteraction):
    """An interaction whose conversation scores as its last turn."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._scores: dict[str, float] = {}

    async def calculate_score(self, instance_id: str, **kwargs: object) -> float:
        return self._scores.get(instance_id, 0.0)

    async def finalize_interaction(self, instance_id: str, **kwargs: object) -> None:
        self._scores.pop(instance_id, None)


class Gsm8kInteraction(_ScoredInteraction):
    """
    Tells the model whether the last number that it wrote is right, and lets it try again until it is. A turn scores
    1.0 if right, else 0.0; the conversation scores as its last turn.

    A row's `interaction_kwargs` have `ground_truth`: a number, or GSM8K's worked solution that ends in `#### number`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._golds: dict[str, Decimal] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: object = None, **kwargs: object
    ) -> str:
        instance_id = await super().start_interaction(instance_id)
        gold = find_number(str(ground_truth))
        if gold is None:
            raise ValueError(f"`ground_truth` in the row's `interaction_kwargs` holds no number: {ground_truth!r}.")
        self._golds[instance_id] = gold
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: object
    ) -> tuple[bool, str, float, dict[str, Any]]:
        said = [message["content"] or "" for message in messages if message["role"] == "assistant"]
        right = bool(said) and find_number(said[-1]) == self._golds[instance_id]
        self._scores[instance_id] = float(right)
        if right:
            return True, "That is the right answer.", 1.0, {}
        return False, "That is not the right answer. Go over your steps, find the mistake, and answer again.", 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: object) -> None:
        await super().finalize_interaction(instance_id)
        self._golds.pop(instance_id, None)


class WeatherInteraction(_ScoredInteraction):
    """
    Ends the conversation at the first message without a tool call: 1.0 if a tool was called before, else 0.0. The
    conversation scores the same. With `tools`, the tools are what the model is to use first.
    """

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: object
    ) -> tuple[bool, str, float, dict[str, Any]]:
        score = self._scores[instance_id] = float(any(message["role"] == "tool" for message in messages))
        return True, "Thank you." if score else "A tool was needed for that.", score, {}


class InteractionEnv(DialogueEnv):
    """A conversation with the interaction that `name` in the row's `extra_info["interaction_kwargs"]` chooses."""

    interaction: BaseInteraction | None = None  # the interaction of this conversation, once it has begun

    def __init__(self, interactions: Mapping[str, BaseInteraction], **options: Any) -> None:
        super().__init__(**options)
        self.interactions = interactions

    def find_kwargs(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row's `interaction_kwargs`, with `name`, without `None`: a table has all keys in every row."""
        given: Any = row
        for key in ("extra_info", "interaction_kwargs"):
            given = given.get(key) if isinstance(given, Mapping) else None
        given = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
        name = str(given.get("name"))
        if name not in self.interactions:
            fault = "A row does not say who answers it: set `name` in its `extra_info.interaction_kwargs` to one of"
            if "name" in given:
                near = did_you_mean(name, self.interactions)
                fault = f"A row names the interaction {name!r}{near}: the interactions are"
            raise ConfigError(f"{fault} {', '.join(self.interactions)}.")
        return {**given, "name": name}

    def check_rows(self, rows: Dataset, name: str) -> None:
        for row in rows.select_columns("extra_info") if "extra_info" in rows.column_names else [{}]:
            self.find_kwargs(row)

    async def run(self, policy: Policy, row: Row) -> Outcome:
        """Starts the interaction, runs the loop of `DialogueEnv`, and asks for the score."""
        self.kwargs = self.find_kwargs(row)
        self.instance_id = uuid.uuid4().hex
        self.data: list[dict[str, Any]] = []
        self.interaction = self.interactions[self.kwargs["name"]]
        await self._call(partial(self.interaction.start_interaction, self.instance_id, **self.kwargs))
        outcome = await outcome_at_end(super().run(policy, row))
        score = await self._call(_bound(self.interaction.calculate_score, self.instance_id, self.kwargs))
        if score is not None:
            what = f"What {type(self.interaction).__name__}.calculate_score returned"
            outcome.rewards = {**outcome.rewards, self.kwargs["name"]: finite(score, what)}
        if self.data:
            outcome.info = {**outcome.info, "interaction": self.data}
        return outcome

    async def respond(self, turn: Turn) -> Step:
        said = [message for each in self.turns for message in (each.message, *each.replies)]
        messages = copy.deepcopy([*self.opening, *said])
        assert self.interaction is not None  # `run` chose it
        method = self.interaction.generate_response
        answer = await self._call(partial(method, self.instance_id, messages, **self.kwargs))
        if not isinstance(answer, tuple) or len(answer) != 4 or not isinstance(answer[1], str):
            raise TypeError(
                f"{type(self.interaction).__name__}.generate_response returned {answer!r:.200}: return "
                "`(should_terminate, response, score, additional_data)`, the response as text."
            )
        done, text, score, data = answer
        if data:
            self.data.append(data)
        return Step(text, score, bool(done))

    async def close(self) -> None:
        try:
            if self.interaction is not None:
                await self._call(_bound(self.interaction.finalize_interaction, self.instance_id, self.kwargs))
        finally:
            await super().close()

    async def _call(self, bound: partial[Any]) -> Any:
        what = f"{type(self.interaction).__name__}.{bound.func.__name__}"
        return await call(bound, what=what, timeout=self.tool_timeout)


def _bound(method: Callable[..., object], instance_id: str, kwargs: dict[str, Any]) -> partial[Any]:
    """A method with the arguments that it takes: in verl, which never calls it, it may be declared without any."""
    for bound in (partial(method, instance_id, **kwargs), partial(method, instance_id)):
        try:
            inspect.signature(method).bind(*bound.args, **bound.keywords)
        except TypeError:
            continue
        return bound
    return partial(method)


@environment("interactions")
def _interactions_of_options(options: Values) -> InteractionEnv:
    """The environment of a run's option `interaction_config_file`."""
    return InteractionEnv(load_interactions(options["interaction_config_file"]), **tool_arguments(options))


def load_interactions(path: str) -> dict[str, BaseInteraction]:
    """
    The interactions of a YAML file by name: by default the class name in lower case without `Interaction` at its end.
    """
    what = f"`interaction_config_file: {path}`"
    listed = read_yaml(Path(path), what)
    entries = listed.get("interaction") if isinstance(listed, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{what} has no list `interaction`: give it one, of `class_name` and `config`.")
    interactions: dict[str, BaseInteraction] = {}
    for entry in entries:
        name, interaction = _load(entry, path)
        if name in interactions:
            raise ConfigError(f"Two interactions of {path} are named {name!r}: give each a `name` of its own.")
        interactions[name] = interaction
    return interactions


_KEYS = ("name", "class_name", "config")  # keys of an entry of an interaction file


def _load(entry: object, path: str) -> tuple[str, BaseInteraction]:
    named = isinstance(entry, dict) and isinstance(entry.get("class_name"), str) and entry["class_name"]
    unknown = [key for key in entry if key not in _KEYS] if isinstance(entry, dict) else []
    if unknown or not isinstance(entry, dict) or not named:
        fault = "no `class_name`: give the dotted path of a class"
        if named:
            fault = f"an unknown key {unknown[0]!r}{did_you_mean(unknown[0], _KEYS)}"
        raise ConfigError(f"An entry of `interaction` in {path} has {fault}.")
    class_name, config = entry["class_name"], entry.get("config") or {}
    what, fault = f"The interaction {class_name!r} of {path}", ""
    found = import_object(class_name, what="interaction")
    if not (isinstance(found, type) and issubclass(found, BaseInteraction)):
        fault = "is no subclass of `BaseInteraction`: import that from `mt_grpo.integrations.verl`, and subclass it"
    elif inspect.isabstract(found):
        fault = f"lacks {', '.join(sorted(found.__abstractmethods__))}: define it"
    elif not isinstance(config, dict):
        fault = f"has the `config` {config!r}: give a mapping"
    if fault:
        raise ConfigError(f"{what} {fault}.")
    name = str(entry.get("name") or found.__name__.removesuffix("Interaction").lower() or found.__name__)
    with users_code(f"{what} does not start"):
        return name, found({**config, "name": name})


# Scores

P = ParamSpec("P")
Result = TypeVar("Result")


def rollout_trace_op(function: Callable[P, Result]) -> Callable[P, Result]:
    """verl's decorator for traces. It does nothing here: the records have every call."""
    return function


_FINAL = re.compile(r"####\s*(-?[0-9.,]+)")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer of a solution: the number after `####`, or with `"flexible"` the last number."""
    found = _FINAL.findall(solution_str) if method == "strict" else []
    number = find_number(solution_str) if method == "flexible" else find_number(found[-1]) if found else None
    return None if number is None else str(number)


def compute_score(
    solution_str: str, ground_truth: object, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, 0 without an answer."""
    said = extract_solution(solution_str, method)
    if said is None:
        return 0.0
    return score if Decimal(said) == find_number(str(ground_truth)) else format_score


_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def _find_grader() -> ModuleType:
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
    grader = _find_grader()
    answer = grader.extract_boxed_content(predict_str) if use_boxed else predict_str
    return float(grader.grade_answer(answer, ground_truth))


def geo3k_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """The mean of `acc_reward` and `format_reward`; the second has the weight `format_score`."""
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * format_reward(predict_str)


# Tools


class _AnswerTool(BaseTool, ABC):
    """
    Tells the model whether its answer is right. A row has `create_kwargs: {ground_truth: ...}`. The conversation's
    reward is that of the last answer. A call that does not improve on the one before costs 0.05, as in verl.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._golds: dict[str, object] = {}
        self._rewards: dict[str, float] = {}

    @abstractmethod
    def score(self, answer: str, gold: object) -> float:
        """How good an answer is, 0 to 1."""

    async def create(
        self, instance_id: str | None = None, ground_truth: object = None, **kwargs: object
    ) -> tuple[str, ToolResponse]:
        if ground_truth is None:
            raise ValueError("the row's `create_kwargs` of this tool have no `ground_truth`")
        instance_id = instance_id or uuid.uuid4().hex
        self._golds[instance_id], self._rewards[instance_id] = ground_truth, 0.0
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: Arguments, **kwargs: object
    ) -> tuple[ToolResponse, float, dict]:
        answer, before = str(parameters.get("answer", "")), self._rewards[instance_id]
        reward = self._rewards[instance_id] = self.score(answer, self._golds[instance_id])
        text = f"Current parsed answer={answer!r} reward={reward}"
        return ToolResponse(text=text), 0.0 if reward > before else -0.05, {}

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        return self._rewards[instance_id]

    async def release(self, instance_id: str, **kwargs: object) -> None:
        self._golds.pop(instance_id, None)
        self._rewards.pop(instance_id, None)


class Gsm8kTool(_AnswerTool):
    """An answer tool that compares numbers."""

    def score(self, answer: str, gold: object) -> float:
        return compute_score(answer, gold, "flexible")


class Geo3kTool(_AnswerTool):
    """An answer tool that compares expressions, as `mathruler` does."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        _find_grader()

    def score(self, answer: str, gold: object) -> float:
        return acc_reward(answer, str(gold), use_boxed=False)


class _ExecutionPool:
    """verl's pool of workers, for subclasses of its tools: functions run in threads, `num_workers` at once."""

    def __init__(self, num_workers: int) -> None:
        self.execute = self
        self._most = num_workers
        self._places: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def remote(self, function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        async with self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._most)):
            return await asyncio.to_thread(function, *args, **kwargs)


class _ServedTool(BaseTool):
    """A tool that asks a server, whose address `config` has."""

    url_key: ClassVar[str]

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.url: str = config.get(self.url_key) or ""
        if not self.url:
            raise ToolDefinitionError(f"The tool `{type(self).__name__}` has no `{self.url_key}` in its `config`.")


class SandboxFusionTool(_ServedTool):
    """
    Runs the code of a call on a server, as `RemotePython` does. `config` has `sandbox_fusion_url`, `default_timeout`
    (defaults to 30 seconds), `default_language` (`"python"`), `memory_limit_mb` (1024), `num_workers` (10) and
    `rate_limit` (10), both of them bounds of concurrent requests. A call may bring `timeout` and `language`. Code that
    fails is a failed call, whose error the model reads.
    """

    url_key = "sandbox_fusion_url"

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        bounds = [config.get("num_workers", 10)]
        if config.get("enable_global_rate_limit", True):
            bounds.append(config.get("rate_limit", 10))
        self.execution_pool = _ExecutionPool(min(bounds))
        self._server = RemotePython(self.url, self.default_timeout, config.get("memory_limit_mb", 1024))

    async def execute(
        self, instance_id: str, parameters: Arguments, **kwargs: object
    ) -> tuple[ToolResponse, None, None]:
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        code = str(parameters.get("code", ""))
        response = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return response, None, None

    def execute_code(
        self, instance_id: str, code: str, timeout: float | None = None, language: str = "python"
    ) -> ToolResponse:
        """What the code prints; `CodeError` if it fails or reaches a limit, `RuntimeError` if the server does."""
        text, _ = self._server.run(code, language, timeout)
        return ToolResponse(text=text)


class SearchTool(_ServedTool):
    """
    Sends each query of `query_list` to a retrieval server. `config` has `retrieval_service_url`, `topk` (defaults to
    3), `timeout` (30 seconds) and `num_workers` (largest number of concurrent requests, 120).
    """

    url_key = "retrieval_service_url"

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._search = RetrievalSearch(self.url, config.get("topk", 3), config.get("timeout", 30.0))
        self.execution_pool = _ExecutionPool(config.get("num_workers", 120))

    async def execute(
        self, instance_id: str, parameters: Arguments, **kwargs: object
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
