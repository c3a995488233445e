"""The environment that the options describe, a tokenizer that can hold its conversations, and what runs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from itertools import chain
from typing import Any

from datasets import Dataset
from trl.chat_template_utils import add_response_schema, supports_tool_calling

from mt_grpo.concurrency import run
from mt_grpo.envs import EnvSource, MultiTurnToolEnv
from mt_grpo.envs.protocols import PROTOCOLS
from mt_grpo.envs.simulated_user import SimulatedUser, SimulatedUserEnv
from mt_grpo.envs.source import COLUMN, check_rows, check_source, close_environments, prototypes
from mt_grpo.errors import ConfigError
from mt_grpo.imports import import_object
from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.integrations.verl import InteractionEnv, load_interactions
from mt_grpo.option_rules import PARTNERS, check_agent, check_partner, check_scheduler, parse_user, verifiers_name
from mt_grpo.options import OF_ENVIRONMENT
from mt_grpo.rollout import Engine, RolloutLimits, RolloutRunner
from mt_grpo.tools import load_tools, load_tools_file
from mt_grpo.training.agents import build_agent, build_scheduler, build_verifiers, for_agents
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.factories import Factory, environments_of, import_factory, warn_of_unused
from mt_grpo.training.preflight import Rows
from mt_grpo.training.rollout_batch import RolloutBatch


def build_env(
    args: MTGRPOConfig,
    factory: Factory | None = None,
    tools: Sequence[Any] | None = None,
    plain: bool = False,
) -> EnvSource:
    """
    The environment, or environments by name, that `args` describe.

    Args:
        args (`MTGRPOConfig`): The options.
        factory (`Factory`, *optional*): What the trainer was given as `environment_factory`.
        tools (`Sequence`, *optional*): What it was given as `tools`, beside those of `args`; their calls are native
            and unbounded where `args` do not say otherwise, as in TRL.
        plain (`bool`, *optional*, defaults to `False`): Whether a run without tools and partners has the call protocol
            `plain`, so that a conversation is one answer, as in TRL.

    Raises:
        ConfigError: If what they name is no environment; see `MultiTurnToolEnv` for further errors.
    """
    options = {name: getattr(args, name) for name in OF_ENVIRONMENT}
    if tools:
        options["tools"] = [*(args.tools or []), *tools]
        options["call_protocol"] = args.call_protocol or "native"
        options["max_env_steps"] = sys.maxsize if args.max_env_steps is None else args.max_env_steps
    if factory is not None:
        options["environment_factory"] = factory
    elif args.environment_factory is not None:
        options["environment_factory"] = import_factory(args.environment_factory, "environment_factory")
    others = (*PARTNERS, "tools", "tools_config_file", "multi_turn_scheduler", "call_protocol")
    if plain and args.environments is None and not any(options[name] for name in others):
        options["call_protocol"] = "plain"
    if args.environments is None:
        return _build(options, "env", args)
    if options["environment_factory"] is not None:
        raise ConfigError(
            "`environment_factory` and `environments` are both set: name each factory in `environments`, as "
            "`{environment_factory: its path}`."
        )
    return {name: _build_named(name, given, args) for name, given in args.environments.items()}


def _build_named(name: str, given: Any, args: MTGRPOConfig) -> EnvSource:
    key = f"environments: {name}"
    given = {"env": given} if isinstance(given, str) else given
    options = {option: getattr(args, option) for option in OF_ENVIRONMENT}
    if any(partner in given for partner in PARTNERS):
        options |= dict.fromkeys((*PARTNERS, "env_config"))
    # of the run's own options those count that this kind of environment has
    scheduler = ("multi_turn_scheduler", "max_turns", "loss_scale")
    if any(name in given for name in (*PARTNERS, "tools", "tools_config_file", "multi_turn_scheduler")):
        defaults = {field.name: field.default for field in fields(args)}
        others = ("tools", "tools_config_file", *PARTNERS) if "multi_turn_scheduler" in given else scheduler
        if "agent" in given or verifiers_name(given.get("env")) is not None:
            others = (*others, "tools", "tools_config_file", "system_prompt", "max_env_steps", "call_protocol")
        options |= {name: defaults[name] for name in others}
    options |= given
    check_scheduler(options, key)
    if options["environment_factory"] is not None:
        options["environment_factory"] = import_factory(options["environment_factory"], f"{key}: environment_factory")
    env = _build(options, key, args)
    if isinstance(env, dict):
        raise ConfigError(f"`{key}` has several factories in `environment_factory`: give each a name of its own.")
    if isinstance(env, TRLEnv):
        env.named = True
    return env


def _build(options: dict[str, Any], key: str, args: MTGRPOConfig) -> EnvSource:
    check_partner(options, "" if key == "env" else f"In `{key}`, ")
    if options["multi_turn_scheduler"] is not None:
        return build_scheduler(options)
    check_agent(options, "" if key == "env" else key)
    if options["agent"] is not None:
        return build_agent(options)
    if verifiers_name(options["env"]) is not None:
        return build_verifiers(options)
    path = options["env"]
    if options["environment_factory"] is not None:
        return _from_factory(options["environment_factory"], options, args)
    found = MultiTurnToolEnv if path is None else import_object(path, what="environment")
    if not (isinstance(found, type) and issubclass(found, MultiTurnToolEnv)):
        check_source(found, key)
        return found
    partner: dict[str, Any] = {}
    if options["simulated_user"] is not None:
        found, partner = SimulatedUserEnv, {"user": SimulatedUser(**parse_user(options["simulated_user"]))}
        partner["user"].check()
    elif options["interaction_config_file"] is not None:
        found, partner = InteractionEnv, {"interactions": load_interactions(options["interaction_config_file"])}
    env = found(
        **partner,
        tools=_tools(options["tools"], options["tools_config_file"]),
        system_prompt=options["system_prompt"],
        max_steps=5 if options["max_env_steps"] is None else options["max_env_steps"],
        protocol=options["call_protocol"] or "tags",
        env_mask=options["env_mask"],
        tool_timeout=options["tool_timeout"],
    )
    env.made_from = args
    return env


def _from_factory(factory: Any, options: dict[str, Any], args: MTGRPOConfig) -> EnvSource:
    return environments_of(
        factory,
        {
            "tools": _tools(options["tools"], options["tools_config_file"]),
            "system_prompt": options["system_prompt"],
            "env_mask": options["env_mask"],
            "tool_timeout": options["tool_timeout"],
            "protocol": options["call_protocol"] or "native",
            "max_steps": options["max_env_steps"],
        },
        args,
    )


def _tools(named: list[Any] | None, file: str | None) -> list[Any]:
    return [*(named or []), *([] if file is None else load_tools_file(file))]


def check_env(
    env: EnvSource | None,
    args: MTGRPOConfig,
    *datasets: Rows | dict[str, Rows] | None,
    factory: Factory | None = None,
    tools: Sequence[Any] | None = None,
    plain: bool = False,
) -> EnvSource:
    """
    Holds an environment that was made by hand against the options that would have made it, as far as these are not
    left at their defaults, and the names of several against the rows that name them; returns it, or where none is
    given that of the options.

    Raises:
        ConfigError: If they contradict each other, or no environment can be made from it.
    """
    if env is not None and factory is not None:
        raise ConfigError("The trainer was given both `env` and `environment_factory`: leave one out.")
    if env is not None and tools:
        raise ConfigError("The trainer was given both `env` and `tools`: give the tools to the environment.")
    if isinstance(env, (list, str)):
        raise ConfigError(
            "The second argument of the trainer is `env`, not a list of rewards as in TRL: pass rewards by name, as "
            "`reward_funcs=...`."
        )
    env = build_env(args, factory, tools, plain) if env is None else env
    check_source(env, branches=args.branch_at is not None)
    every = [rows for data in datasets for rows in (data.values() if isinstance(data, dict) else [data])]
    known = [rows for rows in every if isinstance(rows, Dataset)]  # rows of a stream are not known before
    names = [rows.unique(COLUMN) if COLUMN in rows.column_names else None for rows in known]
    for named in names:
        check_rows(env, named)
    if known and len(known) == len([rows for rows in every if rows is not None]):
        warn_of_unused(env, {name for named in names for name in named or ()})
    for rows in known:
        _check_partners(env, rows)
    if not isinstance(env, MultiTurnToolEnv) or env.made_from is args:
        return env
    for name in PARTNERS[:2]:
        if getattr(args, name) is not None:
            raise ConfigError(
                f"`{name}` is set in the arguments, and the trainer was given an `env`, which says itself who answers "
                "the model: leave one of them out."
            )
    if args.env is not None and not isinstance(env, import_object(args.env, what="environment")):
        raise _contradiction("env", args.env, type(env).__name__)
    of_env = {
        "tools": sorted(env.tools),
        "call_protocol": next((name for name, kind in PROTOCOLS.items() if type(env.protocol) is kind), "its own"),
        "system_prompt": env.system_prompt,
        "max_env_steps": env.max_steps,
        "env_mask": env.env_mask,
        "tool_timeout": env.tool_timeout,
    }
    defaults = {field.name: field.default for field in fields(args)}
    for name, value in of_env.items():
        asked = getattr(args, name)
        if name == "tools" and (tools := _tools(asked, args.tools_config_file)):
            asked = sorted(tool.name for tool in load_tools(tools))
        if asked == defaults[name]:
            continue
        if asked != value:
            raise _contradiction(name, asked, value)
    return env


def _check_partners(env: EnvSource, rows: Dataset) -> None:
    """Holds interactions and simulated users against the rows that they are for."""
    if isinstance(env, SimulatedUserEnv):
        env.user.check_columns(rows.column_names)
    elif isinstance(env, InteractionEnv):
        env.check_rows(rows.select_columns("extra_info") if "extra_info" in rows.column_names else [{}])
    elif isinstance(env, dict):
        names = rows[COLUMN]
        for name, one in env.items():
            if isinstance(one, (SimulatedUserEnv, InteractionEnv)):
                _check_partners(one, rows.select([index for index, each in enumerate(names) if each == name]))


def _contradiction(name: str, asked: Any, given: Any) -> ConfigError:
    return ConfigError(
        f"`{name}` is {asked!r} in the arguments and {given!r} in the `env` that the trainer was given: say it to the "
        "environment only, or leave `env` to the arguments."
    )


def prepare_tokenizer(tokenizer: Any, env: EnvSource) -> None:
    """
    Makes sure that the model's template can hold the conversations of `env`, as far as they are known before; adds
    TRL's response template under the native protocol, where the tokenizer has none of its own.

    Raises:
        ConfigError: If the template cannot show tool calls, or nothing can read them back.
    """
    if not any(one.protocol is not None and one.protocol.native_tools for one in prototypes(env)):
        if for_agents(env) and tokenizer.response_template is None and supports_tool_calling(tokenizer):
            with suppress(ValueError):  # of an agent it is not known whether it will ask for tools
                add_response_schema(tokenizer)
        return
    if not supports_tool_calling(tokenizer):
        raise ConfigError(
            f"The chat template of {tokenizer.name_or_path!r} has no tool support, so `call_protocol: native` cannot "
            "be used: choose `call_protocol: tags`, or a model whose template renders tool calls."
        )
    if tokenizer.response_template is None:
        try:
            add_response_schema(tokenizer)
        except ValueError as error:
            raise ConfigError(
                f"Nothing is known that reads tool calls of the chat template of {tokenizer.name_or_path!r} "
                f"({error}): set `response_template` on the tokenizer, or choose `call_protocol: tags`."
            ) from error


def build_runner(env: EnvSource, engine: Engine, args: MTGRPOConfig) -> RolloutRunner:
    """Runs conversations of `env` as `args` say."""
    limits = RolloutLimits(
        args.max_completion_length,
        args.max_turn_length,
        args.rollout_timeout,
        args.max_concurrent_rollouts,
        args.tool_timeout,
    )
    return RolloutRunner(
        env,
        engine,
        limits,
        args.chat_template_kwargs or {},
        args.history,
        args.compact_every,
        args.tokenization_sanity_check_mode,
    )


@contextmanager
def open_environments(batch: RolloutBatch) -> Iterator[None]:
    """Closes the environments of a batch in the end: rewards may look at them, and nothing leaves them open."""
    try:
        yield
    finally:
        trajectories = [*batch.trajectories, *chain(*batch.discarded)]
        if any(trajectory.environment is not None for trajectory in trajectories):
            run(close_environments(trajectories))
