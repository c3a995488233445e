"""The options of a recipe, as the shipped JSON schema has them: what they take, known before torch is imported."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose

SHIPPED = Path(__file__).with_name("schema.json")

_KINDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
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
class SchemaOption:
    """What the schema says of an option."""

    description: str = ""
    kinds: tuple[str, ...] = ("string",)
    default: Any = None
    minimum: int | None = None
    maximum: int = 2**32 - 1
    items: SchemaOption | None = None
    names: tuple[Any, ...] = ()
    examples: tuple[str, ...] = ()
    flag: bool = False
    many: bool = False
    group: str | None = None
    of_server: bool = False
    owner: str | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> SchemaOption:
        """An option as JSON has it."""
        kinds = said["type"] if isinstance(said["type"], list) else [said["type"]]
        items = cls.of(said["items"]) if "items" in said else None
        plain = {name: said[name] for name in ("description", "default", "minimum") if name in said}
        marks = {name.removeprefix("x-").replace("-", "_"): said[name] for name in said if name.startswith("x-")}
        names, examples = tuple(said.get("enum", ())), tuple(said.get("examples", ()))
        return cls(**plain, **marks, kinds=tuple(kinds), items=items, names=names, examples=examples)

    @property
    def summary(self) -> str:
        """The first sentence about it."""
        return re.split(r"(?<=\.)\s", self.description)[0]

    @property
    def wanted(self) -> str:
        """What it takes, in words."""
        words = [_KINDS[kind][0] for kind in self.kinds if kind != "null"]
        least = "" if self.minimum is None else f" from {self.minimum} on"
        return " or ".join(words) + least

    @property
    def words(self) -> list[str]:
        """The texts that it takes, if it takes no others."""
        return [name for name in self.names if isinstance(name, str)]

    def read(self, value: object) -> Any:
        """The value that a text stands for, where the option takes no text; any other value as it is."""
        if isinstance(value, list) and self.items is not None:
            return [self.items.read(item) for item in value]
        if isinstance(value, float) and value.is_integer() and "integer" in self.kinds and "number" not in self.kinds:
            return int(value)
        if not isinstance(value, str) or "string" in self.kinds:
            return value
        if "boolean" in self.kinds and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        for kind, read in (("integer", int), ("number", float)):
            if kind in self.kinds:
                with contextlib.suppress(ValueError):
                    return read(value)
        return value

    def _takes(self, value: object) -> bool:
        # in Python, true and false are whole numbers too
        kinds = (kind for kind in self.kinds if isinstance(value, bool) == (kind == "boolean"))
        kind = next((kind for kind in kinds if isinstance(value, _KINDS[kind][1])), None)
        if kind == "array" and self.items is not None:
            return all(map(self.items._takes, value))
        return kind is not None and not (self.minimum is not None and value is not None and not value >= self.minimum)

    def check(self, name: str, value: object, label: str, in_file: bool) -> None:
        """Holds a value against the types of the option, and the names that it may be."""
        if self._takes(value):
            if self.names and value not in self.names:
                choose(name, value, self.words)
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(one, int) and abs(one) > self.maximum for one in numbers):
                raise ConfigError(f"{label} is beyond {self.maximum}: give a smaller number.")
            return
        if value is None:
            raise ConfigError(f"{label} is empty: give it {self.wanted}, or leave it out.")
        if in_file and not isinstance(value, list | dict) and "string" in self.kinds:
            read_as = {True: ", as YAML reads `yes` and `on`", False: ", as YAML reads `no` and `off`"}
            as_bool = read_as[value] if isinstance(value, bool) else ""
            raise ConfigError(f"{label} is {_show(value)}{as_bool}: it takes {self.wanted}, so put it in quotes.")
        if isinstance(value, list) and self.items is not None:
            raise ConfigError(f"{label} is {_show(value)}: it takes a list, each item {self.items.wanted}.")
        what = ", a list" if isinstance(value, list) else ", a mapping" if isinstance(value, dict) else ""
        raise ConfigError(f"{label} is {_show(value)}{what}: it takes {self.wanted}.")


@dataclass(frozen=True)
class Schema:
    """The options of a recipe by name; `exact` where the installed libraries are those that it was made from."""

    options: dict[str, SchemaOption]
    exact: bool

    def decides(self, name: str) -> bool:
        """Whether what the schema says of an option holds for the installed libraries."""
        return self.exact or self.options[name].owner == "mt_grpo"

    def check(self, values: Mapping[str, Any], file: Path) -> None:
        """Holds what a file says of options against their types; options of another version are passed over."""
        for name in filter(self.options.__contains__, values):
            if values[name] is not None and self.decides(name):
                option = self.options[name]
                option.check(name, option.read(values[name]), f"`{name}` in {file}", in_file=True)

    @property
    def defaults(self) -> dict[str, Any]:
        """The values of a recipe that says nothing."""
        return {name: option.default for name, option in self.options.items()}


@functools.cache
def load_schema() -> Schema:
    """The schema that ships with the package."""
    schema = json.loads(SHIPPED.read_text(encoding="utf-8"))
    exact = all(version(library) == made_from for library, made_from in schema["x-versions"].items())
    return Schema({name: SchemaOption.of(said) for name, said in schema["properties"].items()}, exact)


def _show(value: object) -> str:
    """A value as a sentence names it."""
    text = json.dumps(value) if isinstance(value, bool) else str(value)
    if isinstance(value, str):
        text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
