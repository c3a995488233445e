"""Agents that hold the conversation themselves: those that a scheduler holds, and anybody's over HTTP."""

from __future__ import annotations

import inspect
from typing import Any

from mt_grpo.envs import EnvSource
from mt_grpo.envs.protocols import PROTOCOLS
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean, import_object
from mt_grpo.integrations.openai_api import AgentSource, Command
from mt_grpo.integrations.swift import MultiTurnScheduler, SchedulerSource, multi_turns
from mt_grpo.integrations.verifiers import VerifiersSource
from mt_grpo.option_rules import is_bare, parse_agent, parse_env_config, verifiers_name


def build_scheduler(options: dict[str, Any]) -> SchedulerSource:
    """
    What makes the environments of `multi_turn_scheduler`.

    Raises:
        ConfigError: If it is no scheduler.
    """
    name = options["multi_turn_scheduler"]
    if not is_bare(name):
        found = import_object(name, what="scheduler")
    elif name in multi_turns:
        found = multi_turns[name]
    else:
        raise ConfigError(
            f"There is no scheduler {name!r}{did_you_mean(name, multi_turns)}: choose one of "
            f"{', '.join(multi_turns)}, name the file that adds it to `multi_turns` in "
            "`external_plugins`, or give a dotted path."
        )
    if not (isinstance(found, type) and issubclass(found, MultiTurnScheduler)):
        raise ConfigError(
            f"`multi_turn_scheduler: {name}` leads to {found!r}: give a subclass of `MultiTurnScheduler`, which is in "
            "`mt_grpo.integrations.swift`."
        )
    tags = PROTOCOLS[options["call_protocol"] or "tags"]().tags
    limits = options["max_turns"], options["loss_scale"], options["system_prompt"], tags, options["tool_timeout"]
    return SchedulerSource(found, *limits)


def build_agent(options: dict[str, Any]) -> AgentSource:
    """
    What makes the environments of `agent`.

    Raises:
        ConfigError: If it is nothing that can be called.
    """
    given = parse_agent(options["agent"])
    if "command" in given:
        agent: Any = Command(given["command"])
    else:
        agent = import_object(given["function"], what="agent")
        if not takes_two(agent):
            raise ConfigError(
                f"`agent: {given['function']}` leads to {agent!r}: give a function that is called with the row "
                "and the client."
            )
    protocol = None if options["call_protocol"] is None else PROTOCOLS[options["call_protocol"]]()
    return AgentSource(agent, protocol, given.get("host", "127.0.0.1"))


def build_verifiers(options: dict[str, Any]) -> VerifiersSource:
    """
    What makes the environments of `env: verifiers:NAME`.

    Raises:
        ConfigError: If verifiers is not installed, or cannot load the environment.
    """
    protocol = None if options["call_protocol"] is None else PROTOCOLS[options["call_protocol"]]()
    config = parse_env_config(options["env_config"] or {})
    return VerifiersSource(verifiers_name(options["env"]), config, protocol)


def takes_two(agent: Any) -> bool:
    """Whether something can be called with a row and a client."""
    try:
        inspect.signature(agent).bind({}, None)
    except (TypeError, ValueError):
        return False
    return True


def for_agents(env: EnvSource) -> bool:
    """Whether any of the environments is an agent's whose calls the chat template writes."""
    if isinstance(env, dict):
        return any(map(for_agents, env.values()))
    return isinstance(env, AgentSource) and (env.protocol is None or env.protocol.native_tools)
