"""A recipe's YAML file: its keys with their lines, read so that nothing in it wins silently."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.app.shipped import shipped
from mt_grpo.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes the later of two equal keys, and `1e-3` for a text; here it is an error, and a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in lines and isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    f"The key {key.value!r} stands in {self.name} twice, in lines {lines[key.value]} and {line}: "
                    "leave one out."
                )
            if isinstance(key, yaml.ScalarNode):
                lines[key.value] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_file(path: str) -> tuple[dict[str, Any], dict[str, int]]:
    """
    Reads a recipe.

    Returns:
        Its keys with their values, and with the lines they stand in.

    Raises:
        ConfigError: If there is no such file, or it is not a YAML mapping, or a key stands in it twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"The recipe {path!r} does not exist{_beside(Path(path))}.") from None
    except IsADirectoryError:
        found = _recipes_in(Path(path))
        example = f", such as {str(found[0])!r}" if found else ", which holds none"
        raise ConfigError(f"The recipe {path!r} is a folder: give a YAML file in it{example}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The recipe {path!r} is no text in UTF-8: give a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"The recipe {path!r} cannot be read: {error.strerror}.") from None
    loader = _Loader(text)
    loader.name = path
    try:
        node = loader.get_single_node()
        recipe = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"The recipe {path!r} is not valid YAML: {' '.join(str(error).split())}.") from error
    finally:
        loader.dispose()
    if recipe is None:
        raise ConfigError(
            f"The recipe {path!r} is empty: it needs at least `model_name_or_path` and `dataset_name`, each with a "
            "value."
        )
    if not isinstance(recipe, dict):
        raise ConfigError(f"The recipe {path!r} is not a mapping of options to values: write lines `option: value`.")
    return recipe, {key.value: key.start_mark.line + 1 for key, _ in node.value}


def _recipes_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.y*ml") if path.is_file())


def _beside(path: Path) -> str:
    """The recipe beside a missing one that has nearly its name, as a clause."""
    names = {recipe.stem: recipe for recipe in _recipes_in(path.parent)}
    near = difflib.get_close_matches(path.stem, names, n=1)
    if near:
        return f"; the nearest is {str(names[near[0]])!r}"
    if path.name in {Path(name).name for name in shipped()}:
        name = next(name for name in shipped() if Path(name).name == path.name)
        return f"; one of that name ships with the package: `mt-grpo recipes cp {name}`"
    return ""
