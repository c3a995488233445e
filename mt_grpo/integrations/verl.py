"""
verl's interactions, classes that answer the model's turns and score them, and the tools that verl brings. A file
written for verl runs unchanged, also under verl's own module names (`mt_grpo.imports`); other files import from here.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml
from datasets import Dataset

from mt_grpo.concurrency import call
from mt_grpo.envs.dialogue import DialogueEnv
from mt_grpo.envs.env import ConversationEnded, Outcome, Policy, Step, finite
from mt_grpo.envs.source import Prototype, source_of
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean, import_object
from mt_grpo.rewards.gsm8k import find_number
from mt_grpo.tools import BaseTool, MCPBaseTool, OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.tools.function import ToolDefinitionError
from mt_grpo.tools.search import RetrievalSearch
from mt_grpo.trajectory import Message, Turn

__all__ = [
    "BaseInteraction",
    "BaseTool",
    "Gsm8kInteraction",
    "Gsm8kTool",
    "InteractionEnv",
    "MCPBaseTool",
    "MCPSearchTool",
    "OpenAIFunctionToolSchema",
    "SearchTool",
    "ToolResponse",
    "compute_score",
    "extract_solution",
    "load_interactions",
    "rollout_trace_op",
]

KEYS = ("name", "class_name", "config")
"""Keys of an entry of an interaction file."""


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


class Gsm8kInteraction(BaseInteraction):
    """
    Tells the model whether the last number that it wrote is right, and lets it try again until it is. A turn scores
    1.0 if right, else 0.0; the conversation scores as its last turn.

    A row's `interaction_kwargs` have `ground_truth`: a number, or GSM8K's worked solution that ends in `#### number`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._golds: dict[str, Decimal] = {}
        self._scores: dict[str, float] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        instance_id = await super().start_interaction(instance_id)
        gold = find_number(str(ground_truth))
        if gold is None:
            raise ValueError(f"`ground_truth` in the row's `interaction_kwargs` holds no number: {ground_truth!r}.")
        self._golds[instance_id], self._scores[instance_id] = gold, 0.0
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        said = [message["content"] or "" for message in messages if message["role"] == "assistant"]
        right = bool(said) and find_number(said[-1]) == self._golds[instance_id]
        self._scores[instance_id] = float(right)
        if right:
            return True, "That is the right answer.", 1.0, {}
        return False, "That is not the right answer. Go over your steps, find the mistake, and answer again.", 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return self._scores[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._golds.pop(instance_id, None)
        self._scores.pop(instance_id, None)


BUILT_IN = {"verl.interactions.gsm8k_interaction.Gsm8kInteraction": Gsm8kInteraction}
"""Our classes for verl's, by the names in interaction files."""


class InteractionEnv(DialogueEnv):
    """
    A conversation with the interaction that `name` in the row's `extra_info["interaction_kwargs"]` chooses. The score
    of a turn is `Turn.reward`. `calculate_score` is a reward of the conversation, under the interaction's name.
    Additional data are listed in `info["interaction"]`.

    Args:
        interactions (`Mapping[str, BaseInteraction]`): By name.
        **options: As in `DialogueEnv`. `tool_timeout` is also the time limit of each call of the interaction.
    """

    interaction: BaseInteraction | None = None
    """The interaction of this conversation, once it has begun."""

    def __init__(self, interactions: Mapping[str, BaseInteraction], **options: Any) -> None:
        super().__init__(**options)
        self.interactions = interactions

    async def run(self, policy: Policy, row: dict[str, Any]) -> Outcome:
        """Starts the interaction, runs the loop of `DialogueEnv`, and asks for the score."""
        self.kwargs = find_kwargs(self.interactions, row)
        self.instance_id = uuid.uuid4().hex
        self.data: list[dict[str, Any]] = []
        self.interaction = self.interactions[self.kwargs["name"]]
        await self._call(partial(self.interaction.start_interaction, self.instance_id, **self.kwargs))
        try:
            outcome = await super().run(policy, row)
        except ConversationEnded as ended:
            outcome = Outcome(stop_reason=ended.stop_reason)
        score = await self._call(_bound(self.interaction.calculate_score, self.instance_id, self.kwargs))
        if score is not None:
            what = f"{type(self.interaction).__name__}.calculate_score gave"
            outcome.rewards = {**outcome.rewards, self.kwargs["name"]: finite(score, what)}
        if self.data:
            outcome.info = {**outcome.info, "interaction": self.data}
        return outcome

    async def respond(self, turn: Turn) -> Step:
        """Asks the interaction for its answer."""
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
        """Ends the interaction and releases the tools."""
        try:
            if self.interaction is not None:
                await self._call(_bound(self.interaction.finalize_interaction, self.instance_id, self.kwargs))
        finally:
            await super().close()

    async def _call(self, bound: partial[Any]) -> Any:
        what = f"{type(self.interaction).__name__}.{bound.func.__name__}"
        return await call(bound, what=what, timeout=self.tool_timeout)


class InteractionSource(Prototype):
    """Interactions, one of which each row names."""

    env: InteractionEnv

    def check(self, rows: Dataset, name: str) -> None:
        for row in rows.select_columns("extra_info") if "extra_info" in rows.column_names else [{}]:
            find_kwargs(self.env.interactions, row)


source_of.register(InteractionEnv, InteractionSource)


def find_kwargs(interactions: Mapping[str, BaseInteraction], row: dict[str, Any]) -> dict[str, Any]:
    """
    The row's `interaction_kwargs`, with `name`, without keys that are `None`: a table has all keys in every row.

    Raises:
        ConfigError: If the row names none of `interactions`.
    """
    given = (row.get("extra_info") or {}).get("interaction_kwargs") or {}
    name = given.get("name")
    if name is None:
        raise ConfigError(
            "A row does not say who answers it: set `name` in its `extra_info.interaction_kwargs` to one of "
            f"{', '.join(interactions)}."
        )
    if name not in interactions:
        raise ConfigError(
            f"A row names the interaction {name!r}{did_you_mean(name, interactions)}: the interactions are "
            f"{', '.join(interactions)}."
        )
    return {key: value for key, value in given.items() if value is not None}


def _bound(method: Callable[..., Any], instance_id: str, kwargs: dict[str, Any]) -> partial[Any]:
    """A method with the arguments that it takes: in verl, which never calls it, it may be declared without any."""
    for args, keywords in (((instance_id,), kwargs), ((instance_id,), {})):
        try:
            inspect.signature(method).bind(*args, **keywords)
        except TypeError:
            continue
        return partial(method, *args, **keywords)
    return partial(method)


def load_interactions(path: str) -> dict[str, BaseInteraction]:
    """
    Loads the interactions of a YAML file, by name:

        interaction:
          - name: gsm8k
            class_name: mt_grpo.integrations.verl.Gsm8kInteraction
            config: {}

    The default `name` is the class name in lower case without `Interaction` at its end.

    Raises:
        ConfigError: If the file or an entry is wrong.
        ImportPathError: If a `class_name` does not lead to an object.
    """
    try:
        listed = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"`interaction_config_file: {path}` cannot be read: {reason}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"`interaction_config_file: {path}` is not YAML: {' '.join(str(error).split())}.") from error
    entries = listed.get("interaction") if isinstance(listed, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"`interaction_config_file: {path}` has no list `interaction`: give it one, of `class_name` and `config`."
        )
    interactions: dict[str, BaseInteraction] = {}
    for entry in entries:
        name, interaction = _load(entry, path)
        if name in interactions:
            raise ConfigError(f"Two interactions of {path} are named {name!r}: give each a `name` of its own.")
        interactions[name] = interaction
    return interactions


def _load(entry: Any, path: str) -> tuple[str, BaseInteraction]:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str) or not entry["class_name"]:
        raise ConfigError(f"An entry of `interaction` in {path} has no `class_name`: give the dotted path of a class.")
    for key in entry:
        if key not in KEYS:
            hint = did_you_mean(key, KEYS)
            raise ConfigError(f"An entry of `interaction` in {path} has an unknown key {key!r}{hint}.")
    class_name, config = entry["class_name"], entry.get("config") or {}
    found = BUILT_IN.get(class_name) or import_object(class_name, what="interaction")
    if not (isinstance(found, type) and issubclass(found, BaseInteraction)):
        raise ConfigError(
            f"The interaction {class_name!r} of {path} is no subclass of `BaseInteraction`: import that from "
            "`mt_grpo.integrations.verl`, and subclass it."
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"The interaction {class_name!r} of {path} lacks {missing}: define it.")
    if not isinstance(config, dict):
        raise ConfigError(f"`config` of the interaction {class_name!r} in {path} is {config!r}: give a mapping.")
    name = entry.get("name") or found.__name__.removesuffix("Interaction").lower() or found.__name__
    try:
        return str(name), found({**config, "name": str(name)})
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(
            f"The interaction {class_name!r} of {path} does not start: {type(error).__name__}: {error}."
        ) from error


Function = TypeVar("Function", bound=Callable[..., Any])

WORSE = -0.05
"""Step reward of an answer that is no better than the one before, as in verl."""
_FINAL = re.compile(r"####\s*(-?[0-9.,]+)")


def rollout_trace_op(function: Function) -> Function:
    """verl's decorator for traces. It does nothing here: the records have every call."""
    return function


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


class Gsm8kTool(BaseTool):
    """
    Tells the model whether its answer is right. A row has `create_kwargs: {ground_truth: ...}`. The conversation's
    reward is 1.0 if the last answer was right. A call that does not improve on the one before costs 0.05.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._states: dict[str, dict[str, Any]] = {}

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
        before, state["reward"] = state["reward"], compute_score(answer, state["gold"], "flexible")
        step_reward = 0.0 if state["reward"] > before else WORSE
        return ToolResponse(text=f"Current parsed answer={answer!r} reward={state['reward']}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self._states[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._states.pop(instance_id, None)


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
