"""The table of options, what is made from it, and what options may say together."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints

import pytest
from trl import ModelConfig, ScriptArguments, TrlParser

from mt_grpo.app import commands as help
from mt_grpo.app.build import MTGRPOScriptArguments, build_schema
from mt_grpo.app.recipe_file import Schema, SchemaOption
from mt_grpo.errors import ConfigError
from mt_grpo.forward.model import FORWARDS
from mt_grpo.options.rules import CONFLICTS
from mt_grpo.options.table import AGENT, GROUPS, OPTIONS, RunOptions, _option, _Rule, options_of
from mt_grpo.rollout.token_row import MODES
from mt_grpo.training import MTGRPOConfig

DOCS = Path(__file__).parents[1] / "docs"

BRANCHES = {"advantage_estimator": "branch_to_go", "branch_at": 1, "num_branches": 2, "num_generations": 4}
COLOCATE = {"use_vllm": True, "vllm_mode": "colocate"}
SERVED = {"use_vllm": True, "vllm_mode": "server"}
SEQUENCES = {"max_staleness": 1}
LAYERS = {"gradient_checkpointing_layers": 4, "gradient_checkpointing": True}

WRONG = [
    ({"scale_rewards": "groups"}, "`scale_rewards` is 'groups'; the nearest is 'group': choose one of group, batch, "),
    ({"importance_sampling_level": "turn"}, "`importance_sampling_level` is 'turn': choose one of token, sequence."),
    ({"top_entropy_quantile": -0.2}, "`top_entropy_quantile` is -0.2; set a number from 0 to 1"),
    ({"ref_model_sync_steps": 0}, "`ref_model_sync_steps` is 0; set a number above 0"),
    ({"repetition_penalty": -1.0}, "`repetition_penalty` is -1.0; set a number above 0"),
    ({"sapo_temperature_neg": 0.0}, "`sapo_temperature_neg` is 0.0; set a number above 0"),
    ({"learning_rate": float("inf")}, "`learning_rate` is inf; set 0 or more, such as 1e-6"),
    ({"distillation_coef": float("inf"), "teacher": "a"}, "`distillation_coef` is inf; set a number from 0 on"),
    ({"beta": float("inf")}, "`beta` is inf; set a number from 0 on"),
    ({"neftune_noise_alpha": float("nan")}, "`neftune_noise_alpha` is nan; set 0 or more, or leave it out."),
    *(
        ({name: value}, f"`{name}` is {value}; give a finite number that 32 bits hold.")
        for name, value in {
            **{"neftune_noise_alpha": float("inf"), "adam_beta2": float("nan"), "weight_decay": float("inf")},
            **{"top_p": 1e-320, "temperature": 1e-320, "adam_epsilon": 1e39, "label_smoothing_factor": float("inf")},
        }.items()
    ),
    ({"env_mask": 2}, "`env_mask` is 2; set 0 "),
    ({"pad_to_multiple_of": 0}, "`pad_to_multiple_of` is 0; set a number above 0, or leave it out."),
    ({"eval_accumulation_steps": 0}, "`eval_accumulation_steps` is 0; set a number above 0, or leave it out."),
    ({"dataloader_num_workers": -1}, "`dataloader_num_workers` is -1; set 0 or more, or leave it out."),
    ({"num_generations": "4"}, "`num_generations` is '4'; give a number."),
    ({"generation_kwargs": {"top_k": 5}}, "`generation_kwargs` is {'top_k': 5}; it has no effect on rollouts of many"),
    ({"rollout_timeout": 0.0}, "`rollout_timeout` is 0.0; set a number above 0, or leave it out."),
    ({"call_protocol": "nativ"}, "`call_protocol` is 'nativ'; the nearest is 'native': choose one of learnt_tags,"),
    ({"sp_size": 0}, "`sp_size` is 0; set a whole number of processes"),
    ({"sp_size": float("inf")}, "`sp_size` is inf; set a whole number of processes"),
    ({"sp_size": 1.5}, "`sp_size` is 1.5; set a whole number of processes"),
    ({"parallelism_config": {"sp_size": 2}}, "`parallelism_config` is {'sp_size': 2}; it splits rows before they are"),
    ({"gradient_checkpointing_layers": 0}, "`gradient_checkpointing_layers` is 0; set a whole number of layers"),
    ({"max_staleness": -1}, "`max_staleness` is -1; it counts generation batches, so set a whole number, 0 or more."),
    ({"max_staleness": 0.5}, "`max_staleness` is 0.5; it counts generation batches, so set a whole number, 0 or mo"),
    ({"max_resample_times": 0}, "`max_resample_times` is 0; set a number above 0"),
    ({"groups_without_signal": "resampel"}, "`groups_without_signal` is 'resampel'; the nearest is 'resample'"),
    ({"vllm_mode": "beside"}, "`vllm_mode` is 'beside': choose one of server, colocate."),
    ({"vllm_tensor_parallel_size": 0}, "`vllm_tensor_parallel_size` is 0; set a number above 0"),
    ({"vllm_gpu_memory_utilization": 30}, "`vllm_gpu_memory_utilization` is 30; it is a share of a GPU's memory"),
    ({"vllm_importance_sampling_clip_max": -1.0}, "`vllm_importance_sampling_clip_max` is -1.0; set a number above 0"),
    ({"branch_at": 0}, "`branch_at` is 0; it counts the turns"),
    ({"gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "`gradient_checkpointing_kwargs: {every_n_layers:"),
    (
        {"gradient_checkpointing_kwargs": "1"},
        "`gradient_checkpointing_kwargs` is 1: give a mapping of names to values.",
    ),
    ({"model_init_kwargs": "x"}, "`model_init_kwargs` is 'x': give a mapping of names to values."),
    (
        {"gradient_checkpointing_kwargs": {"use_re": 1}},
        "The key 'use_re' of `gradient_checkpointing_kwargs` is unknown",
    ),
    ({"activation_checkpointing_kwargs": '{"offload": true}'}, "`activation_checkpointing_kwargs: {offload: true}`"),
]
"""Options, and the beginning of the sentence about one of them."""

CONTRADICTING = [
    ({"num_generations": None}, "`num_generations` is empty: give it a number, or leave it out."),
    ({"max_tool_calling_iterations": 3, "max_env_steps": 2}, "`max_env_steps: 2` and `max_tool_calling_iterations:"),
    ({"fp16": True, "bf16": True}, "`bf16` and `fp16` are both true, and a run computes in one of them: leave one"),
    ({"max_turn_length": 513}, "`max_turn_length: 513` is above `max_completion_length: 512`, the tokens of all"),
    ({"history": "compact"}, "`history: compact` needs `compact_every`"),
    ({"compact_every": 2}, "`compact_every: 2` has an effect with `history: compact` only: leave it out."),
    ({"max_resample_times": 2}, "`max_resample_times: 2` has an effect with `groups_without_signal: resample` only"),
    ({"num_branches": 2}, "`num_branches: 2` has an effect with `branch_at` only: leave it out."),
    (
        {"environments": {"a": {}}, "environment_factory": "a.b"},
        "`environment_factory` and `environments` are both set: name each factory in `environments`, as "
        "`{environment_factory: its path}`.",
    ),
    ({"environments": {"a": {}}, "env": "a.b"}, "`env` and `environments` are both set: name a single one in"),
    ({"environments": {"a": {}}, "agent": "a.b"}, "`agent` and `environments` are both set: name a single one in"),
    ({"early_stopping_patience": 2}, "`early_stopping_patience: 2` compares evaluations during training by a metric"),
    ({"groups_without_signal": "leave_out", "entropy_coef": 0.1}, "`groups_without_signal: leave_out` drops groups"),
    ({"groups_without_signal": "resample", "use_adaptive_entropy": True}, "`groups_without_signal: resample` drops"),
    ({"distillation_coef": 0.1}, "`distillation_coef: 0.1` weighs the distance to a teacher, and there is none"),
    (
        {"teacher": {"model": "a", "gate": "explained"}},
        "`gate` of `teacher` chooses turns to distil, and nothing is distilled",
    ),
    ({"distillation_topk": 1, "distillation_coef": 1.0, "teacher": "a"}, "`distillation_topk` is 1; one token alone"),
    (
        {"distillation_topk": 5, "teacher": "a"},
        "`distillation_topk: 5` says on which tokens the distance to a teacher is taken, and nothing is learnt",
    ),
    (
        {"distillation_topk": 5, "distillation_coef": 1.0, "teacher": "a", "sp_size": 2},
        "`distillation_topk: 5` takes rows that one process computes, and `sp_size: 2` shares them",
    ),
    (
        {"distillation_topk": 5, "distillation_coef": 1.0, "teacher": "a", "top_p": 0.9},
        "`distillation_topk: 5` compares whole distributions, and `top_k: 0`, `top_p: 0.9` or",
    ),
    (
        {"temperature": 0.7, "teacher": {"model": "a", "server": "http://b"}},
        "`temperature: 0.7` divides what the policy samples from, and a teacher's `server` knows log-probs at 1 only",
    ),
    (
        {"distillation_coef": 0.1, "teacher": "a", "groups_without_signal": "leave_out"},
        "`groups_without_signal: leave_out` drops groups from the loss, and `distillation_coef: 0.1` learns",
    ),
    ({"max_staleness": 1, "vllm_importance_sampling_correction": False}, "`max_staleness: 1` trains on what earlier"),
    ({"max_staleness": 1, "vllm_importance_sampling_clip_max": None}, "`max_staleness: 1` trains on what earlier"),
    (
        SEQUENCES | {"vllm_importance_sampling_mode": "sequence_mask"},
        "`max_staleness: 1` trains on conversations whose",
    ),
    (SEQUENCES | {"vllm_importance_sampling_mode": "sequence_truncate"}, "`max_staleness: 1` trains on conversations"),
    ({"max_staleness": 1, "use_vllm": True, "weight_sync": "lora"}, "`max_staleness: 1` sends weights while"),
    ({"sp_size": 2, "forward": "padded"}, "`sp_size: 2` shares packed trees among processes, and `forward: padded`"),
    (LAYERS | {"gradient_checkpointing": False}, "`gradient_checkpointing_layers: 4` groups recomputed layers"),
    (LAYERS | {"activation_checkpointing": False}, "`gradient_checkpointing_layers: 4` groups recomputed layers,"),
    (LAYERS | {"activation_offloading": True}, "`gradient_checkpointing_layers: 4` keeps fewer inputs of layers on"),
    ({"advantage_estimator": "state_baseline"}, "`advantage_estimator: state_baseline` needs a score of states"),
    (BRANCHES | {"num_branches": 1}, "`num_branches` is 1: set 2 or more"),
    (
        BRANCHES | {"num_branches": 4},
        "`num_generations: 4` does not make two conversations or more of `num_branches: 4` each: set it to 8 or a "
        "larger multiple of 4.",
    ),
    (BRANCHES | {"num_branches": 3}, "`num_generations: 4` does not make two conversations or more of"),
    (BRANCHES | {"branch_at": 3, "max_env_steps": 2}, "`branch_at: 3` is never reached, since a conversation has 3"),
    (BRANCHES | {"advantage_estimator": "reward_to_go"}, "`branch_at` needs `advantage_estimator: branch_to_go`:"),
    (BRANCHES | {"branch_at": None}, "`advantage_estimator: branch_to_go` is the rule of conversations that branch:"),
    (SERVED | {"vllm_enable_sleep_mode": True}, "`vllm_enable_sleep_mode: true` gives a server's memory to training"),
    (SERVED | {"weight_sync": "ipc"}, "`weight_sync: ipc` hands over memory of a GPU that trainer and server share"),
    (COLOCATE | {"vllm_server_base_url": "http://a:1"}, "`vllm_mode: colocate` starts its servers itself, and"),
    (COLOCATE | {"weight_sync": "nccl"}, "`weight_sync: nccl` needs a GPU for each end, and with `vllm_mode:"),
    (COLOCATE | {"vllm_enable_sleep_mode": True, "max_staleness": 1}, "`max_staleness: 1` samples in training, when"),
]
"""Options, and the beginning of the sentence about several of them."""


def config(tmp_path, **options):
    return MTGRPOConfig(str(tmp_path), **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, **options})


def said_of(tmp_path, options) -> str:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, **options)
    return str(caught.value)


@pytest.mark.parametrize(("options", "message"), [*WRONG, *CONTRADICTING])
def test_wrong_options_are_refused_with_one_sentence(tmp_path, options, message):
    said = said_of(tmp_path, options)
    assert said.startswith(message) and "\n" not in said


def test_every_conflict_of_the_table_is_found(tmp_path):
    said = [said_of(tmp_path, options) for options, _ in CONTRADICTING]
    for conflict in CONFLICTS:
        form = re.sub(r"<\w+>|\\\{\w+(!r)?\\\}", ".+", re.escape(conflict.what))
        assert any(re.match(f"{form}: ", sentence) for sentence in said), conflict.what


def test_what_stands_at_a_bound_is_taken(tmp_path):
    config(tmp_path, max_turn_length=512, scale_rewards=False, temperature=0.0, max_env_steps=0)
    config(tmp_path, max_turn_length=600, max_completion_length=None, env="my_env.py:Env", call_protocol="of_my_env")


@pytest.mark.parametrize("text", ["8", "auto", "none"])
def test_a_padding_that_a_command_line_has_as_text_is_taken(tmp_path, text):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--pad_to_multiple_of", text]
    (parsed,) = TrlParser((MTGRPOConfig,)).parse_args_into_dataclasses(words)
    assert parsed.pad_to_multiple_of == (8 if text == "8" else None)


@dataclass
class OneMore(MTGRPOConfig):
    """A configuration with one more line in its table."""

    patience: int | None = _option(
        "Turns that a user waits for. Then the user leaves.",
        AGENT,
        default=3,
        rule=_Rule(lambda value: value > 0, "set a number above 0"),
        names=(1, 2, 3, 0),
    )


def test_an_option_is_one_line_of_the_table(tmp_path, monkeypatch):
    properties = build_schema((MTGRPOScriptArguments, OneMore, ModelConfig))["properties"]
    added = properties["patience"]
    assert (added["default"], added["x-owner"]) == (3, "mt_grpo")
    assert added["description"] == "Turns that a user waits for. Then the user leaves."
    monkeypatch.setattr(
        help,
        "load_schema",
        lambda: Schema({name: SchemaOption.of(each) for name, each in properties.items()}, exact=True),
    )
    assert "  --patience               Turns that a user waits for. (3)\n" in help.command_help("train", "train")
    assert "- `patience: 3`: Turns that a user waits for. Then the user leaves.\n" in help.fill_tables(
        f"<!-- options: {AGENT} -->\n\n<!-- end of options -->", OPTIONS | options_of(OneMore)
    )
    (args,) = TrlParser((OneMore,)).parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--patience", "2"])
    assert args.patience == 2 and config(tmp_path).max_env_steps is None
    with pytest.raises(ConfigError, match="`patience` is 0; set a number above 0"):
        OneMore(str(tmp_path), use_cpu=True, patience=0)


def test_none_is_no_value_of_an_option_that_has_one(tmp_path):
    with pytest.raises(ConfigError, match="`max_staleness` cannot be None: leave it out"):
        config(tmp_path, max_staleness=None)
    TrlParser((MTGRPOConfig,)).parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--use_cpu", "true"])
    assert config(tmp_path, max_completion_length=None).max_completion_length is None


def test_the_configuration_is_a_plain_dataclass(tmp_path):
    args = config(tmp_path, tools="calculator", agent=None)
    assert pickle.loads(pickle.dumps(args)).to_dict() == args.to_dict()
    assert get_type_hints(MTGRPOConfig)["max_env_steps"] == int | None
    assert set(options_of(MTGRPOConfig)) == {field.name for field in fields(RunOptions)}
    (_, parsed) = TrlParser((ScriptArguments, MTGRPOConfig)).parse_args_into_dataclasses(
        ["--dataset_name", "d", "--output_dir", str(tmp_path), "--tools", "calculator", "--use_cpu", "true"]
    )
    assert parsed.tools == ["calculator"]


def test_the_docstring_says_what_each_option_is():
    said = " ".join(MTGRPOConfig.__doc__.split())
    for name, described in options_of(MTGRPOConfig).items():
        assert f" {name} (`" in said and described.description in said
    assert "history (`str`, *optional*, defaults to `'keep'`): " in said


def test_the_names_of_the_table_are_those_looked_up():
    assert OPTIONS["forward"].names == tuple(FORWARDS)
    assert set(OPTIONS["tokenization_sanity_check_mode"].names) == set(MODES)


def test_the_tables_of_the_docs_are_those_of_the_options():
    pages = {path: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    assert all(help.fill_tables(text) == text for text in pages.values()), "run scripts/write_options.py"
    assert all(f"<!-- options: {group} -->\n\n- `" in pages[DOCS / "options.md"] for group in GROUPS)
    for described in OPTIONS.values():
        assert described.page is None or (DOCS / described.page.partition("#")[0]).is_file()


def test_the_distance_to_a_teacher_is_better_where_it_is_less(tmp_path):
    assert config(tmp_path, metric_for_best_model="teacher/reverse_kl").greater_is_better is False
    assert config(tmp_path, metric_for_best_model="reward").greater_is_better is not False
