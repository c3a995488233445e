"""Environments of TRL's `environment_factory`: classes whose methods are tools, one instance per conversation."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mt_grpo.envs import MultiTurnToolEnv, Outcome, Policy
from mt_grpo.envs.env import ConversationEnded
from mt_grpo.envs.execution import execute_calls
from mt_grpo.envs.source import COLUMN
from mt_grpo.envs.threads import OutOfTime, call
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.pool import InstancePool
from mt_grpo.tools import Tool
from mt_grpo.tools.results import describe_error
from mt_grpo.trajectory import Message, ToolCall

NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods that the model cannot call. TRL makes `close` a tool."""


class MethodError(Exception):
    """What a method raised, in its own words: TRL shows them to the model without the name of the exception."""


class FactoryError(Exception):
    """`reset` or `get_reward` of the user's class failed; the message says which, and how."""


class Method(Tool):
    """A tool that is called as TRL calls it: with the arguments that the model wrote, unchecked."""

    def check(self, arguments: Any) -> str | None:
        return None


class TRLEnv(MultiTurnToolEnv):
    """
    Environments that a factory in TRL's form makes (TRL 1.16, `GRPOTrainer(environment_factory=...)`). An instance is
    made when a conversation needs one and none is free; `reset` begins each conversation.

    - `reset(**row)`: sync or `async`; gets the columns that it takes. Text that it returns is joined to the last
      message of the prompt.
    - Public methods are tools, except `reset`, `get_reward` and `close`. The model reads `str(result)`, or
      `{'error': ...}` where a method raised. Plain methods run in a thread, one after another; `async` ones of a turn
      then run concurrently.
    - `get_reward()`, sync or `async`: an outcome reward under the name of the class.
    - `close()`, sync or `async`: called when the process ends, and for an instance that is given up because `reset`
      raised or a call of it hangs.

    Args:
        factory (`Callable`): Makes an instance; called without arguments. One instance is made at once, to read its
            methods.
        tools (`Sequence`, *optional*): Tools beside the methods.
        max_steps (`int`, *optional*): See `MultiTurnToolEnv`; `None`, as in TRL, is no limit.
        protocol (`str`, *optional*, defaults to `"native"`): The call protocol; `"native"` is TRL's.
        tool_timeout (`float`, *optional*, defaults to `60.0`): Seconds that a method, `reset` and `get_reward` may
            take.
        system_prompt, env_mask: See `MultiTurnToolEnv`.

    Raises:
        ConfigError: If the factory cannot be called, raises, or makes something without `reset`.
        ToolDefinitionError: If a public method cannot be described to a model.
    """

    user_environment: Any = None
    """The instance of this conversation, which reward functions get as one of their `environments`."""
    named = False
    """Whether the column `environment` chose it; `reset` then does not get that column, as in TRL."""
    _begun = False  # `reset` has succeeded
    _calls: list[str]  # under way, in this conversation's instance

    def __init__(
        self,
        factory: Callable[[], Any],
        tools: Sequence[Callable[..., Any] | str | Tool] = (),
        system_prompt: str | None = None,
        max_steps: int | None = None,
        protocol: str = "native",
        env_mask: int = 0,
        tool_timeout: float | None = 60.0,
    ) -> None:
        self.pool = InstancePool(factory, _first_of(factory))
        self._names = [name for name in self.pool.methods if name not in NOT_TOOLS and not name.startswith("_")]
        methods = [Tool.from_function(getattr(self.pool.first, name)) for name in self._names]
        steps = sys.maxsize if max_steps is None else max_steps
        super().__init__([*tools, *methods], system_prompt, steps, protocol, env_mask, tool_timeout)
        self.tools = {
            name: self._as_in_trl(tool, tool.function) if type(tool) is Tool else tool
            for name, tool in self.tools.items()
        }

    @property
    def reward_name(self) -> str | None:
        """The name of the reward that the class gives; `None` where it has no `get_reward`."""
        return self.pool.name if "get_reward" in self.pool.methods else None

    @property
    def needed_columns(self) -> list[str]:
        """The columns that `reset` cannot do without."""
        parameters = inspect.signature(self.pool.first.reset).parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [one.name for one in parameters if one.kind in by_name and one.default is inspect.Parameter.empty]

    async def run(self, policy: Policy, row: dict[str, Any]) -> Outcome:
        """The loop of `MultiTurnToolEnv` in an instance of the factory, and the reward that it gives in the end."""
        self._calls = []
        self.user_environment = await self.pool.take(self.tool_timeout)
        self.tools = dict(self.tools)
        for name in self._names:
            self.tools[name] = self._as_in_trl(self.tools[name], getattr(self.user_environment, name))
        try:
            outcome = await super().run(policy, row)
        except ConversationEnded as ended:
            outcome = Outcome(stop_reason=ended.stop_reason)
        if self.reward_name is not None:
            reward = await self._ask("get_reward")
            if reward is not None and not math.isnan(reward := float(reward)):
                if math.isinf(reward):
                    raise FactoryError(f"{self.reward_name}.get_reward returned {reward}: return a finite number.")
                outcome.rewards = {**outcome.rewards, self.reward_name: reward}
        return outcome

    async def reset(self, row: dict[str, Any]) -> list[Message]:
        """The prompt of the row, with what the instance's `reset` returned at the end of its last message."""
        messages = await super().reset(row)
        columns = {name: value for name, value in row.items() if not (self.named and name == COLUMN)}
        observation = await self._ask("reset", **_taken(self.user_environment.reset, columns))
        self._begun = True
        if observation is None:
            return messages
        *before, last = messages
        return [*before, {**last, "content": _text(last["content"]) + _text(observation)}]

    async def execute(self, calls: list[ToolCall]) -> None:
        """Runs calls in TRL's order: plain methods see what the calls before them did."""
        at_once = [each for each in calls if each.name in self.tools and self.tools[each.name].is_async]
        for each in calls:
            if each not in at_once:
                await execute_calls([each], self.tools, self.tool_timeout)
        await execute_calls(at_once, self.tools, self.tool_timeout)
        for each in calls:
            if each.error is not None:
                each.error = each.error.removeprefix(f"{MethodError.__name__}: ")
                each.result = str({"error": each.error})

    async def close(self) -> None:
        """Gives the instance back, or gives it up where it can no longer be trusted."""
        await super().close()
        instance, self.user_environment = self.user_environment, None
        if instance is None:
            return
        if self._begun and not self._calls:
            self.pool.give(instance)
        else:
            await self.pool.drop(instance)

    async def _ask(self, name: str, **arguments: Any) -> Any:
        what = f"{self.pool.name}.{name}"
        self._calls.append(name)  # one that hangs stays
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

    def _as_in_trl(self, tool: Tool, function: Callable[..., Any]) -> Method:
        """The tool with results and errors as TRL shows them, and `_calls` kept."""
        calls = vars(self).get("_calls", [])

        def answer(**arguments: Any) -> str:
            calls.append(tool.name)
            try:
                return _text(function(**arguments))
            except Exception as error:  # whatever the user's method raises
                raise MethodError(str(error)) from error
            finally:
                calls.remove(tool.name)

        async def answer_later(**arguments: Any) -> str:
            calls.append(tool.name)
            try:
                return _text(await function(**arguments))
            except Exception as error:  # whatever the user's method raises
                raise MethodError(str(error)) from error
            finally:
                calls.remove(tool.name)

        bound = copy.copy(tool) if isinstance(tool, Method) else Method(**vars(tool))
        bound.function = answer_later if tool.is_async else answer
        return bound


def _first_of(factory: Callable[[], Any]) -> Any:
    """An instance, to read the methods of its class; refuses what is no factory of environments."""
    if not callable(factory):
        raise ConfigError(
            f"`environment_factory` is {factory!r}, which cannot be called: give a class, or a function that makes an "
            "environment."
        )
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        instance = factory()
    except Exception as error:  # whatever the user's factory raises
        raise ConfigError(
            f"`environment_factory` {name} is called without arguments, and raised {describe_error(error)}."
        ) from error
    if not inspect.isroutine(getattr(type(instance), "reset", None)):
        raise ConfigError(
            f"`environment_factory` {name} makes {type(instance).__name__}, which has no `reset`: define "
            "`reset(self, **row)`, which begins a conversation."
        )
    return instance


def _taken(reset: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """The columns that `reset` takes. TRL passes all, so that a class has `**row`; one that has not works as well."""
    parameters = inspect.signature(reset).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return row
    names = [parameter.name for parameter in parameters]
    return {name: value for name, value in row.items() if name in names}


def _text(said: Any) -> str:
    """What a class said, as text: `str(said)`, as in TRL; of a list of parts, as templates take it, the texts."""
    if isinstance(said, list) and said and all(isinstance(part, dict) and "type" in part for part in said):
        for part in said:
            if part["type"] != "text":
                raise TypeError(f"A part of type {part['type']!r} cannot be shown: the model reads text only.")
        return "".join(part["text"] for part in said)
    return str(said)
