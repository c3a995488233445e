"""The configuration of a stranger's run executes nothing unasked; pages and exports of one execute nothing at all."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.hostile import Executing
from support.runs import write_run

from mt_grpo.app.request import read_request
from mt_grpo.errors import ConfigError

RECIPE = {"model_name_or_path": "embedded", "dataset_name": "embedded", "num_generations": 2}
EVIL = {"external_plugins": ["../stranger/evil.py"]}


@pytest.fixture
def stranger(tmp_path, monkeypatch) -> Path:
    """A run's folder; the current one is another, which has code and a file of tools."""
    mine, folder = tmp_path / "mine", tmp_path / "stranger"
    (mine / "package").mkdir(parents=True)
    for name in ("mine.py", "tools.yaml", "package/__init__.py"):
        (mine / name).touch()
    monkeypatch.chdir(mine)
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    return folder


def config(folder: Path, **options: object) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(RECIPE | options))
    return str(path)


def asks(path: str, said: str = "") -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(said)}.* add `--trust`"):
        read_request([path], "rollout")


def takes(path: str, *arguments: str) -> None:
    assert read_request([path, *arguments], "rollout").recipe


USER = {"base_url": "http://x", "model": "m", "system_prompt": "s", "api_key_env": "AWS_KEY"}


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("external_plugins", ["../stranger/evil.py"], "external_plugins: ../stranger/evil.py"),
        ("external_plugins", ["a\0.py"], "external_plugins: a"),
        ("tools", ["search", "../stranger/evil.py:run"], "tools: ../stranger/evil.py:run"),
        ("tools", "subprocess.run", "tools: subprocess.run"),
        ("outcome_reward_funcs", ["os.system"], "outcome_reward_funcs: os.system"),
        ("turn_reward_funcs", [{"name": "yaml:load"}], "turn_reward_funcs: yaml:load"),
        ("env", "yaml.Env", "env: yaml.Env"),
        ("env", "verifiers:game", "env: verifiers:game"),
        ("env", {"LD_PRELOAD": "evil.so"}, "env: LD_PRELOAD"),
        ("environment_factory", {"a": "yaml.make"}, "environment_factory: yaml.make"),
        ("environment_factory", {"name": "mine.make", "a": "yaml.make"}, "environment_factory: yaml.make"),
        ("environment_factory", "{a: yaml.make}", "environment_factory: yaml.make"),
        ("environments", {"a": {"agent": {"command": "sh x"}}}, "agent: sh x"),
        ("environments", "a: {env: yaml.Env}", "env: yaml.Env"),
        ("environments", '{"a": {"env": "yaml.Env"}}', "env: yaml.Env"),
        ("simulated_user", yaml.safe_dump(USER), "simulated_user: api_key_env: AWS_KEY"),
        ("simulated_user", str(USER).replace("'", '"'), "simulated_user: api_key_env: AWS_KEY"),
        ("multi_turn_scheduler", "yaml.S", "multi_turn_scheduler: yaml.S"),
        ("state_score", "yaml.S", "state_score: yaml.S"),
        ("agent", {"command": "sh -c x"}, "agent: sh -c x"),
        ("agent", '{"command": "sh -c x"}', "agent: sh -c x"),
        ("agent", "yaml.solve", "agent: yaml.solve"),
        ("tools_config_file", "../stranger/tools.yaml", "tools_config_file: ../stranger/tools.yaml"),
        ("interaction_config_file", "/etc/x", "interaction_config_file: /etc/x"),
        ("trust_remote_code", True, "trust_remote_code"),
        ("attn_implementation", "a/b", "attn_implementation: a/b"),
        ("teacher", {"model": "self", "gate": "../stranger/evil.py:gate"}, "teacher: gate: ../stranger/evil.py:gate"),
        ("teacher", '{"model": "self", "gate": "yaml.load"}', "teacher: gate: yaml.load"),
        ("env", {"type": "harbor", "tasks": "../stranger/tasks"}, "env: tasks: ../stranger/tasks"),
        ("env", {"type": "harbor", "tasks": "org/tasks@1"}, "env: tasks: org/tasks@1"),
        ("env", {"type": "harbor", "tasks": "t", "agent": "yaml:Agent"}, "env: yaml:Agent"),
        ("env", {"type": "harbor", "tasks": "t", "agent": {"name": "me", "import_path": "yaml:A"}}, "env: yaml:A"),
        ("environments", {"a": {"env": {"type": "harbor", "tasks": "/tasks"}}}, "env: tasks: /tasks"),
        ("trackio_space_id", "evil/space", "trackio_space_id: evil/space`, which gets the token of the Hub"),
    ],
)
def test_a_strangers_configuration_needs_trust_confirmation(stranger, option, value, said):
    asks(config(stranger, **{option: value}), f"`{said}")


def test_a_configuration_that_names_own_code_is_not_asked_about(stranger):
    own = {
        "external_plugins": ["mine.py"],
        "tools": ["search", "mine.tool", "package.tool", "mt_grpo.tools.calculator.calculator"],
        "tools_config_file": "tools.yaml",
        "outcome_reward_funcs": ["exact_match", "no_such_module.reward"],
        "teacher": {"model": "self", "gate": "explained"},
        "distillation_coef": 1.0,
        "environments": {"a": {"type": "harbor", "tasks": "embedded", "eval_tasks": "package", "agent": "codex"}},
        "trust_remote_code": False,
        "attn_implementation": "sdpa",
    }
    takes(config(stranger, **own))


def test_embedded_tasks_are_not_asked_about_in_a_runs_folder(stranger, monkeypatch):
    monkeypatch.chdir(stranger)
    (stranger / "metrics.jsonl").touch()
    takes(config(stranger, env={"type": "harbor", "tasks": "embedded", "eval_tasks": "embedded"}))


def test_a_python_beside_a_strangers_run_needs_trust(stranger, monkeypatch):
    monkeypatch.setattr("mt_grpo.servers._BESIDE", stranger.parent / "site-packages")
    (stranger / "metrics.jsonl").touch()
    (stranger / ".venv-vllm").mkdir()
    takes(config(stranger))  # the one of the current folder is used
    monkeypatch.chdir(stranger)
    asks(config(stranger), "`.venv-vllm`, whose Python starts servers")


@pytest.mark.parametrize("records", [True, False])
def test_code_beside_a_strangers_run_needs_trust_confirmation(stranger, monkeypatch, records):
    """As where an archive with both was unpacked here."""
    monkeypatch.chdir(stranger.parent)
    folder = stranger / "runs" / "one"
    folder.mkdir(parents=True)
    if records:
        (folder / "metrics.jsonl").touch()
    (stranger.parent / "mine.py").touch()
    asks(config(folder, external_plugins=["stranger/evil.py"]), "`external_plugins: stranger/evil.py`")
    takes(config(folder, external_plugins=["mine.py"]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm_server_host", "evil.example"),
        ("vllm_server_host", "127.0.0.1.evil.example"),
        ("vllm_server_base_url", ["http://127.0.0.1:8000", "http://evil.example:8000"]),
        ("vllm_server_base_url", "http://127.0.0.1:8000,http://evil[1-2]:8000"),
        ("vllm_server_base_url", "http://127.0.0.1@evil.example:8000"),
        ("teacher", {"model": "a/b", "server": "http://evil.example:8000"}),
        ("teacher", '{"model": "a/b", "server": "http://evil.example:8000"}'),
    ],
)
def test_a_strangers_configuration_gets_no_key(stranger, monkeypatch, name, value):
    path = config(stranger, **{name: value})
    takes(path)  # without a key nothing is sent
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    asks(path, "which gets VLLM_API_KEY")
    takes(path, "--trust")
    takes(path, f"--{name}", ",".join(value) if isinstance(value, list) else str(value).replace("'", '"'))
    takes(config(stranger, vllm_server_host="localhost"))
    takes(config(stranger, vllm_server_base_url=["http://127.0.0.1:8000"]))
    takes(config(stranger, teacher={"model": "a/b", "server": "http://127.0.0.1:8001"}, trackio_space_id="mine"))


def test_trust_is_said_on_the_command_line(stranger):
    path = config(stranger, **EVIL)
    takes(path, "--external_plugins", "mine.py")
    assert read_request([path, "--trust"], "train").own["trust"] is True


def test_a_recipe_that_is_no_runs_is_not_asked_about(stranger):
    (stranger / "metrics.jsonl").unlink()
    path = config(stranger, **EVIL)
    asks(path)  # a run's by its name
    takes(str(Path(path).rename(stranger / "recipe.yaml")))


def test_code_in_the_runs_folder_is_the_runs_wherever_one_is(stranger, monkeypatch):
    monkeypatch.chdir(stranger)
    asks(config(stranger, external_plugins=["evil.py"]), "`external_plugins: evil.py`")


@pytest.mark.parametrize("command", ["train", "rollout", "doctor", "serve"])
def test_nothing_runs_before_the_question(stranger, tmp_path, refused, command):
    path = config(stranger, external_plugins=[str(stranger / "evil.py")])
    assert "add `--trust`" in refused(command, path) and not (tmp_path / "executed").exists()


def test_pages_and_exports_of_a_run_execute_nothing(tmp_path, stranger):
    folder, executed = write_run(tmp_path / "run", steps=1, groups=2), tmp_path / "executed"
    config(folder, external_plugins=[str(stranger / "evil.py")], trust_remote_code=True)
    (folder / "checkpoint-1").mkdir()
    for name in ("rollouts-rank0.pt", "optimizer.pt", "training_args.bin", "pytorch_model.bin"):
        (folder / "checkpoint-1" / name).write_bytes(pickle.dumps(Executing(executed)))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.T", null]}}')
    for name in ("sitecustomize.py", "numpy.py", "tokenizer/evil.py"):
        (folder / name).write_text((stranger / "evil.py").read_text())
    for arguments in (["view", str(folder), "--export", "x.html"], ["export", str(folder), "--to", "jsonl"]):
        subprocess.run([sys.executable, "-m", "mt_grpo", *arguments], check=True, stdout=subprocess.DEVNULL)
    assert not executed.exists()
