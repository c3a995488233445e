"""What options may say together: rules over plain values, held before torch is imported and by `MTGRPOConfig`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mt_grpo.agent_options import LOSS_SCALES, check_agent, check_partner, check_scheduler, parse_user
from mt_grpo.credit_options import (
    check_branches,
    check_rule,
    check_signalless,
    check_trunks,
    parse_reward,
    parse_rule,
    rule_name,
)
from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose, did_you_mean

HISTORIES = ("keep", "strip_thinking", "compact", "template")
"""What `history` can name, see `mt_grpo.rollout.history`."""

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""The losses of TRL's trainer, which looks at `loss_type` only when it computes one."""

SCALES = ("group", "batch", "none")
"""What TRL's trainer takes as `scale_rewards`, beside true (`group`) and false (`none`)."""

ABOVE_ZERO = (
    "generation_batch_size",
    "gradient_accumulation_steps",
    "max_completion_length",
    "max_concurrent_rollouts",
    "max_resample_times",
    "max_turn_length",
    "num_generations_eval",
    "num_iterations",
    "per_device_eval_batch_size",
    "per_device_train_batch_size",
    "rollout_timeout",
    "steps_per_generation",
    "tool_timeout",
    "verify_sync_every",
)

NOT_BELOW_ZERO = (
    "beta",
    "delta",
    "epsilon",
    "epsilon_high",
    "max_grad_norm",
    "max_tool_calling_iterations",
    "weight_decay",
)

NO_EFFECT = (
    "cache_implementation",
    "generation_kwargs",
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
    for name in NOT_BELOW_ZERO:
        value = options[name]
        if value is not None and not value >= 0:
            raise ConfigError(f"`{name}` is {value}; set 0 or more, or leave it out.")
    ours, of_trl = options["max_env_steps"], options["max_tool_calling_iterations"]
    if None not in (ours, of_trl) and ours != of_trl:
        raise ConfigError(
            f"`max_env_steps` is {ours} and `max_tool_calling_iterations` is {of_trl}, and both bound the replies of "
            "the environment: leave one of them out."
        )
    if options["max_env_steps"] is not None and options["max_env_steps"] < 0:
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
    if options["top_p"] is not None and not 0 < options["top_p"] <= 1:
        raise ConfigError(f"`top_p` is {options['top_p']}: set a number above 0 and at most 1, or leave it out.")
    if options["min_p"] is not None and not 0 <= options["min_p"] <= 1:
        raise ConfigError(f"`min_p` is {options['min_p']}: set a number from 0 to 1, or leave it out.")
    if options["learning_rate"] < 0:
        raise ConfigError(f"`learning_rate` is {options['learning_rate']}; set 0 or more, such as 1e-6.")
    _check_lengths(options["max_turn_length"], options["max_completion_length"])
    if options["multi_objective_aggregation"] != "sum_then_normalize":
        raise ConfigError(
            "`multi_objective_aggregation: normalize_then_sum` does not say which turn a reward belongs to; leave "
            "it out, and weigh rewards with `reward_weights`."
        )
    choose("loss_type", options["loss_type"], LOSS_TYPES)
    choose("loss_scale", options["loss_scale"], LOSS_SCALES)
    check_signalless(options)
    if options["environments"] is None:  # else each may have options of its own
        check_scheduler(options)
        check_agent(options)
    if not isinstance(options["scale_rewards"], bool):
        choose("scale_rewards", options["scale_rewards"], SCALES)
    rule = rule_name(parse_rule(options["advantage_estimator"]))
    for name, known in registered.items():
        value = rule if name == "advantage_estimator" else options[name]
        if value is not None:  # `call_protocol` may be left to the kind of environment
            choose(name, value, known)
    check_rule(options, rule)
    check_branches(options, rule)
    for name in NO_EFFECT:
        if options[name]:
            raise ConfigError(f"`{name}` has no effect on rollouts of many turns: leave it out.")
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


def check_batches(options: Mapping[str, Any], processes: int) -> None:
    """
    Whether the processes of a run make whole groups.

    Args:
        options (`Mapping`): Those of the run.
        processes (`int`): How many there are.

    Raises:
        ConfigError: If they do not; it says which numbers would do.
    """
    sizes = f"{options['per_device_train_batch_size']} a device × {_processes(processes)}"
    step = options["per_device_train_batch_size"] * processes
    steps = options["steps_per_generation"] or options["gradient_accumulation_steps"]
    batch = options["generation_batch_size"] or step * steps
    if batch % step:
        raise ConfigError(
            f"`generation_batch_size: {batch}` is no multiple of {step} ({sizes}): make it one, or leave it out."
        )
    generations = options["num_generations"]
    if batch % generations:
        raise ConfigError(
            f"`num_generations: {generations}` does not divide the generation batch of {batch} ({sizes} × "
            f"{batch // step} step{'s' * (batch > step)}): {_divisors(batch, 2)}make the batch a multiple of "
            f"{generations}."
        )
    check_trunks(options, batch // processes)
    if options["do_eval"] or options["eval_strategy"] != "no":
        check_eval_batch(options, processes)


def check_eval_batch(options: Mapping[str, Any], processes: int) -> None:
    """
    Whether a batch of an evaluation holds whole groups.

    Raises:
        ConfigError: If it does not; it says which numbers would do.
    """
    generations = options["num_generations_eval"] or options["num_generations"]
    size = options["per_device_eval_batch_size"]
    batch = size * processes
    if batch % generations:
        raise ConfigError(
            f"`num_generations_eval: {generations}` does not divide the evaluation batch of {batch} "
            f"({size} a device × {_processes(processes)}): {_divisors(batch, 1)}make the batch a multiple of "
            f"{generations}."
        )


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number > 1)}"


def _divisors(batch: int, least: int) -> str:
    """The beginning of the advice to set a divisor, where there is one."""
    numbers = [str(number) for number in range(least, batch + 1) if batch % number == 0]
    one_of = "one of " if len(numbers) > 1 else ""
    return f"set it to {one_of}{', '.join(numbers)}, or " if numbers else ""


def check_served(options: Mapping[str, Any]) -> None:
    """
    Whether a run would use the server that is to be started.

    Raises:
        ConfigError: If it would not.
    """
    if not options.get("use_vllm"):
        raise ConfigError(
            "The recipe's trainer samples from its own model and would leave a server alone: set `use_vllm: true` for "
            "both commands."
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
            name, _ = parse_reward(reward)
            if is_bare(name) and name not in rewards and not (kind == "outcome" and names_model(name)):
                raise ConfigError(unknown_reward(name, kind, rewards))


def is_bare(name: str) -> bool:
    """Whether it is a name in a registry, and no path of a module or a file."""
    return "." not in name and ":" not in name


def names_model(name: str) -> bool:
    """Whether an outcome reward is named that is a reward model: a folder with one, or an id on the Hub."""
    if ":" in name or name.endswith(".py"):  # a path of something in a file, or JSON
        return False
    return "/" in name or (Path(name) / "config.json").is_file()


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


def check_history(policy: str, compact_every: int | None) -> None:
    """Raises `ConfigError` for an unknown policy, or `"compact"` without its number of turns."""
    choose("history", policy, HISTORIES)
    if policy == "compact" and (compact_every is None or compact_every < 1):
        raise ConfigError("`history: compact` needs `compact_every`, the number of turns between two compactions.")


def _check_lengths(turn: int | None, whole: int | None) -> None:
    if turn is not None and whole is not None and turn > whole:
        raise ConfigError(
            f"`max_turn_length: {turn}` is above `max_completion_length: {whole}`, the tokens of all turns together "
            "and of what the environment replies: lower the first, or raise the second."
        )
