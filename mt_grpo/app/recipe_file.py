"""Reads recipes, those of users and those that ship with the package, without torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.errors import ConfigError, refuse_first

CONFIG = "config.yaml"
"""The recipe of a run, in the run's folder."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes the later of two equal keys, and `1e-3` for a text; here it is an error, and a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"The key {key.value!r} stands in {self.name} twice, in lines {lines[key.value]} and {line}: "
                    "leave one out."
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_file(path: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Reads a recipe: its options, and the line of each."""
    what = f"The recipe {path!r}"
    return read_mapping(
        Path(path),
        what,
        f"{what} is empty: it needs at least `model_name_or_path` and `dataset_name`, each with a value.",
        f"{what} is not a mapping of options to values: write lines `option: value`.",
    )


def read_mapping(path: Traversable, what: str, if_empty: str, if_other: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping that a YAML file holds, and the line of each key. `what` begins sentences about it."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        loader.name = str(path)
        loader.deep_construct = True  # which refuses what refers to itself
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {_unreadable(Path(str(path)), error)}.") from None
    except ConfigError:
        raise
    # beside PyYAML's own, what it does not catch of numbers, dates, tags and depths
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid YAML: {' '.join(str(error).split())}.") from error
    refuse_first((content is None, if_empty), (not isinstance(content, dict), if_other))
    return content, {key.value: key.start_mark.line + 1 for key, _ in node.value}


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> str:
    """What is wrong with a recipe that cannot be read."""
    match error:
        case FileNotFoundError():
            return f"does not exist{_beside(path)}"
        case IsADirectoryError():
            found = recipes_in(path)
            example = f", such as {str(found[0])!r}" if found else ", which holds none"
            return f"is a folder: give a YAML file in it{example}"
        case UnicodeDecodeError():
            return "is no text in UTF-8: give a YAML file"
    return f"cannot be read: {error.strerror}"


_CLUSTER = "cluster"  # folder of what starts a run on several nodes, which is YAML of others


def shipped() -> dict[str, Traversable]:
    """The files by name, which is their path in the folder `recipes`, e.g. `Qwen/gsm8k.yaml`."""
    return dict(sorted(_walk(files("mt_grpo") / "recipes", "")))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != _CLUSTER:
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name, entry


def recipes_in(folder: Path) -> list[Path]:
    """The YAML files in a folder."""
    return sorted(path for path in folder.glob("*.y*ml") if path.is_file())


def _beside(path: Path) -> str:
    """The recipe beside a missing one that has nearly its name, as a clause."""
    names = {recipe.stem: recipe for recipe in recipes_in(path.parent)}
    near = difflib.get_close_matches(path.stem, names, n=1)
    if near:
        return f"; the nearest is {str(names[near[0]])!r}"
    name = next((name for name in shipped() if Path(name).name == path.name), None)
    if name is not None:
        return f"; one of that name ships with the package: `mt-grpo recipes cp {name}`"
    return ""
