"""Every command and every Python block in the documentation works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import build_model
from test_recipes import parse_for

from mt_grpo.training.serve import server_command

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [(page.name, block) for page in PAGES for block in pattern.findall(page.read_text())]


COMMANDS = sorted({line for _, block in blocks("bash") for line in block.strip().splitlines()})


def starting(word: str) -> list[str]:
    return [command for command in COMMANDS if Path(shlex.split(command)[0]).name == word]


def test_no_command_is_left_untested():
    assert sum(len(starting(word)) for word in ("make", "mt-grpo", "accelerate")) == len(COMMANDS)


@pytest.mark.parametrize("command", starting("make"))
def test_make_target_exists(command):
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


SMALL = {
    "train": "--max_steps 1 --per_device_train_batch_size 8 --dataset_test_split validation[:4] --max_turn_length 16",
    "rollout": "--dataset_test_split validation[:4] --max_turn_length 16",
}


SERVE = [command for command in starting("mt-grpo") if shlex.split(command)[1] == "serve"]


@pytest.mark.parametrize("command", SERVE)
def test_serve_command_names_a_recipe(command):
    """`test_vllm_server.py` starts a real server with this command; here its arguments are parsed."""
    path = ROOT / command.split("--config ")[1].split()[0]
    command, _ = server_command(parse_for(7 if path.parent.name == "Qwen" else 1, path))
    assert "vllm.entrypoints.openai.api_server" in command


BENCHMARKS = sorted(
    {name for page in PAGES for name in re.findall(r"python\s+(benchmarks/\w+\.py)", page.read_text())}
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_exists(name):
    """`test_benchmarks.py` runs them."""
    assert (ROOT / name).exists()


@pytest.mark.parametrize("command", [command for command in starting("mt-grpo") if command not in SERVE])
def test_mt_grpo_command_works(command, tmp_path):
    name, *arguments = shlex.split(command)[1:]
    arguments += [*shlex.split(SMALL[name]), "--output_dir", str(tmp_path / "run")]
    run = subprocess.run([sys.executable, "-m", "mt_grpo", name, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run" / "summary.json").exists() == (name == "train")


@pytest.mark.parametrize("command", starting("accelerate"))
def test_accelerate_command_names_files_that_fit_together(command):
    """Seven GPUs are not at hand: the recipe is parsed for seven processes; one process runs it in the next test."""
    _, launch, flag, config, script, config_flag, recipe = shlex.split(command)
    assert (launch, flag, config_flag) == ("launch", "--config_file", "--config")
    assert (ROOT / config).exists() and (ROOT / script).exists()
    parse_for(7, ROOT / recipe)


def test_the_training_script_runs_under_accelerate(tmp_path):
    arguments = shlex.split(SMALL["train"])
    run = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "scripts/train.py"]
        + ["--config", "recipes/quickstart.yaml", "--output_dir", str(tmp_path), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda p: p.name)
def test_python_blocks_run(page, tokenizer, tmp_path, questions, monkeypatch):
    monkeypatch.setattr("mt_grpo.credit.estimators.ADVANTAGE_ESTIMATORS", {})
    namespace = {"__name__": "docs"}
    for name, block in blocks("python"):
        if name == page.name:
            exec(compile(block, page.name, "exec"), namespace)
    if page.name == "agents.md":
        result = namespace["converse"](build_model(tokenizer, max_position_embeddings=2048), tokenizer)
        assert len(result["ids"][0]) == len(result["mask"][0]) > 0
    if page.name == "rollouts.md":
        assert "42" in tokenizer.decode(namespace["replay"](tokenizer)["ids"][0])
    if page.name == "README.md":
        assert callable(namespace["train"])
