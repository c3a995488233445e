"""
The environment that the options describe, a tokenizer that can hold its conversations, and what runs them: the runner,
and the engine of the trainer's own model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import add_response_schema
from trl.distributed import DistributedBackend

from mt_grpo.envs import EnvLike, EnvSource, MultiTurnToolEnv, StepEnv
from mt_grpo.envs.env import ServedEnv
from mt_grpo.envs.protocols import PROTOCOLS
from mt_grpo.envs.source import COLUMN, TRLFactory, build_environment, check_source, named_tools, source_of
from mt_grpo.errors import ConfigError, refuse_first
from mt_grpo.imports import import_object
from mt_grpo.options.rules import PARTNERS, check_agent, check_factory, check_partner, check_scheduler
from mt_grpo.options.table import OF_ENVIRONMENT
from mt_grpo.options.values import TYPES, verifiers_name
from mt_grpo.rollout import Engine, RolloutLimits, RolloutRunner, TemplateError
from mt_grpo.rollout.chat_template import ChatTemplate
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.escaped_text import MediaEncoder
from mt_grpo.tools import Tool, load_tools
from mt_grpo.training.columns import Rows, named_datasets
from mt_grpo.training.config import MTGRPOConfig

logger = logging.getLogger(__name__)


def build_env(
    args: MTGRPOConfig,
    factory: TRLFactory | None = None,
    tools: Sequence[Callable[..., object] | str] | None = None,
    plain: bool = False,
) -> EnvLike:
    """The environment, or environments by name, that `args` describe."""
    options = {name: getattr(args, name) for name in OF_ENVIRONMENT}
    if tools:
        of_trl = import_object("mt_grpo.integrations.trl.TRLTool").of
        given = (of_trl(tool) if type(tool) is Tool else tool for tool in load_tools(list(tools)))
        options["tools"] = [*(args.tools or []), *given]
        options["call_protocol"] = args.call_protocol or "native"
        options["max_env_steps"] = sys.maxsize if args.max_env_steps is None else args.max_env_steps
    if factory is not None:
        options |= {"environment_factory": factory, "factory": factory}
    others = (*PARTNERS, "tools", "tools_config_file", "multi_turn_scheduler", "call_protocol")
    if plain and args.environments is None and not any(options[name] for name in others):
        options["call_protocol"] = "plain"
    if args.environments is None:
        return _build(options, "env", options)
    assert isinstance(args.environments, dict)  # the options have read it
    several = {name: {"env": given} if isinstance(given, str) else given for name, given in args.environments.items()}
    check_factory({**options, "environments": several})
    if args.tool_processes and not any(map(_names_tools, [options, *several.values()])):
        raise _no_tool(args.tool_processes)
    settings = {name: _settings(given, options, args) for name, given in several.items()}
    named = {name: _build_named(name, settings[name], given, args) for name, given in several.items()}
    if not any(isinstance(env, MultiTurnToolEnv) for env in named.values()):
        scheduled = any(given["multi_turn_scheduler"] for given in settings.values())
        of_schedulers = TYPES["scheduler"].takes if scheduled else ()
        unused = {name: value for name, value in options.items() if name not in of_schedulers}
        _check_unused(unused, "any of `environments`")
    if args.environment_urls is not None and not any(isinstance(env, ServedEnv) for env in named.values()):
        _at(named, args.environment_urls, "environments")
    return named


def _settings(given: dict[str, Any], options: dict[str, Any], args: MTGRPOConfig) -> dict[str, Any]:
    """The options of one of `environments`: its own, and of the run's those that this kind of environment has."""
    options = dict(options)
    if any(partner in given for partner in PARTNERS):
        options |= dict.fromkeys((*PARTNERS, "env_config"))
    scheduler = ("multi_turn_scheduler", "max_turns", "loss_scale")
    if any(name in given for name in (*PARTNERS, "tools", "tools_config_file", "multi_turn_scheduler")):
        defaults = {field.name: field.default for field in fields(args)}
        others = ("tools", "tools_config_file", *PARTNERS) if "multi_turn_scheduler" in given else scheduler
        if "agent" in given or verifiers_name(given.get("env")) is not None:
            others = (*others, "tools", "tools_config_file", "system_prompt", "max_env_steps", "call_protocol")
        options |= {name: defaults[name] for name in others}
    options |= {"environment_urls": None, **given}
    if "tool_processes" not in given and not _names_tools(options):
        options["tool_processes"] = 0
    return options


def _build_named(name: str, options: dict[str, Any], given: dict[str, Any], args: MTGRPOConfig) -> EnvLike:
    key = f"environments: {name}"
    check_scheduler(options, key)
    env = _build({**options, "key": key}, key, given)
    if isinstance(env, dict):
        raise ConfigError(f"`{key}` has several factories in `environment_factory`: give each a name of its own.")
    if isinstance(env, ServedEnv) and not given.get("environment_urls") and args.environment_urls is not None:
        return env.at(args.environment_urls)
    return env


def _build(options: dict[str, Any], key: str, said: Mapping[str, object]) -> EnvLike:
    """Builds an environment from options; refuses those that were `said` of it and that it would ignore."""
    check_partner(options, "" if key == "env" else f"In `{key}`, ")
    if options["tool_processes"] and not _names_tools(options):
        raise _no_tool(options["tool_processes"])
    check_agent(options, "" if key == "env" else key)
    env, path = build_environment(options), options["env"]
    takes_options = any(isinstance(each, MultiTurnToolEnv) for each in source_of(env).prototypes())
    if path is not None and verifiers_name(path) is None and not takes_options:
        check_source(env, key)
        name, taken = (
            (path, ()) if isinstance(path, str) else (f"env: {{type: {path['type']}}}", TYPES[path["type"]].takes)
        )
        unused = {option: value for option, value in said.items() if option not in taken}
        _check_unused(unused, f"`{name}`{'' if key == 'env' else f' of `{key}`'}")
    return env if options["environment_urls"] is None else _at(env, options["environment_urls"], key)


def _at(env: EnvLike, urls: list[str], key: str) -> ServedEnv:
    """The OpenEnv environment at its servers; refuses any other environment."""
    if not isinstance(env, ServedEnv):
        raise ConfigError(
            f"`environment_urls` names OpenEnv servers, and `{key}` is no environment that `openenv_server` made: "
            "leave one of them out (MCP servers are named in their own file)."
        )
    return env.at(urls)


def _check_unused(said: Mapping[str, object], env: str) -> None:
    """Refuses options of which a `MultiTurnToolEnv` is made, for an environment that is none."""
    for name in ("tools", "tools_config_file", "system_prompt", "max_env_steps", "call_protocol", "env_mask"):
        if value := said.get(name):
            raise ConfigError(
                f"`{name}: {value}` has no effect on {env}: only what is made of options takes it, as a "
                "`MultiTurnToolEnv` is. Leave it out."
            )


def _names_tools(options: dict[str, Any]) -> bool:
    """Whether options, or one of `environments`, name tools."""
    return bool(options.get("tools") or options.get("tools_config_file"))


def _no_tool(processes: int) -> ConfigError:
    return ConfigError(f"`tool_processes` is {processes}, and no tool is named: leave it out.")


def check_env(
    env: EnvLike | None,
    args: MTGRPOConfig,
    *datasets: Rows | dict[str, Rows] | None,
    factory: TRLFactory | None = None,
    tools: Sequence[Callable[..., object] | str] | None = None,
    plain: bool = False,
) -> EnvLike:
    """The environment of a run, given or described by options; refuses one that contradicts options or rows."""
    given = env is not None
    refuse_first(
        (
            given and factory is not None,
            "The trainer was given both `env` and `environment_factory`: leave one out.",
        ),
        (given and tools, "The trainer was given both `env` and `tools`: give the tools to the environment."),
        (
            isinstance(env, (list, str)),
            "The second argument of the trainer is `env`, not a list of rewards as in TRL: pass rewards by name, as "
            "`reward_funcs=...`.",
        ),
        (
            given and not isinstance(env, EnvSource) and args.tool_processes,
            f"`tool_processes` is {args.tool_processes}, and the trainer was given an `env`: give the environment "
            f"`in_processes(tools, {args.tool_processes})` (of `mt_grpo.tools`) as its tools.",
        ),
    )
    if isinstance(env, MultiTurnToolEnv):
        _check_options(env, args)
    elif isinstance(env, StepEnv) or (isinstance(env, type) and not issubclass(env, MultiTurnToolEnv)):
        _check_unused(vars(args), "the `env` that the trainer was given")
    if env is not None and args.environment_urls is not None and not isinstance(env, EnvSource):
        env = _at(env, args.environment_urls, "env")
    env = build_env(args, factory, tools, plain) if env is None else env
    env = env.given if isinstance(env, EnvSource) else env
    check_source(env, branches=args.branch_at is not None)
    _check_rows(source_of(env), datasets)
    return env


def _check_rows(source: EnvSource, datasets: Sequence[Rows | dict[str, Rows] | None]) -> None:
    every = named_datasets(*datasets)
    known = {name: rows for name, rows in every.items() if isinstance(rows, Dataset)}  # rows of a stream are not known
    for name, rows in known.items():
        source.check(rows, name)
    named = {one for rows in known.values() if COLUMN in rows.column_names for one in rows.unique(COLUMN)}
    unused = [name for name in source.names if name not in named]
    if unused and known and len(known) == len(every):
        logger.warning(
            "No row of the dataset names the environment%s %s in its column `environment`.",
            "s" if len(unused) > 1 else "",
            ", ".join(map(repr, unused)),
        )


def _check_options(env: MultiTurnToolEnv, args: MTGRPOConfig) -> None:
    """Holds an environment that was made by hand against the options that would have made it."""
    for name in PARTNERS[:2]:
        if getattr(args, name) is not None:
            raise ConfigError(
                f"`{name}` is set in the arguments, and the trainer was given an `env`, which says itself who answers "
                "the model: leave one of them out."
            )
    if isinstance(args.env, dict) or args.env and not isinstance(env, import_object(args.env, what="environment")):
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
        if name == "tools" and (tools := named_tools(asked, args.tools_config_file)):
            asked = sorted(tool.name for tool in load_tools(tools))
        if asked not in (defaults[name], value):
            raise _contradiction(name, asked, value)


def _contradiction(name: str, asked: object, given: object) -> ConfigError:
    return ConfigError(
        f"`{name}` is {asked!r} in the arguments and {given!r} in the `env` that the trainer was given: say it to the "
        "environment only, or leave `env` to the arguments."
    )


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, source: EnvSource) -> None:
    """Checks that the template can hold a source's conversations; adds TRL's response template to read calls."""
    needed = source.needs_template_calls
    if needed is False:
        return
    name, lack = repr(tokenizer.name_or_path), ""
    if needed:
        try:
            if not ChatTemplate(tokenizer, {}, calls=True).calls_shown:
                lack = f"The chat template of {name} has no tool support of its own. "
        except TemplateError as error:
            raise ConfigError(
                f"The chat template of {name} has no tool support, so `call_protocol: native` cannot be used. {error}"
            ) from error
    try:
        if tokenizer.response_template is None:
            add_response_schema(tokenizer)
    except ValueError as error:
        if needed:
            raise ConfigError(
                f"{lack}Nothing is known that reads tool calls of the chat template of {name} ({error}): set "
                "`response_template` on the tokenizer, or choose `call_protocol: tags`."
            ) from error


def build_runner(env: EnvLike, engine: Engine, args: MTGRPOConfig, media: MediaEncoder | None = None) -> RolloutRunner:
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
        media,
    )


def own_engine(
    args: MTGRPOConfig, tokenizer: PreTrainedTokenizerBase, model: nn.Module, accelerator: Accelerator
) -> TransformersEngine:
    """An engine that samples from the trainer's own model."""
    backend = DistributedBackend(accelerator)
    sharded = backend.is_fsdp or (backend.is_zero3 and not args.ds3_gather_for_generation)
    if sharded and accelerator.num_processes > 1:
        raise ConfigError(
            "A model with sharded weights cannot sample by itself, since processes take different numbers of turns: "
            "set `use_vllm: true`, or shard with DeepSpeed ZeRO-3 and `ds3_gather_for_generation: true`."
        )
    return TransformersEngine(accelerator.unwrap_model(model), tokenizer, record_routes=args.replays_routes)
