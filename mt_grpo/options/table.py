"""
The table of options: what a recipe can say, once. The configuration's fields and docstring, `--help`, the JSON schema,
the tables of the docs and the checks of single values come from it. Rules over several options are in `rules`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose

Values = Mapping[str, Any]
"""Values of options by name."""

MODEL, AGENT, REWARDS = "Model and data", "Agent", "Rewards and credit"
TRAINING, SERVER, RUN = "Training", "vLLM server", "Run"

GROUPS = (MODEL, AGENT, REWARDS, TRAINING, SERVER, RUN)
"""In their order in `--help` and the docs. In each, the options of TRL and transformers come first."""


@dataclass(frozen=True)
class _Rule:
    """A rule for one value: a test, and the advice where the test fails. `None`, an option left out, is fine."""

    holds: Callable[[Any], bool]
    advice: str
    of_numbers: bool = True


def _is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _whole_from(least: int, advice: str) -> _Rule:
    return _Rule(lambda value: value >= least and value % 1 == 0, advice)


_ABOVE_ZERO = _Rule(lambda value: value > 0, "set a number above 0, or leave it out")
_NOT_BELOW_ZERO = _Rule(lambda value: value >= 0, "set 0 or more, or leave it out")
_WEIGHT = _Rule(lambda value: 0 <= value < math.inf, "set a number from 0 on, or leave it out")
_SHARE = _Rule(lambda value: 0 <= value <= 1, "set a number from 0 to 1, or leave it out")
_PORT = _Rule(lambda value: 0 < value < 2**16, "set a port from 1 to 65535, or leave it out")
_NO_EFFECT = _Rule(lambda value: not value, "it has no effect on rollouts of many turns, so leave it out", False)


@dataclass(frozen=True)
class Option:
    """What the table says of an option, beside its name, type and default. `--help` leaves out those used `seldom`."""

    help: str = ""
    group: str | None = None
    rule: _Rule | None = None
    names: tuple[Any, ...] = ()
    also: str | None = None
    page: str | None = None
    executes: str | None = None
    of_environment: bool = False
    of_server: bool = False
    seldom: bool = False

    @property
    def description(self) -> str:
        """The text of `help`, and where to read more."""
        return f"{self.help} See docs/{self.page}." if self.page else self.help


_OPTIONS: dict[dataclasses.Field[Any], Option] = {}
"""By field, since the metadata of a field has to be what `argparse` takes."""


def _option(help: str, group: str, default: Any = None, **more: Any) -> Any:
    """A field of a dataclass of options; `more` are further arguments of `Option`."""
    described = Option(help, group, **more)
    made: dataclasses.Field[Any] = dataclasses.field(default=default, metadata={"help": described.description})
    _OPTIONS[made] = described
    return made


_model, _agent, _rewards, _training, _server, _run = (functools.partial(_option, group=group) for group in GROUPS)
_env = functools.partial(_agent, of_environment=True)


@dataclass
class DataOptions:
    """Options that TRL's `ScriptArguments` does not have."""

    column_mapping: dict[str, str] | str | None = _model("Columns to add: {wanted: one that is there}.")
    eval_datasets: dict[str, Any] | str | None = _model(
        "Several evaluation sets: {name: split}. Or {name: {dataset_name, split, dataset_config}}; in place of "
        "`dataset_test_split`. Metrics are `eval_NAME_reward` and the like.",
        page="evaluate.md#in-training",
    )
    dataset_filter: dict[str, Any] | str | None = _model(
        "Training rows, by how often they are passed. `{file, between: [low, high]}`, where `mt-grpo rollout "
        "--difficulty` wrote the file.",
        page="start.md#rows-that-are-neither-too-easy-nor-too-hard",
    )


@dataclass
class RunOptions:
    """Options that TRL's `GRPOConfig` does not have, or to which it gives another meaning or default."""

    tools: list[str] | None = _env("Tools by name or dotted path.", page="tools.md", executes="path")
    tools_config_file: str | None = _env(
        "YAML file of further tools, in verl's form. Those of MCP servers may be among them.",
        page="mcp.md",
        executes="file",
    )
    env: dict[str, Any] | str | None = _env(
        "An environment: `{type: NAME, ...}`, a dotted path, or `verifiers:NAME`. A type is one of class, tools, "
        "agent, simulated_user, interactions, scheduler, trl, verifiers, harbor, gym, textarena and openenv. The path "
        "leads to a class, a `StepEnv`, or a function from a row to one. Unset: tools alone.",
        page="environments.md",
        executes="path",
    )
    env_config: dict[str, Any] | str | None = _env(
        "Options of an environment of verifiers.", page="any_agent.md#environments-of-verifiers"
    )
    environment_urls: list[str] | None = _env(
        "OpenEnv servers of the environment. A list, or ranges such as `http://node[1-4]:8000`.",
        page="games.md#openenv",
    )
    environment_factory: dict[str, Any] | str | None = _env(
        "A factory in TRL's form, or several by name. Dotted paths; a row's column `environment` has the name.",
        page="trl_environments.md",
        executes="path",
    )
    agent: dict[str, Any] | str | None = _env(
        "Anybody's agent: a function's path, or its `command`. It asks the policy over HTTP as it would ask OpenAI.",
        page="any_agent.md",
    )
    environments: dict[str, Any] | str | None = _agent(
        "Several, by the names in the column `environment`. Each is a dotted path, or a mapping of its own options, "
        "such as `env`, `agent`, `tools` and `max_env_steps`.",
        page="environments.md#several-in-one-run",
    )
    simulated_user: dict[str, Any] | str | None = _env(
        "A user whom an OpenAI-compatible endpoint plays. A mapping of `base_url`, `model`, `system_prompt` and more.",
        page="simulated_users.md",
    )
    interaction_config_file: str | None = _env(
        "YAML file of verl's interactions.", page="interactions.md", executes="file"
    )
    multi_turn_scheduler: str | None = _env(
        "A scheduler in the place of an environment. By name or dotted path.", page="schedulers.md", executes="path"
    )
    max_turns: int | None = _env("Responses of one conversation of the scheduler.", rule=_ABOVE_ZERO)
    call_protocol: str | None = _env(
        "How calls are written: tags, native or another. `native` is the model's own form; `learnt_tags` are `tags` "
        "without instructions; with `plain` a conversation is one answer without calls. Unset: `tags`, and `native` "
        "for `environment_factory`, as in TRL."
    )
    system_prompt: str | None = _env(
        "The system message of prompts that bring none. The call protocol's instructions follow it."
    )
    max_env_steps: int | None = _env(
        "Replies in one conversation; 5 where unset. Those of the environment; no bound with "
        "`environment_factory`. TRL's `max_tool_calling_iterations` is the same.",
        rule=_Rule(lambda value: value >= 0, "it counts replies of the environment, so set 0 or more"),
    )
    max_turn_length: int | None = _agent(
        "Tokens sampled in one turn. Reaching it ends the conversation.", rule=_ABOVE_ZERO
    )
    max_completion_length: int | None = _agent(
        "Tokens of a conversation after the prompt. Those that the environment writes count.",
        default=512,
        rule=_ABOVE_ZERO,
    )
    tool_timeout: float | None = _env(
        "Seconds one tool call may take. Also between two turns of an environment with a loop of its own.",
        default=60.0,
        rule=_ABOVE_ZERO,
    )
    tool_processes: int = _env(
        "Processes that call tools which are plain functions. 0 calls them in threads.",
        default=0,
        rule=_Rule(lambda value: value >= 0, "set 0 or more"),
        page="tools.md",
    )
    rollout_timeout: float | None = _agent("Seconds one conversation may take.", rule=_ABOVE_ZERO)
    max_concurrent_rollouts: int | None = _agent(
        "Conversations under way at once in a process. Unset: all, and with a server as many as its cache holds.",
        rule=_ABOVE_ZERO,
        page="rollouts.md",
    )
    history: str = _agent(
        "keep, strip_thinking, compact or template. What stays of the past in the next turn's context.",
        default="keep",
        names=("keep", "strip_thinking", "compact", "template"),
        page="history.md",
    )
    compact_every: int | None = _agent("Turns between two compactions. For `history: compact`.")
    tokenization_sanity_check_mode: str = _agent(
        "strict, ignore_strippable or disable. How a trajectory is compared with its full rendering.",
        default="strict",
        names=("strict", "ignore_strippable", "disable"),
        page="history.md",
    )
    external_plugins: list[str] | None = _agent(
        "Python files imported before anything is looked up by name.", executes="path"
    )

    turn_reward_funcs: list[str] | None = _rewards(
        "Turn rewards by name or dotted path. A class also by a mapping of its `name` and its options.",
        also="object",
        page="rewards.md",
        executes="path",
    )
    outcome_reward_funcs: list[str] | None = _rewards(
        "Outcome rewards by name or dotted path. In the same form; reward models too.",
        also="object",
        page="rewards.md",
        executes="path",
    )
    reward_weights: list[float] | None = _rewards(
        "Weights of turn rewards, then of outcome rewards. Unset: 1 each.",
        rule=_Rule(
            lambda value: isinstance(value, (list, tuple)) and all(map(_is_finite, value)),
            "give a list of finite numbers, one for each reward",
            of_numbers=False,
        ),
    )
    state_score: dict[str, Any] | str | None = _rewards(
        "State score, for the rule `state_baseline`. By name or dotted path, or a mapping with its options.",
        page="credit.md#bias-and-noise",
        executes="path",
    )
    advantage_estimator: dict[str, Any] | str | None = _rewards(
        "Credit rule: its name, or `name` and options (JSON). Unset: `lambda_to_go`, `lam: 0.8`, `scales: batch`; "
        "`grpo_or` without turn rewards, as in TRL.",
        page="credit.md",
    )
    turn_advantage_coef: float | None = _rewards(
        "Weight of the turn advantage. Unset: the rule's default (1.0 for `mt_grpo`).",
        rule=_Rule(math.isfinite, "give a finite number"),
    )
    groups_without_signal: str = _rewards(
        "keep, resample or leave_out. What becomes of groups whose advantages are all 0. `keep`: they count where the "
        "loss is divided; `resample`: their prompts are sampled again; `leave_out`: they do not count.",
        default="keep",
        names=("keep", "resample", "leave_out"),
        page="credit.md",
    )
    max_resample_times: int = _rewards("Rounds of sampling such groups again.", default=3, rule=_ABOVE_ZERO)
    branch_at: int | None = _rewards(
        "Turns after which a conversation branches. In training only; unset: none does.",
        rule=_Rule(lambda value: value >= 1, "it counts the turns that branches share, so set 1 or more"),
        page="branching.md",
    )
    num_branches: int = _rewards("Branches of a conversation, with `branch_at`.", default=4, page="branching.md")
    env_mask: int = _rewards(
        "Loss mask of tokens that the environment wrote. 1 trains on tool results too.",
        default=0,
        rule=_Rule(lambda value: value in (0, 1), "set 0 (tool results are not trained) or 1 (they are)"),
        of_environment=True,
    )
    loss_scale: str = _rewards(
        "Trained of a scheduler: all or last_round. A `response_loss_mask` wins over it.",
        default="all",
        names=("all", "last_round"),
        page="schedulers.md",
        of_environment=True,
    )

    forward: str = _training(
        "Log-probs in training: tree, padded or turn_by_turn. `tree` computes every token once, `padded` is TRL's, "
        "`turn_by_turn` computes each turn alone, as an oracle.",
        default="tree",
        names=("tree", "padded", "turn_by_turn"),
        page="forward.md",
    )
    tree_attention: str = _training(
        "auto, segment, flex or dense. The attention of `forward: tree`.", default="auto", page="forward.md"
    )
    sp_size: int = _training(
        "Processes that share each micro-batch's tokens. For conversations too long for one GPU.",
        default=1,
        rule=_whole_from(1, "set a whole number of processes, or leave it out"),
        page="long_conversations.md",
    )
    gradient_checkpointing_layers: int = _training(
        "Layers that keep one input between them. The square root of their number keeps least, for one more forward.",
        default=1,
        rule=_whole_from(1, "set a whole number of layers, or leave it out"),
        page="long_conversations.md",
    )
    activation_offloading: bool = _training(
        "Keep activations in the machine's memory.", default=False, page="long_conversations.md"
    )
    router_replay: bool = _training(
        "Train mixtures by the experts of sampling. It needs `forward: tree`, and an engine that names them.",
        default=True,
        page="forward.md",
    )
    max_staleness: int = _training(
        "Generation batches that are sampled ahead. 0 samples and trains them one after the other; 1 or 2 suit slow "
        "tools.",
        default=0,
        rule=_whole_from(0, "it counts generation batches, so set a whole number, 0 or more"),
        page="staleness.md",
    )
    vllm_importance_sampling_mode: str | None = _training(
        "How the loss corrects for others' log-probs. Unset: TRL's `sequence_mask`; with `max_staleness`, "
        "`token_truncate` at 2.",
        names=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        page="staleness.md",
    )

    teacher: dict[str, Any] | str | None = _training(
        "A model that reads what the policy samples. A name, or a mapping: `model`, or `self` for the policy; "
        "`server`, a vLLM server that has it; `sees`, what it is shown beside: answer, sibling, feedback; for "
        "`self` TRL's `teacher_model_kind`; `gate`, which turns are distilled.",
        page="teachers.md",
    )
    distillation_coef: float = _training(
        "Weight of the distance to a teacher. In the loss it is the reverse KL divergence on the sampled tokens.",
        default=0.0,
        rule=_WEIGHT,
        page="teachers.md",
    )
    distillation_topk: int | None = _training(
        "Distil on so many of a teacher's likeliest tokens. Unset: on the sampled token.",
        rule=_Rule(lambda value: value >= 2, "one token alone has the probability 1 in both models, so set 2 or more"),
        page="teachers.md",
    )

    disable_dropout: bool = _training(
        "Train without dropout, as sampling has none. An adapter's is included. TRL's default is false.", default=True
    )

    vllm_mode: str = _server(
        "server or colocate. `mt-grpo serve` starts the server, on other GPUs; or the trainer does, on its own. TRL's "
        "default is colocate.",
        default="server",
        names=("server", "colocate"),
        page="colocate.md",
    )
    vllm_server_host: str = _server("Host of the vLLM server.", default="127.0.0.1", of_server=True)
    vllm_server_base_url: list[str] | None = _server(
        "Addresses of several servers. A list, or ranges such as `http://node[1-4]:8000`.",
        page="server.md#several-servers",
        of_server=True,
    )
    vllm_min_servers: int | None = _server(
        "Servers that a run needs. It begins with so many, and the others join later. Unset: it waits for all, and "
        "goes on with those that are up.",
        rule=_ABOVE_ZERO,
        page="server.md#several-servers",
    )
    weight_sync: str = _server(
        "How weights reach the server. `safetensors` goes through a file, `http` over the network, `delta` sends only "
        "what changed, `nccl` goes from GPU to GPU, `ipc` within a GPU, and `lora` sends the adapter. `auto` is the "
        "first, or `ipc` with `vllm_mode: colocate` on a GPU.",
        default="auto",
        page="server.md",
        of_server=True,
    )
    weight_sync_folder: str | None = _server(
        "Folder of the weights' file, shared between hosts. Unset: shared memory.", page="server.md"
    )
    weight_sync_port: int | None = _server(
        "Port at which the trainer offers weights by `http` or `delta`. Unset: any free one.",
        rule=_PORT,
        page="server.md",
    )
    verify_sync_every: int = _server(
        "Every so many weight syncs are verified. So is the first.", default=50, rule=_ABOVE_ZERO, page="server.md"
    )

    overwrite_output_dir: bool = _run(
        "Remove what an earlier run left in `output_dir`. A run that is resumed keeps it.", default=False
    )
    early_stopping_patience: int | None = _run(
        "Evaluations in a row without a better `metric_for_best_model` after which training ends.",
        rule=_ABOVE_ZERO,
        page="evaluate.md#in-training",
    )
    replay: str | None = _run(
        "A run's folder, to train on what it logged. Nothing is sampled, scored or evaluated.",
        page="runs.md#training-on-what-a-run-logged",
    )
    metrics_address: int | str | None = _run(
        "Where Prometheus reads the run's metrics: a port of this machine, or HOST:PORT.",
        rule=_Rule(
            lambda value: re.fullmatch(r"(.+:)?\d{1,5}", str(value)) is not None,
            "set a port such as 9464, or an address such as `0.0.0.0:9464`",
            of_numbers=False,
        ),
        page="watching.md",
    )
    logging_steps: float = _run(
        "Steps between two lines of metrics. Below 1, a share of all steps. TRL's default is 10.", default=1
    )


OF_LIBRARIES = {
    "model_name_or_path": Option("Model: a Hub id, a folder, or `embedded`.", MODEL, of_server=True),
    "model_revision": Option("Branch, tag or commit of the model on the Hub.", MODEL, of_server=True, seldom=True),
    "dtype": Option("Weights: float32, bfloat16, float16 or auto.", MODEL, of_server=True),
    "dataset_name": Option("`embedded`, `triviaqa`, `gsm8k`, a file, a folder or a Hub id.", MODEL),
    "dataset_config": Option("Configuration of a dataset of the Hub.", MODEL),
    "dataset_train_split": Option("Split to train on.", MODEL),
    "dataset_test_split": Option("Split to evaluate on.", MODEL),
    "dataset_streaming": Option("Read rows when they are needed.", MODEL),
    "trust_remote_code": Option("Run code that comes with the model.", MODEL, of_server=True, seldom=True),
    "attn_implementation": Option("Attention of forwards that are not packed.", MODEL, seldom=True),
    "load_in_4bit": Option("Load the model in 4 bits, to train an adapter.", MODEL, seldom=True),
    "chat_template_kwargs": Option("Variables of the chat template, such as `enable_thinking`.", MODEL, seldom=True),
    "shuffle_dataset": Option("Draw the rows in random order.", MODEL, seldom=True),
    "num_train_epochs": Option("Passes over the dataset, where `max_steps` is -1.", TRAINING),
    "max_steps": Option("Optimiser steps; -1: by `num_train_epochs`.", TRAINING),
    "num_generations": Option(
        "Conversations for each prompt.",
        TRAINING,
        rule=_Rule(lambda value: value >= 2, "an advantage compares the completions of one prompt, so set 2 or more"),
    ),
    "per_device_train_batch_size": Option(
        "Conversations in one microbatch of each process.", TRAINING, rule=_ABOVE_ZERO
    ),
    "gradient_accumulation_steps": Option("Microbatches in one optimiser step.", TRAINING, rule=_ABOVE_ZERO),
    "learning_rate": Option(
        "Learning rate at its highest.",
        TRAINING,
        rule=_Rule(lambda value: 0 <= value < math.inf, "set 0 or more, such as 1e-6"),
    ),
    "temperature": Option(
        "Sampling temperature.", TRAINING, rule=_Rule(lambda value: value >= 0, "set a number above 0, such as 1.0")
    ),
    "loss_type": Option(
        "grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo or vespo.",
        TRAINING,
        names=("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    ),
    "scale_rewards": Option(
        "Divide by the deviation of: group, batch or none.",
        TRAINING,
        names=("group", "batch", "none", True, False),
        also="boolean",
    ),
    "num_iterations": Option("Times that each batch is trained on.", TRAINING, rule=_ABOVE_ZERO, seldom=True),
    "steps_per_generation": Option(
        "Microbatches that are sampled together; unset, those of a step.", TRAINING, rule=_ABOVE_ZERO, seldom=True
    ),
    "epsilon": Option(
        "How far a ratio may fall below 1 before it is clipped.", TRAINING, rule=_NOT_BELOW_ZERO, seldom=True
    ),
    "epsilon_high": Option("How far above; unset, as `epsilon`.", TRAINING, rule=_NOT_BELOW_ZERO, seldom=True),
    "importance_sampling_level": Option(
        "A ratio for each token, or one of the sequence.", TRAINING, names=("token", "sequence"), seldom=True
    ),
    "mask_truncated_completions": Option(
        "Leave out conversations that a limit of tokens ended.", TRAINING, seldom=True
    ),
    "top_p": Option(
        "Sample from the likeliest tokens of this probability together.",
        TRAINING,
        rule=_Rule(lambda value: 0 < value <= 1, "set a number above 0 and at most 1, or leave it out"),
        seldom=True,
    ),
    "top_k": Option("Sample from so many likeliest tokens; 0: all.", TRAINING, seldom=True),
    "min_p": Option(
        "Sample from tokens at least so likely, relative to the likeliest.",
        TRAINING,
        rule=_SHARE,
        seldom=True,
    ),
    "optim": Option("Optimiser, such as adamw_torch_fused or adamw_bnb_8bit.", TRAINING, seldom=True),
    "weight_decay": Option("Weight decay.", TRAINING, rule=_NOT_BELOW_ZERO, seldom=True),
    "max_grad_norm": Option("Largest norm of the gradient.", TRAINING, rule=_NOT_BELOW_ZERO, seldom=True),
    "sync_ref_model": Option("Move the reference towards the policy.", TRAINING, seldom=True),
    "beta": Option("Weight of the KL divergence from a reference.", TRAINING, rule=_WEIGHT),
    "use_peft": Option("Train a LoRA adapter; see `lora_...`.", TRAINING, of_server=True),
    "lora_r": Option("Rank of a LoRA adapter.", TRAINING, of_server=True),
    "lora_alpha": Option("Scale of a LoRA adapter, a multiple of 1 / rank.", TRAINING),
    "lora_target_modules": Option("Layers that get a LoRA adapter.", TRAINING),
    "lora_dropout": Option("Dropout of a LoRA adapter, off by `disable_dropout`.", TRAINING, rule=_SHARE, seldom=True),
    "lora_modules_to_save": Option("Layers trained whole beside the adapter.", TRAINING, seldom=True),
    "lr_scheduler_type": Option("How the learning rate changes: linear, cosine, constant ...", TRAINING),
    "warmup_steps": Option("Steps of a rising learning rate; below 1, a share.", TRAINING),
    "gradient_checkpointing": Option("Compute activations again, to save memory.", TRAINING),
    "bf16": Option(
        "Compute in bfloat16; weights stay in `dtype`. Unset: on a GPU that can, without `fp16` and `use_cpu`.",
        TRAINING,
    ),
    "do_eval": Option("Measure the agent before and after training.", TRAINING),
    "num_generations_eval": Option(
        "Conversations for each row there; unset, as in training.", TRAINING, rule=_ABOVE_ZERO, seldom=True
    ),
    "per_device_eval_batch_size": Option("Conversations of a batch there.", TRAINING, rule=_ABOVE_ZERO, seldom=True),
    "use_cpu": Option("Use no GPU.", TRAINING, of_server=True),
    "use_vllm": Option("Sample with servers of vLLM. `mt-grpo serve` starts them.", SERVER),
    "vllm_server_port": Option("Port of the vLLM server.", SERVER, rule=_PORT, of_server=True),
    "vllm_server_timeout": Option("Seconds to wait for a server that does not answer.", SERVER, seldom=True),
    "vllm_tensor_parallel_size": Option("GPUs of one server.", SERVER, rule=_ABOVE_ZERO, of_server=True, seldom=True),
    "vllm_gpu_memory_utilization": Option(
        "Share of a GPU's memory that vLLM takes, with `vllm_mode: colocate`.",
        SERVER,
        rule=_Rule(lambda value: 0 < value <= 1, "it is a share of a GPU's memory, so set one such as 0.3"),
        seldom=True,
    ),
    "vllm_max_model_length": Option("Context length; unset, the model's.", SERVER, of_server=True, seldom=True),
    "vllm_importance_sampling_clip_max": Option("Bound of that correction.", SERVER, rule=_ABOVE_ZERO, seldom=True),
    "output_dir": Option("Folder of the run.", RUN),
    "resume_from_checkpoint": Option(
        "A checkpoint's folder; true: the latest; auto: it, if any.", RUN, also="boolean"
    ),
    "save_strategy": Option("When checkpoints are written: no, steps, epoch or best.", RUN),
    "save_steps": Option("Steps between two checkpoints.", RUN),
    "enable_jit_checkpoint": Option(
        "SIGTERM ends the run after its step, with a checkpoint and status 75.",
        RUN,
        page="runs.md#machines-that-are-wanted-back",
    ),
    "save_total_limit": Option("Checkpoints to keep.", RUN),
    "eval_strategy": Option("When the agent is measured during training: no, steps or epoch.", RUN),
    "eval_steps": Option("Steps between two measures; unset, `logging_steps`.", RUN),
    "push_to_hub": Option("Upload the model to the Hub whenever it is saved.", RUN),
    "hub_model_id": Option("Its name there, as USER/NAME.", RUN),
    "load_best_model_at_end": Option("Keep the best checkpoint's weights at the end.", RUN, seldom=True),
    "metric_for_best_model": Option("The metric that says which is best.", RUN, seldom=True),
    "log_completions": Option("Print some conversations, and write TRL's Parquet files.", RUN, seldom=True),
    "num_completions_to_print": Option("How many.", RUN, seldom=True),
    "run_name": Option("Name of the run in trackers.", RUN, seldom=True),
    "report_to": Option("Where metrics go: wandb, trackio, tensorboard ...", RUN),
    "seed": Option(
        "Seed of everything drawn.",
        RUN,
        rule=_Rule(lambda value: 0 <= value < 2**32, "set a whole number from 0 to 4294967295"),
    ),
    "multi_objective_aggregation": Option(
        rule=_Rule(
            lambda value: value == "sum_then_normalize",
            "it does not say which turn a reward belongs to, so leave it out, and weigh rewards with `reward_weights`",
            of_numbers=False,
        )
    ),
    **dict.fromkeys(
        (
            *("generation_batch_size", "ref_model_sync_steps", "repetition_penalty"),
            *("sapo_temperature_neg", "sapo_temperature_pos"),
            *("eval_accumulation_steps", "dataloader_prefetch_factor"),
        ),
        Option(rule=_ABOVE_ZERO),
    ),
    "pad_to_multiple_of": Option(
        rule=_Rule(
            # a command line has it as text, which TRL reads
            lambda value: (
                (said := str(value).lower()) in ("auto", "none", "null") or (said.isdecimal() and int(said) > 0)
            ),
            _ABOVE_ZERO.advice,
            of_numbers=False,
        )
    ),
    "top_entropy_quantile": Option(rule=_SHARE),
    **dict.fromkeys(
        ("delta", "max_tool_calling_iterations", "dataloader_num_workers", "neftune_noise_alpha"),
        Option(rule=_NOT_BELOW_ZERO),
    ),
    **dict.fromkeys(  # of TRL's own generation
        (
            *("cache_implementation", "generation_kwargs", "use_transformers_continuous_batching"),
            *("use_transformers_paged", "vllm_structured_outputs_regex"),
        ),
        Option(rule=_NO_EFFECT),
    ),
    "parallelism_config": Option(
        rule=_Rule(
            lambda value: not value,
            "it splits rows before they are sampled, so leave it out: set `sp_size` to split them afterwards, and "
            "shard weights by `--accelerate_config`",
            of_numbers=False,
        )
    ),
}
"""What we say of options of TRL and transformers, before their own text."""


def options_of(config: type) -> dict[str, Option]:
    """The options of ours among the fields of a dataclass, by name."""
    return {field.name: _OPTIONS[field] for field in dataclasses.fields(config) if field in _OPTIONS}


OPTIONS = {**OF_LIBRARIES, **options_of(DataOptions), **options_of(RunOptions)}
"""The whole table, by name."""

OF_ENVIRONMENT = {name: described for name, described in OPTIONS.items() if described.of_environment}
"""The options that one of several `environments` may have for itself."""


def check_values(values: Values, table: Mapping[str, Option], place: str = "") -> None:
    """Holds each value against the names and the rule that the table has for it; `place` says where it was given."""
    for name, described in table.items():
        value, rule = values.get(name), described.rule
        if value is None:
            continue
        if described.names and value not in described.names:
            choose(name, value, [known for known in described.names if isinstance(known, str)])
        if rule and rule.of_numbers and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise ConfigError(f"`{name}`{place} is {value!r}; give a number.")
        if rule and not rule.holds(value):
            raise ConfigError(f"`{name}`{place} is {value}; {rule.advice}.")


def with_options_in_docstring(config: type) -> type:
    """Adds what the table says of a dataclass's options to its docstring, as its arguments."""
    lines = []
    for field in dataclasses.fields(config):
        if field in _OPTIONS:
            default = "" if field.default is None else f", defaults to `{field.default!r}`"
            text = f"{field.name} (`{field.type}`, *optional*{default}): {_OPTIONS[field].description}"
            lines += textwrap.wrap(
                text, 119, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
            )
    config.__doc__ = "\n".join([textwrap.dedent(config.__doc__ or "").strip(), "", "Args:", *lines])
    return config
