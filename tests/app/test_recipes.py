"""Recipes, those of the repository and others: all that they name is found, and their schema is shipped."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from jsonschema import Draft7Validator
from peft import get_peft_model
from support.models import build_model, build_tokenizer
from support.recipes import RECIPES, ROOT, parse_recipe, processes_of
from support.registered import keep, keep_estimators
from trl import get_peft_config

from mt_grpo.app import request
from mt_grpo.app.build import build_schema
from mt_grpo.app.recipe_file import SHIPPED, load_schema, read_file
from mt_grpo.app.request import read_request
from mt_grpo.envs.source import tool_names
from mt_grpo.rewards import REWARDS, OutcomeReward, load_rewards
from mt_grpo.tools.loading import TOOLS
from mt_grpo.training import ConfigError, MTGRPOConfig
from mt_grpo.training.environment import build_env
from mt_grpo.training.preflight import check_batch_sizes

SANDBOX = '{"type": "harbor", "tasks": "embedded", "eval_tasks": "embedded", "sandbox": "bubblewrap"}'


def elsewhere(path):
    """What replaces containers and tasks that are not here."""
    if path.parent.name != "terminal":
        return []
    if shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed: run `make sandbox`")
    return ["--env", SANDBOX]


PAPER = ROOT / "Qwen" / "triviaqa_7b.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_follows_the_schema_it_names(path, monkeypatch, tmp_path):
    monkeypatch.setattr(MTGRPOConfig, "world_size", processes_of(path))
    recipe = parse_recipe(["--config", str(path), *elsewhere(path)])
    check_batch_sizes(recipe.training)
    assert tool_names(build_env(recipe.training))
    assert load_rewards(recipe.training.outcome_reward_funcs, "outcome")
    load_rewards(recipe.training.turn_reward_funcs or [], "turn")
    assert recipe.training.output_dir in (f"runs/{path.stem}", f"runs/{path.parent.name}")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe.resolved()))
    read_request([str(tmp_path / "config.yaml")], "train")  # the resolved options of a run are a recipe
    named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", path.read_text().splitlines()[0])[1]
    assert (path.parent / named).resolve() == SHIPPED.resolve()
    schema = Draft7Validator(json.loads(SHIPPED.read_text(encoding="utf-8")))
    assert not list(schema.iter_errors(read_file(str(path))[0]))


def test_the_setting_is_that_of_the_papers_public_code():
    assert yaml.safe_load(PAPER.read_text())["model_name_or_path"] == "Qwen/Qwen2.5-7B"
    args = parse_recipe(["--config", str(PAPER)]).training
    assert (args.learning_rate, args.num_generations, args.num_iterations, args.max_steps) == (1e-6, 21, 2, 300)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (12, 4)
    assert (args.beta, args.max_grad_norm, args.warmup_steps) == (0.0, 0.1, 20)
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.epsilon) == (0.9, 0.99, 0.0, 0.2)
    assert (args.max_completion_length, args.max_env_steps, args.temperature) == (1024, 2, 0.9)
    assert (args.loss_type, args.turn_advantage_coef, args.save_steps) == ("bnpo", 1.0, 100)
    assert args.lr_scheduler_type == "constant_with_warmup"


@pytest.mark.parametrize("path", sorted(ROOT.glob("Qwen/triviaqa_*.yaml")), ids=lambda path: path.stem)
def test_other_sizes_keep_batch_and_settings_of_the_paper(path):
    whole, other = yaml.safe_load(PAPER.read_text()), yaml.safe_load(path.read_text())
    assert other["per_device_train_batch_size"] * other["gradient_accumulation_steps"] * processes_of(path) == 336
    may_differ = {"model_name_or_path", "output_dir", "per_device_train_batch_size", "per_device_eval_batch_size"}
    may_differ |= {"gradient_accumulation_steps"}
    if path.stem == "triviaqa_1.5b_1gpu":
        may_differ |= {name for name in (*whole, *other) if name.startswith(("vllm", "lora"))}
        may_differ |= {"use_vllm", "use_peft", "learning_rate"}
    assert whole.keys() - other.keys() <= may_differ >= other.keys() - whole.keys()
    assert all(other[name] == whole[name] for name in whole.keys() - may_differ)


@pytest.mark.parametrize("path", sorted(ROOT.glob("accelerate/*.yaml")), ids=lambda path: path.stem)
def test_accelerate_config_loads_with_seven_processes(path):
    config = load_config_from_file(str(path))
    assert (config.num_processes, config.mixed_precision) == (7, "bf16")


# Values


def write(tmp_path: Path, text: str = "", **keys: object) -> list[str]:
    path = tmp_path / "recipe.yaml"
    options = {"model_name_or_path": "m", "dataset_name": "d", "use_cpu": True, "bf16": False, **keys}
    path.write_text(yaml.safe_dump(options) + text)
    return ["--config", str(path)]


def test_every_form_of_an_option_reaches_the_parser(tmp_path):
    recipe = write(
        tmp_path, "lr_scheduler_kwargs: {min_lr: 1e-4}\nwarmup_steps: 1e-1\n", max_steps="7", learning_rate=1
    )
    forms = ["--learning-rate=2e-3", "--use_cpu", "--no-gradient-checkpointing", "--max_grad-norm", "0.5"]
    args = parse_recipe([*forms, "--tools", "calculator", "wikipedia_search", *recipe]).training
    assert (args.learning_rate, args.use_cpu, args.gradient_checkpointing) == (2e-3, True, False)
    assert (args.max_grad_norm, args.tools, args.max_steps) == (0.5, ["calculator", "wikipedia_search"], 7)
    assert (args.lr_scheduler_kwargs, args.warmup_steps) == ({"min_lr": 1e-4}, 0.1)  # which YAML reads as text


@pytest.mark.parametrize("form", [["--teacher", "null"], ["--teacher=null"]])
def test_null_leaves_out_what_the_recipe_gives(tmp_path, form):
    given = {"teacher": {"model": "self", "sees": ["answer"]}, "distillation_coef": 0.1, "max_completion_length": 9}
    recipe = write(tmp_path, **given)
    args = parse_recipe([*form, "--max_completion_length", "null", *recipe, "--distillation_coef", "0"]).training
    assert (args.teacher, args.max_completion_length) == (None, None)
    with pytest.raises(ConfigError, match="`--learning_rate` is 'null'"):
        read_request(["--learning_rate", "null", *recipe])


def test_env_is_a_class_as_text_and_variables_as_a_mapping(tmp_path, monkeypatch):
    monkeypatch.delenv("MT_GRPO_TEST_VARIABLE", raising=False)
    env = "mt_grpo.envs.MultiTurnToolEnv"
    assert parse_recipe(write(tmp_path, env=env)).training.env == env
    assert parse_recipe(write(tmp_path, env={"MT_GRPO_TEST_VARIABLE": 3})).training.env is None
    assert os.environ.pop("MT_GRPO_TEST_VARIABLE") == "3"


@pytest.mark.parametrize("layers", ["q_proj", "all-linear", ".*q_proj"])
def test_a_single_layer_of_an_adapter_is_one_by_name(tmp_path, layers):
    """TRL makes one text of a list of one, which to peft is a pattern of whole paths."""
    given = get_peft_config(parse_recipe(write(tmp_path, use_peft=True, lora_target_modules=[layers])).model)
    found = get_peft_model(build_model(build_tokenizer()), given).targeted_module_names
    assert found and (layers == "all-linear") == any("mlp" in name for name in found)


@pytest.mark.parametrize("option", ["lora_modules_to_save", "lora_target_parameters"])
def test_a_text_stands_for_a_list_of_one_layer(tmp_path, option):
    """To peft each of its letters would be the end of a layer's name."""
    assert vars(parse_recipe(write(tmp_path, use_peft=True, **{option: "lm_head"})).model)[option] == ["lm_head"]


def rule(batch, *, turn_coef: float = 1.0, gamma: float = 0.9):
    return batch.turn_mask * gamma


class Rewarded(OutcomeReward):
    def score(self, trajectory, **row):
        return 1.0


def look_up(word: str) -> str:
    """
    Looks a word up.

    Args:
        word: The word.
    """
    return word


REGISTERS = """
from mt_grpo.credit import advantage_estimator
from mt_grpo.rewards import reward
from mt_grpo.tools import tool
from test_recipes import Rewarded, look_up, rule

advantage_estimator("from_plugin")(rule)
reward("from_plugin_reward")(Rewarded)
tool("from_plugin_tool")(look_up)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The path of a plugin that registers `from_plugin`, `from_plugin_reward` and `from_plugin_tool`."""
    keep_estimators(monkeypatch)
    keep(monkeypatch, REWARDS)
    keep(monkeypatch, TOOLS)
    path = tmp_path / "plugin.py"
    path.write_text(REGISTERS)
    return str(path)


def test_what_a_plugin_registers_is_found_by_name(tmp_path, plugin):
    names = {
        "advantage_estimator": {"name": "from_plugin", "gamma": 0.5},
        "outcome_reward_funcs": "from_plugin_reward",
        "tools": "from_plugin_tool",
    }
    args = parse_recipe(write(tmp_path, external_plugins=plugin, **names)).training
    assert load_rewards(args.outcome_reward_funcs, "outcome")[0].name == "from_plugin_reward"
    assert list(build_env(args).tools) == ["look_up"]
    assert args.advantage_estimator == names["advantage_estimator"]


def test_a_script_finds_the_rule_of_a_plugin_too(tmp_path, plugin):
    rule = {"name": "from_plugin", "gamma": 0.5}
    options = {"use_cpu": True, "bf16": False, "external_plugins": [plugin]}
    assert MTGRPOConfig(str(tmp_path), advantage_estimator=rule, **options).advantage_estimator == rule
    with pytest.raises(ConfigError, match="no option 'gama'; the nearest is 'gamma'"):
        MTGRPOConfig(str(tmp_path), advantage_estimator={"name": "from_plugin", "gama": 0.5}, **options)


def test_a_rule_is_json_on_the_command_line_and_reads_back(tmp_path, plugin):
    arguments = [*write(tmp_path, external_plugins=plugin), "--advantage_estimator"]
    recipe = parse_recipe([*arguments, '{"name": "from_plugin", "gamma": 1e-1}'])
    assert recipe.training.advantage_estimator == {"name": "from_plugin", "gamma": 0.1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe.resolved()))
    again = parse_recipe(["--config", str(tmp_path / "config.yaml"), "--trust"])
    assert again.resolved() == recipe.resolved()
    assert again.training.generation_batch_size == recipe.training.generation_batch_size


def test_a_coefficient_in_the_rule_is_the_only_one(tmp_path):
    rule = {"name": "mt_grpo", "turn_coef": 0.5}
    assert parse_recipe(write(tmp_path, advantage_estimator=rule)).training.turn_advantage_coef is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"advantage_estimator": {"gamma": 0.9}}, "a mapping of its `name`"),
        ({"advantage_estimator": {"name": "mt_grpo", "turn_coef": "high"}}, "input should be a valid number"),
        (
            {"advantage_estimator": {"name": "mt_grpo", "turn_coef": 0.5}, "turn_advantage_coef": 1.0},
            "contradict each other: leave one out",
        ),
        ({"logging_steps": float("inf")}, "`logging_steps` is inf; give a finite number"),
        ({"accelerator_config": {"a": 1}}, "The options do not fit together: .* unexpected keyword argument 'a'"),
        ({"parallelism_config": {}}, "The options do not fit together: "),
        ({"tree_attention": "dens"}, "the nearest is 'dense': choose one of auto, dense, flex, segment"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_recipe(write(tmp_path, **keys))


# The schema


def test_the_shipped_schema_is_that_of_the_dataclasses(prints):
    schema = json.loads(prints("schema"))
    Draft7Validator.check_schema(schema)
    assert all(Draft7Validator(option).is_valid(option["default"]) for option in schema["properties"].values())
    if not load_schema().exact:
        pytest.skip("it is that of another TRL or transformers")
    stale = "make it again: python scripts/write_options.py"
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == build_schema(), stale


@pytest.fixture
def of_another_trl(monkeypatch):
    """The shipped schema beside libraries that it was not made from."""
    other = dataclasses.replace(load_schema(), exact=False)
    monkeypatch.setattr(request, "load_schema", lambda: other)


def test_what_another_trl_may_know_is_left_to_its_parser(of_another_trl, tmp_path):
    recipe = write(tmp_path, of_another_trl=1, max_steps="half")
    found = read_request([*recipe, "--also_of_it", "2", "3", "--eval_strategy", "often"])
    assert found.recipe["of_another_trl"] == 1
    assert found.arguments == ["--also_of_it", "2", "3", "--eval_strategy=often"]
    with pytest.raises(ConfigError, match="'of_another_trl' in .* is unknown"):
        parse_recipe(recipe)
    with pytest.raises(ConfigError, match="'--also_of_it' is unknown"):
        parse_recipe([*write(tmp_path), "--also_of_it", "2"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max_env_steps", "some"], "`--max_env_steps` is 'some': it takes a whole number"),
        (["--history", "keeps"], "`history` is 'keeps'; the nearest is 'keep'"),
    ],
)
def test_our_own_options_are_checked_with_any_trl(of_another_trl, arguments, message):
    with pytest.raises(ConfigError, match=message):
        read_request(["--model_name_or_path", "m", "--dataset_name", "d", *arguments])
