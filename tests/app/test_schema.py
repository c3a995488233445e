"""The JSON schema of recipes: made from the dataclasses, shipped, and followed by every recipe."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import yaml
from jsonschema import Draft7Validator
from support.recipes import RECIPES, parse_recipe

from mt_grpo.app import request
from mt_grpo.app.recipe import build_schema
from mt_grpo.app.request import read_file, read_request
from mt_grpo.app.schema import SHIPPED, load_schema
from mt_grpo.cli import main
from mt_grpo.errors import ConfigError


def test_the_shipped_schema_is_that_of_the_dataclasses():
    if not load_schema().exact:
        pytest.skip("it is that of another TRL or transformers")
    stale = "make it again: python scripts/write_options.py"
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == build_schema(), stale


def test_the_command_prints_a_schema(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft7Validator.check_schema(schema)
    assert all(Draft7Validator(option).is_valid(option["default"]) for option in schema["properties"].values())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_the_schema_and_follows_it(path):
    first = path.read_text().splitlines()[0]
    named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)[1]
    assert (path.parent / named).resolve() == SHIPPED.resolve()
    recipe, _ = read_file(str(path))
    assert not list(Draft7Validator(json.loads(SHIPPED.read_text(encoding="utf-8"))).iter_errors(recipe))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_resolved_options_of_a_run_are_a_recipe(path, tmp_path):
    recipe = parse_recipe([str(path)])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe.resolved()))
    read_request([str(tmp_path / "config.yaml")], "train")


@pytest.fixture
def of_another_trl(monkeypatch):
    """The shipped schema beside libraries that it was not made from."""
    other = dataclasses.replace(load_schema(), exact=False)
    monkeypatch.setattr(request, "load_schema", lambda: other)


def test_every_form_of_an_option_reaches_the_parser(tmp_path):
    (tmp_path / "r.yaml").write_text("model_name_or_path: m\ndataset_name: d\nbf16: false\nmax_steps: '7'\n")
    forms = ["--learning-rate=2e-3", "--use_cpu", "--no-gradient-checkpointing", "--max_grad-norm", "0.5"]
    recipe = parse_recipe([*forms, "--tools", "calculator", "wikipedia_search", "--config", str(tmp_path / "r.yaml")])
    args = recipe.training
    assert (args.learning_rate, args.use_cpu, args.gradient_checkpointing, args.max_grad_norm) == (
        2e-3,
        True,
        False,
        0.5,
    )
    assert (args.tools, args.max_steps) == (["calculator", "wikipedia_search"], 7)


def test_what_another_trl_may_know_is_left_to_its_parser(of_another_trl, tmp_path):
    (tmp_path / "r.yaml").write_text("model_name_or_path: m\ndataset_name: d\nof_another_trl: 1\nmax_steps: half\n")
    found = read_request([str(tmp_path / "r.yaml"), "--also_of_it", "2", "3", "--eval_strategy", "often"])
    assert found.recipe["of_another_trl"] == 1
    assert found.arguments == ["--also_of_it", "2", "3", "--eval_strategy=often"]
    with pytest.raises(ConfigError, match="'of_another_trl' in .* is unknown"):
        parse_recipe([str(tmp_path / "r.yaml")])
    (tmp_path / "r.yaml").write_text("model_name_or_path: m\ndataset_name: d\n")
    with pytest.raises(ConfigError, match="'--also_of_it' is unknown"):
        parse_recipe([str(tmp_path / "r.yaml"), "--also_of_it", "2"])


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
