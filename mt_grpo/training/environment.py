"""The environment that the options describe, a tokenizer that can hold its conversations, and what runs them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trl.chat_template_utils import add_response_schema, supports_tool_calling

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.protocols import PROTOCOLS
from mt_grpo.errors import ConfigError
from mt_grpo.imports import import_object
from mt_grpo.rollout import Engine, RolloutLimits, RolloutRunner
from mt_grpo.tools import load_tools, load_tools_file
from mt_grpo.training.config import MTGRPOConfig


def build_env(args: MTGRPOConfig) -> MultiTurnToolEnv:
    """The environment that `args` describes; see `MultiTurnToolEnv` for the errors."""
    env_class = MultiTurnToolEnv if args.env is None else import_object(args.env, what="environment")
    env = env_class(
        tools=_tools(args),
        system_prompt=args.system_prompt,
        max_steps=args.max_env_steps,
        protocol=args.call_protocol,
        env_mask=args.env_mask,
        tool_timeout=args.tool_timeout,
    )
    env.made_from = args
    return env


def _tools(args: MTGRPOConfig) -> list[Any]:
    from_file = [] if args.tools_config_file is None else load_tools_file(args.tools_config_file)
    return [*(args.tools or []), *from_file]


def check_env(env: MultiTurnToolEnv, args: MTGRPOConfig) -> MultiTurnToolEnv:
    """
    Holds an environment that was made by hand against the options that would have made it, as far as these are not
    left at their defaults; returns it.

    Raises:
        ConfigError: If they contradict each other.
    """
    if env.made_from is args:
        return env
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
        if name == "tools" and (tools := _tools(args)):
            asked = sorted(tool.name for tool in load_tools(tools))
        if asked == defaults[name]:
            continue
        if asked != value:
            raise _contradiction(name, asked, value)
    return env


def _contradiction(name: str, asked: Any, given: Any) -> ConfigError:
    return ConfigError(
        f"`{name}` is {asked!r} in the arguments and {given!r} in the `env` that the trainer was given: say it to the "
        "environment only, or leave `env` to the arguments."
    )


def prepare_tokenizer(tokenizer: Any, env: MultiTurnToolEnv) -> None:
    """
    Makes sure that the model's template can hold the conversations of `env`; adds TRL's response template under the
    native protocol, where the tokenizer has none of its own.

    Raises:
        ConfigError: If the template cannot show tool calls, or nothing can read them back.
    """
    if not env.protocol.native_tools:
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


def build_runner(env: MultiTurnToolEnv, engine: Engine, args: MTGRPOConfig) -> RolloutRunner:
    """Runs conversations of `env` as `args` say."""
    limits = RolloutLimits(
        args.max_completion_length, args.max_turn_length, args.rollout_timeout, args.max_concurrent_rollouts
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
