"""Environments of TRL's `environment_factory`: classes whose methods are tools, one instance per conversation."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, Self, SupportsFloat

from datasets import Dataset

from mt_grpo.concurrency import OutOfTime, call, guarded, in_thread
from mt_grpo.data import lacks_column
from mt_grpo.envs import MultiTurnToolEnv, Outcome, Policy
from mt_grpo.envs.env import outcome_at_end
from mt_grpo.envs.source import CLOSE_TIMEOUT, COLUMN, EnvLike, environment, tool_arguments
from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.errors import ConfigError, describe_error, users_code
from mt_grpo.imports import import_object
from mt_grpo.media import Part, has_media, kind_of_part, read_parts, returned_parts
from mt_grpo.options.table import Values
from mt_grpo.rewards import EnvReward, RewardFunc
from mt_grpo.tools import Tool
from mt_grpo.tools.function import Result
from mt_grpo.trajectory import Message, Row, ToolCall

logger = logging.getLogger(__name__)

_NOT_TOOLS = ("reset", "get_reward", "close")  # public methods that the model cannot call; TRL makes `close` a tool


class PartError(Exception):
    """`reset` returned a content part that models cannot be shown. The conversation ends with this."""


class FactoryError(Exception):
    """`reset` or `get_reward` of the user's class failed. The message names the method and the cause."""


class TRLTool(Tool):
    """
    A tool whose results are TRL's: `str(result)`, or `{'error': ...}`. Of a list, the model reads the text, and reward
    functions get the list.
    """

    @classmethod
    def of(cls, tool: Tool) -> Self:
        """A tool of this kind that is otherwise as the given one."""
        return cls(**{each.name: getattr(tool, each.name) for each in fields(tool)})

    def read(self, returned: object) -> Result:
        shown = returned if has_media(returned) else _as_text(returned)
        return super().read(shown)._replace(data=None, returned=returned if isinstance(returned, list) else None)

    def describe(self, error: Exception) -> str:
        return str(error)

    @classmethod
    def failure(cls, error: str) -> str:
        return str({"error": error})


class _Method(TRLTool):
    """A method of an environment. It gets the model's arguments unchecked, as in TRL."""

    def check(self, arguments: object) -> str | None:
        return None


class TRLEnv(MultiTurnToolEnv):
    """
    Environments that a factory in TRL's form makes, see docs/trl_environments.md. An instance is made when a
    conversation needs one and none is free; `close` is called when the process ends, `reset` raised, or a call hangs.
    """

    writes_prompts = True
    user_environment: Any = None  # the instance of this conversation; reward functions get it in their `environments`
    named = False
    """Whether the column `environment` chose it. `reset` then does not get that column, as in TRL."""
    _begun = False  # `reset` has succeeded
    _calls: list[str]  # names of the methods of the instance that have not returned

    def __init__(
        self,
        factory: Callable[[], object],
        tools: Sequence[Callable[..., Any] | str | Tool] = (),
        system_prompt: str | None = None,
        max_steps: int | None = None,
        protocol: str = "native",
        **options: Any,
    ) -> None:
        self.pool = _InstancePool(factory, _first_of(factory))
        self._names = [name for name in self.pool.methods if name not in _NOT_TOOLS and not name.startswith("_")]
        methods = [Tool.from_function(getattr(self.pool.first, name)) for name in self._names]
        steps = sys.maxsize if max_steps is None else max_steps
        super().__init__([*tools, *methods], system_prompt, steps, protocol, **options)
        self.tools = {
            name: self._as_in_trl(tool, tool.function) if type(tool) in (Tool, TRLTool) else tool
            for name, tool in self.tools.items()
        }

    @property
    def reward_name(self) -> str | None:
        """The name of the reward of `get_reward`; `None` if the class has no such method."""
        return self.pool.name if "get_reward" in self.pool.methods else None

    def own_rewards(self) -> list[RewardFunc]:
        """`get_reward`, as a reward of the class's name."""
        if self.reward_name is None:
            return []
        reward = EnvReward(self.reward_name)
        reward.name = self.reward_name
        return [reward]

    def check_rows(self, rows: Dataset, name: str) -> None:
        """Refuses rows without a column that `reset` needs."""
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        for one in inspect.signature(self.pool.first.reset).parameters.values():
            needed = one.kind in by_name and one.default is inspect.Parameter.empty
            if needed and one.name not in rows.column_names:
                needs = f"`reset` of the environment {self.pool.name}"
                raise lacks_column(needs, one.name, name, rows.column_names)

    async def run(self, policy: Policy, row: Row) -> Outcome:
        """Runs the loop of `MultiTurnToolEnv` with an instance of the factory, then asks for its reward."""
        self._calls = []
        self.user_environment = await self.pool.take(self.tool_timeout)
        self.tools = dict(self.tools)
        for name in self._names:
            self.tools[name] = self._as_in_trl(self.tools[name], getattr(self.user_environment, name))
        outcome = await outcome_at_end(super().run(policy, row))
        if self.reward_name is not None:
            reward = await self._ask("get_reward")
            reward = math.nan if reward is None else reward  # text of a number is none
            if not isinstance(reward, SupportsFloat) or math.isinf(earned := float(reward)):
                raise FactoryError(f"{self.reward_name}.get_reward returned {reward!r:.80}: return a finite number.")
            if not math.isnan(earned):
                outcome.rewards = {**outcome.rewards, self.reward_name: earned}
        return outcome

    async def reset(self, row: Row) -> list[Message]:
        """The prompt of the row. What the instance's `reset` returned is appended to the last message."""
        messages = await super().reset(row)
        columns = {name: value for name, value in row.items() if not (self.named and name == COLUMN)}
        taken = inspect.signature(self.user_environment.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):  # TRL passes all columns
            columns = {name: value for name, value in columns.items() if name in taken}
        observation = await self._ask("reset", **columns)
        self._begun = True
        if observation is None:
            return messages
        *before, last = messages
        said, seen = _text(last["content"]), _text(observation)
        if not (isinstance(said, str) and isinstance(seen, str)):
            said, seen = await in_thread(lambda: (_parts(said), _parts(seen)), "mt-grpo-reset")
        return [*before, {**last, "content": said + seen}]

    async def execute(self, calls: list[ToolCall]) -> None:
        """Runs calls in TRL's order: plain methods one after another, then all `async` ones concurrently."""
        at_once = [each for each in calls if each.name in self.tools and self.tools[each.name].is_async]
        for each in calls:
            if each not in at_once:
                await execute_calls([each], self.tools, self.tool_timeout)
        await execute_calls(at_once, self.tools, self.tool_timeout)

    async def close(self) -> None:
        """Returns the instance to the pool, or drops it if `reset` failed or a call of it hangs."""
        try:
            await super().close()
        finally:
            instance, self.user_environment = self.user_environment, None
            if instance is not None and self._begun and not self._calls:
                self.pool.give(instance)
            elif instance is not None:
                await self.pool.drop(instance)

    async def _ask(self, name: str, /, **arguments: object) -> object:
        what = f"{self.pool.name}.{name}"
        self._calls.append(name)  # a method that hangs stays in the list
        try:
            answer = await call(
                partial(getattr(self.user_environment, name), **arguments), what=what, timeout=self.tool_timeout
            )
        except OutOfTime:
            raise
        except Exception as error:  # whatever the user's class raises
            self._calls.remove(name)
            raise FactoryError(f"{what} raised {describe_error(error)}") from error
        self._calls.remove(name)
        return answer

    def _as_in_trl(self, tool: Tool, function: Callable[..., Any]) -> _Method:
        """The tool with another function, which keeps `_calls`."""
        calls = vars(self).get("_calls", [])

        @contextmanager
        def under_way() -> Iterator[None]:
            calls.append(tool.name)
            try:
                yield
            finally:
                calls.remove(tool.name)

        def answer(**arguments: object) -> object:
            with under_way():
                return function(**arguments)

        async def answer_later(**arguments: object) -> object:
            with under_way():
                return await function(**arguments)

        bound = copy.copy(tool) if isinstance(tool, _Method) else _Method.of(tool)
        bound.function = answer_later if tool.is_async else answer
        return bound


def _import_factory(path: object, key: str) -> Any:
    """What a recipe names as a factory: a dotted path, or a mapping of dotted paths by name."""
    if isinstance(path, dict) and path:
        return {name: _import_factory(one, f"{key}: {name}") for name, one in path.items()}
    if not isinstance(path, str):
        raise ConfigError(f"`{key}` is {path!r}: give a dotted path, or a mapping from names to dotted paths.")
    return import_object(path, what="environment factory")


@environment("trl")
def _environments_of_options(options: Values) -> EnvLike:
    """Environments of a run's option `environment_factory`: of a factory, or of several by name."""
    key, factory = options.get("key"), options.get("factory")  # the second: the trainer's own argument
    if factory is None:
        place = "environment_factory" if key is None else f"{key}: environment_factory"
        factory = _import_factory(options["environment_factory"], place)
    arguments = tool_arguments(options, "native", max_steps=None)
    if not isinstance(factory, dict):
        return _environment(factory, arguments, named=key is not None)
    if not factory:
        raise ConfigError("`environment_factory` is an empty dictionary: give factories by name.")
    return {name: _environment(one, arguments, named=True) for name, one in factory.items()}


def _environment(factory: Any, arguments: dict[str, Any], named: bool) -> TRLEnv:
    env = TRLEnv(factory, **arguments)
    env.named = named
    if not env.tools:
        logger.warning(
            "The environment %s has no tools: it has no public method but `reset`, `get_reward` and `close`, so each "
            "conversation has one turn.",
            env.pool.name,
        )
    return env


def _first_of(factory: Callable[[], object]) -> Any:
    """The first instance; refuses a factory whose instances are no environments."""
    if not callable(factory):
        raise ConfigError(
            f"`environment_factory` is {factory!r}, which cannot be called: give a class, or a function that makes an "
            "environment."
        )
    name = getattr(factory, "__name__", type(factory).__name__)
    with users_code(f"`environment_factory` {name} makes nothing without arguments"):
        instance = factory()
    if not inspect.isroutine(getattr(type(instance), "reset", None)):
        raise ConfigError(
            f"`environment_factory` {name} makes {type(instance).__name__}, which has no `reset`: define "
            "`reset(self, **row)`, which begins a conversation."
        )
    return instance


def _as_text(result: object) -> str:
    """The text of a result: `str(result)`; the joined texts if it is a list of parts with text."""
    parts = [part for part in (result if isinstance(result, list) else ()) if isinstance(part, dict)]
    texts = [part["text"] for part in parts if part.get("type") == "text" and isinstance(part.get("text"), str)]
    return "".join(texts) if texts and len(texts) == len(result) else str(result)  # type: ignore[arg-type]


def _text(said: object) -> object:
    """What `reset` returned as text, as `_as_text` has it; as it is if it shows images."""
    if isinstance(said, list) and said and all(isinstance(part, dict) and "type" in part for part in said):
        for part in said:
            if part["type"] != "text" and not kind_of_part(part):
                raise PartError(
                    f"A part of type {part['type']!r} cannot be shown: models read text, images, videos and sounds."
                )
    return returned_parts(said) if has_media(said) else _as_text(said)


def _parts(said: object) -> list[Part]:
    if isinstance(said, str):
        return [{"type": "text", "text": said}] if said else []
    return read_parts(said if isinstance(said, list) else [said])


class _InstancePool:
    """Instances of a factory for one conversation after another; free ones are closed at the end."""

    def __init__(self, factory: Callable[[], object], first: Any) -> None:
        self.first = first
        self.name = type(first).__name__
        # of the class, as in TRL: reading the instance would evaluate its properties
        self.methods = [name for name, _ in inspect.getmembers(type(first), predicate=inspect.isfunction)]
        self._factory = factory
        self._free = [first]
        if "close" in self.methods:
            over, closed = threading.Event(), threading.Event()
            # an interpreter that is ending can start no thread, so this one waits from the beginning
            threading.Thread(
                target=_close_all, args=(self._free, over, closed), daemon=True, name=f"close {self.name}"
            ).start()
            weakref.finalize(self, _end, over, closed)

    def __len__(self) -> int:
        return len(self._free)

    async def take(self, timeout: float | None) -> Any:
        """A free instance, or another one of the factory."""
        if self._free:
            return self._free.pop()
        return await call(self._factory, what=f"the factory of {self.name}", timeout=timeout, late=self.give)

    def give(self, instance: object) -> None:
        self._free.append(instance)

    async def drop(self, instance: Any) -> None:
        """Closes an instance that is not to be used again."""
        if "close" in self.methods:
            await call(instance.close, what=f"{self.name}.close", timeout=CLOSE_TIMEOUT)


def _close_all(free: list[Any], over: threading.Event, closed: threading.Event) -> None:
    over.wait()
    while free:
        instance = free.pop()
        try:
            closing = instance.close()
            if inspect.isawaitable(closing):
                asyncio.run(guarded(closing))
        except Exception as error:  # whatever the user's class raises
            logger.warning("%s could not be closed: %s", type(instance).__name__, describe_error(error))
    closed.set()


def _end(over: threading.Event, closed: threading.Event) -> None:
    over.set()
    closed.wait(CLOSE_TIMEOUT)
