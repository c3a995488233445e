"""
What options may say together: rows of conflicts over plain values, held before torch is imported and by
`MTGRPOConfig`. What a single value may be is in `table`, and how mappings are read in `values`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from mt_grpo.errors import ConfigError, refuse_first
from mt_grpo.imports import choose, did_you_mean
from mt_grpo.options.table import OF_ENVIRONMENT, OPTIONS, Option, RunOptions, Values, check_values
from mt_grpo.options.values import (
    ALIASES,
    VERIFIERS,
    chosen_rule,
    is_bare,
    names_model,
    parse_agent,
    parse_env_config,
    parse_mapping,
    parse_reward,
    parse_rule,
    parse_teacher,
    parse_user,
    refuse_unknown,
    rule_name,
    verifiers_name,
)
from mt_grpo.servers import expand_addresses, host_url

_BRANCH_RULE = "branch_to_go"  # the credit rule of conversations that branch

_LARGEST_GROUP = 1000  # conversations of a prompt that are advised at most

PARTNERS = tuple(name for name in ALIASES if name != "multi_turn_scheduler")
"""Mutually exclusive options: each says who replies to the model."""


@dataclass(frozen=True)
class _Conflict:
    """Values that do not go together; in its texts `{option}` is an option's value, `<option>` its name with it."""

    when: Callable[[SimpleNamespace], object]
    what: str
    mend: str = "leave one of them out"


def _refuse(conflicts: Iterable[_Conflict], options: Values) -> None:
    """Raises `ConfigError` for the first conflict among the options."""
    values = SimpleNamespace(**options)
    for conflict in conflicts:
        if conflict.when(values):
            sentence = re.sub(r"<(\w+)>", r"`\1: {\1}`", f"{conflict.what}: {conflict.mend}.")
            raise ConfigError(sentence.format_map(options))


_HISTORY = _Conflict(
    lambda o: o.history == "compact" and (o.compact_every is None or o.compact_every < 1),
    "`history: compact` needs `compact_every`, the number of turns between two compactions",
    "set 1 or more",
)

_FACTORY = _Conflict(
    lambda o: None not in (o.environment_factory, o.environments),
    "`environment_factory` and `environments` are both set",
    "name each factory in `environments`, as `{{environment_factory: its path}}`",
)

CONFLICTS = (
    _Conflict(lambda o: o.num_generations is None, "`num_generations` is empty", "give it a number, or leave it out"),
    _Conflict(
        lambda o: None not in (ours := o.max_env_steps, trl := o.max_tool_calling_iterations) and ours != trl,
        "<max_env_steps> and <max_tool_calling_iterations> both bound the replies of the environment",
    ),
    _Conflict(
        lambda o: o.bf16 and o.fp16,
        "`bf16` and `fp16` are both true, and a run computes in one of them",
        "leave one out",
    ),
    _Conflict(
        lambda o: None not in (turn := o.max_turn_length, whole := o.max_completion_length) and turn > whole,
        "<max_turn_length> is above <max_completion_length>, the tokens of all turns and replies together",
        "lower the first, or raise the second",
    ),
    _HISTORY,
    _Conflict(
        lambda o: o.history != "compact" and o.compact_every is not None,
        "<compact_every> has an effect with `history: compact` only",
        "leave it out",
    ),
    _FACTORY,
    _Conflict(
        lambda o: o.environments is not None and (o.env, o.agent) != (None, None),
        "`{alone}` and `environments` are both set",
        "name a single one in `environments` too",
    ),
    _Conflict(
        lambda o: o.early_stopping_patience and (o.eval_strategy == "no" or o.metric_for_best_model is None),
        "<early_stopping_patience> compares evaluations during training by a metric",
        "set `eval_strategy: steps` and `metric_for_best_model`, such as `reward`",
    ),
    _Conflict(
        lambda o: o.groups_without_signal != "resample" and o.max_resample_times != RunOptions.max_resample_times,
        "<max_resample_times> has an effect with `groups_without_signal: resample` only",
        "leave it out",
    ),
    _Conflict(
        lambda o: o.groups_without_signal != "keep" and (o.entropy_coef or o.use_adaptive_entropy),
        "<groups_without_signal> drops groups from the loss, and <entropy_coef> with <use_adaptive_entropy> learns "
        "from all",
    ),
    # a teacher
    _Conflict(
        lambda o: o.distillation_coef and o.teacher is None,
        "<distillation_coef> weighs the distance to a teacher, and there is none",
        "name one in `teacher`, or leave it out",
    ),
    _Conflict(
        lambda o: o.distillation_topk and not o.distillation_coef,
        "<distillation_topk> says on which tokens the distance to a teacher is taken, and nothing is learnt from it",
        "set `distillation_coef` too",
    ),
    _Conflict(
        lambda o: o.teacher_gate and not o.distillation_coef,
        "`gate` of `teacher` chooses turns to distil, and nothing is distilled",
        "set `distillation_coef` too, or leave it out",
    ),
    _Conflict(
        lambda o: o.distillation_topk and o.sp_size > 1,
        "<distillation_topk> takes rows that one process computes, and <sp_size> shares them",
    ),
    _Conflict(
        lambda o: o.distillation_topk and ((o.top_k or 0) > 0 or o.top_p != 1 or o.min_p),
        "<distillation_topk> compares whole distributions, and <top_k>, <top_p> or <min_p> cut off what is sampled",
    ),
    _Conflict(
        lambda o: o.teacher_server and o.temperature != 1,
        "<temperature> divides what the policy samples from, and a teacher's `server` knows log-probs at 1 only",
        "set `temperature: 1.0`, or leave `server` out",
    ),
    _Conflict(
        lambda o: o.distillation_coef and o.groups_without_signal != "keep",
        "<groups_without_signal> drops groups from the loss, and <distillation_coef> learns from all",
    ),
    # sampling ahead
    _Conflict(
        lambda o: (
            o.max_staleness
            and not (o.vllm_importance_sampling_correction and o.vllm_importance_sampling_clip_max is not None)
        ),
        "<max_staleness> trains on what earlier weights sampled, which needs a correction with a bound",
        "leave `vllm_importance_sampling_correction` and `vllm_importance_sampling_clip_max` out, or `max_staleness` "
        "at 0",
    ),
    _Conflict(
        lambda o: o.max_staleness and o.vllm_importance_sampling_mode in ("sequence_truncate", "sequence_mask"),
        "<max_staleness> trains on conversations whose ratio as a whole is far from 1, and "
        "<vllm_importance_sampling_mode> would take most of them out of the loss",
        "leave it out (it is then `token_truncate`), or `max_staleness` at 0",
    ),
    _Conflict(
        lambda o: o.max_staleness and o.use_vllm and o.weight_sync == "lora",
        "<max_staleness> sends weights while conversations go on, and `weight_sync: lora` takes their adapter away",
        "choose `weight_sync: safetensors`, or leave `max_staleness` at 0",
    ),
    # the forward
    _Conflict(
        lambda o: o.sp_size > 1 and o.forward != "tree",
        "<sp_size> shares packed trees among processes, and <forward> packs none",
        "set `forward: tree`, or leave `sp_size` out",
    ),
    _Conflict(
        lambda o: o.gradient_checkpointing_layers > 1 and not vars(o)[o.checkpointing],
        "<gradient_checkpointing_layers> groups recomputed layers, and `{checkpointing}: false` computes none again",
        "leave one of the two out",
    ),
    _Conflict(
        lambda o: o.gradient_checkpointing_layers > 1 and o.activation_offloading,
        "<gradient_checkpointing_layers> keeps fewer inputs of layers on the GPU, and `activation_offloading: true` "
        "keeps none there",
        "leave one of the two out",
    ),
    # credit
    _Conflict(
        lambda o: o.credit_rule == "state_baseline" and o.state_score is None,
        "`advantage_estimator: state_baseline` needs a score of states",
        "name a `StateScore` in `state_score`",
    ),
    _Conflict(
        lambda o: o.branch_at is None and o.credit_rule == _BRANCH_RULE,
        "`advantage_estimator: {credit_rule}` is the rule of conversations that branch",
        "set `branch_at`, or choose `reward_to_go`",
    ),
    _Conflict(
        lambda o: o.branch_at is None and o.num_branches != RunOptions.num_branches,
        "<num_branches> has an effect with `branch_at` only",
        "leave it out",
    ),
    _Conflict(
        lambda o: o.branch_at is not None and o.num_branches < 2,
        "`num_branches` is {num_branches}",
        "set 2 or more, or leave `branch_at` out",
    ),
    _Conflict(
        lambda o: (
            o.branch_at is not None and (o.num_generations % o.num_branches or o.num_generations < o.least_group)
        ),
        "<num_generations> does not make two conversations or more of <num_branches> each",
        "set it to {least_group} or a larger multiple of {num_branches}",
    ),
    _Conflict(
        # of several environments each may have its own number of replies
        lambda o: None not in (o.branch_at, o.most_turns) and o.branch_at >= o.most_turns and o.environments is None,
        "<branch_at> is never reached, since a conversation has {most_turns} turns at most with <max_env_steps>",
        "lower the first, or raise the second",
    ),
    _Conflict(
        lambda o: o.branch_at is not None and o.credit_rule != _BRANCH_RULE,
        f"`branch_at` needs `advantage_estimator: {_BRANCH_RULE}`",
        "{credit_rule!r} does not know which members of a group share turns, and would be biased",
    ),
    # servers, on GPUs of their own or on the trainer's
    _Conflict(
        lambda o: o.use_vllm and o.vllm_mode == "server" and o.vllm_enable_sleep_mode,
        "`vllm_enable_sleep_mode: true` gives a server's memory to training on the same GPU",
        "set `vllm_mode: colocate`, or leave it out, since this run's server has a GPU of its own",
    ),
    _Conflict(
        lambda o: o.use_vllm and o.vllm_mode == "server" and o.weight_sync == "ipc",
        "`weight_sync: ipc` hands over memory of a GPU that trainer and server share",
        "set `vllm_mode: colocate`, or choose `safetensors` or `nccl`",
    ),
    _Conflict(
        lambda o: o.use_vllm and o.vllm_mode == "colocate" and o.vllm_server_base_url,
        "`vllm_mode: colocate` starts its servers itself, and <vllm_server_base_url> names one",
        "leave it out, or set `vllm_mode: server`",
    ),
    _Conflict(
        lambda o: o.use_vllm and o.vllm_mode == "colocate" and o.weight_sync == "nccl",
        "`weight_sync: nccl` needs a GPU for each end, and with `vllm_mode: colocate` both are on one",
        "leave it out, or choose `ipc` or `safetensors`",
    ),
    _Conflict(
        lambda o: o.use_vllm and o.vllm_mode == "colocate" and o.vllm_enable_sleep_mode and o.max_staleness,
        "<max_staleness> samples in training, when `vllm_enable_sleep_mode: true` has taken the server's weights away",
    ),
)
"""
Of every command. Beside the options they know `alone`, `credit_rule`, `checkpointing`, `least_group`, `most_turns`,
`teacher_server` and `teacher_gate`.
"""

_OF_TRAINING = (
    _Conflict(
        lambda o: not o.temperature > 0,
        "<temperature> cannot be trained, since log-probs are those of the logits divided by it",
        "set a number above 0, such as 1.0",
    ),
    _Conflict(
        lambda o: o.max_steps == 0, "`max_steps` is 0, so nothing is trained", "set a number above 0, or leave it out"
    ),
    _Conflict(
        lambda o: o.max_steps < 0 and not o.num_train_epochs > 0,
        "`num_train_epochs` is {num_train_epochs}, so nothing is trained",
        "set a number above 0",
    ),
)
"""Rollouts and evaluations need less."""

_OF_SERVE = (
    _Conflict(
        lambda o: not o.use_vllm,
        "The recipe's trainer samples from its own model and would leave a server alone",
        "set `use_vllm: true` for both commands",
    ),
    _Conflict(
        lambda o: o.vllm_mode == "colocate",
        "The recipe's trainer starts its servers itself (`vllm_mode: colocate`)",
        "run `mt-grpo train` alone, or give both commands `--vllm_mode server`",
    ),
)

_SERVER_GROUPS = _Conflict(
    lambda o: o.use_vllm and o.vllm_mode == "colocate" and o.processes % o.vllm_tensor_parallel_size,
    "<vllm_tensor_parallel_size> does not divide the {all} that train, and each server of `vllm_mode: colocate` runs "
    "on the GPUs of so many of them",
    "set a divisor, such as 1",
)
_SEQUENCE_GROUPS = _Conflict(
    lambda o: o.processes % o.sp_size,
    "<sp_size> does not divide {all}",
    "start a multiple of it (`--num_processes`), or leave it out",
)
_OF_BATCHES = (
    _SERVER_GROUPS,
    _SEQUENCE_GROUPS,
    _Conflict(
        lambda o: o.seed + o.processes > 2**32,
        "<seed> is too large for {all}, each of which adds its number to it",
        "set a smaller one",
    ),
    _Conflict(
        lambda o: o.batch % o.step,
        "`generation_batch_size: {batch}` is no multiple of {step} ({sizes})",
        "make it one, or leave it out",
    ),
    _Conflict(
        lambda o: o.batch % o.num_generations,
        "<num_generations> does not divide the generation batch of {batch} ({sizes} × {steps})",
        "{divisors}make the batch a multiple of {num_generations}",
    ),
    _Conflict(
        lambda o: o.branch_at is not None and o.rows % o.num_branches,
        "<num_branches> does not divide the {rows} conversations that a process samples, and branches share a process",
        "change it, or `per_device_train_batch_size`",
    ),
)
"""Of the processes of a run, which have to make whole groups."""
_OF_EVAL_BATCHES = (
    _Conflict(
        lambda o: o.batch % o.generations,
        "`num_generations_eval: {generations}` does not divide the evaluation batch of {batch} ({sizes})",
        "{divisors}make the batch a multiple of {generations}",
    ),
)


_MAY_BE_INFINITE = (
    *("epsilon", "epsilon_high", "delta", "max_grad_norm", "off_policy_mask_threshold", "entropy_coef_max"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", "vllm_server_timeout", "tool_timeout"),
    *("rollout_timeout", "eval_delay"),
)
"""Bounds: an infinite one bounds nothing."""
_LEAST, _MOST = 2.0**-126, 2.0**128  # of numbers above 0 with 32 bits


def _fits(value: float) -> bool:
    return value == 0 or _LEAST <= abs(value) < _MOST


def check_options(
    options: Values, registered: Mapping[str, Iterable[str]], table: Mapping[str, Option] = OPTIONS
) -> None:
    """Holds the options of a run against the rules of the table, and against each other."""
    check_values(options, table)
    for name, value in options.items():
        if isinstance(value, float) and not (_fits(value) or value == math.inf and name in _MAY_BE_INFINITE):
            raise ConfigError(f"`{name}` is {value}; give a finite number that 32 bits hold.")
    if options["environments"] is None:  # else each may have options of its own
        check_scheduler(options)
        check_agent(options)
    given = options["advantage_estimator"]
    rule = rule_name(chosen_rule(None if given is None else parse_rule(given), bool(options["turn_reward_funcs"])))
    for name, known in registered.items():
        value = rule if name == "advantage_estimator" else options[name]
        if value is not None:  # `call_protocol` may be left to the kind of environment
            choose(name, value, known)
    steps = options["max_env_steps"]
    teacher = parse_teacher(options["teacher"]) if options["teacher"] else {}
    derived = {
        "alone": "agent" if options["env"] is None else "env",
        "credit_rule": rule,
        "checkpointing": _checkpointing(options, ""),
        "least_group": 2 * options["num_branches"],
        "most_turns": None if steps is None else steps + 1,
        **{f"teacher_{key}": teacher.get(key) for key in ("server", "gate")},
    }
    _refuse(CONFLICTS, {**options, **derived})
    _check_checkpointing_options(options)
    _check_addresses(options)
    check_partner(options)
    _check_environments(options)
    if options["simulated_user"] is not None:
        parse_user(options["simulated_user"])


def check_history(policy: str, compact_every: int | None) -> None:
    """Raises `ConfigError` for an unknown policy, or `"compact"` without its number of turns."""
    options = {"history": policy, "compact_every": compact_every}
    check_values(options, OPTIONS)
    _refuse([_HISTORY], options)


def check_factory(options: Values) -> None:
    """Checks that a factory does not stand beside several environments."""
    _refuse([_FACTORY], options)


def _check_addresses(options: Values) -> None:
    """Checks the addresses of servers: each is valid and named once, and there are as many as the run needs."""
    host_url(options["vllm_server_host"], options["vllm_server_port"])
    named = max(len(expand_addresses(options["vllm_server_base_url"] or [], "vllm_server_base_url")), 1)
    least = options["vllm_min_servers"]
    if least is not None and least > named:
        raise ConfigError(
            f"`vllm_min_servers: {least}` wants more servers than are named, {named}: name the others in "
            "`vllm_server_base_url`, or lower it."
        )


def _checkpointing(options: Values, end: str) -> str:
    """The name of an option of gradient checkpointing: transformers' later one where that is given, since it wins."""
    later = f"activation_checkpointing{end}"
    return f"gradient_checkpointing{end}" if options.get(later) is None else later


_OF_CHECKPOINT = "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"
"""What torch takes."""


def _check_checkpointing_options(options: Values) -> None:
    """Refuses options of gradient checkpointing that have no effect."""
    name = _checkpointing(options, "_kwargs")
    for each in ("model_init_kwargs", name):
        given = parse_mapping(options[each], each) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"`{each}` is {given!r}: give a mapping of names to values.")
    for key in ("every_n_layers", "offload"):
        if key in given:
            raise ConfigError(
                f"`{name}: {{{key}: {str(given[key]).lower()}}}` is reset by TRL after the first batch: leave it "
                "out, and set `gradient_checkpointing_layers` to keep fewer inputs of layers, or "
                "`activation_offloading` to move them."
            )
    for key in given:
        refuse_unknown(
            str(key), f"The key {key!r} of `{name}`", _OF_CHECKPOINT, f"it takes {', '.join(_OF_CHECKPOINT)}"
        )


def check_served(options: Values) -> None:
    """Checks that a run would use the server that is to be started."""
    _refuse(_OF_SERVE, {"use_vllm": None, "vllm_mode": None, **options})


def check_groups(options: Values, processes: int) -> None:
    """Checks that the servers that a run starts share its processes evenly."""
    _refuse([_SERVER_GROUPS], {**options, "processes": processes, "all": _processes(processes)})


def check_sharing(size: int, processes: int) -> None:
    """Checks that `sp_size` divides the processes."""
    _refuse([_SEQUENCE_GROUPS], {"sp_size": size, "processes": processes, "all": _processes(processes)})


def check_trainable(options: Values) -> None:
    """Checks that training would take a step."""
    _refuse(_OF_TRAINING, options)


def check_batches(options: Values, processes: int) -> None:
    """Checks that batches divide into whole groups, on so many processes."""
    device = options["per_device_train_batch_size"]
    step = device * processes
    batch = options["generation_batch_size"] or step * (
        options["steps_per_generation"] or options["gradient_accumulation_steps"]
    )
    derived = {
        "processes": processes,
        "all": _processes(processes),
        "sizes": f"{device} a device × {_processes(processes)}",
        "step": step,
        "batch": batch,
        "steps": f"{batch // step} step{'s' * (batch > step)}",
        "rows": batch // processes,
        "divisors": _divisors(batch, 2),
    }
    _refuse(_OF_BATCHES, {**options, **derived})
    if options["do_eval"] or options["eval_strategy"] != "no":
        check_eval_batch(options, processes)


def check_eval_batch(options: Values, processes: int) -> None:
    """Checks that a batch of an evaluation divides into whole groups."""
    device = options["per_device_eval_batch_size"]
    sizes = {
        "generations": options["num_generations_eval"] or options["num_generations"],
        "batch": device * processes,
        "sizes": f"{device} a device × {_processes(processes)}",
        "divisors": _divisors(device * processes, 1),
    }
    _refuse(_OF_EVAL_BATCHES, sizes)


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number > 1)}"


def _divisors(batch: int, least: int) -> str:
    """The beginning of the advice to set a divisor, where there is one."""
    numbers = [str(number) for number in range(least, min(batch, _LARGEST_GROUP) + 1) if batch % number == 0]
    one_of = "one of " if len(numbers) > 1 else ""
    return f"set it to {one_of}{', '.join(numbers)}, or " if numbers else ""


def check_names(options: Values, tools: Iterable[str], rewards: Iterable[str]) -> None:
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
    near = f": TRL's is `trl.rewards.{name}`" if name in TRL_REWARDS else did_you_mean(name, known)
    return f"The {kind} reward {name!r} is neither a built-in name nor a path such as `package.module.name`{near}."


TRL_REWARDS = "accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"
"""Functions that TRL's own command knows by these names."""


def check_partner(options: Values, place: str = "") -> None:
    """Checks that at most one of `PARTNERS` is set."""
    given = [name for name in PARTNERS if options[name] is not None]
    if len(given) > 1:
        raise ConfigError(
            f"{place}`{given[0]}` and `{given[1]}` both say who answers the model: leave one of them out."
        )


def _check_environments(options: Values) -> None:
    """Checks that `environments` names environments, each with options that one may have for itself."""
    if options["environments"] is None:
        return
    environments = parse_mapping(options["environments"], "environments")
    if not isinstance(environments, Mapping) or not environments:
        raise ConfigError("`environments` is a mapping from the names in the column `environment` to environments.")
    takes = ", ".join(OF_ENVIRONMENT)
    for name, given in environments.items():
        place = f"`environments: {name}`"
        if isinstance(given, str):
            continue
        if not isinstance(given, Mapping):
            raise ConfigError(f"{place} is {given!r}: give a dotted path, or a mapping of {takes}.")
        for option in given:
            refuse_unknown(str(option), f"The key {option!r} of {place}", OF_ENVIRONMENT, f"it takes {takes}")
        check_values(given, OF_ENVIRONMENT, f" of {place}")


def check_agent(options: Values, key: str = "") -> None:
    """Refuses options beside an agent, or an environment of verifiers, that would have no effect."""
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
    both = f"and `{what}`{place} are both set, and {who} brings its own tools, messages and end: leave"
    brought = ("tools", "tools_config_file", "system_prompt", "max_env_steps")
    refuse_first(*((options[name], f"`{name}` {both} `{name}` out.") for name in brought))


def check_scheduler(options: Values, key: str = "") -> None:
    """Refuses options beside a scheduler that would have no effect, and a scheduler's without one."""
    place = f" of `{key}`" if key else ""
    if options["multi_turn_scheduler"] is None:
        alone = f"{place} has an effect with `multi_turn_scheduler` only: leave it out"
        refuse_first(
            (options["max_turns"] is not None, f"`max_turns`{alone}, and set `max_env_steps`."),
            (options["loss_scale"] != "all", f"`loss_scale`{alone}."),
        )
        return
    both = f"and `multi_turn_scheduler`{place} are both set, and a scheduler holds the conversation itself"
    others = ("tools", "tools_config_file", *PARTNERS)
    refuse_first(*((options.get(name), f"`{name}` {both}: leave one out.") for name in others))
