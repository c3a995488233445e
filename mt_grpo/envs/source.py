"""
Where the environment of a conversation comes from: one to copy, a class, a factory, or one of these by name. What
builds the environments that a run's options describe registers itself by type, in a file that is imported where a run
names it.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Union

from mt_grpo.concurrency import Future, begin, call, in_thread
from mt_grpo.envs.env import Env, StepEnv
from mt_grpo.envs.tool_env import MultiTurnToolEnv
from mt_grpo.errors import ConfigError, describe_error, find_fault
from mt_grpo.imports import did_you_mean, import_object
from mt_grpo.options.table import Values
from mt_grpo.options.values import TYPES, env_type
from mt_grpo.tools import in_processes, load_tools_file
from mt_grpo.tools.function import cut
from mt_grpo.trajectory import Row, Trajectory

if TYPE_CHECKING:
    from datasets import Dataset

    from mt_grpo.rewards import RewardFunc

logger = logging.getLogger(__name__)

_EnvFactory = Callable[[Row], Env]  # makes the environment of a row; it may be `async`
EnvLike = Union[StepEnv, type[Env], _EnvFactory, dict[str, "EnvLike"], "EnvSource"]
"""
What a run can be given: a `StepEnv` that each conversation has a shallow copy of; a class or factory, called with
nothing or with the row; a dictionary of these, of which the row's `environment` names one; or an `EnvSource`.
"""

CLOSE_TIMEOUT = 30.0  # seconds an environment may take to close
COLUMN = "environment"  # the column of a dataset that names a row's environment


class EnvSource:
    """
    What the environments of a run come from. It makes them, and says what is known before any conversation. A subclass
    defines `make`; the rest suits environments that bring neither rows nor rewards.
    """

    @property
    def needs_template_calls(self) -> bool | None:
        """Whether the model's chat template has to hold tool calls; `None` where only a conversation can tell."""
        return False

    @property
    def writes_prompts(self) -> bool:
        """Whether its environments write the prompts, so that rows need none."""
        return False

    @property
    def given(self) -> EnvLike:
        """What the run was given."""
        return self

    in_sandboxes: ClassVar[bool] = False
    """Whether each conversation has a sandbox, outside of which its tools cannot be called."""

    def examine(self, rows: Any, at_once: int) -> Iterable[tuple[bool, str, str]]:
        """What `mt-grpo doctor` says of the sandboxes: whether it is fine, what was found, and the mend."""
        return ()

    @property
    def names(self) -> list[str]:
        """What the column `environment` can say; empty where there is one environment."""
        return []

    async def make(self, row: Row) -> Env:
        """The environment of a row; `ValueError` if the row names none, `TypeError` if a factory made none."""
        raise NotImplementedError(f"{type(self).__name__} has no `make`: define it.")

    def ahead(self, rows: Sequence[Row]) -> AbstractAsyncContextManager[None]:
        """A block in which the conversations of rows begin in this order: what they need can be made before."""
        return nullcontext()

    def of_row(self, row: Row) -> EnvSource:
        """The source of a row's environment; raises `ValueError` if the row names none of several."""
        return self

    def prototypes(self) -> list[StepEnv]:
        """The environments that are copied: what they ask of a tokenizer is known before any conversation."""
        return []

    def rows(self, split: str) -> Dataset | None:
        """The rows that it brings itself, of `"train"` or `"eval"`."""
        return None

    def rewards(self) -> list[RewardFunc]:
        """The outcome rewards that it brings itself."""
        return []

    def check(self, rows: Dataset, name: str) -> None:
        """Raises `ConfigError` if a row of the dataset `name` lacks what it needs."""


class Prototype(EnvSource):
    """A `StepEnv` that each conversation has a shallow copy of."""

    def __init__(self, env: StepEnv) -> None:
        self.env = env

    @property
    def given(self) -> EnvLike:
        return self.env

    @property
    def unforkable(self) -> str | None:
        """See `StepEnv.unforkable`."""
        return self.env.unforkable

    @property
    def needs_template_calls(self) -> bool:
        return self.env.protocol is not None and self.env.protocol.native_tools

    @property
    def writes_prompts(self) -> bool:
        return self.env.writes_prompts

    async def make(self, row: Row) -> Env:
        return copy.copy(self.env)

    def ahead(self, rows: Sequence[Row]) -> AbstractAsyncContextManager[None]:
        return self.env.begin_ahead(rows)

    def prototypes(self) -> list[StepEnv]:
        return [self.env]

    def rewards(self) -> list[RewardFunc]:
        return self.env.own_rewards()

    def check(self, rows: Dataset, name: str) -> None:
        self.env.check_rows(rows, name)


class _Factory(EnvSource):
    """A class, or a function that makes an environment, called with the row or with nothing; it may be `async`."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        self.factory = factory

    @property
    def given(self) -> EnvLike:
        return self.factory

    async def make(self, row: Row) -> Env:
        factory, what = self.factory, f"environment {_name(self.factory)}"
        args = () if takes(factory, ()) else (row,)
        if inspect.iscoroutinefunction(factory):
            env = factory(*args)
        else:
            env = await _made(in_thread(partial(factory, *args), what))
        if inspect.isawaitable(env):
            env = await _made(begin(env, what))
        if not isinstance(env, Env):
            raise TypeError(
                f"{_name(factory)} made {type(env).__name__}, which has no `run` and `close`: return an `Env`."
            )
        return env


class _NamedEnvSources(EnvSource):
    """Environments by name, of which the column `environment` of a row names one."""

    def __init__(self, given: dict[str, EnvLike]) -> None:
        self._given = given
        self.parts = {name: source_of(one) for name, one in given.items()}

    @property
    def given(self) -> EnvLike:
        return self._given

    @property
    def names(self) -> list[str]:
        return list(self.parts)

    @property
    def needs_template_calls(self) -> bool | None:
        needs = [part.needs_template_calls for part in self.parts.values()]
        return True if True in needs else None if None in needs else False

    @property
    def writes_prompts(self) -> bool:
        known = [part for part in self.parts.values() if part.prototypes()]
        return bool(known) and all(part.writes_prompts for part in known)

    async def make(self, row: Row) -> Env:
        return await self.of_row(row).make(row)

    @asynccontextmanager
    async def ahead(self, rows: Sequence[Row]) -> AsyncIterator[None]:
        async with AsyncExitStack() as held:
            for name, part in self.parts.items():
                await held.enter_async_context(part.ahead([row for row in rows if row.get(COLUMN) == name]))
            yield

    def of_row(self, row: Row) -> EnvSource:
        name = row.get(COLUMN)
        if name not in self.parts:
            raise ValueError(f"The row's `{COLUMN}` is {name!r}: name one of {', '.join(self.parts)}.")
        return self.parts[name].of_row(row)

    def prototypes(self) -> list[StepEnv]:
        return [env for part in self.parts.values() for env in part.prototypes()]

    def rewards(self) -> list[RewardFunc]:
        return list({reward.name: reward for part in self.parts.values() for reward in part.rewards()}.values())

    def check(self, rows: Dataset, name: str) -> None:
        """Also refuses rows that name none of them."""
        if COLUMN not in rows.column_names:
            raise ConfigError(
                f"There are several environments ({', '.join(self.parts)}), but the dataset has no column "
                f"`{COLUMN}` that says which one a row is for."
            )
        for one in rows.unique(COLUMN):
            if one not in self.parts:
                raise ConfigError(
                    f"A row of the dataset names the environment {one!r}{did_you_mean(str(one), self.names)}: the "
                    f"environments are {', '.join(self.parts)}."
                )
        names = rows[COLUMN]
        for key, part in self.parts.items():
            part.check(rows.select([index for index, each in enumerate(names) if each == key]), name)


def source_of(given: Any) -> EnvSource:
    """The source of what a run was given, see `EnvLike`."""
    if isinstance(given, EnvSource):
        return given
    if isinstance(given, StepEnv):
        return Prototype(given)
    return _NamedEnvSources(given) if isinstance(given, dict) else _Factory(given)


async def _made(making: Future) -> Any:
    """Waits for an environment. If the wait is cancelled, the environment is closed as soon as it is made."""
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_late)
        if isinstance(making, asyncio.Task):  # a thread goes on: Python cannot stop it
            making.cancel()
        raise


def _close_late(making: Future) -> None:
    """Closes an environment that was made when nobody waited for it any more."""
    if making.cancelled() or making.exception() is not None:
        return
    if inspect.iscoroutine(making.result()):
        making.result().close()
    elif isinstance(making.result(), Env):
        closing = asyncio.ensure_future(_close(making.result()))
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


_closing: set[Future] = set()  # the event loop itself keeps no task alive


async def close_environments(trajectories: Iterable[Trajectory]) -> None:
    """Closes the environments of trajectories, and warns of those that raise or exceed `CLOSE_TIMEOUT`."""
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
        where = find_fault(error).where
        return cut(describe_error(error), 1000) + (f" ({where})" if where else "")
    return None


def check_source(source: Any, name: str = "env", branches: bool = False) -> None:
    """Refuses what no environment can be made from."""
    fault = None
    if isinstance(source, dict):
        for key, value in source.items():
            check_source(value, f"{name}[{key!r}]")
        if not source:
            fault = "is an empty dictionary: give environments by name"
    elif isinstance(source, (StepEnv, EnvSource)):
        pass
    elif isinstance(source, type) and not issubclass(source, Env):
        fault = (
            f"is the class {source.__name__}, which has no `run` and `close`: subclass `StepEnv`, give it as "
            "`environment_factory` if it is one of TRL's, or wrap it in `mt_grpo.integrations.gym.GymEnv` if it has "
            "Gym's `reset` and `step(action)`"
        )
    elif isinstance(source, type) and inspect.isabstract(source):
        missing = ", ".join(sorted(source.__abstractmethods__))  # type: ignore[attr-defined]  # abstract classes have it
        fault = f"is the class {source.__name__}, which lacks {missing}: define them"
    elif not callable(source):
        fault = (
            f"is {source!r}, from which no environment can be made: give a `StepEnv`, a class, or a function from a "
            "row to an environment"
        )
    elif not takes(source, ()) and not takes(source, ({},)):
        fault = (
            f"is called with the row or with nothing, and {_name(source)} takes neither: give its other parameters "
            "defaults"
        )
    if fault:
        raise ConfigError(f"`{name}` {fault}.")
    if branches:
        _check_forkable(source)


def _check_forkable(source: EnvLike) -> None:
    """Refuses environments that cannot go on several times from the middle of a conversation."""
    for one in source.values() if isinstance(source, dict) else [source]:
        if isinstance(one, dict):
            _check_forkable(one)
            continue
        given, one = one, one.env if isinstance(one, Prototype) else one
        kind = one if isinstance(one, type) else type(one)
        if not issubclass(kind, StepEnv):
            fault = f"{_name(one)} is none of which that is known: give a `StepEnv` with a `fork`, or its class"
        elif "fork" not in vars(kind):
            fault = f"{kind.__name__} has no `fork` of its own: define it, see `StepEnv.fork`"
        elif kind.run not in (StepEnv.run, MultiTurnToolEnv.run) and "resume" not in vars(kind):
            fault = f"{kind.__name__} has a `run` of its own, which a branch does not begin with: define `resume` too"
        elif isinstance(given, (StepEnv, Prototype)) and given.unforkable:
            fault = given.unforkable
        else:
            continue
        raise ConfigError(
            f"`branch_at` needs an environment that can be forked, and {fault}, or leave `branch_at` out."
        )


def takes(source: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether something can be called with these arguments."""
    try:
        inspect.signature(source).bind(*args)
    except TypeError:
        return False
    return True


def tool_names(given: EnvLike) -> list[str]:
    """Names of the tools that the environments offer which are known before any conversation."""
    names: list[str] = []
    for one in source_of(given).prototypes():
        in_schemas = [schema["function"]["name"] for schema in one.tool_schemas or []]
        names += one.tools if isinstance(one, MultiTurnToolEnv) else in_schemas
    return list(dict.fromkeys(names))


def _name(source: object) -> str:
    return getattr(source, "__name__", type(source).__name__)


TRLFactory = Callable[[], Any] | dict[str, Callable[[], Any]]
"""What TRL's trainer takes: something that makes an environment, or a dictionary by the column `environment`."""

_Build = Callable[[Mapping[str, Any]], EnvLike]  # makes an environment, or several by name, from the options of a run

_BUILDS: dict[str, _Build] = {}


def environment(name: str) -> Callable[[_Build], _Build]:
    """Registers what builds a type of environment; `name` is in `mt_grpo.options.values.TYPES`."""

    def add(build: _Build) -> _Build:
        _BUILDS[name] = build
        return build

    return add


def build_environment(options: Values) -> EnvLike:
    """The environment that options describe; the module of its type is imported."""
    name = env_type(options)
    importlib.import_module(TYPES[name].module)
    return _BUILDS[name](options)


@environment("tools")
def _tool_environment(options: Values) -> MultiTurnToolEnv:
    """Tools that the model calls until it answers."""
    return MultiTurnToolEnv(**tool_arguments(options))


@environment("class")
def _environment_at(options: Values) -> EnvLike:
    """What a path leads to: a class with tools is made from the options, anything else is the environment itself."""
    found = import_object(options["env"], what="environment")
    if isinstance(found, type) and issubclass(found, MultiTurnToolEnv):
        return found(**tool_arguments(options))
    return found


def tool_arguments(options: Values, protocol: str = "tags", max_steps: int | None = 5) -> dict[str, Any]:
    """The arguments of a `MultiTurnToolEnv` of a run; `protocol` and `max_steps` where the options leave them open."""
    tools = named_tools(options["tools"], options["tools_config_file"])
    return {
        "tools": in_processes(tools, options["tool_processes"]) if options["tool_processes"] else tools,
        "system_prompt": options["system_prompt"],
        "max_steps": max_steps if options["max_env_steps"] is None else options["max_env_steps"],
        "protocol": options["call_protocol"] or protocol,
        "env_mask": options["env_mask"],
        "tool_timeout": options["tool_timeout"],
    }


def named_tools(named: list[Any] | None, file: str | None) -> list[Any]:
    """Tools of a list and of a file."""
    return [*(named or []), *([] if file is None else load_tools_file(file))]
