"""Environments of verifiers 0.4: tasksets, harnesses and episodes of `verifiers.v1`."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

from mt_grpo.envs import Outcome
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.verifiers import EXAMPLE, SPLIT, Client, Row, example_of
from mt_grpo.integrations.verifiers_chat import HARNESS
from mt_grpo.trajectory import StopReason

KEY_NAME = "MT_GRPO_VERIFIERS_API_KEY"
"""
Begins the names of environment variables in which verifiers' clients find the key of the policy's server. verifiers
hides variables with `API_KEY` in their names from the agents that it starts.
"""
STOPPED = {
    "max_turns": StopReason.MAX_STEPS,
    "max_input_tokens": StopReason.TOKEN_BUDGET,
    "max_output_tokens": StopReason.TOKEN_BUDGET,
    "max_total_tokens": StopReason.TOKEN_BUDGET,
    "setup_timeout": StopReason.TIMEOUT,
    "agent_timeout": StopReason.TIMEOUT,
    "rollout_timeout": StopReason.TIMEOUT,
}
"""Names of stop conditions that are limits; the others are ends."""


class TasksetEnvironment:
    """
    A taskset by its name, with its own agents. Where the configuration says nothing else, agents run as local
    processes (`runtime: {type: subprocess}`) and those that would have verifiers' `bash` harness, which lets the model
    run commands on this machine, have `ChatHarness`.

    Args:
        name (`str`): Of the taskset.
        config (`dict`): See `mt_grpo.integrations.verifiers.load_environment`.
    """

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        given = dict(config)
        self._selects = {"train": given.pop("select", {}), "eval": given.pop("eval_select", None)}
        given["taskset"] = {**given.get("taskset", {}), "id": name}
        self.name, self.config = name, resolve_env_config(_with_agents(name, given))
        self._tasks: dict[str, list[Any]] = {}
        self._tasks["train"] = self._load("train")
        self._serving: dict[asyncio.AbstractEventLoop, _Serving] = {}

    def rows(self, split: str) -> list[Row]:
        """The tasks that are selected."""
        return [
            {"prompt": _prompt(task.data), "answer": _answer(task.data), EXAMPLE: index, SPLIT: split}
            for index, task in enumerate(self._of(split))
        ]

    def _of(self, split: str) -> list[Any]:
        if split not in self._tasks:
            self._tasks[split] = self._load(split)
        return self._tasks[split]

    def _load(self, split: str) -> list[Any]:
        option = "select" if split == "train" else "eval_select"
        if self._selects[split] is None:
            raise ConfigError(
                f"Nothing says which tasks of {self.name!r} are evaluated: set `eval_select` in `env_config`, such as "
                "`{skip: 100, limit: 20}`."
            )
        tasks = load_environment(self.config).taskset.select(SelectConfig(**self._selects[split]))
        if not tasks.bounded:
            raise ConfigError(
                f"The tasks of {self.name!r} have no end: set `{option}` in `env_config`, such as `{{limit: 500}}`."
            )
        return list(tasks)

    async def play(self, row: Row, client: Client, relay_key: str) -> Outcome:
        """
        One episode, scored by its task.

        Raises:
            RuntimeError: If verifiers recorded an error.
        """
        split, number = example_of(row)
        task = self._of(split)[number]
        # all conversations have one URL, and so one client of verifiers': the name of each trace leads to its own
        variable = f"{KEY_NAME}_{blake2b(relay_key.encode(), digest_size=8).hexdigest()}"
        os.environ[variable] = relay_key
        url = urlsplit(client.base_url)._replace(path="/v1").geturl()
        context = ModelContext("policy", EvalClientConfig(base_url=url, api_key_var=variable))
        async with self._served() as env:
            episode = await env.run_episode(task, context, on_trace=lambda trace: client.add_session(trace.id))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            said = [f"{error.type}: {error.message}" for error in errors] or ["no error was recorded"]
            raise RuntimeError(f"verifiers: {said[0]}")
        return _outcome(episode)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[Any]:
        """The environment with its servers, which are there as long as a conversation of this event loop is."""
        loop = asyncio.get_running_loop()
        serving = self._serving.get(loop)
        if serving is None:
            serving = self._serving[loop] = _Serving(load_environment(self.config))
        serving.count += 1
        try:
            await asyncio.shield(serving.ready)
            yield serving.env
        finally:
            serving.count -= 1
            if serving.count == 0:
                if self._serving.get(loop) is serving:
                    del self._serving[loop]
                serving.over.set()
                await asyncio.wait([serving.task])


class _Serving:
    """Servers of an environment, held by one task: what it enters, it leaves itself."""

    def __init__(self, env: Any) -> None:
        self.env, self.count = env, 0
        self.over = asyncio.Event()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.ensure_future(self._hold())

    async def _hold(self) -> None:
        try:
            async with self.env.serving():
                self.ready.set_result(None)
                await self.over.wait()
        except Exception as error:  # whatever the environment's servers raise
            if self.ready.done():
                raise
            self.ready.set_exception(error)


def _with_agents(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with a place and a harness for each agent."""
    kind = env_config_type(name, config.get("id", ""))
    unset = default_agent_harness(name).id == "bash"
    for seat, field in kind.model_fields.items():
        if isinstance(field.default, AgentConfig):
            agent = {"runtime": {"type": "subprocess"}, **config.get(seat, {})}
            if "harness" not in agent and (field.default.harness.id == "null" if field.default.harness else unset):
                agent["harness"] = {"id": HARNESS}
            config[seat] = agent
    return config


def _prompt(data: Any) -> list[dict[str, Any]]:
    """What is known of a task's first messages."""
    messages = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if data.prompt is None or isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt or ""}]
    return messages + [message_to_wire(message) for message in data.prompt]


def _answer(data: Any) -> str:
    return str((data.model_extra or {}).get("answer", getattr(data, "answer", "")) or "")


def _outcome(episode: Any) -> Outcome:
    """Each reward with its weight, and the mean where an agent ran several times; by agent where there are several."""
    found: dict[str, list[float]] = defaultdict(list)
    several = len({trace.agent.name for trace in episode.traces}) > 1
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                found[f"{trace.agent.name}/{name}" if several else name].append(reward.value)
    conditions = [trace.stop_condition for trace in episode.traces]
    reason = next((STOPPED[condition] for condition in conditions if condition in STOPPED), None)
    metrics = [dict(trace.metrics) for trace in episode.traces]
    return Outcome(
        {name: sum(values) / len(values) for name, values in found.items()},
        reason,
        info={"stop_conditions": conditions, "metrics": metrics},
    )
