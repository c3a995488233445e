"""
Environments of verifiers 0.4: tasksets and episodes of `verifiers.v1`, and a harness that runs in this process. It
imports that version at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

from mt_grpo.envs import Outcome
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.openai_api import AgentClient
from mt_grpo.trajectory import Message, Row, StopReason

HARNESS = "mt_grpo_chat"  # name of `ChatHarness` in verifiers' configurations

# verifiers imports a harness by its name as a module of this package, and takes the class in its `__all__`
sys.modules.setdefault(f"verifiers.v1.harnesses.{HARNESS}", sys.modules[__name__])
__all__ = ["ChatHarness"]

KEY_NAME = "MT_GRPO_VERIFIERS_API_KEY"
"""
Beginning of the names of the environment variables that hold the key of the policy's server for verifiers' clients.
verifiers hides variables with `API_KEY` in their names from the agents that it starts.
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
"""Stop conditions that are limits. All others are the regular end."""


class TasksetEnvironment:
    """
    A taskset by its name, with its own agents. By default, agents run as local processes (`runtime: {type:
    subprocess}`), and `ChatHarness` replaces verifiers' default harness `bash`, which lets the model run commands on
    this machine.
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
        """The selected tasks of `train` or `eval`, each with `prompt` and `answer`."""
        found = []
        for data in (task.data for task in self._of(split)):
            answer = (data.model_extra or {}).get("answer", getattr(data, "answer", ""))
            found.append({"prompt": _messages(data.system_prompt, data.prompt or ""), "answer": str(answer or "")})
        return found

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

    async def play(self, split: str, number: int, client: AgentClient, relay_key: str) -> Outcome:
        """Runs an episode of a task, and scores it as the task does."""
        task = self._of(split)[number]
        # all conversations share one URL, so that verifiers makes one client; the trace's name finds the conversation
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
        """The environment with its servers, which run as long as this event loop has a conversation."""
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
    """The servers of an environment. One task enters and leaves their context, as its cancel scopes require."""

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
    """The configuration with a runtime and a harness for each agent."""
    kind = env_config_type(name, config.get("id", ""))
    unset = default_agent_harness(name).id == "bash"
    for seat, field in kind.model_fields.items():
        if isinstance(field.default, AgentConfig):
            agent = {"runtime": {"type": "subprocess"}, **config.get(seat, {})}
            if "harness" not in agent and (field.default.harness.id == "null" if field.default.harness else unset):
                agent["harness"] = {"id": HARNESS}
            config[seat] = agent
    return config


def _messages(system: str | None, prompt: Any) -> list[Message]:
    """A task's first messages, of a prompt that is text, messages of verifiers', or nothing."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return messages + [message_to_wire(message) for message in prompt or ()]


def _outcome(episode: Any) -> Outcome:
    """Weighted rewards, averaged over the runs of an agent; with several agents, named `agent/reward`."""
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


class ChatHarness(NullHarness):
    """verifiers' `null` harness without a process: asks until the model calls no tool, or its context is full."""

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: Runtime) -> None:
        """Nothing is installed."""

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        messages = _messages(*self.resolve_prompt(data))
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            http = DefaultAsyncHttpxClient(trust_env=False, verify=False)
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http)
            await stack.enter_async_context(client)
            asked = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            try:
                while True:
                    completion = await client.chat.completions.create(**asked)
                    message = completion.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        break
                    for call in message.tool_calls:
                        messages.append(await _answered(call, dispatch, connections))
            except APIStatusError as error:
                if trace.stop_condition is None and not is_context_overflow(error):
                    raise
        return ProgramResult(0, "", "")


async def _answered(call: Any, dispatch: dict[str, Any], connections: dict[str, Any]) -> dict[str, Any]:
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except json.JSONDecodeError as error:
        content: Any = f"error: invalid JSON in tool arguments ({error})"
    else:
        if name not in dispatch:
            content = f"error: unknown tool {name!r}"
        elif not isinstance(arguments, dict):
            content = "error: tool arguments must be a JSON object"
        else:
            content = await call_mcp(connections, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": content, "name": name}
