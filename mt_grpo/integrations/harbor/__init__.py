"""Tasks of Harbor in their containers, in which the policy has a shell, or one of Harbor's own agents asks it."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib.util
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from datasets import Dataset

from mt_grpo.concurrency import abandon, begin, run
from mt_grpo.data.terminal import embedded_tasks
from mt_grpo.envs.env import Outcome, Policy, Step, outcome_at_end
from mt_grpo.envs.protocols import CallProtocol
from mt_grpo.envs.source import EnvLike, EnvSource, Prototype, environment, tool_arguments
from mt_grpo.envs.tool_env import MultiTurnToolEnv
from mt_grpo.errors import ConfigError, describe_error, refuse_first, users_code
from mt_grpo.imports import did_you_mean, need_library
from mt_grpo.integrations.harbor.bubblewrap import check_usable, read_machine
from mt_grpo.integrations.harbor.containers import (
    BUBBLEWRAP,
    ENGINES,
    HOST,
    TaskError,
    Verified,
    get_images,
    image_of_task,
    no_way_here,
    one_process,
    read_task,
    remove_leftovers,
)
from mt_grpo.integrations.harbor.pool import Pool
from mt_grpo.integrations.harbor.shell import Restartable, Shell
from mt_grpo.integrations.openai_api import AgentClient, AgentEnv, AgentSource, protocol_of
from mt_grpo.integrations.openai_api.conversation import Conversation
from mt_grpo.options.table import RunOptions, Values
from mt_grpo.rollout.policy import ConversationPolicy
from mt_grpo.tools import load_tools
from mt_grpo.trajectory import Message, Row, Turn

logger = logging.getLogger(__name__)

_DISK = 1e9  # bytes for a sandbox, below which the doctor warns

TASK = "task"  # the column with the folder of a row's task


class _Tasks:
    """
    Folders of tasks, or datasets of Harbor's registry, as rows: `prompt` is a task's instruction, `task` its folder;
    `embedded` are our own.
    """

    def __init__(self, sandbox: str, tasks: str, eval_tasks: str | None = None) -> None:
        self.sandbox = sandbox
        _check_usable(self.sandbox)
        if removed := remove_leftovers(self.sandbox):
            logger.warning("Removed what an earlier run left: %s", ", ".join(removed))
        self._given: dict[str, dict[Path, str]] = {}  # folders and names of tasks, by split
        for split, option, given in (("train", "tasks", tasks), ("eval", "eval_tasks", eval_tasks)):
            if given is not None:
                self._given[split] = _tasks_of(option, str(embedded_tasks(split)) if given == "embedded" else given)

    def rows(self, split: str) -> Dataset | None:
        """The tasks of a split; metadata that is of one type in some tasks, and of another in others, is text."""
        if split not in self._given:
            return None
        rows = []
        for path, name in self._given[split].items():
            metadata = read_task(path).get("metadata", {})
            row = {key: value for key, value in metadata.items() if isinstance(value, (str, int, float))}
            row["prompt"] = (path / "instruction.md").read_text(errors="replace").strip()
            if not row["prompt"]:
                raise ConfigError(f"{path / 'instruction.md'} is empty: write the task, or take its folder out.")
            rows.append({**row, TASK: str(path.resolve()), "name": name})
        for name in {name for row in rows for name in row}:
            having = [row for row in rows if name in row]
            if len({float if type(row[name]) is int else type(row[name]) for row in having}) > 1:
                for row in having:
                    row[name] = str(row[name])
        return Dataset.from_list(rows)

    in_sandboxes: ClassVar[bool] = True

    def examine(self, rows: Any, at_once: int) -> Iterator[tuple[bool, str, str]]:
        """Whether sandboxes start here, and their images and disk are here."""
        yield True, f"`{self.sandbox}` is here and answers", ""  # else there were no environment
        tasks = list(dict.fromkeys(row[TASK] for row in rows.select_columns(TASK)))
        place = tempfile.gettempdir() if self.sandbox == BUBBLEWRAP else "/var/lib"
        if self.sandbox == BUBBLEWRAP:
            for task in tasks:
                read_machine(Path(task))
            yield True, f"{len(tasks)} tasks need no image", ""
        elif self.sandbox in ENGINES:
            images = [image for image in map(image_of_task, tasks) if image is not None]
            here = sum(image.is_here(self.sandbox) for image in images)
            mend = "the others are built or pulled before the first batch" if here < len(images) else ""
            yield not mend, f"{here} of the images of {len(tasks)} tasks are here", mend
        else:
            return
        free = shutil.disk_usage(place).free
        mend = "free some, or run fewer at once" if free < at_once * _DISK else ""
        yield not mend, f"{free / 1e9:.1f} GB of disk are free for {at_once} sandboxes at once", mend

    def check(self, rows: Dataset, name: str) -> None:
        """Refuses rows without a task, and gets the images of the others."""
        if TASK not in rows.column_names:
            raise ConfigError(
                f"The {name} has no column `{TASK}`: give the folder of each row's task there, or leave "
                "`dataset_name` out."
            )
        if self.sandbox in ENGINES:
            get_images(self.sandbox, filter(None, map(image_of_task, rows.unique(TASK))))
        elif self.sandbox == BUBBLEWRAP:
            for task in rows.unique(TASK):
                read_machine(Path(task))


def _check_sandbox(name: str) -> None:
    """Refuses a sandbox that Harbor does not have."""
    if name != BUBBLEWRAP:
        _check_installed()
        from harbor.models.environment_type import EnvironmentType

        _check_known("sandbox", name, [kind.value for kind in EnvironmentType])


def _agent_config(given: str | Mapping[str, Any]) -> Any:
    """Harbor's configuration of an agent."""
    _check_installed()
    from harbor.models.agent.name import AgentName
    from harbor.models.trial.config import AgentConfig
    from pydantic import ValidationError

    if not isinstance(given, (str, Mapping)):
        raise ConfigError(f"`agent: {given}` is no agent: give a name, or options of Harbor's `AgentConfig`.")
    options = {"name": given} if isinstance(given, str) else dict(given)
    if unknown := options.keys() - AgentConfig.model_fields.keys():
        raise ConfigError(f"`agent` has no option {min(unknown)!r}: it has those of Harbor's `AgentConfig`.")
    try:
        config = AgentConfig(**options)
    except ValidationError as error:
        raise ConfigError(f"`agent: {options}` is refused by Harbor: {error.errors()[0]['msg']}") from error
    if config.name is not None and ":" not in config.name:
        _check_known("agent", config.name, sorted(AgentName.values()))
    return config


def _check_installed() -> None:
    mend = "mt-grpo[harbor]` with Python 3.12 or later, or take `sandbox: bubblewrap"
    need_library("harbor", "`env: {type: harbor}`", mend)


def _check_known(option: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = did_you_mean(name, known)
        raise ConfigError(f"`{option}: {name}` is none of Harbor's{near}: it has {', '.join(known)}.")


def _check_usable(sandbox: str) -> None:
    """Asks Harbor whether a sandbox can be used: its program answers, its credentials are there."""
    if sandbox == BUBBLEWRAP:
        return check_usable()
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType

    try:
        EnvironmentFactory.run_preflight(EnvironmentType(sandbox))
    except (Exception, SystemExit) as error:  # Harbor ends its own command with the reason
        raise ConfigError(f"`sandbox: {sandbox}` cannot be used on this machine: {error}") from error


_OF_REGISTRY = re.compile(r"[\w.-]+(/[\w.-]+(@[\w.:-]+)?|@[\w.:-]+)")
"""How Harbor names a dataset of its registry: ORG/NAME, with a version or without, or NAME@VERSION."""


def _tasks_of(option: str, given: object) -> dict[Path, str]:
    """The tasks, with their names, of a folder or of a dataset of Harbor's registry; refuses where there are none."""
    found, fault = dict[Path, str](), ""
    if isinstance(given, (str, os.PathLike)):
        root = Path(given).expanduser()
        found = {path: path.name for path in ([root] if (root / "task.toml").is_file() else sorted(root.glob("*")))}
        fault = "" if root.exists() else ", and no such folder is there"
        known = isinstance(given, str) and _OF_REGISTRY.fullmatch(given) and not root.exists()
        here = root.parent != Path() and root.parent.is_dir() and "@" not in str(given)  # else each process would ask
        if known and not here and importlib.util.find_spec("harbor") is not None:
            try:
                found = run(_downloaded(str(given)))
            except Exception as error:  # whatever Harbor or its libraries raise
                fault += f", nor can Harbor fetch such a dataset of its registry ({describe_error(error)})"
        found = {path: name for path, name in found.items() if all((path / file).is_file() for file in _OF_TASK)}
    if not found:
        raise ConfigError(
            f"`{option}: {given}` has no tasks of Harbor{fault}: a task is a folder with `task.toml` and "
            "`instruction.md`."
        )
    return found


_OF_TASK = ("task.toml", "instruction.md")


async def _downloaded(name: str) -> dict[Path, str]:
    """Tasks of a dataset, in Harbor's own cache."""
    from harbor.registry.client import RegistryClientFactory
    from harbor.registry.client.package import PackageDatasetClient

    client = PackageDatasetClient() if "/" in name else RegistryClientFactory.create()
    with one_process(f"dataset {name}"):  # of those of a run
        return {Path(item.downloaded_path): item.id.get_name() for item in await client.download_dataset(name)}


SYSTEM_PROMPT = (
    "You work in the shell of a Linux machine. Solve the task with commands, look at what they print, and call submit "
    "when it is done."
)


class HarborEnv(MultiTurnToolEnv):
    """
    One task per conversation: the model has a shell in the task's container, and what Harbor's verifier says of the
    container in the end is the reward.

    Args:
        sandbox (`str`, *optional*, defaults to `"docker"`): What runs containers, by Harbor's name: `docker`,
            `podman`, `e2b`, `daytona`, `modal` and others; or `bubblewrap`, which needs neither Harbor nor containers.
        tool_timeout (`float`, *optional*, defaults to `60.0`): Seconds that a command may take.
        verify_every (`int`, *optional*): Verifies after each so many turns too. The reward of a turn, see
            `step_reward`, is by how much the best so far has grown since the last time.
        sandbox_pool (`int`, *optional*, defaults to `0`): Containers that are started ahead of their conversations.
        **options: Of `MultiTurnToolEnv`; `max_steps` is 30 by default.

    Raises:
        ConfigError: If Harbor is not installed, or has no such sandbox; if an option is no such number.
    """

    def __init__(
        self,
        sandbox: str = "docker",
        tool_timeout: float | None = 60.0,
        verify_every: int | None = None,
        sandbox_pool: int = 0,
        **options: Any,
    ) -> None:
        every = 1 if verify_every is None else verify_every
        refuse_first(
            (
                not isinstance(every, int) or every < 1,
                f"`verify_every: {every}` is no number of turns: give 1 or more.",
            ),
            (
                not isinstance(sandbox_pool, int) or sandbox_pool < 0,
                f"`sandbox_pool: {sandbox_pool}` is no number of containers: give 0 or more.",
            ),
            (
                sandbox_pool and sandbox == BUBBLEWRAP,
                "`sandbox_pool` is of containers, and `sandbox: bubblewrap` has none: leave it out.",
            ),
        )
        _check_sandbox(sandbox)
        self.sandbox, self.verify_every = sandbox, verify_every
        self.command_seconds = 60.0 if tool_timeout is None else tool_timeout
        options = {"system_prompt": SYSTEM_PROMPT, "max_steps": 30, **options}
        self._shell, self._forked = Shell(), None
        self._started: asyncio.Future[None] | None = None  # once its container has
        self._needed = 0.0  # when that was needed first, by the monotonic clock
        self.pool = None if self.sandbox == BUBBLEWRAP else Pool(sandbox_pool, self._begin)
        super().__init__([self._shell.bash, self._shell.submit], tool_timeout=None, **options)

    def begin_ahead(self, rows: Sequence[Row]) -> AbstractAsyncContextManager[None]:
        """A block in which containers start before their conversations."""
        return (
            super().begin_ahead(rows) if self.pool is None else self.pool.ahead([r[TASK] for r in rows if TASK in r])
        )

    async def _begin(self, task: str) -> Any:
        return await _trials(self.sandbox).begin_trial(self.sandbox, task)

    async def step(self, turn: Turn) -> Step:
        await self._until_started()
        step = await super().step(turn)
        if self._shell.failure is not None:  # no command of this conversation would succeed any more
            raise TaskError(self._shell.failure)
        if self._shell.spoilt and not step.done:  # the agent can do nothing more
            step.done = True
        if self.verify_every is not None:
            step.reward = 0.0
            if not step.done and len(self.turns) % self.verify_every == 0:
                found = await _trials(self.sandbox).verify(self._container, self.row[TASK])
                step.reward = max(0.0, (found or 0.0) - self._best)
                self._best += step.reward
        return step

    async def run(self, policy: Policy, row: Row) -> Outcome:
        self._best = 0.0
        begun = await (self._begin if self.pool is None else self.pool.take)(row[TASK])
        return await self._hold(begun, partial(super().run, policy, row))

    async def resume(self, policy: Policy, messages: list[Message]) -> Outcome:
        """The loop; that of a fork is in a trial of its own."""
        go_on = partial(super().resume, policy, messages)
        if self._forked is None:
            return await go_on()
        begun, self._forked = self._forked, None
        return await self._hold(begun, go_on)

    @property
    def unforkable(self) -> str | None:
        if self.sandbox in (BUBBLEWRAP, *ENGINES):
            return None
        return f"`sandbox: {self.sandbox}` copies no containers: use docker, podman or bubblewrap"

    async def fork(self) -> HarborEnv:
        await self._until_started()
        twin = copy.copy(self)
        twin._forked, lost = await self._container.fork()
        if lost:
            _say_lost()
        return twin

    def _need(self, *ended: object) -> None:
        self._needed = self._needed or time.monotonic()

    async def _until_started(self) -> None:
        if self._started is not None:
            self._need()
            await asyncio.shield(self._started)  # whoever waits may be cancelled: it has not started for that

    async def close(self) -> None:
        """Removes a fork in which no conversation went on."""
        if self._forked is not None:
            await self._forked.drop()

    async def _hold(self, begun: Any, converse: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """A conversation in a trial that has begun: its first turn is sampled while the container starts."""
        outcome, failure = Outcome(), None
        started = self._started = asyncio.get_running_loop().create_future()
        self._needed = 0.0

        async def until_end() -> Outcome:
            return await outcome_at_end(converse())  # what was done until a limit is verified all the same

        held = begin(until_end(), "the conversation in a container")
        held.add_done_callback(self._need)

        async def talk(container: Any) -> None:
            nonlocal outcome, failure

            async def execute(script: str, seconds: float) -> Any:
                return await container.exec(script, timeout_sec=int(seconds))

            self._container = container
            begin_again = container.begin_again if isinstance(container, Restartable) else None
            self._shell = shell = Shell(execute, self.command_seconds, begin_again, self._shell.worked)
            self.tools = {tool.name: tool for tool in load_tools([shell.bash, shell.submit])}
            started.set_result(None)
            try:
                outcome = await held
            except Exception as error:
                failure = error
                raise

        try:
            done = await begun.talk_in(talk)
        except Exception as error:
            if failure is not None:
                raise failure from None
            if not (self._shell.spoilt and isinstance(error, TaskError)):
                raise
            done = Verified({"reward": 0.0, "*": 0.0}, str(error))  # no test can run in what the agent left
        finally:
            abandon(held)  # where the container did not start
            await asyncio.wait([held])
        if failure is not None:
            raise failure
        if not started.done():  # what is verified is none of the policy's work
            raise TaskError(f"The conversation came into no container: {done.agent_error}")
        info: dict[str, Any] = {"verifier_log": done.verifier_log, "files_changed": done.files_changed}
        if self.pool is not None:
            waited = max(0.0, done.started - self._needed)
            info |= {"start_seconds": round(done.start_seconds, 3), "start_waited": round(waited, 3)}
        outcome.rewards, outcome.info = done.rewards, {**info, **outcome.info}
        return outcome


@functools.cache
def _say_lost() -> None:
    logger.warning("A branch has no copy of what the agent left running in the sandbox. This is said once.")


def _trials(sandbox: str) -> ModuleType:
    """What holds trials in a sandbox: Harbor, or our own path without containers."""
    return import_module(f"mt_grpo.integrations.harbor.{'bubblewrap' if sandbox == BUBBLEWRAP else 'trial'}")


class HarborTasks(_Tasks, Prototype):
    """Folders of Harbor's tasks, for training and for evaluation, as rows for the conversations of `env`."""

    def __init__(self, env: HarborEnv, tasks: str, eval_tasks: str | None = None) -> None:
        Prototype.__init__(self, env)
        _Tasks.__init__(self, env.sandbox, tasks, eval_tasks)

    @property
    def given(self) -> EnvLike:
        return self  # an environment alone has no rows

    @property
    def unforkable(self) -> str | None:
        tasks = list(self._given["train"])
        for task in tasks:
            if (task / "environment" / "docker-compose.yaml").is_file():
                return f"the task {task.name} composes services, which are not copied: leave it out"
        if fault := super().unforkable:
            return fault
        if self.sandbox in ENGINES:
            images = [image for image in map(image_of_task, map(str, tasks)) if image is not None]
            get_images(self.sandbox, images)
            for image in images:
                if volumes := image.volumes(self.sandbox):
                    return (
                        f"the image of the task {image.task.name} has volumes ({', '.join(volumes)}), which are not "
                        "copied: leave it out"
                    )
        return None


@environment("harbor")
def _harbor_of_options(options: Values) -> EnvSource:
    """The tasks of `env: {type: harbor}`."""
    own = {name: value for name, value in options["env"].items() if value is not None}
    sandbox, agent = own.get("sandbox", "docker"), own.get("agent", "bash")
    folders = own["tasks"], own.get("eval_tasks")
    if agent != "bash":
        loop = f"is of the shell that `agent: bash` has, and `env: {{agent: {agent}}}` has its own loop: leave it out."
        defaults = RunOptions.__dataclass_fields__
        refuse_first(
            *(
                (options[option] not in (None, defaults[option].default), f"`{option}` {loop}")
                for option in ("system_prompt", "max_env_steps", "env_mask", "tool_timeout")
            ),
            (
                "verify_every" in own,
                f"`verify_every` is of `agent: bash`: the turns of `{agent}` are its own. Leave it out.",
            ),
            (
                own.get("sandbox_pool"),
                "`sandbox_pool` is of `agent: bash`: other agents start their own. Leave it out.",
            ),
        )
        return HarborAgents(agent, *folders, sandbox, own.get("host"), protocol_of(options))
    given = tool_arguments(options, max_steps=30)
    refuse_first(
        (given.pop("tools"), "`env: {type: harbor}` has a shell for tools: leave `tools` out."),
        ("host" in own, "`host` is for Harbor's own agents, and `agent: bash` asks from no container: leave it out."),
    )
    given = {name: value for name, value in given.items() if value is not None}
    given |= {name: own[name] for name in ("verify_every", "sandbox_pool") if name in own}
    return HarborTasks(HarborEnv(sandbox, **given), *folders)


_ALL_INTERFACES = "0.0.0.0"
_KWARGS: dict[str, dict[str, Any]] = {
    "codex": {"disable_web_search": True, "config": {"features": {"multi_agent": False}}},
    "terminus-2": {"record_terminal_session": False},
}
"""Options of agents unless the user gives others: no tools that the policy's server would have to run, no films."""


class HarborAgents(_Tasks, AgentSource):
    """
    Tasks of Harbor for one of its agents: what it samples is a conversation of the policy's, token for token. `agent`
    is its name, or options of Harbor's `AgentConfig`; `host` the name by which containers reach this machine.
    """

    def __init__(
        self,
        agent: str | Mapping[str, Any],
        tasks: str,
        eval_tasks: str | None = None,
        sandbox: str = "docker",
        host: str | None = None,
        protocol: CallProtocol | None = None,
    ) -> None:
        if sandbox == BUBBLEWRAP:
            raise ConfigError(f"`agent: {agent}` is Harbor's and needs its containers: use another `sandbox`.")
        self._of_harbor = _agent_config(agent)
        from harbor.agents.installed.base import BaseInstalledAgent

        _check_sandbox(sandbox)
        self.inside = issubclass(self._agent_class(), BaseInstalledAgent)  # it asks from its container
        if self.inside and host is None and sandbox not in ENGINES:
            raise ConfigError(
                f"`agent: {self.name}` works in a container of `{sandbox}`, which runs elsewhere: give the address by "
                "which it reaches this machine as `host`."
            )
        self.seen_as = host or HOST
        _Tasks.__init__(self, sandbox, tasks, eval_tasks)
        AgentSource.__init__(self, self._agent_class(), protocol, _ALL_INTERFACES if self.inside else "127.0.0.1")

    @property
    def name(self) -> str:
        return self._of_harbor.name or self._of_harbor.import_path

    def examine(self, rows: Any, at_once: int) -> Iterator[tuple[bool, str, str]]:
        """As `_Tasks.examine`, and whether the agent reaches the policy from its container."""
        yield from super().examine(rows, at_once)
        if not self.inside:
            return
        reaches = f"{self.name} reaches this machine from its container as {self.seen_as}"
        if self.sandbox not in ENGINES:
            yield False, f"whether {reaches} was not tried", "`mt-grpo rollout --num_prompts 1` with this recipe does"
            return
        images = [image for image in map(image_of_task, rows.unique(TASK)) if image is not None]
        image = next((each for each in images if each.is_here(self.sandbox)), None)
        if image is None:
            yield False, f"whether {reaches} was not tried", "build an image: `mt-grpo train --dry_run` does"
        elif (fault := no_way_here(self.sandbox, image.name, self.seen_as)) is None:
            yield True, reaches, ""
        else:
            raise ConfigError(
                f"{self.name} does not reach this machine from its container as {self.seen_as}: {fault}: let the "
                "firewall pass connections from containers, or give an address that they reach as `host` in `env`."
            )

    def _agent_class(self) -> Any:
        from harbor.agents.factory import AgentFactory

        with users_code(f"`agent: {self.name}` is no agent of Harbor's"):
            return AgentFactory.get_agent_class_from_config(self._of_harbor)

    def config(self, client: AgentClient, context_length: int) -> Any:
        """What Harbor is told of the agent: where the policy is, its key, the form of its API, and its context."""
        from harbor.models.model_api_format import ModelApiFormat

        agent = self._agent_class()
        kwargs = _KWARGS.get(self.name, {}) | self._of_harbor.kwargs
        options = getattr(agent, "options_model", None)
        if "model_info" in getattr(options, "model_fields", {}):  # it compacts before the context is full
            info = {"max_input_tokens": context_length, "max_output_tokens": context_length}
            kwargs.setdefault(
                "model_info", info | dict.fromkeys(("input_cost_per_token", "output_cost_per_token"), 0.0)
            )
        spec = getattr(agent, "MODEL_CONNECTION", None)
        formats = getattr(spec, "supported_api_formats", None) or [ModelApiFormat.OPENAI_CHAT_COMPLETIONS]
        asked = self._of_harbor.model_api_format
        anthropic = ModelApiFormat.ANTHROPIC_MESSAGES in ([asked] if asked else formats[:1])
        key = "ANTHROPIC_API_KEY" if anthropic else "OPENAI_API_KEY"
        url = client.base_url.replace(f"//{_ALL_INTERFACES}:", f"//{self.seen_as}:")
        return self._of_harbor.model_copy(
            update={
                "model_name": self._of_harbor.model_name or ("anthropic/policy" if anthropic else "openai/policy"),
                "base_url": url.removesuffix("/v1") if anthropic else url,
                "env": {key: client.api_key, **self._of_harbor.env},
                "kwargs": kwargs,
            }
        )

    async def make(self, row: Mapping[str, object]) -> Any:
        return _HarborAgentEnv(self)


class _HarborAgentEnv(AgentEnv):
    """One conversation of an agent of Harbor's, and the verification of what it did."""

    def __init__(self, source: HarborAgents) -> None:
        super().__init__(source)
        self._tasks = source
        self._failed: Exception | None = None

    async def run(self, policy: ConversationPolicy, row: Mapping[str, object]) -> Outcome:
        """Holds the conversation; a trial without a reward is an error, also where a limit ended the conversation."""
        outcome = await super().run(policy, row)
        if self._failed is not None:
            raise self._failed
        return outcome

    async def work(self, conversation: Conversation, row: Mapping[str, object], client: AgentClient) -> object:
        """A trial, whose agent ends when it does not stop asking beyond its limits."""
        from mt_grpo.integrations.harbor.trial import run_trial

        source = self._tasks
        try:
            config = source.config(client, conversation.policy.context_length)
            done = await run_trial(source.sandbox, str(row[TASK]), config, conversation)
            if not conversation.asked:
                said = done.agent_error or done.agent_log.strip()[-500:] or "it printed nothing"
                raise TaskError(f"No request of {source.name} reached the policy: {said}")
        except Exception as error:  # raised by `run`: a limit that was reached before is not what went wrong
            self._failed = error
            return None
        info = {"verifier_log": done.verifier_log, "agent_log": done.agent_log, "agent_error": done.agent_error}
        info["files_changed"] = done.files_changed
        return Outcome(done.rewards, info={name: said for name, said in info.items() if said})
