"""What `mt-grpo COMMAND --help` prints for the commands that take a recipe: their options from the shipped schema."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import Any

from mt_grpo.app.request import OWN_OPTIONS
from mt_grpo.app.schema import kinds, load_schema

GROUPS = {
    "Model and data": "model_name_or_path dtype dataset_name dataset_train_split dataset_test_split column_mapping",
    "Agent": """tools tools_config_file env env_config environment_factory agent environments simulated_user
        interaction_config_file multi_turn_scheduler max_turns call_protocol system_prompt max_env_steps
        max_turn_length max_completion_length tool_timeout rollout_timeout max_concurrent_rollouts history
        compact_every tokenization_sanity_check_mode external_plugins""",
    "Rewards and credit": """turn_reward_funcs outcome_reward_funcs reward_weights state_score advantage_estimator
        turn_advantage_coef scale_rewards groups_without_signal max_resample_times branch_at num_branches env_mask
        loss_scale""",
    "Training": """max_steps num_generations per_device_train_batch_size gradient_accumulation_steps learning_rate
        temperature loss_type beta use_peft forward tree_attention disable_dropout do_eval use_cpu""",
    "vLLM server": """use_vllm vllm_mode vllm_server_host vllm_server_port weight_sync weight_sync_folder
        verify_sync_every""",
    "Run": "output_dir overwrite_output_dir resume_from_checkpoint save_steps logging_steps report_to seed",
}
"""The options that `--help` shows: all of ours, and of the libraries' those that most recipes set."""

SERVER = """model_name_or_path model_revision dtype trust_remote_code use_cpu vllm_server_host vllm_server_port
    vllm_server_base_url vllm_tensor_parallel_size vllm_max_model_length weight_sync use_peft lora_r"""
"""What of a recipe the server's command is made of."""

SHOWN = {
    "environment_factory": "A factory in TRL's form, or several by name.",
    "agent": "An agent: a function's path, or its `command`.",
    "environments": "Several, by the names in the column `environment`.",
    "simulated_user": "A user whom an endpoint plays.",
    "interaction_config_file": "YAML file of what answers turns without a call.",
    "multi_turn_scheduler": "A scheduler in the place of an environment.",
    "call_protocol": "How calls are written: tags, native or another.",
    "groups_without_signal": "keep, resample or leave_out.",
    "max_resample_times": "Rounds of sampling such groups again.",
    "branch_at": "Turns after which a conversation branches.",
    "loss_scale": "Trained of a scheduler: all or last_round.",
    "model_name_or_path": "Model: a Hub id, a folder, or `embedded`.",
    "dtype": "Weights: float32, bfloat16, float16 or auto.",
    "dataset_name": "`embedded`, `triviaqa`, `gsm8k`, a file, a folder or a Hub id.",
    "dataset_train_split": "Split to train on.",
    "dataset_test_split": "Split to evaluate on.",
    "max_completion_length": "Tokens of a whole conversation after the prompt.",
    "reward_weights": "Weights of the turn rewards, then of the outcome rewards.",
    "scale_rewards": "Divide by the deviation of: group, batch or none.",
    "advantage_estimator": "Credit rule: its name, or its `name` and options.",
    "history": "keep, strip_thinking, compact or template.",
    "tokenization_sanity_check_mode": "strict, ignore_strippable or disable.",
    "forward": "Log-probs in training: tree, padded or turn_by_turn.",
    "disable_dropout": "Train without dropout, as sampling has none.",
    "trust_remote_code": "Run code that comes with the model.",
    "save_steps": "Steps between two checkpoints.",
    "seed": "Seed of everything drawn.",
    "learning_rate": "Learning rate at its highest.",
    "max_steps": "Optimiser steps; -1: as many as `num_train_epochs` makes.",
    "num_generations": "Conversations for each prompt.",
    "per_device_train_batch_size": "Conversations in one microbatch of each process.",
    "gradient_accumulation_steps": "Microbatches in one optimiser step.",
    "temperature": "Sampling temperature.",
    "loss_type": "grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo or vespo.",
    "beta": "Weight of the KL divergence from the first model.",
    "use_peft": "Train a LoRA adapter; see the options `lora_...`.",
    "do_eval": "Measure the agent before and after training.",
    "use_cpu": "Use no GPU.",
    "use_vllm": "Sample with the server that `mt-grpo serve` starts.",
    "vllm_server_port": "Port of the vLLM server.",
    "output_dir": "Folder of the run.",
    "resume_from_checkpoint": "A checkpoint's folder, or true for the latest in `output_dir`.",
    "report_to": "Where metrics are sent: wandb, trackio, tensorboard ...",
}
"""One line about an option whose own description is long or says less here."""

NAMES = 24
"""Columns for the name of an option; a longer name moves its own words."""

_VALUES = {"integer": "N", "number": "X", "boolean": "true|false", "object": "MAPPING", "string": "TEXT"}


def command_help(command: str, line: str, everything: bool = False) -> str:
    """
    The help of a command that takes a recipe.

    Args:
        command (`str`): One of `OWN_OPTIONS`.
        line (`str`): What it does.
        everything (`bool`, *optional*, defaults to `False`): Whether every option of a recipe is listed, with its
            whole description.
    """
    width = min(shutil.get_terminal_size((100, 24)).columns, 119)
    text = [
        f"usage: mt-grpo {command} RECIPE.yaml [--option value ...]",
        "",
        f"{line[0].upper()}{line[1:]}.",
        "",
        *textwrap.wrap(
            "RECIPE.yaml holds options as `option: value`; `--config RECIPE.yaml` is the same. An option on the "
            "command line wins over the recipe: `--option value`, `--option=value`, `--list one two`, and mappings as "
            "JSON.",
            width,
        ),
    ]
    if OWN_OPTIONS[command]:
        text += ["", f"Options of {command}:", *_lines(OWN_OPTIONS[command], width)]
    options = load_schema().properties
    if everything:
        ours = {name: option for name, option in options.items() if option["x-owner"] == "mt_grpo"}
        rest = {name: options[name] for name in sorted(options.keys() - ours.keys())}
        for title, group in (("Options of mt-grpo", ours), ("Options of TRL and transformers", rest)):
            text += ["", f"{title}:", *(part for name in group for part in _paragraph(name, group[name], width))]
        return "\n".join(text) + "\n"
    groups = {"The server": SERVER} if command == "serve" else GROUPS
    for title, names in groups.items():
        text += ["", f"{title}:", *_lines({name: options[name] for name in names.split()}, width)]
    text += ["", f"`mt-grpo {command} --help-all` lists all {len(options)} options of a recipe."]
    return "\n".join(text) + "\n"


def _lines(options: dict[str, dict[str, Any]], width: int) -> list[str]:
    """A line for each option, and a second one where a narrow terminal needs it."""
    lines = []
    for name, option in options.items():
        words = SHOWN.get(name) or re.split(r"(?<=\.)\s", option["description"])[0]
        default = _default(option)
        lines += textwrap.wrap(
            words + default,
            width,
            initial_indent=f"  {f'--{name}':<{NAMES}} ",
            subsequent_indent=" " * (NAMES + 3),
        )
    return lines


def _paragraph(name: str, option: dict[str, Any], width: int) -> list[str]:
    choices = [choice for choice in option.get("enum", ()) if isinstance(choice, str)]
    takes = "{" + ",".join(choices) + "}" if choices else "|".join(_takes(option))
    head = textwrap.wrap(f"--{name} {takes}{_default(option)}", width, initial_indent="  ", subsequent_indent="    ")
    indent = " " * 8
    return [*head, *textwrap.wrap(option["description"], width, initial_indent=indent, subsequent_indent=indent)]


def _takes(option: dict[str, Any]) -> list[str]:
    if option.get("x-many"):
        return [f"{_VALUES[kinds(option['items'])[0]]} ..."]
    return [_VALUES[kind] for kind in kinds(option) if kind in _VALUES]


def _default(option: dict[str, Any]) -> str:
    default = option["default"]
    if default in (None, "", [], {}) and default is not False:
        return ""
    return f" ({str(default).lower() if isinstance(default, bool) else default})"
