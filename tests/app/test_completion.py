"""The scripts of `mt-grpo completion`; the one for bash in a real bash, the others where there is such a shell."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from trl import ModelConfig, TrlParser

from mt_grpo.app.recipe import MTGRPOScriptArguments
from mt_grpo.app.request import OF_HOSTS
from mt_grpo.cli import COMMANDS, main
from mt_grpo.options.table import OPTIONS
from mt_grpo.runlog.export import FORMS
from mt_grpo.training import MTGRPOConfig


@pytest.fixture(scope="module")
def fields() -> list[str]:
    parser = TrlParser((MTGRPOScriptArguments, MTGRPOConfig, ModelConfig))
    return sorted({action.dest for action in parser._actions} - {"help"})


@pytest.fixture
def script(capsys):
    def make(shell: str) -> str:
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return make


@pytest.fixture
def complete(script, tmp_path):
    """What bash offers for the last word of a line, in a folder with a recipe, a note and a folder."""
    (tmp_path / "completion.bash").write_text(script("bash"))
    here = tmp_path / "here"
    (here / "runs").mkdir(parents=True)
    (here / "my recipe.yaml").touch()
    (here / "runs" / "config.yaml").touch()
    (here / "notes.txt").touch()

    def run(*words: str) -> list[str]:
        line = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_mt_grpo'
        code = f"{line}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        command = ["bash", "--norc", "-c", code, "bash", str(tmp_path / "completion.bash"), "mt-grpo", *words]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
        assert not done.stderr
        return [line for line in done.stdout.splitlines() if line]

    return run


def test_commands_are_completed(complete):
    assert complete("tr") == ["train"]
    assert complete("re") == ["recipes"]
    assert complete("--v") == ["--version"]
    assert set(complete("")) == set(COMMANDS)


def test_the_values_of_an_option_are_completed(complete):
    assert complete("train", "r.yaml", "--loss_type", "b") == ["bnpo"]
    assert set(complete("serve", "--history", "")) == set(OPTIONS["history"].names)
    assert complete("export", "run", "--to", "") == list(FORMS)


@pytest.mark.parametrize("command", ["train", "rollout", "serve", "doctor"])
def test_options_of_recipes_are_completed(complete, fields, command):
    assert complete(command, "--advantage_") == ["--advantage_estimator"]
    offered = set(complete(command, "recipe.yaml", "--"))
    assert {f"--{name}" for name in fields} <= offered
    launched = {"--accelerate_config", "--num_processes"}
    own = {
        "train": {"--dry_run", "--trust", *launched, *(f"--{name}" for name in OF_HOSTS)},
        "rollout": {"--num_prompts", "--audit", "--save", "--trust"},
        "serve": {"--trust", "--replicas"},
        "doctor": {"--trust", "--gpu", "--gpu_memory", "--calibrate", "--probe", "--json", *launched},
    }
    assert offered - {f"--{name}" for name in fields} == {"--config", "--help", "--help-all", *own.get(command, ())}


@pytest.mark.parametrize("words", [("train", ""), ("rollout", "--config", ""), ("train", "--dry_run", "")])
def test_recipes_are_completed_by_their_files(complete, words):
    assert complete(*words) == ["my recipe.yaml", "runs"]


def test_a_recipe_in_a_folder_is_completed(complete):
    assert complete("serve", "runs/") == ["runs/config.yaml"]


def test_words_of_the_other_commands_are_completed(complete):
    assert complete("train", "--accelerate_config", "zero") == ["zero2", "zero3"]
    assert complete("doctor", "--accelerate_config", "zero") == ["zero2", "zero3"]
    assert complete("train", "--accelerate_config", "my") == ["my recipe.yaml"]
    assert complete("recipes", "") == ["ls", "cp"]
    assert complete("recipes", "cp", "Qwen/gsm8k.") == ["Qwen/gsm8k.yaml"]
    assert complete("completion", "b") == ["bash"]
    assert complete("env", "") == []
    assert complete("credit", "r") == ["runs"] and complete("credit", "runs", "--st") == ["--step"]
    assert complete("view", "r") == ["runs"] and complete("view", "runs", "--p") == ["--port"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_holds_all_there_is_to_complete(script, fields, shell):
    text = script(shell)
    assert not re.search(r"@[A-Z]+@", text)
    words = set(re.findall(r"[\w-]+", text))
    assert shell != "zsh" or "== (eval|file) ]]" in text  # so that `source <(...)` registers it
    prefix = "" if shell == "fish" else "--"
    assert {*COMMANDS, "zero3", *(prefix + name for name in fields)} <= words
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
