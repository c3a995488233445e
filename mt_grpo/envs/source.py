"""Where the environment of a conversation comes from: one to copy, a class, a factory, or one of these by name."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from mt_grpo.concurrency import begin, call, in_thread
from mt_grpo.envs.env import Env, StepEnv
from mt_grpo.envs.tool_env import MultiTurnToolEnv
from mt_grpo.errors import ConfigError, describe_error
from mt_grpo.imports import did_you_mean
from mt_grpo.tools.results import cut
from mt_grpo.trajectory import Trajectory

logger = logging.getLogger(__name__)

EnvFactory = Callable[[dict[str, Any]], Env]
"""Makes the environment of a row; it may be `async`."""
EnvSource = StepEnv | type[Env] | EnvFactory | dict[str, "EnvSource"]
"""
A `StepEnv` that each conversation has a shallow copy of; a class or factory, called with nothing or with the row; or a
dictionary of these, of which the row's `environment` names one.
"""

CLOSE_TIMEOUT = 30.0
"""Seconds an environment may take to close."""

COLUMN = "environment"
"""The column of a dataset that names a row's environment."""


async def make_env(source: EnvSource, row: dict[str, Any]) -> Env:
    """
    Makes the environment of one conversation.

    Args:
        source (`EnvSource`): What to make it from.
        row (`dict`): The row it is for.

    Raises:
        ValueError: If the row names no environment of the dictionary.
        TypeError: If what the factory made is no environment.
    """
    if isinstance(source, StepEnv):
        return copy.copy(source)
    if isinstance(source, dict):
        return await make_env(named(source, row), row)
    args = () if _takes(source, ()) else (row,)
    what = f"environment {_name(source)}"
    if inspect.iscoroutinefunction(source):
        env = source(*args)
    else:
        env = await _made(in_thread(partial(source, *args), what))
    if inspect.isawaitable(env):
        env = await _made(begin(env, what))
    if not isinstance(env, Env):
        raise TypeError(f"{_name(source)} made {type(env).__name__}, which has no `run` and `close`: return an `Env`.")
    return env


async def _made(making: asyncio.Future[Any]) -> Any:
    """Waits for what is made; where the wait is cancelled, what is still made is closed."""
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_late)
        if isinstance(making, asyncio.Task):  # a thread goes on: Python cannot stop it
            making.cancel()
        raise


def _close_late(making: asyncio.Future[Any]) -> None:
    """Closes an environment that was made when nobody waited for it any more."""
    if making.cancelled() or making.exception() is not None:
        return
    if inspect.iscoroutine(making.result()):
        making.result().close()
    elif isinstance(making.result(), Env):
        closing = asyncio.ensure_future(_close(making.result()))
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Future[Any]] = set()  # the event loop itself keeps no task alive


async def close_environments(trajectories: Iterable[Trajectory]) -> None:
    """
    Closes the environments that trajectories hold, whatever becomes of each: one that raises, or takes longer than
    `CLOSE_TIMEOUT`, is counted in a warning.
    """
    warn_of_unclosed(await close_each(trajectories))


async def close_each(trajectories: Iterable[Trajectory]) -> list[str]:
    """Closes the environments that trajectories hold, and returns why some could not be closed, a text each."""
    held = {}  # copies of a conversation that did not branch hold the same one
    for trajectory in trajectories:
        env = trajectory.environment
        if env is not None and not (isinstance(env, StepEnv) and type(env).close is StepEnv.close):
            held[id(env)] = env
        trajectory.environment = None
    return [failure for failure in await asyncio.gather(*map(_close, held.values())) if failure] if held else []


def warn_of_unclosed(failures: list[str]) -> None:
    """One warning, whatever number of environments could not be closed."""
    if failures:
        logger.warning("%d environments could not be closed, the first for: %s", len(failures), failures[0])


async def _close(env: Env) -> str | None:
    name = type(env).__name__
    try:
        await call(env.close, what=f"{name}.close", timeout=CLOSE_TIMEOUT)
    except Exception as error:  # whatever the user's code raises
        return cut(describe_error(error), 1000)
    return None


def named(source: dict[str, EnvSource], row: dict[str, Any]) -> EnvSource:
    """The environment that a row names in its column `environment`."""
    name = row.get(COLUMN)
    if name not in source:
        raise ValueError(f"The row's `{COLUMN}` is {name!r}: name one of {', '.join(source)}.")
    return source[name]


def check_source(source: Any, name: str = "env", branches: bool = False) -> None:
    """
    Refuses what no environment can be made from.

    Args:
        source: What was given.
        name (`str`, *optional*, defaults to `"env"`): Its name in errors.
        branches (`bool`, *optional*, defaults to `False`): Whether its conversations branch, see `check_forkable`.

    Raises:
        ConfigError: With one sentence that says what to give instead.
    """
    if isinstance(source, dict):
        if not source:
            raise ConfigError(f"`{name}` is an empty dictionary: give environments by name.")
        for key, value in source.items():
            check_source(value, f"{name}[{key!r}]")
    elif isinstance(source, type):
        if not issubclass(source, Env):
            raise ConfigError(
                f"`{name}` is the class {source.__name__}, which has no `run` and `close`: subclass `StepEnv`, "
                "give it as `environment_factory` if it is one of TRL's, or wrap it in "
                "`mt_grpo.integrations.gym.GymEnv` if it has Gym's `reset` and `step(action)`."
            )
        if inspect.isabstract(source):
            missing = ", ".join(sorted(source.__abstractmethods__))
            raise ConfigError(f"`{name}` is the class {source.__name__}, which lacks {missing}: define them.")
        _check_call(source, name)
    elif not isinstance(source, StepEnv):
        if not callable(source):
            raise ConfigError(
                f"`{name}` is {source!r}, from which no environment can be made: give a `StepEnv`, a class, or a "
                "function from a row to an environment."
            )
        _check_call(source, name)
    if branches:
        check_forkable(source)


def check_forkable(source: EnvSource) -> None:
    """
    Refuses environments that cannot go on several times from the middle of a conversation.

    Raises:
        ConfigError: If one does not define `fork` itself, or has a tool that keeps a state.
    """
    for one in source.values() if isinstance(source, dict) else [source]:
        if isinstance(one, dict):
            check_forkable(one)
            continue
        kind = one if isinstance(one, type) else type(one)
        if not issubclass(kind, StepEnv):
            raise ConfigError(
                f"`branch_at` needs an environment that can be forked, and {_name(one)} is none of which that is "
                "known: give a `StepEnv` with a `fork`, or its class, or leave `branch_at` out."
            )
        if "fork" not in vars(kind):
            raise ConfigError(
                f"`branch_at` needs an environment that can be forked, and {kind.__name__} has no `fork` of its own: "
                "define it, see `StepEnv.fork`, or leave `branch_at` out."
            )
        if kind.run not in (StepEnv.run, MultiTurnToolEnv.run) and "resume" not in vars(kind):
            raise ConfigError(
                f"`branch_at` needs an environment that can be forked, and {kind.__name__} has a `run` of its own, "
                "which a branch does not begin with: define `resume` too, or leave `branch_at` out."
            )
        for tool in one.tools.values() if isinstance(one, MultiTurnToolEnv) else ():
            if tool.keeps_state:
                raise ConfigError(
                    f"`branch_at` needs an environment that can be forked, and the tool {tool.name!r} keeps a state "
                    "of which a branch has no copy: leave `branch_at` or the tool out."
                )


def _check_call(source: Callable[..., Any], name: str) -> None:
    if not _takes(source, ()) and not _takes(source, ({},)):
        raise ConfigError(
            f"`{name}` is called with the row or with nothing, and {_name(source)} takes neither: give its other "
            "parameters defaults."
        )


def _takes(source: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(source).bind(*args)
    except TypeError:
        return False
    return True


def check_rows(source: EnvSource, names: list[str] | None) -> None:
    """
    Holds the values of the column `environment` against a dictionary of environments.

    Args:
        source (`EnvSource`): The environments.
        names (`list[str]`, *optional*): The values that occur; `None` where there is no such column.

    Raises:
        ConfigError: If a row names none.
    """
    if not isinstance(source, dict):
        return
    if names is None:
        raise ConfigError(
            f"There are several environments ({', '.join(source)}), but the dataset has no column `{COLUMN}` that "
            "says which one a row is for."
        )
    for name in names:
        if name not in source:
            raise ConfigError(
                f"A row of the dataset names the environment {name!r}{did_you_mean(str(name), list(source))}: the "
                f"environments are {', '.join(source)}."
            )


def prototypes(source: EnvSource) -> Iterator[StepEnv]:
    """The environments in it that are copied: what they ask of a tokenizer is known before any conversation."""
    if isinstance(source, StepEnv):
        yield source
    elif isinstance(source, dict):
        for value in source.values():
            yield from prototypes(value)


def tool_names(source: EnvSource) -> list[str]:
    """Names of the tools that the environments offer which are known before any conversation."""
    names: list[str] = []
    for one in prototypes(source):
        in_schemas = [schema["function"]["name"] for schema in one.tool_schemas or []]
        names += one.tools if isinstance(one, MultiTurnToolEnv) else in_schemas
    return list(dict.fromkeys(names))


def _name(source: Any) -> str:
    return getattr(source, "__name__", type(source).__name__)
