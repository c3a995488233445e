"""Commands that need no trainer: they answer at once, and refuse what they cannot do with one sentence."""

import json
import platform
import re
import shutil
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from support.recipes import LISTED, ROOT
from trl import ModelConfig, TrlParser

from mt_grpo import __version__
from mt_grpo.app import commands
from mt_grpo.app.build import MTGRPOScriptArguments
from mt_grpo.app.commands import _describe
from mt_grpo.app.recipe_file import shipped
from mt_grpo.app.request import OF_HOSTS
from mt_grpo.cli import COMMANDS
from mt_grpo.options.table import OPTIONS
from mt_grpo.runlog.export import FORMS
from mt_grpo.training import MTGRPOConfig

WITHOUT_TORCH = """
import sys
from mt_grpo.cli import main
status = main(sys.argv[1:])
assert not {"torch", "transformers", "trl"} & set(sys.modules)
sys.exit(status)
"""


@pytest.mark.parametrize("command", ["--version", "recipes ls", "recipes cp nowhere", "completion tcsh"])
def test_what_needs_no_torch_does_not_import_it(command):
    run = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *command.split()], capture_output=True, text=True)
    assert "Traceback" not in run.stderr
    if command == "--version":
        assert (run.returncode, run.stdout) == (0, f"mt-grpo {__version__}\n")


@pytest.mark.parametrize("command", ["recipes", "env", "completion", "view", "runs", "compare"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_each_command_shows_its_usage(command, flag, prints):
    assert prints(command, flag).startswith(f"usage: mt-grpo {command}")


# env


@pytest.fixture
def facts(prints):
    return lambda: {
        name: value.strip() for name, value in (line.split("  ", 1) for line in prints("env").splitlines())
    }


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """The package is in a folder without anything beside it, and so are programs."""
    monkeypatch.setattr(commands.mt_grpo, "__file__", str(tmp_path / "mt_grpo" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr("mt_grpo.servers._BESIDE", tmp_path)
    return tmp_path


def test_env_names_versions_and_devices_and_no_secret(facts, prints, monkeypatch):
    for name in ("VLLM_API_KEY", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "a-secret-value")
    found = facts()
    packages = ("trl", "transformers", "torch", "accelerate", "peft", "datasets")
    assert found.items() >= {"mt-grpo": __version__, "python": platform.python_version()}.items()
    assert found.items() >= {name: version(name) for name in packages}.items()
    assert found.keys() >= {"git commit", "OS", "vllm", "deepspeed", "vllm in .venv-vllm", "NVIDIA driver"}
    assert found.keys() >= {"CUDA of torch", "cores", "memory"} and any("device" in name for name in found)
    printed = prints("env")
    assert "a-secret-value" not in printed and str(Path.home()) not in printed
    assert socket.gethostname() not in printed.split()


def test_env_says_what_is_missing(facts, elsewhere, monkeypatch):
    monkeypatch.setattr(commands, "_PACKAGES", ("trl", "a-package-that-nobody-has"))
    monkeypatch.setenv("PATH", str(elsewhere))
    missing = ("a-package-that-nobody-has", "vllm in .venv-vllm", "NVIDIA driver")
    assert facts().items() >= {"git commit": "no checkout", **dict.fromkeys(missing, "not installed")}.items()


def test_env_finds_the_server_of_the_checkout(facts, elsewhere):
    installed = elsewhere / ".venv-vllm" / "lib" / "python3.12" / "site-packages" / "vllm-0.31.2.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.2\n")
    assert facts()["vllm in .venv-vllm"] == "0.31.2"


@pytest.mark.parametrize(("status", "said"), [("0", "580.65.06"), ("9", "nvidia-smi fails")])
def test_env_asks_for_the_driver(facts, elsewhere, status, said):
    (elsewhere / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '580.65.06\\n580.65.06\\n'\nexit {status}\n")
    (elsewhere / "nvidia-smi").chmod(0o755)
    assert facts()["NVIDIA driver"] == said


# recipes


def test_every_recipe_ships_and_says_what_it_is(prints):
    listed = dict(line.split("  ", 1) for line in prints("recipes", "ls").splitlines())
    assert list(listed) == sorted(str(path.relative_to(ROOT)) for path in LISTED)
    assert len({text.strip() for text in listed.values()}) == len(listed)
    assert all(text.endswith(".") and len(text) > 20 for text in listed.values())


@pytest.mark.parametrize(
    ("recipe", "description"),
    [
        ("# Qwen2.5-7B with\n# a search. Needs 7 GPUs.\nbeta: 0", "Qwen2.5-7B with a search."),
        ("# yaml-language-server: $schema=schema.json\n# A search.\n\n# Model\nbeta: 0", "A search."),
        ("# yaml-language-server: $schema=schema.json\n\n# A search.\nbeta: 0", "A search."),
        ("# no full stop\nbeta: 0", "no full stop"),
        ("beta: 0\n# Late.", ""),
    ],
)
def test_a_recipe_is_described_by_its_first_sentence(recipe, description):
    assert _describe(recipe) == description


@pytest.mark.parametrize("name", ["quickstart.yaml", "quickstart", "Qwen/gsm8k", "accelerate/zero3.yaml"])
def test_a_recipe_is_copied_here(name, tmp_path, monkeypatch, prints):
    monkeypatch.chdir(tmp_path)
    printed = prints("recipes", "cp", name)
    (copy,) = tmp_path.iterdir()
    assert printed == f"{copy.name}\n"
    text, original = copy.read_text(), shipped()[f"{name.removesuffix('.yaml')}.yaml"].read_text()
    editors = "# yaml-language-server: $schema="
    assert text.startswith(editors) == original.startswith(editors) == ("accelerate" not in name)
    if "accelerate" not in name:
        schema, *rest = text.split("\n")
        assert "learning_rate" in json.loads(Path(schema.removeprefix(editors)).read_text())["properties"]
        assert rest == original.split("\n")[1:]
    assert yaml.safe_load(text) == yaml.safe_load(original)


@pytest.mark.parametrize("folder", ["sql", "cluster"])
def test_what_belongs_together_is_copied_as_one_folder(folder, tmp_path, prints, refused):
    printed = prints("recipes", "cp", folder, tmp_path).splitlines()
    files = [path.name for path in (ROOT / folder).iterdir() if path.is_file()]
    assert sorted(Path(line).relative_to(tmp_path / folder).name for line in printed) == sorted(files)
    for name in files:
        if not name.endswith("sql.yaml"):  # whose first line names the schema of this package
            assert (tmp_path / folder / name).read_bytes() == (ROOT / folder / name).read_bytes()
    assert "File exists; give another place" in refused("recipes", "cp", folder, tmp_path)


def test_copying_takes_a_folder_or_a_file_and_overwrites_nothing(tmp_path, prints, refused):
    (tmp_path / "link.yaml").symlink_to("elsewhere.yaml")
    for place in (tmp_path, tmp_path / "mine.yaml"):
        prints("recipes", "cp", "quickstart.yaml", place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml", "mine.yaml", "quickstart.yaml"]
    (tmp_path / "quickstart.yaml").write_text("mine")
    for place in (tmp_path, tmp_path / "quickstart.yaml", tmp_path / "link.yaml"):
        said = refused("recipes", "cp", "quickstart.yaml", place)
        assert "is there already: remove it, or give another place" in said
    assert (tmp_path / "quickstart.yaml").read_text() == "mine" and not (tmp_path / "elsewhere.yaml").exists()


# completion: the script for bash in a real bash, the others where there is such a shell


@pytest.fixture(scope="module")
def fields() -> list[str]:
    parser = TrlParser((MTGRPOScriptArguments, MTGRPOConfig, ModelConfig))
    return sorted({action.dest for action in parser._actions} - {"help"})


@pytest.fixture
def complete(prints, tmp_path):
    """What bash offers for the last word of a line, in a folder with a recipe, a note and a folder."""
    (tmp_path / "completion.bash").write_text(prints("completion", "bash"))
    here = tmp_path / "here"
    (here / "runs").mkdir(parents=True)
    for name in ("my recipe.yaml", "runs/config.yaml", "notes.txt"):
        (here / name).touch()

    def run(line: str) -> list[str]:
        sets = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_mt_grpo'
        code = f"{sets}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        words = [str(tmp_path / "completion.bash"), "mt-grpo", *line.split(" ")]
        command = ["bash", "--norc", "-c", code, "bash", *words]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
        assert not done.stderr
        return [line for line in done.stdout.splitlines() if line]

    return run


COMPLETED = {
    "tr": ["train"],
    "re": ["recipes"],
    "ru": ["runs"],
    "--v": ["--version"],
    "": [*COMMANDS],
    "train r.yaml --loss_type b": ["bnpo"],
    "serve --history ": [*OPTIONS["history"].names],
    "export run --to ": [*FORMS],
    "train ": ["my recipe.yaml", "runs"],
    "rollout --config ": ["my recipe.yaml", "runs"],
    "train --dry_run ": ["my recipe.yaml", "runs"],
    "serve runs/": ["runs/config.yaml"],
    "train --accelerate_config zero": ["zero2", "zero3"],
    "doctor --accelerate_config zero": ["zero2", "zero3"],
    "train --accelerate_config my": ["my recipe.yaml"],
    "recipes ": ["ls", "cp"],
    "recipes cp Qwen/gsm8k.": ["Qwen/gsm8k.yaml"],
    "completion b": ["bash"],
    "env ": [],
    "credit r": ["runs"],
    "credit runs --st": ["--step"],
    "view r": ["runs"],
    "compare runs --j": ["--json"],
    "view runs --p": ["--port"],
}


def test_words_are_completed(complete):
    assert {line: sorted(complete(line)) for line in COMPLETED} == {
        line: sorted(words) for line, words in COMPLETED.items()
    }


LAUNCHED = {"--accelerate_config", "--num_processes"}


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("train", {"--dry_run", "--trust", *LAUNCHED, *(f"--{name}" for name in OF_HOSTS)}),
        (
            "rollout",
            {"--num_prompts", "--audit", "--save", "--trust", "--model", "--keep", "--difficulty", "--api_key_env"}
            | {"--prices", "--again", "--conversation", "--turn"},
        ),
        ("serve", {"--trust", "--replicas", "--checkpoint"}),
        ("chat", {"--trust", "--checkpoint", "--server"}),
        ("doctor", {"--trust", "--gpu", "--gpu_memory", "--calibrate", "--suggest", "--probe", "--json", *LAUNCHED}),
    ],
)
def test_options_of_recipes_are_completed(complete, fields, command, own):
    assert complete(f"{command} --advantage_") == ["--advantage_estimator"]
    offered, of_recipes = set(complete(f"{command} recipe.yaml --")), {f"--{name}" for name in fields}
    assert of_recipes <= offered and offered - of_recipes == {"--config", "--help", "--help-all", *own}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_holds_all_there_is_to_complete(prints, fields, shell):
    text = prints("completion", shell)
    assert not re.search(r"@[A-Z]+@", text)
    assert shell != "zsh" or "== (eval|file) ]]" in text  # so that `source <(...)` registers it
    prefix = "" if shell == "fish" else "--"
    assert {*COMMANDS, "zero3", *(prefix + name for name in fields)} <= set(re.findall(r"[\w-]+", text))
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
