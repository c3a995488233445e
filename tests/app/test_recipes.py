"""Every recipe in the repository is loaded and everything it names is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from support.recipes import RECIPES, ROOT, parse_recipe, processes_of
from support.registered import keep, keep_estimators

from mt_grpo.rewards import REWARDS, load_rewards
from mt_grpo.tools.loading import TOOLS
from mt_grpo.training import ConfigError, MTGRPOConfig
from mt_grpo.training.environment import build_env
from mt_grpo.training.preflight import check_batch_sizes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_for_its_number_of_processes(path, monkeypatch):
    monkeypatch.setattr(MTGRPOConfig, "world_size", processes_of(path))
    recipe = parse_recipe(["--config", str(path)])
    check_batch_sizes(recipe.training)
    env = build_env(recipe.training)
    assert env.tools
    assert load_rewards(recipe.training.outcome_reward_funcs, "outcome")
    assert load_rewards(recipe.training.turn_reward_funcs, "turn")
    assert recipe.training.output_dir == f"runs/{path.stem}"


def test_the_setting_is_that_of_the_papers_public_code():
    path = ROOT / "Qwen" / "triviaqa_7b.yaml"
    assert yaml.safe_load(path.read_text())["model_name_or_path"] == "Qwen/Qwen2.5-7B"
    args = parse_recipe(["--config", str(path)]).training
    assert (args.learning_rate, args.num_generations, args.num_iterations, args.max_steps) == (1e-6, 21, 2, 300)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (12, 4)
    assert (args.beta, args.max_grad_norm, args.warmup_steps) == (0.0, 0.1, 20)
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.epsilon) == (0.9, 0.99, 0.0, 0.2)
    assert (args.max_completion_length, args.max_env_steps, args.temperature) == (1024, 2, 0.9)
    assert (args.loss_type, args.turn_advantage_coef, args.save_steps) == ("bnpo", 1.0, 100)
    assert args.lr_scheduler_type == "constant_with_warmup"


@pytest.mark.parametrize("path", sorted(ROOT.glob("Qwen/triviaqa_*.yaml")), ids=lambda path: path.stem)
def test_other_sizes_keep_batch_and_settings_of_the_paper(path):
    whole = yaml.safe_load((ROOT / "Qwen" / "triviaqa_7b.yaml").read_text())
    other = yaml.safe_load(path.read_text())
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
    assert config.num_processes == 7
    assert config.mixed_precision == "bf16"


def write(tmp_path: Path, **keys: object) -> list[str]:
    path = tmp_path / "recipe.yaml"
    options = {"model_name_or_path": "m", "dataset_name": "d", "use_cpu": True, "bf16": False, **keys}
    path.write_text(yaml.safe_dump(options))
    return ["--config", str(path)]


def test_the_command_line_wins_over_the_recipe(tmp_path):
    recipe = parse_recipe([*write(tmp_path, learning_rate=1e-3), "--learning_rate", "2e-3"])
    assert recipe.training.learning_rate == 2e-3


def test_scientific_notation_is_a_number_at_every_depth(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "{model_name_or_path: m, dataset_name: d, use_cpu: true, bf16: false, learning_rate: 1e-3, "
        "lr_scheduler_kwargs: {min_lr: 1e-4}}"
    )
    training = parse_recipe(["--config", str(path)]).training
    assert training.learning_rate == 1e-3
    assert training.lr_scheduler_kwargs == {"min_lr": 1e-4}


def test_env_is_a_class_as_text_and_variables_as_a_mapping(tmp_path, monkeypatch):
    monkeypatch.delenv("MT_GRPO_TEST_VARIABLE", raising=False)
    recipe = parse_recipe(write(tmp_path, env="mt_grpo.envs.MultiTurnToolEnv"))
    assert recipe.training.env == "mt_grpo.envs.MultiTurnToolEnv"
    recipe = parse_recipe(write(tmp_path, env={"MT_GRPO_TEST_VARIABLE": 3}))
    assert recipe.training.env is None
    assert os.environ.pop("MT_GRPO_TEST_VARIABLE") == "3"


def test_one_name_stands_for_a_list_of_one(tmp_path):
    assert parse_recipe(write(tmp_path, tools="calculator")).training.tools == ["calculator"]


RULE = """
from mt_grpo.credit import advantage_estimator
from mt_grpo.rewards import OutcomeReward, reward
from mt_grpo.tools import tool


@advantage_estimator("NAME")
def rule(batch, *, turn_coef: float = 1.0, gamma: float = 0.9):
    return batch.turn_mask * gamma


@reward("NAME_reward")
class Rewarded(OutcomeReward):
    def score(self, trajectory, **row):
        return 1.0


@tool("NAME_tool")
def look_up(word: str) -> str:
    \"\"\"
    Looks a word up.

    Args:
        word: The word.
    \"\"\"
    return word
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The path of a plugin that registers `from_plugin`, `from_plugin_reward` and `from_plugin_tool`."""
    keep_estimators(monkeypatch)
    keep(monkeypatch, REWARDS)
    keep(monkeypatch, TOOLS)
    path = tmp_path / "plugin.py"
    path.write_text(RULE.replace("NAME", "from_plugin"))
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


def test_a_coefficient_that_is_said_twice_is_refused(tmp_path):
    rule = {"name": "mt_grpo", "turn_coef": 0.5}
    assert parse_recipe(write(tmp_path, advantage_estimator=rule)).training.turn_advantage_coef is None
    with pytest.raises(ConfigError, match="contradict each other: leave one out"):
        parse_recipe(write(tmp_path, advantage_estimator=rule, turn_advantage_coef=1.0))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"advantage_estimator": {"name": "mtgrpo"}}, "the nearest is 'mt_grpo'"),
        ({"advantage_estimator": {"gamma": 0.9}}, "a mapping of its `name`"),
        ({"advantage_estimator": {"name": "mt_grpo", "turn_coef": "high"}}, "its type is float"),
        ({"weight_sync": "safetensor"}, "the nearest is 'safetensors': choose one of auto, delta, http"),
        ({"tree_attention": "dens"}, "the nearest is 'dense': choose one of auto, dense, flex, segment"),
    ],
)
def test_a_name_that_is_not_registered_is_refused(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_recipe(write(tmp_path, **keys))
