"""The table of options, what is made from it, and what options may say together."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints

import pytest
from trl import ModelConfig, ScriptArguments, TrlParser

from mt_grpo.app import help
from mt_grpo.app.make_schema import build_schema
from mt_grpo.app.recipe import MTGRPOScriptArguments
from mt_grpo.app.schema import Schema, SchemaOption
from mt_grpo.errors import ConfigError
from mt_grpo.forward.plan import FORWARDS
from mt_grpo.options.rules import check_trainable
from mt_grpo.options.table import AGENT, GROUPS, OPTIONS, Rule, RunOptions, option, options_of
from mt_grpo.rollout.token_check import MODES
from mt_grpo.training import MTGRPOConfig

DOCS = Path(__file__).parents[1] / "docs"

WRONG = [
    ({"scale_rewards": "groups"}, "`scale_rewards` is 'groups'; the nearest is 'group': choose one of group, batch, "),
    ({"env_mask": 2}, "`env_mask` is 2; set 0 "),
    ({"num_generations": "4"}, "`num_generations` is '4'; give a number."),
    ({"generation_kwargs": {"top_k": 5}}, "`generation_kwargs` is {'top_k': 5}; it has no effect on rollouts of many"),
    (
        {"max_turn_length": 513},
        "`max_turn_length: 513` is above `max_completion_length: 512`, the tokens of all turns and replies together: "
        "lower the first, or raise the second.",
    ),
    (
        {"bf16": True, "fp16": True},
        "`bf16` and `fp16` are both true, and a run computes in one of them: leave one out.",
    ),
    ({"rollout_timeout": 0.0}, "`rollout_timeout` is 0.0; set a number above 0, or leave it out."),
    (
        {"call_protocol": "nativ"},
        "`call_protocol` is 'nativ'; the nearest is 'native': choose one of learnt_tags, native, plain, tags.",
    ),
    ({"history": "compact"}, "`history: compact` needs `compact_every`"),
    (
        {"use_vllm": True, "vllm_mode": "colocate", "vllm_server_base_url": "http://a:1"},
        "`vllm_mode: colocate` starts its servers itself",
    ),
]


def config(tmp_path, **options):
    return MTGRPOConfig(str(tmp_path), **{"use_cpu": True, "bf16": False, **options})


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_contradict_each_other_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "options",
    [
        {"max_turn_length": 512},
        {"max_turn_length": 600, "max_completion_length": None},
        {"scale_rewards": False},
        {"temperature": 0.0},
        {"max_env_steps": 0},
        {"env": "my_env.py:Env", "call_protocol": "of_my_env"},
    ],
)
def test_what_stands_at_a_bound_is_taken(tmp_path, options):
    config(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "`temperature: 0.0` cannot be trained"),
        ({"max_steps": 0}, "`max_steps` is 0, so nothing is trained"),
        ({"num_train_epochs": 0.0}, "`num_train_epochs` is 0.0, so nothing is trained"),
    ],
)
def test_training_needs_more_than_a_rollout(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        check_trainable(vars(config(tmp_path, **options)))


@dataclass
class OneMore(MTGRPOConfig):
    """A configuration with one more line in its table."""

    patience: int | None = option(
        "Turns that a user waits for. Then the user leaves.",
        AGENT,
        default=3,
        rule=Rule(lambda value: value > 0, "set a number above 0"),
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
    assert "| `patience` | `3` | Turns that a user waits for. Then the user leaves. |" in help.fill_tables(
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
    assert all(f"<!-- options: {group} -->\n| option" in pages[DOCS / "recipes.md"] for group in GROUPS)
    for described in OPTIONS.values():
        assert described.page is None or (DOCS / described.page.partition("#")[0]).is_file()
