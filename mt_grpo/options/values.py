"""
How a recipe's words are read: names and mappings as a recipe, a command line (a mapping as JSON) or a script gives
them, the types of `env`, and the names that other trainers have for our options. Plain values: imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, Required, get_origin, get_type_hints

import yaml
from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import TypedDict

from mt_grpo.errors import ConfigError, UserError, refuse_first
from mt_grpo.imports import choose, did_you_mean
from mt_grpo.options.table import RunOptions, Values

VERIFIERS = "verifiers:"
"""What `env` begins with where it names an environment of verifiers."""


_Text = Annotated[str, MinLen(1)]


class _UserOptions(TypedDict, total=False):
    """Keys of `simulated_user`; see `mt_grpo.envs.simulated_user`."""

    base_url: Required[_Text]
    model: Required[_Text]
    system_prompt: Required[_Text]
    api_key_env: str
    stop_phrase: _Text
    max_turns: Annotated[int, Ge(1)]
    timeout: Annotated[float, Gt(0)]
    max_retries: Annotated[int, Ge(0)]
    request: Mapping[str, Any]


class _TeacherOptions(TypedDict, total=False):
    """Keys of `teacher`; see `mt_grpo.training.distillation`."""

    model: Required[_Text]
    server: _Text
    sees: Annotated[list[Literal["answer", "sibling", "feedback"]], MinLen(1)]
    teacher_model_kind: Literal["base", "live", "ema"]
    teacher_update_rate: Annotated[float, Gt(0), Le(1)]
    teacher_sync_steps: Annotated[int, Ge(1)]
    gate: _Text


SELF = "self"
"""The `model` of a teacher that is the policy itself."""


class _FilterOptions(TypedDict):
    """Keys of `dataset_filter`."""

    file: _Text
    between: list[float]


class _AgentOptions(TypedDict, total=False):
    """Keys of `agent` as a mapping; it has one of the first two."""

    function: _Text
    command: _Text
    host: _Text


DEFAULT_RULE: dict[str, Any] = {"name": "lambda_to_go", "lam": 0.8, "scales": "batch"}
"""The credit rule where none is chosen. benchmarks/reports/designs.md says why."""

_OUTCOME_RULE = "grpo_or"
"""The same without turn rewards: TRL's, which gives the outcome to every token of a conversation."""


def is_bare(name: str) -> bool:
    """Whether it is a name in a registry, and no path of a module or a file."""
    return "." not in name and ":" not in name


def names_model(name: str) -> bool:
    """Whether an outcome reward is named that is a reward model: a folder with one, or an id on the Hub."""
    if ":" in name or name.endswith(".py"):  # a path of something in a file, or JSON
        return False
    return "/" in name or (Path(name) / "config.json").is_file()


def parse_reward(entry: object) -> tuple[Any, dict[str, Any]]:
    """A reward as recipes, command lines (JSON) or scripts list it: its name, path or object, and options."""
    given = _parse_braces(entry, "The reward")
    if not isinstance(given, Mapping):
        return given, {}
    if not isinstance(given.get("name"), str):
        raise ConfigError(
            f"The reward {dict(given)!r} has no name: give the name or the path of a reward class and its options, "
            "such as `{name: information_gain, column: answer}`."
        )
    return given["name"], {name: value for name, value in given.items() if name != "name"}


def chosen_rule(rule: str | dict[str, Any] | None, has_turn_rewards: bool) -> str | dict[str, Any]:
    """The credit rule of a run: the one that was chosen, or a default."""
    if rule is not None:
        return rule
    return dict(DEFAULT_RULE) if has_turn_rewards else _OUTCOME_RULE


def parse_rule(rule: object) -> str | dict[str, Any]:
    """A credit rule as a recipe, a command line (the mapping as JSON) or a script gives it."""
    given = _parse_braces(rule, "The credit rule")
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        return dict(given)
    raise ConfigError(
        f"`advantage_estimator` is {given!r}: give the name of a rule, or a mapping of its `name` and its options, "
        'such as `{"name": "mt_grpo", "turn_coef": 0.5}`.'
    )


def rule_name(rule: str | Mapping[str, Any]) -> str:
    """The name of a rule that `parse_rule` returned."""
    return rule if isinstance(rule, str) else rule["name"]


def parse_mapping(value: object, key: str) -> Any:
    """What a text stands for where an option takes a mapping (JSON or YAML); other values stay as they are."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError, RecursionError):  # YAML takes the number 1e-3 for a text
        return json.loads(value)
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"`{key}` is {value!r}, which is not a JSON mapping.") from None


def read_yaml(file: Path | Traversable, what: str, error: type[UserError] = ConfigError) -> Any:
    """What a file of YAML says; `what` begins the sentence that refuses one which cannot be read."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as failure:
        fault = f"cannot be read: {failure.strerror if isinstance(failure, OSError) else 'it is not text'}"
    except (yaml.YAMLError, ValueError, RecursionError) as failure:  # the second: a date that is none
        fault = f"is not valid YAML: {' '.join(str(failure).split())}"
    raise error(f"{what} {fault}.")


def _parse_braces(value: object, what: str) -> Any:
    """The mapping that a text in JSON stands for, where an option takes plain text too; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} {value!r} is not valid JSON ({error.msg} at character {error.pos}).") from error


def _validated(options: type, given: object, key: str) -> dict[str, Any]:
    """A mapping as pydantic takes it; else one sentence about the first thing that is wrong with it."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config  # not for `--help`: it takes a moment

    closed = with_config(ConfigDict(extra="forbid", strict=True))(options)
    try:
        return TypeAdapter(closed).validate_python(given)
    except ValidationError as error:
        wrong = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")  # likely of a missing key
    known = get_type_hints(options)
    hints = get_type_hints(options, include_extras=True)  # `__required_keys__` does not read what is written as text
    needed = [name for name, hint in hints.items() if options.__total__ or get_origin(hint) is Required]  # type: ignore[attr-defined]
    name = ".".join(map(str, wrong["loc"]))
    if wrong["type"] == "extra_forbidden":
        said = f"`{key}` has an unknown key {name!r}{did_you_mean(name, known)}"
    elif wrong["type"] == "missing":
        said = f"`{key}` has no `{name}`: it needs {', '.join(needed)}"
    elif not name:
        said = f"`{key}` is {given!r}: give a mapping of {', '.join(needed or known)}"
    else:
        said = f"`{key}: {name}` is {wrong['input']!r}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}"
    raise ConfigError(f"{said}.")


def parse_user(user: object) -> dict[str, Any]:
    """A simulated user as a recipe, a command line (the mapping as JSON) or a script gives it."""
    user = parse_mapping(user, "simulated_user")
    if isinstance(user, Mapping):
        if "api_key" in user:
            raise ConfigError(
                "`simulated_user: api_key` would write a key into a file: put it into an environment variable, and "
                "name that in `api_key_env`."
            )
        user = {name: value for name, value in user.items() if value is not None}
    user = _validated(_UserOptions, user, "simulated_user")
    _check_url(user["base_url"], "simulated_user: base_url", "a URL such as `http://127.0.0.1:8001/v1`")
    for name in ("model", "messages", "stream"):
        if name in user.get("request", {}):
            raise ConfigError(f"`simulated_user: request` sets `{name}`, which is set for it: leave that out.")
    return user


def _check_url(given: str, key: str, wanted: str) -> None:
    if not given.startswith(("http://", "https://")):
        raise ConfigError(f"`{key}` is {given!r}: give {wanted}.")


def parse_agent(agent: object, key: str = "agent") -> dict[str, str]:
    """An agent as a recipe, a command line (the mapping as JSON) or a script gives it."""
    if isinstance(agent, str):
        agent = parse_mapping(agent, key) if agent.lstrip().startswith("{") else {"function": agent}
    forms = 'the path of a function, such as `my_agent.solve`, or `{command: "node agent.js"}`'
    if not isinstance(agent, Mapping):
        raise ConfigError(f"`{key}` is {agent!r}: give {forms}.")
    agent = _validated(_AgentOptions, agent, key)
    try:
        program = next(iter(shlex.split(agent.get("command", ""))), "")
    except ValueError as error:
        raise ConfigError(f"`{key}: command` cannot be split into words ({error}): close its quotes.") from error
    refuse_first(
        (("function" in agent) == ("command" in agent), f"`{key}` has to name one thing that runs: {forms}."),
        (
            "command" in agent and shutil.which(program) is None,
            f"`{key}: command` begins with {program!r}, which is no program here: install it, or give its path.",
        ),
    )
    return agent


def parse_teacher(teacher: object) -> dict[str, Any]:
    """A teacher as a recipe, a command line (the mapping as JSON) or a script gives it."""
    given = _parse_braces(teacher, "`teacher`")
    teacher = _validated(_TeacherOptions, {"model": given} if isinstance(given, str) else given, "teacher")
    if "server" in teacher:
        _check_url(
            teacher["server"], "teacher: server", "the address of a vLLM server, such as `http://127.0.0.1:8001`"
        )
    if "sees" in teacher:
        teacher = {**teacher, "sees": list(dict.fromkeys(teacher["sees"]))}
    is_policy = teacher["model"] == SELF
    if is_policy:
        teacher = {"teacher_model_kind": "ema", **teacher}
    kind = teacher.get("teacher_model_kind")
    mean = next((name for name in ("teacher_update_rate", "teacher_sync_steps") if name in teacher), None)
    refuse_first(
        (
            kind is not None and not is_policy,
            f"`teacher: teacher_model_kind` says which weights of the policy teach, and the teacher is "
            f"{teacher['model']!r}: leave it out, or set `model: self`.",
        ),
        (
            mean is not None and not (is_policy and kind == "ema"),
            f"`teacher: {mean}` says how a mean of the policy follows it: leave it out, or set `model: self` and "
            "`teacher_model_kind: ema`.",
        ),
        (
            is_policy and "sees" not in teacher and kind == "live",
            "`teacher: {model: self, teacher_model_kind: live}` is the policy, which knows no more than itself: write "
            "`sees: [answer]` (or sibling, feedback), or `teacher_model_kind: ema` or `base`.",
        ),
        (
            is_policy and "server" in teacher,
            "`teacher: server` has another model than the policy: leave it out for `model: self`.",
        ),
    )
    return teacher


def verifiers_name(env: object) -> str | None:
    """The name of the environment of verifiers that `env` stands for; `None` where it is none of verifiers'."""
    if not isinstance(env, str) or not env.startswith(VERIFIERS):
        return None
    name = env.removeprefix(VERIFIERS).strip()
    if not name:
        raise ConfigError(f"`env: {env}` names no environment: write `{VERIFIERS}NAME`.")
    return name


def parse_env_config(config: object, key: str = "env_config") -> dict[str, Any]:
    """The options of an environment, as `parse_user` reads its own."""
    config = parse_mapping(config, key)
    if not isinstance(config, Mapping):
        raise ConfigError(f"`{key}` is {config!r}: give a mapping from names of options to values.")
    return dict(config)


def _parse_factories(given: object) -> Any:
    """A factory in TRL's form: its path or itself; or several by name, as a mapping or as one in JSON or YAML."""
    is_mapping = isinstance(given, str) and given.lstrip().startswith("{")
    return parse_mapping(given, "environment_factory") if is_mapping else given


def parse_eval_datasets(given: object) -> dict[str, dict[str, Any]] | None:
    """Evaluation sets by name, each with those of `dataset_name`, `split` and `dataset_config` that it has."""
    sets = parse_mapping(given, "eval_datasets")
    if sets is None:
        return None
    if not isinstance(sets, dict) or not sets:
        raise ConfigError(f"`eval_datasets` is {given!r}: give splits by name, such as `{{hard: 'test[:100]'}}`.")
    read = {str(name): {"split": one} if isinstance(one, str) else one for name, one in sets.items()}
    for name, one in read.items():
        takes = f"give a split, or a mapping with some of {', '.join(_OF_SETS)}"
        texts = isinstance(one, dict) and one and all(isinstance(value, str) for value in one.values())
        refuse_first(
            (
                not re.fullmatch(r"\w+", name),
                f"`eval_datasets` has the name {name!r}, which metrics cannot have: write a word.",
            ),
            (not texts or set(one) - set(_OF_SETS), f"`eval_datasets: {name}` is {one!r}: {takes}."),
        )
    return read


_OF_SETS = ("dataset_name", "split", "dataset_config")


def parse_dataset_filter(given: object) -> dict[str, Any] | None:
    """A filter of training rows as a recipe, a command line (the mapping as JSON) or a script gives it."""
    chosen = parse_mapping(given, "dataset_filter")
    if chosen is None:
        return None
    chosen = _validated(_FilterOptions, chosen, "dataset_filter")
    low, high = chosen["between"] if len(chosen["between"]) == 2 else (1.0, 0.0)
    if not 0 <= low <= high <= 1:
        raise ConfigError(
            f"`dataset_filter: between` is {chosen['between']}: give the lowest and the highest rate to train on, as "
            "`[0.1, 0.9]`."
        )
    return chosen


PARSERS: dict[str, Callable[[Any], Any]] = {
    "environment_factory": _parse_factories,
    "agent": parse_agent,
    "env_config": parse_env_config,
    "simulated_user": parse_user,
    "advantage_estimator": parse_rule,
    "teacher": parse_teacher,
}
"""How the options that may be mappings are read."""


_OF_TOOLS = (
    *("tools", "tools_config_file", "tool_processes", "system_prompt", "max_env_steps", "call_protocol", "env_mask"),
    "tool_timeout",
)
"""Options of a run that an environment with tools takes."""

_OF_GAMES = ("tag", "max_turns", "step_timeout")
_OF_USERS, _OF_AGENTS = tuple(get_type_hints(_UserOptions)), tuple(get_type_hints(_AgentOptions))
_BROUGHT = "mt_grpo.integrations"


@dataclass(frozen=True)
class _EnvType:
    """A kind of environment."""

    module: str  # registers what builds it, see `mt_grpo.envs.source`; imported where a run names the type
    keys: tuple[str, ...] = ()
    needs: int = 1  # how many of these, from the first on, have to be given
    takes: tuple[str, ...] = _OF_TOOLS  # options of a run that it may have for itself
    option: str | None = None  # the older one that means the same; its value is the only key's, or a mapping of all
    paths: tuple[str, ...] = ()  # keys that name code
    folders: tuple[str, ...] = ()  # keys that name folders of what is run
    brings_rows: bool = False  # so that a run needs no dataset


TYPES = {
    "tools": _EnvType("mt_grpo.envs.source", needs=0),
    "simulated_user": _EnvType("mt_grpo.envs.simulated_user", _OF_USERS, 0, option="simulated_user"),
    "interactions": _EnvType(f"{_BROUGHT}.verl", ("file",), option="interaction_config_file"),
    "class": _EnvType("mt_grpo.envs.source", ("path",), takes=(*_OF_TOOLS, "environment_urls"), option="env"),
    "trl": _EnvType(f"{_BROUGHT}.trl", ("factory",), option="environment_factory"),
    "agent": _EnvType(f"{_BROUGHT}.openai_api", _OF_AGENTS, 0, ("call_protocol",), "agent"),
    "scheduler": _EnvType(
        f"{_BROUGHT}.swift",
        ("name",),
        takes=("max_turns", "loss_scale", "system_prompt", "call_protocol", "tool_timeout"),
        option="multi_turn_scheduler",
    ),
    "verifiers": _EnvType(f"{_BROUGHT}.verifiers", ("name", "config"), takes=("call_protocol",), brings_rows=True),
    "harbor": _EnvType(
        f"{_BROUGHT}.harbor",
        ("tasks", "eval_tasks", "sandbox", "agent", "host", "verify_every", "sandbox_pool"),
        takes=("system_prompt", "max_env_steps", "call_protocol", "env_mask", "tool_timeout"),
        paths=("agent",),
        folders=("tasks", "eval_tasks"),
        brings_rows=True,
    ),
    "gym": _EnvType(f"{_BROUGHT}.gym", ("make", "parse", *_OF_GAMES), takes=(), paths=("make", "parse")),
    "textarena": _EnvType(
        f"{_BROUGHT}.textarena", ("game", "opponent", "max_turns", "options"), takes=(), paths=("opponent",)
    ),
    "openenv": _EnvType(
        f"{_BROUGHT}.openenv",
        ("action", "url", "observe", "client", *_OF_GAMES),
        takes=("environment_urls",),
        paths=("action", "observe", "client"),
    ),
}
"""By the names that `type` takes."""

HAS_A_USER = ("tools", "simulated_user", "interactions", "class")
"""Types in which the model answers a user, whose place `mt-grpo chat` gives to a person."""

ALIASES = {kind.option: name for name, kind in TYPES.items() if kind.option is not None}
"""Types by the older options that mean them. `env: verifiers:NAME` is `verifiers`, and none of the options `tools`."""


def env_type(options: Values) -> str:
    """The type of environment that options of a run describe."""
    if isinstance(options["env"], Mapping):
        return options["env"]["type"]
    if verifiers_name(options["env"]) is not None:
        return "verifiers"
    return next((kind for name, kind in ALIASES.items() if options[name] is not None), "tools")


def brings_rows(env: object) -> bool:
    """Whether what `env` names has rows of its own, so that a run needs no dataset."""
    named = env.get("type") if isinstance(env, Mapping) else None
    return verifiers_name(env) is not None or (named in TYPES and TYPES[named].brings_rows)


def with_env_options(options: Values) -> dict[str, Any]:
    """Options in which each `env: {type: NAME, ...}`, also of `environments`, is written as what it means."""
    written = _of_env(options, "env")
    environments = parse_mapping(written.get("environments"), "environments")
    if isinstance(environments, Mapping):
        written["environments"] = {
            name: _listed(_of_env({"env": given} if "type" in given else given, f"environments: {name}"))
            if isinstance(given, Mapping)
            else given
            for name, given in environments.items()
        }
    return written


def _listed(options: dict[str, Any]) -> dict[str, Any]:
    """Options in which one name stands in a list, as a recipe may leave out."""
    return {name: [value] if name in _LISTS and isinstance(value, str) else value for name, value in options.items()}


_LISTS = "tools", "environment_urls"


def _of_env(options: Values, key: str) -> dict[str, Any]:
    env = options.get("env")
    if isinstance(env, str) and env.lstrip().startswith("{"):
        env = parse_mapping(env, key)
    if not isinstance(env, Mapping):
        return dict(options)
    if "type" not in env:
        raise ConfigError(f"`{key}` has no `type`: name one of {', '.join(TYPES)}.")
    choose(f"{key}: type", env["type"], TYPES)
    kind, name = TYPES[env["type"]], f"`{key}` of the type `{env['type']}`"
    takes = (*kind.keys, *kind.takes)
    unknown = [option for option in env if option not in ("type", *takes)]  # `null` may be one
    first = next(iter(unknown), None)
    near = f"{did_you_mean(first, takes)}: it takes {', '.join(takes)}"
    missing = next((option for option in kind.keys[: kind.needs] if not env.get(option)), None)
    refuse_first(
        (unknown, f"{name} has an unknown key {first!r}{near}."),
        (missing is not None, f"{name} has no `{missing}`: give it."),
    )
    own = {option: value for option, value in env.items() if option in kind.keys}
    shared = {option: value for option, value in env.items() if option not in ("type", *kind.keys)}
    made = {"env": None, **_as_options(env["type"], own), **shared}
    for option, value in options.items():
        if option == "env" or value is None or value == _DEFAULTS.get(option):
            continue
        refuse_first(
            (option in ALIASES, f"{name} and `{option}` both say who answers the model: leave one of them out."),
            (option in made, f"`{option}` is set both in {name} and beside it: leave one of them out."),
        )
    return {**options, **made}


def _as_options(name: str, own: dict[str, Any]) -> dict[str, Any]:
    """A type's own keys as options of a run; those of games have none of their own and stay a mapping in `env`."""
    kind = TYPES[name]
    if name == "verifiers":
        return {"env": f"{VERIFIERS}{own['name']}", "env_config": own.get("config")}
    if kind.option is not None:
        return {kind.option: own[kind.keys[0]] if len(kind.keys) == 1 else own}
    return {"env": {"type": name, **own}} if own else {}


_DEFAULTS = {field.name: field.default for field in fields(RunOptions)}


_CUTOFF = 0.82  # how near, of 1, the name of an option must be to be guessed

SYNONYMS = {
    "model_name_or_path": "model model_name model_path model_id base_model pretrained_model_name_or_path",
    "model_revision": "revision",
    "dtype": "torch_dtype model_dtype precision",
    "attn_implementation": "attn_impl flash_attn use_flash_attn use_flash_attention use_flash_attention_2",
    "dataset_name": "dataset dataset_path dataset_id data data_path train_file train_files train_dataset",
    "dataset_config": "dataset_config_name dataset_subset subset",
    "dataset_train_split": "train_split dataset_split split",
    "dataset_test_split": "test_split eval_split val_split validation_split dataset_eval_split",
    "dataset_streaming": "streaming",
    "outcome_reward_funcs": "reward_funcs reward_func reward_functions reward_function reward_fn rewards reward orms "
    "reward_model reward_model_name_or_path custom_reward_function",
    "turn_reward_funcs": "step_reward_funcs step_rewards turn_rewards process_reward_funcs",
    "tools_config_file": "tool_config tool_config_path tool_config_file tools_config tools_config_path",
    "interaction_config_file": "interaction_config interaction_config_path",
    "external_plugins": "plugin plugins plugin_path external_plugin",
    "system_prompt": "system default_system system_message",
    "call_protocol": "agent_template tool_call_parser tool_parser",
    "max_env_steps": "max_tool_calls max_tool_turns max_tool_rounds max_assistant_turns max_user_turns max_num_turns",
    "max_turn_length": "max_turn_tokens max_tokens_per_turn",
    "max_completion_length": "max_response_length response_length max_new_tokens max_tokens max_gen_len "
    "rollout_max_response_len",
    "vllm_max_model_length": "max_length max_seq_length max_seq_len max_model_len max_model_length vllm_max_model_len",
    "num_generations": "group_size rollout_n rollouts_per_example rollouts_per_prompt n_samples_per_prompt "
    "num_samples num_return_sequences n_generations n_rollouts num_rollouts_per_prompt",
    "num_generations_eval": "eval_n val_n n_samples_per_eval_prompt num_eval_generations",
    "per_device_train_batch_size": "batch_size train_batch_size micro_batch_size per_device_batch_size "
    "ppo_mini_batch_size ppo_micro_batch_size_per_gpu rollout_batch_size global_batch_size",
    "per_device_eval_batch_size": "eval_batch_size val_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation grad_accum grad_accum_steps grad_accumulation_steps",
    "learning_rate": "lr actor_lr actor_learning_rate",
    "lr_scheduler_type": "lr_scheduler scheduler lr_schedule lr_decay_style",
    "warmup_steps": "warmup warmup_ratio lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps",
    "num_train_epochs": "epochs epoch num_epochs n_epochs total_epochs train_epochs",
    "max_steps": "steps num_steps total_steps train_steps num_train_steps training_steps total_training_steps "
    "max_train_steps",
    "beta": "kl kl_coef kl_coeff kl_beta kl_loss_coef init_kl_coef",
    "epsilon": "clip_ratio clip_ratio_low clip_range cliprange clip_eps clip_epsilon eps_clip",
    "epsilon_high": "clip_ratio_high clip_high eps_clip_high",
    "num_iterations": "mu ppo_epochs num_ppo_epochs",
    "entropy_coef": "entropy_coeff ent_coef entropy_loss_coef",
    "scale_rewards": "norm_adv_by_std_in_grpo normalize_advantages normalize_rewards",
    "advantage_estimator": "adv_estimator advantage_type algorithm rl_algorithm rlhf_type",
    "max_grad_norm": "grad_clip clip_grad gradient_clipping clip_grad_norm grad_norm",
    "optim": "optimizer optimiser",
    "mask_truncated_completions": "overlong_filter overlong_filtering",
    "distillation_coef": "distillation_weight distillation_coeff distill_coef kd_coef distillation_loss_coef",
    "teacher": "teacher_model teacher_model_name_or_path teacher_name teacher_path teacher_model_kind "
    "teacher_update_rate teacher_sync_steps",
    "use_peft": "use_lora lora peft enable_lora train_type tuner_type finetuning_type peft_config",
    "lora_r": "lora_rank lora_dim rank r peft_r",
    "lora_alpha": "alpha peft_alpha",
    "lora_target_modules": "target_modules lora_target lora_modules",
    "lora_modules_to_save": "modules_to_save",
    "load_in_4bit": "use_4bit load_4bit qlora use_qlora",
    "load_in_8bit": "use_8bit load_8bit",
    "gradient_checkpointing": "use_gradient_checkpointing enable_gradient_checkpointing",
    "sp_size": "sequence_parallel_size ulysses_sequence_parallel_size context_parallel_size cp_size",
    "use_vllm": "vllm fast_inference",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_tensor_parallel_size": "tensor_parallel_size tensor_model_parallel_size tp tp_size rollout_tp",
    "vllm_server_base_url": "vllm_base_url vllm_server_url vllm_url server_url base_url",
    "vllm_server_host": "vllm_host",
    "vllm_server_port": "vllm_port",
    "vllm_enable_sleep_mode": "enable_sleep_mode sleep_level",
    "max_concurrent_rollouts": "max_concurrent max_concurrency max_num_seqs",
    "max_staleness": "max_async_level async_level max_off_policy_steps max_head_offpolicyness staleness_threshold",
    "output_dir": "output output_path save_dir save_path default_local_dir checkpoint_dir ckpt_dir ckpt_path",
    "run_name": "experiment_name exp_name wandb_run_name trackio_run_name",
    "project": "project_name wandb_project",
    "report_to": "logger loggers log_with wandb use_wandb use_tensorboard",
    "logging_steps": "log_steps log_interval log_every log_freq logging_interval",
    "save_steps": "save_freq save_interval save_every ckpt_interval",
    "save_total_limit": "max_checkpoints max_actor_ckpt_to_keep max_ckpt_to_keep",
    "eval_strategy": "evaluation_strategy",
    "eval_steps": "eval_freq eval_interval eval_every test_freq",
    "do_eval": "evaluate val_before_train eval_before_train",
    "eval_on_start": "eval_at_start",
    "resume_from_checkpoint": "resume resume_from resume_mode load_checkpoint",
    "seed": "random_seed",
}
"""What other trainers, and people, call our options: by our name of each, separated by spaces."""
LONGEST_PROMPT = "max_prompt_length", "prompt_max_len"
"""What other trainers call a bound of prompts, which is none of our options."""


def refuse_unknown(
    name: str,
    written: str,
    known: Iterable[str],
    otherwise: str = "`mt-grpo train --help-all` lists all that there are",
) -> None:
    """Refuses an unknown option, with its name here if it is another trainer's, or the nearest."""
    known = list(known)
    if name not in known:
        word = name.lower().replace("-", "_")
        other = next((own for own, others in SYNONYMS.items() if word in others.split()), None)
        near = f": here it is `{other}`" if other in known else did_you_mean(name, known, cutoff=_CUTOFF)
        if word in LONGEST_PROMPT:
            near = ": prompts are never cut here, so leave it out, and rows that are too long out of the dataset"
        raise ConfigError(f"{written} is unknown{near or f': {otherwise}'}.")
