"""
What options may say together. Rules over plain values: they are held before torch is imported, and by `MTGRPOConfig`.
What a single value may be is in `table`, and how mappings are read in `values`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose, did_you_mean
from mt_grpo.options.names import refuse_unknown
from mt_grpo.options.table import OF_ENVIRONMENT, OPTIONS, Option, check_value, check_values
from mt_grpo.options.values import (
    VERIFIERS,
    chosen_rule,
    is_bare,
    names_model,
    parse_agent,
    parse_env_config,
    parse_mapping,
    parse_reward,
    parse_rule,
    parse_user,
    rule_name,
    verifiers_name,
)
from mt_grpo.servers.addresses import expand_addresses, host_url

BRANCH_RULE = "branch_to_go"
"""The credit rule of conversations that branch."""

PARTNERS = ("simulated_user", "interaction_config_file", "env", "environment_factory", "agent")
"""Options of which one at most says who answers the model's words."""


def check_options(
    options: Mapping[str, Any], registered: Mapping[str, Iterable[str]], table: Mapping[str, Option] = OPTIONS
) -> None:
    """Holds the options of a run against the rules of the table, and against each other."""
    check_values(options, table)
    ours, of_trl = options["max_env_steps"], options["max_tool_calling_iterations"]
    if None not in (ours, of_trl) and ours != of_trl:
        raise ConfigError(
            f"`max_env_steps` is {ours} and `max_tool_calling_iterations` is {of_trl}, and both bound the replies of "
            "the environment: leave one of them out."
        )
    if options["bf16"] and options["fp16"]:
        raise ConfigError("`bf16` and `fp16` are both true, and a run computes in one of them: leave one out.")
    turn, whole = options["max_turn_length"], options["max_completion_length"]
    if None not in (turn, whole) and turn > whole:
        raise ConfigError(
            f"`max_turn_length: {turn}` is above `max_completion_length: {whole}`, the tokens of all turns together "
            "and of what the environment replies: lower the first, or raise the second."
        )
    check_signalless(options)
    if options["environments"] is None:  # else each may have options of its own
        check_scheduler(options)
        check_agent(options)
    given = options["advantage_estimator"]
    chosen = chosen_rule(None if given is None else parse_rule(given), bool(options["turn_reward_funcs"]))
    rule = rule_name(chosen)
    for name, known in registered.items():
        value = rule if name == "advantage_estimator" else options[name]
        if value is not None:  # `call_protocol` may be left to the kind of environment
            choose(name, value, known)
    check_staleness(options)
    check_sequence(options)
    check_activations(options)
    check_rule(options, rule)
    check_branches(options, rule)
    check_servers(options)
    check_addresses(options)
    check_partner(options)
    check_environments(options)
    if options["simulated_user"] is not None:
        parse_user(options["simulated_user"])
    check_history(options["history"], options["compact_every"])


def check_servers(options: Mapping[str, Any]) -> None:
    """
    Whether servers can do what the options ask of them where they run: on GPUs of their own, or on the trainer's.
    """
    if not options["use_vllm"]:
        return
    if options["vllm_mode"] == "server":
        if options["vllm_enable_sleep_mode"]:
            raise ConfigError(
                "`vllm_enable_sleep_mode: true` gives a server's memory to training on the same GPU: set `vllm_mode: "
                "colocate`, or leave it out, since this run's server has a GPU of its own."
            )
        if options["weight_sync"] == "ipc":
            raise ConfigError(
                "`weight_sync: ipc` hands over memory of a GPU that trainer and server share: set `vllm_mode: "
                "colocate`, or choose `safetensors` or `nccl`."
            )
        return
    if options["vllm_server_base_url"]:
        raise ConfigError(
            f"`vllm_mode: colocate` starts its servers itself, and `vllm_server_base_url: "
            f"{options['vllm_server_base_url']}` names one: leave it out, or set `vllm_mode: server`."
        )
    if options["weight_sync"] == "nccl":
        raise ConfigError(
            "`weight_sync: nccl` needs a GPU for each end, and with `vllm_mode: colocate` both are on one: leave it "
            "out, or choose `ipc` or `safetensors`."
        )
    if options["vllm_enable_sleep_mode"] and options["max_staleness"]:
        raise ConfigError(
            f"`max_staleness: {options['max_staleness']}` samples while the model is trained, when "
            "`vllm_enable_sleep_mode: true` has taken the server's weights away: leave one of them out."
        )


def check_groups(options: Mapping[str, Any], processes: int) -> None:
    """Whether the processes of a run make whole groups for the servers that it starts."""
    size = options["vllm_tensor_parallel_size"]
    if options["use_vllm"] and options["vllm_mode"] == "colocate" and processes % size:
        raise ConfigError(
            f"`vllm_tensor_parallel_size: {size}` does not divide the {_processes(processes)} that train, and each "
            "server of `vllm_mode: colocate` runs on the GPUs of so many of them: set a divisor, such as 1."
        )


def check_addresses(options: Mapping[str, Any]) -> None:
    """
    Whether the servers of a run are addresses, each named once, and as many as the run needs; the host is one alone.
    """
    host_url(options["vllm_server_host"], options["vllm_server_port"], "vllm_server_host")
    urls = expand_addresses(options["vllm_server_base_url"] or [], "vllm_server_base_url")
    least = options["vllm_min_servers"]
    if least is not None and least > max(len(urls), 1):
        raise ConfigError(
            f"`vllm_min_servers: {least}` wants more servers than are named, {max(len(urls), 1)}: name the others in "
            "`vllm_server_base_url`, or lower it."
        )


def check_staleness(options: Mapping[str, Any]) -> None:
    """Whether the loss corrects for weights that are not the latest, in a way that keeps what it is to learn from."""
    if not options["max_staleness"]:
        return
    mode = options["vllm_importance_sampling_mode"]
    given = f"`max_staleness: {options['max_staleness']}`"
    bound = options["vllm_importance_sampling_clip_max"]
    if not options["vllm_importance_sampling_correction"] or bound is None:
        raise ConfigError(
            f"{given} trains on conversations of earlier weights, which needs a correction with a bound: leave "
            "`vllm_importance_sampling_correction` and `vllm_importance_sampling_clip_max` out, or `max_staleness` at "
            "0."
        )
    if mode in ("sequence_truncate", "sequence_mask"):
        raise ConfigError(
            f"{given} trains on conversations of earlier weights, and `vllm_importance_sampling_mode: {mode}` would "
            "take most of them out of the loss, since the ratio of a whole conversation is far from 1: leave it out "
            "(it is then `token_truncate`), or `max_staleness` at 0."
        )
    if options["use_vllm"] and options["weight_sync"] == "lora":
        raise ConfigError(
            f"{given} sends weights while conversations go on, and `weight_sync: lora` takes away the adapter that "
            "they are sampled with: choose `weight_sync: safetensors`, or leave `max_staleness` at 0."
        )


def check_sequence(options: Mapping[str, Any]) -> None:
    """Whether the forward is one that several processes can share."""
    size, forward = options["sp_size"], options["forward"]
    if size > 1 and forward != "tree":
        raise ConfigError(
            f"`sp_size: {size}` shares packed trees among processes, and `forward: {forward}` packs none: set "
            "`forward: tree`, or leave `sp_size` out."
        )


def check_activations(options: Mapping[str, Any]) -> None:
    """Whether what is said about activations has an effect."""

    def name(end: str) -> str:
        """transformers' later name, where that is given, since it wins."""
        later = f"activation_checkpointing{end}"
        return f"gradient_checkpointing{end}" if options.get(later) is None else later

    checkpointing, given = name(""), name("_kwargs")
    extras = parse_mapping(options[given], given) or {}
    for key in ("every_n_layers", "offload"):
        if key in extras:
            raise ConfigError(
                f"`{given}: {{{key}: {str(extras[key]).lower()}}}` does not outlast the first batch, since TRL's "
                "trainer turns checkpointing off and on again without it: leave it out, and set "
                "`gradient_checkpointing_layers` to keep fewer inputs of layers, or `activation_offloading` to move "
                "them."
            )
    layers = options["gradient_checkpointing_layers"]
    if layers > 1 and not options[checkpointing]:
        raise ConfigError(
            f"`gradient_checkpointing_layers: {layers}` groups layers that are computed again, and "
            f"`{checkpointing}: false` computes none again: leave one of the two out."
        )
    if layers > 1 and options["activation_offloading"]:
        raise ConfigError(
            f"`gradient_checkpointing_layers: {layers}` keeps fewer inputs of layers on the GPU, and "
            "`activation_offloading: true` keeps none there: leave one of the two out."
        )


def check_sharing(size: int, processes: int) -> None:
    """Whether processes make whole groups of `sp_size`."""
    if processes % size:
        raise ConfigError(
            f"`sp_size: {size}` does not divide {_processes(processes)}: start a multiple of it (`--num_processes`), "
            "or leave it out."
        )


def check_trainable(options: Mapping[str, Any]) -> None:
    """Whether the options let training take a step; rollouts and evaluations need less."""
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
    """Whether the processes of a run make whole groups."""
    check_groups(options, processes)
    check_sharing(options["sp_size"], processes)
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
    """Whether a batch of an evaluation holds whole groups."""
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
    """Whether a run would use the server that is to be started."""
    if not options.get("use_vllm"):
        raise ConfigError(
            "The recipe's trainer samples from its own model and would leave a server alone: set `use_vllm: true` for "
            "both commands."
        )
    if options.get("vllm_mode") == "colocate":
        raise ConfigError(
            "The recipe's trainer starts its servers itself (`vllm_mode: colocate`): run `mt-grpo train` alone, or "
            "give both commands `--vllm_mode server`."
        )


def check_names(options: Mapping[str, Any], tools: Iterable[str], rewards: Iterable[str]) -> None:
    """Holds tools and rewards that are given by a bare name against the built-in ones."""
    for tool in options["tools"] or []:
        if is_bare(tool) and tool not in tools:
            raise ConfigError(unknown_tool(tool, tools))
    for kind in ("turn", "outcome"):
        for reward in options[f"{kind}_reward_funcs"] or []:
            name, _ = parse_reward(reward)
            if is_bare(name) and name not in rewards and not (kind == "outcome" and names_model(name)):
                raise ConfigError(unknown_reward(name, kind, rewards))


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
    check_value("history", policy, OPTIONS["history"])
    if policy == "compact" and (compact_every is None or compact_every < 1):
        raise ConfigError("`history: compact` needs `compact_every`, the number of turns between two compactions.")


def check_signalless(options: Mapping[str, Any]) -> None:
    """Whether `groups_without_signal` goes together with the other options."""
    choice = options["groups_without_signal"]
    for name in ("entropy_coef", "use_adaptive_entropy"):
        if choice != "keep" and options[name]:
            raise ConfigError(
                f"`groups_without_signal: {choice}` takes groups out of the loss, and `{name}: {options[name]}` "
                "learns from all that is sampled: leave one of them out."
            )


def check_rule(options: Mapping[str, Any], rule: str) -> None:
    """Whether the options have what a credit rule needs."""
    if rule == "state_baseline" and options["state_score"] is None:
        raise ConfigError(
            "`advantage_estimator: state_baseline` needs a score of states: name a `StateScore` in `state_score`."
        )


def check_branches(options: Mapping[str, Any], rule: str) -> None:
    """Whether conversations can branch as the options say."""
    at, number, group = options["branch_at"], options["num_branches"], options["num_generations"]
    if at is None and rule == BRANCH_RULE:
        raise ConfigError(
            f"`advantage_estimator: {rule}` is the rule of conversations that branch: set `branch_at`, or choose "
            "`reward_to_go`."
        )
    if at is None:
        return
    if number < 2:
        raise ConfigError(f"`num_branches` is {number}; set 2 or more, or leave `branch_at` out.")
    if group % number or group == number:
        raise ConfigError(
            f"`num_generations: {group}` does not make two conversations or more of `num_branches: {number}` each: "
            f"set it to {2 * number} or a larger multiple of {number}."
        )
    steps = options["max_env_steps"]
    if steps is not None and at > steps and options["environments"] is None:  # else each may have its own number
        raise ConfigError(
            f"`branch_at: {at}` is never reached, since a conversation has {steps + 1} turns at most with "
            f"`max_env_steps: {steps}`: lower the first, or raise the second."
        )
    if rule != BRANCH_RULE:
        raise ConfigError(
            f"`branch_at` needs `advantage_estimator: {BRANCH_RULE}`: {rule!r} does not know which members of a group "
            "share turns, and would be biased."
        )


def check_trunks(options: Mapping[str, Any], rows: int) -> None:
    """Whether all branches of a conversation are on one process."""
    if options["branch_at"] is not None and rows % options["num_branches"]:
        raise ConfigError(
            f"`num_branches: {options['num_branches']}` does not divide the {rows} conversations that a process "
            "samples at once, and a conversation branches on one process: change it, or "
            "`per_device_train_batch_size`."
        )


def check_partner(options: Mapping[str, Any], place: str = "") -> None:
    """Whether the options say once at most who answers the model's words."""
    given = [name for name in PARTNERS if options[name] is not None]
    if len(given) > 1:
        raise ConfigError(
            f"{place}`{given[0]}` and `{given[1]}` both say who answers the model: leave one of them out."
        )


def check_environments(options: Mapping[str, Any]) -> None:
    """Whether `environments` names environments, each with options that one may have for itself."""
    if options["environments"] is None:
        return
    if options["environment_factory"] is not None:
        raise ConfigError(
            "`environment_factory` and `environments` are both set: name each factory in `environments`, as "
            "`{environment_factory: its path}`."
        )
    for name in ("env", "agent"):
        if options[name] is not None:
            raise ConfigError(f"`{name}` and `environments` are both set: name a single one in `environments` too.")
    environments = parse_mapping(options["environments"], "environments")
    if not isinstance(environments, Mapping) or not environments:
        raise ConfigError("`environments` is a mapping from the names in the column `environment` to environments.")
    for name, given in environments.items():
        if isinstance(given, str):
            continue
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"`environments: {name}` is {given!r}: give a dotted path, or a mapping of "
                f"{', '.join(OF_ENVIRONMENT)}."
            )
        for option in given:
            written = f"The key {option!r} of `environments: {name}`"
            refuse_unknown(str(option), written, OF_ENVIRONMENT, f"it takes {', '.join(OF_ENVIRONMENT)}")
        check_values(given, OF_ENVIRONMENT, f" of `environments: {name}`")


def check_agent(options: Mapping[str, Any], key: str = "") -> None:
    """Holds the options of one environment that may be an agent's or of verifiers against each other."""
    place = f" of `{key}`" if key else ""
    own = verifiers_name(options["env"]) is not None
    if options["env_config"] is not None:
        parse_env_config(options["env_config"], f"{key}: env_config" if key else "env_config")
        if not own:
            raise ConfigError(f"`env_config`{place} has an effect with `env: {VERIFIERS}NAME` only: leave it out.")
    if options["agent"] is not None:
        parse_agent(options["agent"], f"{key}: agent" if key else "agent")
    elif not own:
        return
    what, who = ("env", "an environment of verifiers") if own else ("agent", "an agent")
    for name in ("tools", "tools_config_file", "system_prompt", "max_env_steps"):
        if options[name]:
            raise ConfigError(
                f"`{name}` and `{what}`{place} are both set, and {who} brings its own tools, messages and end: "
                f"leave `{name}` out."
            )


def check_scheduler(options: Mapping[str, Any], key: str = "") -> None:
    """Holds the options of one environment that may be a scheduler's against each other."""
    place = f" of `{key}`" if key else ""
    if options["multi_turn_scheduler"] is None:
        for name, default in (("max_turns", None), ("loss_scale", "all")):
            if options[name] != default:
                raise ConfigError(
                    f"`{name}`{place} has an effect with `multi_turn_scheduler` only: leave it out"
                    f"{', and set `max_env_steps`' if name == 'max_turns' else ''}."
                )
        return
    for name in ("tools", "tools_config_file", *PARTNERS):
        if options.get(name):
            raise ConfigError(
                f"`{name}` and `multi_turn_scheduler`{place} are both set, and a scheduler holds the conversation "
                "itself: leave one out."
            )
