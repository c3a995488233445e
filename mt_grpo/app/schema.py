"""The options of a recipe, as the shipped JSON schema has them: what they take, known before torch is imported."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose

SHIPPED = Path(__file__).with_name("schema.json")

KINDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "integer": ("a whole number", int),
    "number": ("a number", (int, float)),
    "boolean": ("true or false", bool),
    "string": ("text", str),
    "array": ("a list", list),
    "object": ("a mapping", dict),
    "null": ("nothing", NoneType),
}
"""The types of JSON schema: in plain words, and Python's."""

_BOOLEANS = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)
_SHOWN = 60


@dataclass(frozen=True)
class Schema:
    """"""

    properties: dict[str, dict[str, Any]]
    exact: bool

    def decides(self, name: str) -> bool:
        """Whether what the schema says of an option holds for the installed libraries."""
        return self.exact or self.properties[name].get("x-owner") == "mt_grpo"


@functools.cache
def load_schema() -> Schema:
    """The schema that ships with the package."""
    schema = json.loads(SHIPPED.read_text(encoding="utf-8"))
    exact = all(version(library) == made_from for library, made_from in schema["x-versions"].items())
    return Schema(schema["properties"], exact)


def kinds(option: dict[str, Any]) -> list[str]:
    """The JSON types that an option takes."""
    return option["type"] if isinstance(option["type"], list) else [option["type"]]


def summary(option: dict[str, Any]) -> str:
    """The first sentence about an option."""
    return re.split(r"(?<=\.)\s", option["description"])[0]


def wanted(option: dict[str, Any]) -> str:
    """What an option takes, in words."""
    words = [KINDS[kind][0] for kind in kinds(option) if kind != "null"]
    least = f" from {option['minimum']} on" if "minimum" in option else ""
    return " or ".join(words) + least


def from_text(option: dict[str, Any], value: Any) -> Any:
    """The value that a text stands for, where the option takes no text; any other value as it is."""
    if isinstance(value, list) and "items" in option:
        return [from_text(option["items"], item) for item in value]
    takes = kinds(option)
    if isinstance(value, float) and value.is_integer() and "integer" in takes and "number" not in takes:
        return int(value)
    if not isinstance(value, str) or "string" in takes:
        return value
    if "boolean" in takes and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    for kind, read in (("integer", int), ("number", float)):
        if kind in takes:
            try:
                return read(value)
            except ValueError:
                continue
    return value


def _is_taken(option: dict[str, Any], value: Any) -> bool:
    # in Python, true and false are whole numbers too
    takes = (kind for kind in kinds(option) if isinstance(value, bool) == (kind == "boolean"))
    kind = next((kind for kind in takes if isinstance(value, KINDS[kind][1])), None)
    if kind == "array" and "items" in option:
        return all(_is_taken(option["items"], item) for item in value)
    return kind is not None and not ("minimum" in option and value < option["minimum"])


def check_type(name: str, option: dict[str, Any], value: Any, label: str, in_file: bool) -> None:
    """Holds a value against the type of its option, and the names that it may be."""
    if _is_taken(option, value):
        if "enum" in option and value not in option["enum"]:
            choose(name, value, [choice for choice in option["enum"] if isinstance(choice, str)])
        return
    if value is None:
        raise ConfigError(f"{label} is empty: give it {wanted(option)}, or leave it out.")
    plain = in_file and not isinstance(value, list | dict)
    if plain and "string" in kinds(option):
        as_bool = (
            f", as YAML reads {'`yes` and `on`' if value else '`no` and `off`'}" if isinstance(value, bool) else ""
        )
        raise ConfigError(f"{label} is {show(value)}{as_bool}: it takes {wanted(option)}, so put it in quotes.")
    if isinstance(value, list) and "array" in kinds(option):
        raise ConfigError(f"{label} is {show(value)}: it takes a list, each item {wanted(option['items'])}.")
    what = ", a list" if isinstance(value, list) else ", a mapping" if isinstance(value, dict) else ""
    raise ConfigError(f"{label} is {show(value)}{what}: it takes {wanted(option)}.")


def show(value: Any) -> str:
    """A value as a sentence names it."""
    text = json.dumps(value) if isinstance(value, bool) else str(value)
    if isinstance(value, str):
        text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
