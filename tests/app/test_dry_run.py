"""`mt-grpo train --dry_run` checks and builds all that training does, and neither samples nor writes."""

import json
import re

import pytest
import yaml
from support.loopback import free_port
from support.recipes import parse_recipe
from transformers import Trainer

from mt_grpo.app.request import read_request
from mt_grpo.cli import main
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.runlog import files


class Sampled(MultiTurnToolEnv):
    async def step(self, turn):
        raise SystemExit("a conversation was begun")


class Silent(MultiTurnToolEnv):
    def start(self, prompt):
        return [{"role": "user", "content": str(prompt)}]


Refuses = type("Refuses", (MultiTurnToolEnv,), {"start": None})


@pytest.fixture
def dry_run(capsys):
    """Status, and what was printed and said."""

    def run(*arguments):
        status = main(["train", *arguments, "--dry_run"])
        return status, *capsys.readouterr()

    return run


def test_the_resolved_recipe_is_printed_and_is_a_recipe(recipe, tmp_path, dry_run):
    arguments = recipe(env="test_dry_run.Sampled", learning_rate=3e-5, tool_processes=1)
    status, printed, said = dry_run(*arguments, "--beta", "0.5")
    options = yaml.safe_load(printed)
    assert status == 0 and "Chat template: " in said and "nothing was sampled or written" in said
    expected = {"learning_rate": 3e-5, "beta": 0.5, "max_env_steps": None, "tool_processes": 1}
    assert options.items() >= expected.items()
    (tmp_path / "printed.yaml").write_text(printed)
    assert parse_recipe(["--config", str(tmp_path / "printed.yaml")]).resolved() == options


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"call_protocol": None, "system_prompt": "Compute."}, "<|im_start|>system\nCompute.\n\nSolve the task"),
        ({"call_protocol": None}, "<|im_start|>system\nSolve the task"),
        ({"call_protocol": None, "system_prompt": ""}, "<|im_start|>system\nSolve the task"),
        ({"call_protocol": "learnt_tags"}, "<|im_start|>user\n"),
        ({"call_protocol": None, "env": "test_dry_run.Silent"}, "<|im_start|>user\n"),
    ],
)
def test_what_the_model_is_shown_is_printed(recipe, dry_run, options, shown):
    status, _, said = dry_run(*recipe(model_name_or_path="embedded", **options))
    assert status == 0 and f"for the first row:\n{shown}" in said
    unseen = "it is not shown its tools (calculator): describe them in `system_prompt`"
    assert (unseen in said) == ("not shown its tools" in said) == ("env" in options)
    assert ("calculator" in said.partition("Chat template")[0].partition("it is not shown")[0]) == (
        options["call_protocol"] is None and "env" not in options
    )


def test_one_prompt_of_each_environment_is_printed(recipe, tmp_path, dry_run):
    rows = [{"prompt": f"{name}?", "answer": "1", "environment": name} for name in ("sums", "words") for _ in range(4)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {"sums": {"tools": ["calculator"]}, "words": {"call_protocol": "plain"}}
    keys = {"model_name_or_path": "embedded", "environments": named, "dataset_train_split": "train", "do_eval": False}
    keys |= dict.fromkeys(("tools", "call_protocol", "column_mapping"))
    status, _, said = dry_run(*recipe(**keys, dataset_name=str(tmp_path / "all.jsonl")))
    assert status == 0 and said.count("for the first row of `environment: ") == 2
    assert "calculator" in said and "<|im_start|>user\nwords?" in said


@pytest.mark.parametrize("name", ["quickstart", "quickstart_vllm"])
def test_the_embedded_model_is_shown_what_it_has_learnt(name, dry_run):
    own = ["--use_vllm", "false", "--do_eval", "false", "--output_dir", "/nowhere"]
    status, _, said = dry_run(f"recipes/{name}.yaml", *own)
    (question,) = re.findall(
        r"first row:\n<\|im_start\|>system\nSearch, then answer.<\|im_end\|>\n<\|im_start\|>user\n(.*)<\|im_end\|>\n"
        r"<\|im_start\|>assistant\n\nChat template",
        said,
    )
    assert (status, question) == (0, "Name the continent of Venezuela.")


def test_a_log_says_what_takes_long_before_the_run(recipe, monkeypatch, capsys):
    monkeypatch.setattr(files, "QUIET", 0.001)
    assert main(["train", *map(str, recipe()), "--dry_run", "true"]) == 0
    told = capsys.readouterr().err
    assert "reading the data ..." in told and "loading the model ..." in told


def test_nothing_is_written(recipe, tmp_path, monkeypatch, dry_run):
    monkeypatch.setattr("mt_grpo.training.preflight.check_push", lambda args: None)  # there is no token, and no Hub
    arguments = recipe(output_dir=str(tmp_path / "runs" / "one"), push_to_hub=True, hub_model_id="nobody/nothing")
    before = sorted(tmp_path.rglob("*"))
    status, printed, _ = dry_run(*arguments)
    assert status == 0 and yaml.safe_load(printed)["push_to_hub"] is True
    assert sorted(tmp_path.rglob("*")) == before


def test_an_earlier_run_is_refused_or_left_alone(recipe, tmp_path, dry_run):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    status, printed, said = dry_run(*recipe())
    assert (status, printed) == (1, "") and "holds an earlier run (metrics.jsonl)" in said
    assert dry_run(*recipe(overwrite_output_dir=True))[0] == 0
    assert {path.name: path.read_text() for path in (tmp_path / "run").iterdir()} == {"metrics.jsonl": "{}\n"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"outcome_reward_funcs": ["exact_match"]}, "exact_match_reward_func"),
        ({"env": "test_dry_run.Refuses"}, "The first prompt cannot be rendered: TypeError: 'NoneType' obj"),
        ({"per_device_train_batch_size": 12}, "has 4 rows"),
        ({"optim": "lomo"}, "pip install lomo-optim"),
        ({"adam_beta2": 2.0}, "cannot be made from these options: Invalid beta parameter at index 1: 2.0."),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set through"),
        ({"use_peft": True, "lora_target_modules": "*.q_proj"}, "`lora_target_modules: *.q_proj` is no regular"),
        (
            {"use_peft": True, "lora_target_modules": ["q_proj"], "lora_modules_to_save": ["heads"]},
            "`lora_modules_to_save` names 'heads', and the model has no such layer.",
        ),
        ({"model_init_kwargs": {"x": 1}}, "got an unexpected keyword argument 'x'"),
        ({"accelerator_config": {"dispatch_batches": True}}, "`accelerator_config: {dispatch_batches: true}` takes"),
        ({"accelerator_config": {"split_batches": True}}, "`accelerator_config: {split_batches: true}` takes groups"),
        ({"lr_scheduler_kwargs": {"x": 1}}, "got an unexpected keyword argument 'x'"),
        ({"use_vllm": True, "vllm_server_base_url": "URL", "vllm_server_timeout": 0.1}, "URL"),
    ],
)
def test_what_training_refuses_a_dry_run_refuses(recipe, tmp_path, dry_run, keys, message):
    url = f"http://127.0.0.1:{free_port()}"
    keys = {key: url if value == "URL" else value for key, value in keys.items()}
    status, printed, said = dry_run(*recipe(**keys))
    line = said.splitlines()[-1]
    assert (status, printed) == (1, "") and line.startswith("mt-grpo: ") and message.replace("URL", url) in line
    assert not (tmp_path / "run").exists()


def test_an_optimiser_by_layers_hooks_in_once(recipe, monkeypatch, dry_run):
    asked = []
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", lambda *given: (asked.append(given[-2].optim), {}))
    assert dry_run(*recipe(optim="galore_adamw_layerwise", optim_target_modules=["q_proj"]))[0] == 0
    assert asked == ["galore_adamw"]


def test_the_server_is_asked_and_neither_sampled_nor_kept(recipe, server, dry_run):
    assert dry_run(*recipe(use_vllm=True, vllm_server_base_url=server.url))[0] == 0
    paths = {path for _, path, _ in server.requests}
    assert {"/server_info", "/v1/models"} <= paths
    assert not paths & {"/v1/completions", "/update_weights", "/update_weight_version"}


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
    assert (request.path, request.own["dry_run"]) == (path, dry) and "--dry_run" not in request.arguments
