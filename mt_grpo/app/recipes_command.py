"""`mt-grpo recipes`: the recipes that ship with the package, listed and copied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.app.schema import SHIPPED
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean

_ACCELERATE = "accelerate/"
_CLUSTER = "cluster"
"""Folder of what starts a run on several nodes, which is YAML of others."""
_EDITORS = "# yaml-language-server: $schema="

USAGE = """usage: mt-grpo recipes ls
       mt-grpo recipes cp NAME [DEST]

  ls    lists the recipes, and the accelerate configurations, with a line about each
  cp    copies one to DEST, a folder (this one where none is given) or a file; overwrites nothing
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


def describe(recipe: str) -> str:
    """
    The first sentence of the comment that a recipe begins with. The line that tells editors of the
    schema is no part of it.
    """
    lines = []
    for line in recipe.lstrip().splitlines():
        if not (line or lines):
            continue
        if not line.startswith("#"):
            break
        if not line.startswith(_EDITORS):
            lines.append(line.lstrip("# "))
    return re.split(r"(?<=\.)\s", " ".join(lines))[0]


def run(arguments: list[str]) -> int:
    """`mt-grpo recipes ls` and `mt-grpo recipes cp NAME [DEST]`."""
    match arguments:
        case ["-h" | "--help"]:
            print(USAGE, end="")
        case ["ls"]:
            texts = {name: describe(entry.read_text(encoding="utf-8")) for name, entry in shipped().items()}
            width = max(map(len, texts))
            for name, text in texts.items():
                print(f"{name:{width}}  {text}")
        case ["cp", name]:
            print(copy(name, Path()))
        case ["cp", name, destination]:
            print(copy(name, Path(destination)))
        case _:
            raise ConfigError("Write `mt-grpo recipes ls`, or `mt-grpo recipes cp NAME [DEST]`.")
    return 0


def copy(name: str, destination: Path) -> Path:
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
