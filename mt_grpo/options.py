"""What options may say together: rules over plain values, held before torch is imported and by `MTGRPOConfig`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean

HISTORIES = ("keep", "strip_thinking", "compact", "template")
"""What `history` can name, see `mt_grpo.rollout.history`."""

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""The losses of TRL's trainer, which looks at `loss_type` only when it computes one."""

SCALES = ("group", "batch", "none")
"""What TRL's trainer takes as `scale_rewards`, beside true (`group`) and false (`none`)."""

LOSS_SCALES = ("all", "last_round")
"""Which of a scheduler's responses are trained."""

ABOVE_ZERO = (
    "max_turn_length",
    "max_concurrent_rollouts",
    "rollout_timeout",
    "tool_timeout",
    "verify_sync_every",
)

NO_EFFECT = (
    "cache_implementation",
    "generation_kwargs",
    "max_tool_calling_iterations",
    "use_transformers_continuous_batching",
    "use_transformers_paged",
    "vllm_structured_outputs_regex",
)
"""Options of TRL's own generation, which rollouts of many turns do not use."""


def check_options(options: Mapping[str, Any], registered: Mapping[str, Iterable[str]]) -> None:
    """
    Holds the options of a run against each other.

    Args:
        options (`Mapping`): Every option of `MTGRPOConfig` with its value.
        registered (`Mapping`): The names that an option can give; an option that is not in it is not looked up.

    Raises:
        ConfigError: For the first rule that they break.
    """
    for name in ABOVE_ZERO:
        value = options[name]
        if value is not None and not value > 0:
            raise ConfigError(f"`{name}` is {value}; set a number above 0, or leave it out.")
    if options["max_env_steps"] < 0:
        raise ConfigError(
            f"`max_env_steps` is {options['max_env_steps']}; it counts replies of the environment, so set 0 or more."
        )
    if options["num_generations"] < 2:
        raise ConfigError(
            f"`num_generations` is {options['num_generations']}, and an advantage compares the completions of one "
            "prompt: set 2 or more."
        )
    if options["env_mask"] not in (0, 1):
        raise ConfigError(
            f"`env_mask` is {options['env_mask']}; set 0 (tool results are not trained) or 1 (they are)."
        )
    if options["temperature"] < 0:
        raise ConfigError(f"`temperature` is {options['temperature']}; set a number above 0, such as 1.0.")
    _check_lengths(options["max_turn_length"], options["max_completion_length"])
    if options["multi_objective_aggregation"] != "sum_then_normalize":
        raise ConfigError(
            "`multi_objective_aggregation: normalize_then_sum` does not say which turn a reward belongs to; leave "
            "it out, and weigh rewards with `reward_weights`."
        )
    choose("loss_type", options["loss_type"], LOSS_TYPES)
    choose("loss_scale", options["loss_scale"], LOSS_SCALES)
    if options["environments"] is None:  # else each may have options of its own
        check_scheduler(options)
    if not isinstance(options["scale_rewards"], bool):
        choose("scale_rewards", options["scale_rewards"], SCALES)
    rule = rule_name(parse_rule(options["advantage_estimator"]))
    for name, known in registered.items():
        choose(name, rule if name == "advantage_estimator" else options[name], known)
    for name in NO_EFFECT:
        if options[name]:
            raise ConfigError(
                f"`{name}` has no effect on rollouts of many turns: leave it out"
                f"{', and set `max_env_steps`' if name == 'max_tool_calling_iterations' else ''}."
            )
    if options["use_vllm"] and options["vllm_mode"] != "server":
        raise ConfigError(
            f"`vllm_mode: {options['vllm_mode']}` is not supported: leave it out, and start the server with "
            "`mt-grpo serve`."
        )
    check_partner(options)
    if options["simulated_user"] is not None:
        parse_user(options["simulated_user"])
    check_history(options["history"], options["compact_every"])
    if options["history"] != "keep" and options["forward"] == "padded":
        raise ConfigError(
            f"`history: {options['history']}` rewrites the past, so a trajectory is several sequences, which "
            "`forward: padded` cannot train: leave `forward` at `tree`."
        )


def check_scheduler(options: Mapping[str, Any], key: str = "") -> None:
    """
    Holds the options of one environment that may be a scheduler's against each other.

    Args:
        options (`Mapping`): `multi_turn_scheduler`, and what stands beside it.
        key (`str`, *optional*): Where it stands, for errors.

    Raises:
        ConfigError: If they contradict each other.
    """
    place = f" of `{key}`" if key else ""
    if options["multi_turn_scheduler"] is None:
        for name, default in (("max_turns", None), ("loss_scale", "all")):
            if options[name] != default:
                raise ConfigError(
                    f"`{name}`{place} has an effect with `multi_turn_scheduler` only: leave it out"
                    f"{', and set `max_env_steps`' if name == 'max_turns' else ''}."
                )
        return
    choose("loss_scale", options["loss_scale"], LOSS_SCALES)
    if options["max_turns"] is not None and not options["max_turns"] > 0:
        raise ConfigError(f"`max_turns`{place} is {options['max_turns']}; set a number above 0, or leave it out.")
    for name in ("tools", "tools_config_file", *PARTNERS):
        if options.get(name):
            raise ConfigError(
                f"`{name}` and `multi_turn_scheduler`{place} are both set, and a scheduler holds the conversation "
                "itself: leave one out."
            )


def check_trainable(options: Mapping[str, Any]) -> None:
    """
    Whether the options let training take a step; rollouts and evaluations need less.

    Raises:
        ConfigError: If they do not.
    """
    if not options["temperature"] > 0:
        raise ConfigError(
            f"`temperature: {options['temperature']}` cannot be trained, since log-probs are those of the logits "
            "divided by it: set a number above 0, such as 1.0."
        )
    if options["max_steps"] == 0:
        raise ConfigError("`max_steps` is 0, so nothing is trained: set a number above 0, or leave it out.")
    if options["max_steps"] < 0 and not options["num_train_epochs"] > 0:
        raise ConfigError(
            f"`num_train_epochs` is {options['num_train_epochs']}, so nothing is trained: set a number above 0."
        )


def check_names(options: Mapping[str, Any], tools: Iterable[str], rewards: Iterable[str]) -> None:
    """
    Holds tools and rewards that are given by a bare name against the built-in ones.

    Raises:
        ConfigError: If one is unknown.
    """
    for tool in options["tools"] or []:
        if is_bare(tool) and tool not in tools:
            raise ConfigError(unknown_tool(tool, tools))
    for kind in ("turn", "outcome"):
        for reward in options[f"{kind}_reward_funcs"] or []:
            if is_bare(reward) and reward not in rewards:
                raise ConfigError(unknown_reward(reward, kind, rewards))


def is_bare(name: str) -> bool:
    """Whether it is a name in a registry, and no path of a module or a file."""
    return "." not in name and ":" not in name


def unknown_tool(name: str, known: Iterable[str]) -> str:
    """The sentence about a tool that is not registered."""
    return (
        f"There is no built-in tool {name!r}{did_you_mean(name, known)}: use one of {', '.join(known)}, or a path "
        f"such as `my_tools.py:{name}`."
    )


def unknown_reward(name: str, kind: str, known: Iterable[str]) -> str:
    """The sentence about a reward that is not registered; `kind` is `"turn"` or `"outcome"`."""
    return (
        f"The {kind} reward {name!r} is neither a built-in name nor a path such as `package.module.name`"
        f"{did_you_mean(name, known)}."
    )


PARTNERS = ("simulated_user", "interaction_config_file", "env", "environment_factory")
"""Options of which one at most says who answers the model's words."""

USER_OPTIONS: dict[str, tuple[type, ...]] = {
    "base_url": (str,),
    "model": (str,),
    "system_prompt": (str,),
    "api_key_env": (str,),
    "stop_phrase": (str,),
    "max_turns": (int,),
    "timeout": (int, float),
    "max_retries": (int,),
    "request": (Mapping,),
}
"""Keys of `simulated_user`, the first three needed, and what they take; see `mt_grpo.envs.simulated_user`."""


def check_partner(options: Mapping[str, Any], place: str = "") -> None:
    """
    Whether the options say once at most who answers the model's words.

    Args:
        options (`Mapping`): With `PARTNERS` among them.
        place (`str`, *optional*): Where they stand, for the error.

    Raises:
        ConfigError: If they say it twice.
    """
    given = [name for name in PARTNERS if options[name] is not None]
    if len(given) > 1:
        raise ConfigError(
            f"{place}`{given[0]}` and `{given[1]}` both say who answers the model: leave one of them out."
        )


def parse_user(user: Any) -> dict[str, Any]:
    """
    A simulated user as a recipe, a command line (the mapping as JSON) or a script gives it.

    Raises:
        ConfigError: If it is no mapping, or one of its keys or values is wrong.
    """
    if isinstance(user, str):
        try:
            user = json.loads(user)
        except json.JSONDecodeError as error:
            raise ConfigError(f"`simulated_user` is {user!r}, which is not a JSON mapping.") from error
    needed = list(USER_OPTIONS)[:3]
    if not isinstance(user, Mapping):
        raise ConfigError(f"`simulated_user` is {user!r}: give a mapping of {', '.join(needed)} and further options.")
    if "api_key" in user:
        raise ConfigError(
            "`simulated_user: api_key` would write a key into a file: put it into an environment variable, and name "
            "that in `api_key_env`."
        )
    for name, value in user.items():
        if name not in USER_OPTIONS:
            raise ConfigError(f"`simulated_user` has an unknown key {name!r}{did_you_mean(name, USER_OPTIONS)}.")
        kinds = USER_OPTIONS[name]
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            wanted = {str: "text", int: "a whole number", float: "a number", Mapping: "a mapping"}[kinds[-1]]
            raise ConfigError(f"`simulated_user: {name}` is {value!r}: give {wanted}.")
    for name in needed:
        if not user.get(name):
            raise ConfigError(f"`simulated_user` has no `{name}`: it needs {', '.join(needed)}.")
    if not user["base_url"].startswith(("http://", "https://")):
        raise ConfigError(
            f"`simulated_user: base_url` is {user['base_url']!r}: give a URL such as `http://127.0.0.1:8001/v1`."
        )
    for name in ("model", "messages", "stream"):
        if name in (user.get("request") or {}):
            raise ConfigError(f"`simulated_user: request` sets `{name}`, which is set for it: leave that out.")
    if user.get("stop_phrase") == "":
        raise ConfigError("`simulated_user: stop_phrase` is empty, which every reply has: give one, or leave it out.")
    for name, least in (("max_turns", 1), ("max_retries", 0)):
        if user.get(name) is not None and user[name] < least:
            raise ConfigError(f"`simulated_user: {name}` is {user[name]}: set {least} or more.")
    if user.get("timeout") is not None and not user["timeout"] > 0:
        raise ConfigError(f"`simulated_user: timeout` is {user['timeout']}: set seconds above 0.")
    return {name: value for name, value in user.items() if value is not None}


def check_history(policy: str, compact_every: int | None) -> None:
    """Raises `ConfigError` for an unknown policy, or `"compact"` without its number of turns."""
    choose("history", policy, HISTORIES)
    if policy == "compact" and (compact_every is None or compact_every < 1):
        raise ConfigError("`history: compact` needs `compact_every`, the number of turns between two compactions.")


def parse_rule(rule: Any) -> str | dict[str, Any]:
    """
    A credit rule as a recipe, a command line (the mapping as JSON) or a script gives it.

    Raises:
        ConfigError: If it is neither a name nor a mapping with one.
    """
    if isinstance(rule, str) and rule.lstrip().startswith("{"):
        try:
            rule = json.loads(rule)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"`advantage_estimator` is {rule!r}, which is not valid JSON ({error.msg} at character {error.pos})."
            ) from error
    if isinstance(rule, Mapping) and isinstance(rule.get("name"), str):
        return dict(rule)
    if isinstance(rule, str):
        return rule
    raise ConfigError(
        f"`advantage_estimator` is {rule!r}: give the name of a rule, or a mapping of its `name` and its options, "
        'such as `{"name": "mt_grpo", "turn_coef": 0.5}`.'
    )


def rule_name(rule: str | Mapping[str, Any]) -> str:
    """The name of a rule that `parse_rule` returned."""
    return rule if isinstance(rule, str) else rule["name"]


def _check_lengths(turn: int | None, whole: int | None) -> None:
    if turn is not None and whole is not None and turn > whole:
        raise ConfigError(
            f"`max_turn_length: {turn}` is above `max_completion_length: {whole}`, the tokens of all turns together "
            "and of what the environment replies: lower the first, or raise the second."
        )


def choose(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises `ConfigError` if the value of an option is none of the known names."""
    known = list(known)
    if value not in known:
        raise ConfigError(f"`{name}` is {value!r}{did_you_mean(value, known)}: choose one of {', '.join(known)}.")
