"""Every recipe in the repository is loaded and everything it names is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from support.recipes import RECIPES, ROOT, parse_for

from mt_grpo.app.recipe import parse_recipe
from mt_grpo.rewards import load_rewards
from mt_grpo.training import ConfigError
from mt_grpo.training.environment import build_env


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_for_its_number_of_processes(path):
    recipe = parse_for(7 if path.parent.name == "Qwen" else 1, path)
    env = build_env(recipe.training)
    assert env.tools
    assert load_rewards(recipe.training.outcome_reward_funcs, "outcome")
    assert load_rewards(recipe.training.turn_reward_funcs, "turn")
    assert recipe.training.output_dir == f"runs/{path.stem}"


def test_the_paper_setting_is_met():
    args = parse_for(7, ROOT / "Qwen" / "triviaqa_7b.yaml").training
    assert (args.learning_rate, args.num_generations, args.num_iterations, args.max_steps) == (1e-6, 21, 2, 300)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (7 * 12, 4)
    assert (args.beta, args.max_grad_norm, args.warmup_steps) == (0.0, 0.1, 20)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=recipe.yaml"], "with a space"),
        (["--config"], "needs the path"),
        (["--config", "missing.yaml"], "'missing.yaml' does not exist"),
        (["--learning_rat", "1"], "nearest is '--learning_rate'"),
        (["--max_steps", "many"], "invalid int value: 'many'"),
        (["--use_cpu", "true", "--bf16", "false"], "model_name_or_path"),
        (["--use_cpu", "true", "--bf16", "false", "--model_name_or_path", "m"], "dataset_name"),
    ],
)
def test_a_wrong_command_line_is_refused_with_one_sentence(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_recipe(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "'learning_rat' in .* is unknown; the nearest is 'learning_rate'"),
        ("- a", "not a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_recipe_is_refused_with_one_sentence(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_recipe(["--config", str(path)])
