"""
Tools as a recipe names them, by registered name, dotted path or callable (`tools`); and tools with a state per
conversation, as verl's `BaseTool`, with the session that holds the states.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from mt_grpo.concurrency import ConcurrencyLimit, OutOfTime, call, in_thread
from mt_grpo.errors import describe_error, users_code
from mt_grpo.imports import Registry, import_object
from mt_grpo.media import read_parts
from mt_grpo.options.rules import unknown_tool
from mt_grpo.options.values import is_bare
from mt_grpo.processes import Processes
from mt_grpo.tools.function import Tool, ToolDefinitionError, ToolOptions, check_data, finite
from mt_grpo.trajectory import Arguments, Row

TOOLS: Registry[Callable[..., Any]] = Registry("tool", "mt_grpo.tools")  # the tools a recipe can list by bare name


def tool(
    name: str | None = None,
    *,
    concurrency: int | None = None,
    max_result_size: int | None = None,
    ends_episode: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Gives options to a tool, and perhaps a name for recipes. The tool is a function, a method, or a class that starts
    without arguments and has one public method.

    Args:
        name (`str`, *optional*): Registers it under this name. The model calls it by the name of the function or
            method.
        concurrency (`int`, *optional*), max_result_size (`int`, *optional*), ends_episode (`bool`, *optional*): See
            `Tool`. A concurrency limit above a method is one for all objects of its class.

    Raises:
        RegistrationError: If the name is no word, or another file has registered it.
    """
    limit = None if concurrency is None else ConcurrencyLimit(concurrency)
    options = ToolOptions(concurrency, max_result_size, ends_episode, limit)
    register = None if name is None and options != ToolOptions() else TOOLS.register(name or "")

    def decorate(thing: Callable[..., object]) -> Callable[..., Any]:
        if options != ToolOptions():
            thing.tool_options = options  # type: ignore[attr-defined]  # functions and classes take attributes
        return thing if register is None else register(thing)

    return decorate


def load_tools(entries: list[str | Callable[..., Any] | Tool]) -> list[Tool]:
    """
    Makes tools of what a recipe or a script lists: names of registered tools, dotted paths, functions, bound methods,
    callable objects, classes (started without arguments), objects with one public method, `BaseTool`s and `Tool`s.
    """
    tools: dict[str, Tool] = {}
    for entry in entries:
        source = _named(entry) if isinstance(entry, str) else entry
        cls = source if isinstance(source, type) else type(source)
        tool = _as_tool(source, repr(entry) if isinstance(entry, str) else f"An object of {cls.__name__!r}")
        if tool.name in tools:
            raise ToolDefinitionError(f"Two tools are named {tool.name!r}: rename one, since the model calls by name.")
        tools[tool.name] = tool
    return list(tools.values())


def in_processes(entries: Sequence[str | Callable[..., object] | Tool], size: int) -> list[Tool]:
    """
    Tools whose calls run in `size` processes of their own, and so many at once; what is no plain function is left as
    it is.
    """
    tools = load_tools(list(entries))
    plain = [tool for tool in tools if inspect.isfunction(tool.function) and not tool.is_async]
    if not plain:
        raise ToolDefinitionError(
            f"`tool_processes` is {size}, and no tool is a plain function that a process can call (the tools are: "
            f"{', '.join(tool.name for tool in tools) or 'none'}): leave it out."
        )
    processes, limit = Processes(size), ConcurrencyLimit(size)
    processes.start([tool.function for tool in plain])
    return [_in(processes, limit, tool) if tool in plain else tool for tool in tools]


def _in(processes: Processes, limit: ConcurrencyLimit, tool: Tool) -> Tool:
    async def call(**arguments: object) -> object:
        return await processes.call(tool.function, arguments)

    own = limit if tool.limit is None or tool.limit.size > limit.size else tool.limit
    return replace(tool, function=call, is_async=True, limit=own, concurrency=own.size)


def _named(entry: str) -> object:
    if not is_bare(entry):
        return import_object(entry, what="tool")
    if entry not in TOOLS:
        raise ToolDefinitionError(unknown_tool(entry, TOOLS))
    return TOOLS[entry]


def _as_tool(source: object, label: str) -> Tool:
    if isinstance(source, Tool):
        return source
    if isinstance(source, BaseTool):
        return StatefulTool.of(source)
    if isinstance(source, type):
        what = f"The tool class {source.__name__!r} does not start without arguments"
        with users_code(what, ToolDefinitionError, ": make an object of it in a Python file and name that"):
            source = source()
    if callable(source):
        return Tool.from_function(source)
    methods = [name for name, _ in inspect.getmembers(type(source), inspect.isroutine) if not name.startswith("_")]
    if len(methods) != 1:
        wraps = callable(getattr(source, "func", None))  # as a tool of LangChain's does
        raise ToolDefinitionError(
            f"{label} is no tool: it is not callable and has {len(methods)} public methods instead of one; name "
            f"{'the function that it wraps, its `func`' if wraps else 'a function or a bound method'}."
        )
    return Tool.from_function(getattr(source, methods[0]))


# Tools with a state


class OpenAIFunctionPropertySchema(BaseModel):
    """One argument; keywords of JSON schema that have no field here are kept."""

    model_config = ConfigDict(extra="allow")
    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The arguments of a function, a JSON schema."""

    model_config = ConfigDict(extra="allow")
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema | bool] = {}
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """A function: what the model reads of it."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool in OpenAI's form: `{"type": "function", "function": {...}}`."""

    type: str = "function"
    function: OpenAIFunctionSchema


@dataclass
class ToolResponse:
    """What `create` and `execute` may return instead of text."""

    text: str | None = None  # what the model reads
    image: list[Any] | None = None  # images that the model is shown before the text
    video: list[Any] | None = None  # refused


class BaseTool:
    """
    A tool that holds a state in each conversation. Subclass it and override what you need; the methods may be `async`
    or not, those that are not run in threads. One object serves all conversations: keep states by `instance_id`.

    In each conversation, `create` is called before the first call, `execute` for each call, `calc_reward` at the end,
    and at last `release`, whatever happened. The columns of the dataset row may bring arguments for them, as
    `tools_kwargs` or `extra_info.tools_kwargs`: `{tool name: {create_kwargs: {...}, execute_kwargs: {...},
    calc_reward_kwargs: {...}, release_kwargs: {...}}}`.

    Args:
        config (`dict`): What the tool's entry in `tools_config_file` gives as `config`.
        tool_schema (`OpenAIFunctionToolSchema`, *optional*): Its description; `get_openai_tool_schema` where none is
            given.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.tool_schema = self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ToolDefinitionError(
                f"The tool class {type(self).__name__!r} has no schema: give its entry a `tool_schema`, or override "
                "`get_openai_tool_schema`."
            )
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The description of the tool for the model."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Makes the state of one conversation; returns its id for the other methods, alone or first in a tuple."""
        return instance_id or uuid4().hex

    async def execute(
        self, instance_id: str, parameters: Arguments, **kwargs: Any
    ) -> tuple[Any, float | None, dict | None]:
        """
        Answers a call of the conversation `instance_id`, with arguments that were held against the schema, by text (or
        a `ToolResponse`, or anything JSON can hold) for the model; the reward of this step, which `None` leaves to
        others; and numbers to log, or `None`.
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the conversation, from the state it ended with; only asked for where it is overridden."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Lets go of what the conversation held."""


@dataclass
class StatefulTool(Tool):
    """A `BaseTool` as the model sees it, called in a conversation only, through `ToolSession`'s copy."""

    base: BaseTool = field(kw_only=True)
    keeps_state: bool = field(default=True, repr=False, compare=False)

    @classmethod
    def of(cls, base: BaseTool) -> StatefulTool:
        """The description of a tool; raises `ToolDefinitionError` where its schema is none."""
        assert base.tool_schema is not None  # its constructor refuses that
        function = base.tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"]
        parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
        description = function.get("description", "")
        return cls(function["name"], description, parameters, _outside(base.name), is_async=True, base=base)


def _outside(name: str) -> Callable[..., Any]:
    async def refuse(**arguments: object) -> object:
        raise RuntimeError(f"the tool {name!r} keeps a state, so it is called in a conversation only (`ToolSession`)")

    return refuse


class ToolStateError(Exception):
    """The state of a tool could not be made, scored or released. The message names tool and cause."""


class ToolSession:
    """
    The tools of one conversation, those with a state bound to it. Use it in the event loop that runs the conversation:

        session = ToolSession(tools, row, timeout)
        try:
            ... execute calls by `session.tools`; after those of a turn, turn.reward = session.take_reward() ...
            rewards = await session.rewards()
        finally:
            await session.release()

    `timeout` is the seconds that each `create`, `calc_reward` and `release` may take. `metrics` are what `execute`
    gave to log, by tool, and `failures` what `calc_reward` and `release` failed with, a sentence each.
    """

    def __init__(self, tools: Iterable[Tool], row: Row, timeout: float | None = None) -> None:
        tools = list(tools)
        self.tools = {tool.name: self._bound(tool) if isinstance(tool, StatefulTool) else tool for tool in tools}
        self.metrics: dict[str, list[dict[str, Any]]] = {}
        self.failures: list[str] = []
        self._stateful = {tool.name: tool.base for tool in tools if isinstance(tool, StatefulTool)}
        self._timeout = timeout
        self._options = _options(row) if self._stateful else {}
        self._creating = {name: asyncio.Lock() for name in self._stateful}
        self._instances: dict[str, str] = {}  # by tool
        # every id that a tool was asked to make a state for: one that failed half-way has something to release, too
        self._attempts: list[tuple[BaseTool, str]] = []
        self._step_rewards: list[float] = []
        self._release: asyncio.Task[None] | None = None

    async def create(self, name: str) -> str:
        """The id of a tool's state, made by its first call, or the next if `create` failed; see `ToolStateError`."""
        async with self._creating[name]:
            if name not in self._instances:
                base, instance = self._stateful[name], uuid4().hex
                attempt = len(self._attempts)
                self._attempts.append((base, instance))
                try:
                    made = await self._ask(base, base.create, instance)
                except Exception as error:  # whatever the user's tool raises
                    raise ToolStateError(self._failed(base, "create", error)) from error
                made = made[0] if isinstance(made, tuple) else made
                self._instances[name] = instance if made is None else made
                self._attempts[attempt] = base, self._instances[name]
            return self._instances[name]

    def take_reward(self) -> float | None:
        """The sum of the step rewards since the last time, or `None` if no call gave one."""
        rewards, self._step_rewards = self._step_rewards, []
        return sum(rewards) if rewards else None

    async def rewards(self) -> dict[str, float]:
        """
        What `calc_reward` of each tool returns; one that was never called is asked too, or no group could learn to
        call it.
        """
        rewards = {}
        for name, base in self._stateful.items():
            if type(base).calc_reward is not BaseTool.calc_reward:
                try:
                    reward = await self._ask(base, base.calc_reward, await self.create(name))
                    if reward is not None:
                        rewards[name] = finite(reward, "the reward that it returned")
                except ToolStateError as error:
                    self.failures.append(str(error))
                except Exception as error:  # whatever the user's tool raises
                    self.failures.append(self._failed(base, "calc_reward", error))
        return rewards

    async def release(self) -> None:
        """Releases the states, the last made first, each once; never fails, and outlives its caller."""
        if self._release is None:
            self._release = asyncio.create_task(self._release_all(), name="release of the tools of a conversation")
        await asyncio.shield(self._release)

    async def _release_all(self) -> None:
        for base, instance in reversed(self._attempts):
            try:
                await self._ask(base, base.release, instance)
            except Exception as error:  # whatever the user's tool raises
                self.failures.append(self._failed(base, "release", error))

    def _bound(self, tool: StatefulTool) -> Tool:
        async def call_tool(**arguments: object) -> object:
            options = self._options.get(tool.base.name, {}).get("execute_kwargs", {})
            execute = partial(tool.base.execute, await self.create(tool.name), arguments, **options)
            result = await call(execute, what=f"execute of tool {tool.name!r}")
            if not isinstance(result, tuple) or len(result) != 3:
                raise TypeError(f"`execute` must return (response, reward, metrics), not {type(result).__name__}")
            response, reward, metrics = result
            text, metrics = _read(response), {} if metrics is None else metrics
            if text is not response and isinstance(text, list):
                text = await in_thread(partial(read_parts, text), f"images of tool {tool.name!r}")
            check_data(metrics, "the mapping of metrics that `execute` returned")
            if reward is not None:
                self._step_rewards.append(finite(reward, "the step reward that `execute` returned"))
            self.metrics.setdefault(tool.base.name, []).append(metrics)
            return text

        bound = copy.copy(tool)
        bound.function = call_tool
        return bound

    async def _ask(self, base: BaseTool, method: Callable[..., Any], instance: str) -> Any:
        options = self._options.get(base.name, {}).get(f"{method.__name__}_kwargs", {})
        what = f"{method.__name__} of tool {base.name!r}"
        try:
            return await call(partial(method, instance, **options), what=what, timeout=self._timeout)
        except OutOfTime:
            raise TimeoutError(f"it took longer than {self._timeout:g} s") from None

    def _failed(self, base: BaseTool, method: str, error: Exception) -> str:
        return f"`{method}` of the tool {base.name!r} failed: {describe_error(error)}."


def _options(row: Row) -> dict[str, dict[str, dict[str, Any]]]:
    """The arguments for tools' methods, without `None`, with which a table fills what only other rows have."""
    extra = row.get("extra_info")
    options = row.get("tools_kwargs") or (extra.get("tools_kwargs") if isinstance(extra, dict) else None) or {}
    try:
        return {
            tool: {
                method: {name: value for name, value in arguments.items() if value is not None}
                for method, arguments in methods.items()
                if arguments
            }
            for tool, methods in options.items()
            if methods
        }
    except AttributeError:
        raise TypeError(
            "The row's `tools_kwargs` is no mapping of tools to their methods' arguments: write "
            "`{tool: {create_kwargs: {name: value}}}`."
        ) from None


def _read(response: Any) -> Any:
    """What the model reads of a response."""
    if isinstance(response, ToolResponse):
        response = {"text": response.text, "image": response.image, "video": response.video}
    if not isinstance(response, dict) or not response.keys() <= {"text", "image", "video"}:
        return response
    if response.get("video"):
        raise TypeError("a video cannot be shown: give frames of it as `image`")
    text, images = response.get("text") or "", response.get("image")
    if not images:
        return text
    shown: list[Any] = [
        {"type": "image", "image": image} for image in (images if isinstance(images, list) else [images])
    ]
    return [*shown, {"type": "text", "text": text}] if text else shown
