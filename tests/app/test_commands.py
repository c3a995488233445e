"""Commands that need no trainer: they answer at once, and refuse what they cannot do with one sentence."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from support.recipes import LISTED, ROOT

from mt_grpo import __version__
from mt_grpo.app import commands
from mt_grpo.app.commands import _describe, shipped
from mt_grpo.cli import main

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


# env


def test_env_names_versions_and_devices(capsys):
    assert main(["env"]) == 0
    facts = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["mt-grpo"] == __version__ and facts["python"] == platform.python_version()
    for name in ("trl", "transformers", "torch", "accelerate", "peft", "datasets"):
        assert facts[name] == version(name)
    assert {"git commit", "OS", "vllm", "deepspeed", "vllm in .venv-vllm", "NVIDIA driver"} <= facts.keys()
    assert {"CUDA of torch", "cores", "memory"} <= facts.keys() and any("device" in name for name in facts)


def test_env_tells_no_secret(capsys, monkeypatch):
    for name in ("VLLM_API_KEY", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "a-secret-value")
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert "a-secret-value" not in printed and str(Path.home()) not in printed
    assert socket.gethostname() not in printed.split()


def test_env_says_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(commands, "_PACKAGES", ("trl", "a-package-that-nobody-has"))
    monkeypatch.setattr(commands.mt_grpo, "__file__", str(tmp_path / "mt_grpo" / "__init__.py"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["env"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "a-package-that-nobody-has not installed" in printed and "git commit no checkout" in printed
    assert "vllm in .venv-vllm not installed" in printed and "NVIDIA driver not installed" in printed


def test_env_finds_the_server_of_the_checkout(capsys, monkeypatch, tmp_path):
    installed = tmp_path / ".venv-vllm" / "lib" / "python3.12" / "site-packages" / "vllm-0.31.2.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.2\n")
    monkeypatch.setattr(commands.mt_grpo, "__file__", str(tmp_path / "mt_grpo" / "__init__.py"))
    assert main(["env"]) == 0
    assert "vllm in .venv-vllm 0.31.2" in " ".join(capsys.readouterr().out.split())


SMI = "#!/bin/sh\nprintf '580.65.06\\n580.65.06\\n'\nexit STATUS\n"


@pytest.mark.parametrize(("status", "said"), [("0", "580.65.06"), ("9", "nvidia-smi fails")])
def test_env_asks_for_the_driver(capsys, monkeypatch, tmp_path, status, said):
    (tmp_path / "nvidia-smi").write_text(SMI.replace("STATUS", status))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["env"]) == 0
    assert f"NVIDIA driver {said} " in " ".join(capsys.readouterr().out.split())


# recipes


def test_every_recipe_ships_and_says_what_it_is(capsys):
    assert main(["recipes", "ls"]) == 0
    listed = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
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
def test_a_recipe_is_copied_here(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "cp", name]) == 0
    (copy,) = tmp_path.iterdir()
    assert capsys.readouterr().out == f"{copy.name}\n"
    original = shipped()[name if name.endswith(".yaml") else f"{name}.yaml"].read_text()
    editors = "# yaml-language-server: $schema="
    assert copy.read_text().startswith(editors) == original.startswith(editors) == ("accelerate" not in name)
    if "accelerate" not in name:
        schema = copy.read_text().split("\n")[0].removeprefix(editors)
        assert "learning_rate" in json.loads(Path(schema).read_text())["properties"]
        assert copy.read_text().split("\n")[1:] == original.split("\n")[1:]
    assert yaml.safe_load(copy.read_text()) == yaml.safe_load(original)


def test_copying_takes_a_folder_or_a_file_and_overwrites_nothing(tmp_path, capsys):
    (tmp_path / "link.yaml").symlink_to("elsewhere.yaml")
    places = (tmp_path, tmp_path / "mine.yaml")
    assert [main(["recipes", "cp", "quickstart.yaml", str(place)]) for place in places] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml", "mine.yaml", "quickstart.yaml"]
    (tmp_path / "quickstart.yaml").write_text("mine")
    for place in (tmp_path, tmp_path / "quickstart.yaml", tmp_path / "link.yaml"):
        assert main(["recipes", "cp", "quickstart.yaml", str(place)]) == 1
        assert "is there already: remove it, or give another place" in capsys.readouterr().err
    assert (tmp_path / "quickstart.yaml").read_text() == "mine" and not (tmp_path / "elsewhere.yaml").exists()


@pytest.mark.parametrize("command", ["recipes", "env", "completion", "view"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_each_command_shows_its_usage(command, flag, capsys):
    assert main([command, flag]) == 0
    assert capsys.readouterr().out.startswith(f"usage: mt-grpo {command}")
