"""`mt-grpo train --dry_run` checks and builds all that training does, and neither samples nor writes."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout

import pytest
import yaml
from support.loopback import free_port
from support.recipes import parse_recipe

from mt_grpo.app.request import read_request
from mt_grpo.cli import main

ENV = """
from mt_grpo.envs import MultiTurnToolEnv

class Env(MultiTurnToolEnv):
    async def step(self, turn):
        raise SystemExit("a conversation was begun")
"""

SILENT = """
from mt_grpo.envs import MultiTurnToolEnv

class Env(MultiTurnToolEnv):
    def start(self, prompt):
        return [{"role": "user", "content": str(prompt)}]
"""


def dry_run(arguments: list[str]) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as printed:
        status = main(["train", *arguments, "--dry_run"])
    return status, printed.getvalue()


def test_the_resolved_recipe_is_printed_and_is_a_recipe(recipe, tmp_path, capsys):
    (tmp_path / "env.py").write_text(ENV)
    arguments = recipe(env=f"{tmp_path / 'env.py'}:Env", learning_rate=3e-5)
    status, printed = dry_run([*arguments, "--beta", "0.5"])
    assert status == 0
    options = yaml.safe_load(printed)
    assert (options["learning_rate"], options["beta"], options["max_env_steps"]) == (3e-5, 0.5, None)
    (tmp_path / "printed.yaml").write_text(printed)
    assert parse_recipe(["--config", str(tmp_path / "printed.yaml")]).resolved() == options
    said = capsys.readouterr().err
    assert "Chat template: " in said and "nothing was sampled or written" in said


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"call_protocol": None, "system_prompt": "Compute."}, "<|im_start|>system\nCompute.\n\nSolve the task"),
        ({"call_protocol": None}, "<|im_start|>system\nSolve the task"),
        ({"call_protocol": None, "system_prompt": ""}, "<|im_start|>system\nSolve the task"),
        ({"call_protocol": "learnt_tags"}, "<|im_start|>user\n"),
    ],
)
def test_what_the_model_is_shown_is_printed(recipe, capsys, options, shown):
    assert dry_run(recipe(model_name_or_path="embedded", **options))[0] == 0
    said = capsys.readouterr().err
    assert f"for the first row:\n{shown}" in said and "not shown its tools" not in said
    assert ("calculator" in said.partition("Chat template")[0]) == (options["call_protocol"] is None)


def test_tools_that_an_environment_does_not_show_are_named(recipe, tmp_path, capsys):
    (tmp_path / "env.py").write_text(SILENT)
    assert dry_run(recipe(model_name_or_path="embedded", call_protocol=None, env=f"{tmp_path}/env.py:Env"))[0] == 0
    assert "it is not shown its tools (calculator): describe them in `system_prompt`" in capsys.readouterr().err


def test_one_prompt_of_each_environment_is_printed(recipe, tmp_path, capsys):
    rows = [{"prompt": f"{name}?", "answer": "1", "environment": name} for name in ("sums", "words") for _ in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {"sums": {"tools": ["calculator"]}, "words": {"call_protocol": "plain"}}
    keys = {"model_name_or_path": "embedded", "environments": named, "dataset_train_split": "train", "do_eval": False}
    status, _ = dry_run(recipe(**keys, tools=None, call_protocol=None, column_mapping=None))
    said = capsys.readouterr().err
    assert status == 0 and said.count("for the first row of `environment: ") == 2
    assert "calculator" in said and "<|im_start|>user\nwords?" in said


@pytest.mark.parametrize("name", ["quickstart", "quickstart_vllm"])
def test_the_embedded_model_is_shown_what_it_has_learnt(name, capsys):
    own = ["--use_vllm", "false", "--do_eval", "false", "--output_dir", "/nowhere"]
    assert dry_run([f"recipes/{name}.yaml", *own])[0] == 0
    (question,) = re.findall(
        r"first row:\n<\|im_start\|>system\nSearch, then answer.<\|im_end\|>\n<\|im_start\|>user\n(.*)<\|im_end\|>\n"
        r"<\|im_start\|>assistant\n\nChat template", capsys.readouterr().err)  # fmt: skip
    assert question == "Name the continent of Venezuela."


def test_tools_of_a_recipe_may_have_processes(recipe):
    status, printed = dry_run(recipe(tool_processes=1))
    assert status == 0 and yaml.safe_load(printed)["tool_processes"] == 1


def test_nothing_is_written(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("mt_grpo.training.preflight.check_push", lambda args: None)  # there is no token, and no Hub
    arguments = recipe(output_dir=str(tmp_path / "runs" / "one"), push_to_hub=True, hub_model_id="nobody/nothing")
    before = sorted(tmp_path.rglob("*"))
    status, printed = dry_run(arguments)
    assert status == 0 and yaml.safe_load(printed)["push_to_hub"] is True
    assert sorted(tmp_path.rglob("*")) == before


def test_an_earlier_run_is_refused_or_left_alone(recipe, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert dry_run(recipe()) == (1, "")
    assert "holds an earlier run (metrics.jsonl)" in capsys.readouterr().err
    assert dry_run(recipe(overwrite_output_dir=True))[0] == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"outcome_reward_funcs": ["exact_match"]}, "exact_match_reward_func"),
        ({"per_device_train_batch_size": 12}, "has 4 rows"),
    ],
)
def test_what_training_refuses_a_dry_run_refuses(recipe, tmp_path, capsys, keys, message):
    assert dry_run(recipe(**keys)) == (1, "")
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_the_server_is_asked_and_neither_sampled_nor_kept(recipe, server):
    status, _ = dry_run(recipe(use_vllm=True, vllm_server_base_url=server.url))
    assert status == 0
    paths = {path for _, path, _ in server.requests}
    assert {"/server_info", "/v1/models"} <= paths
    assert not paths & {"/v1/completions", "/update_weights", "/update_weight_version"}


def test_a_server_that_is_not_there_is_refused(recipe, tmp_path, capsys):
    url = f"http://127.0.0.1:{free_port()}"
    arguments = recipe(use_vllm=True, vllm_server_base_url=url, vllm_server_timeout=0.1)
    assert dry_run(arguments) == (1, "")
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("mt-grpo: ") and url in line
    assert not (tmp_path / "run").exists()


# The options of the command


@pytest.mark.parametrize(
    ("given", "dry"),
    [
        ("R --dry_run", True),
        ("R --dry_run true", True),
        ("R --dry_run=True", True),
        ("R --dry_run false", False),
        ("--dry_run R", True),
        ("--dry_run --beta 1 R", True),
        ("R --tools calculator wikipedia_search", False),
    ],
)
def test_dry_run_takes_a_truth_value_and_nothing_else(recipe, given, dry):
    (_, path) = recipe()
    request = read_request(given.replace("R", path).split(), "train")
    assert (request.path, request.own["dry_run"]) == (path, dry)
    assert "--dry_run" not in request.arguments
