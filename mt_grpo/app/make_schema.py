"""
`mt-grpo schema`: the JSON schema of recipes, made from the dataclasses that hold their options. Apart from `schema`,
which reads the shipped one before torch is imported.
"""

from __future__ import annotations

import argparse
import enum
import json
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from importlib.metadata import version
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from mt_grpo.errors import ConfigError
from mt_grpo.options.table import OF_LIBRARIES, Option, options_of

HELP = """usage: mt-grpo schema

Print the JSON schema of a recipe, with the options of the TRL and transformers that are installed. An editor completes
and checks a recipe by it where the recipe's first line names a file that holds it:

  mt-grpo schema > recipe.schema.json

  # yaml-language-server: $schema=recipe.schema.json
"""

LIBRARIES = ("trl", "transformers")
"""Whose options are among those of a recipe."""


def main(arguments: list[str]) -> int:
    """Prints the schema of the installed libraries."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if arguments:
        raise ConfigError(f"`mt-grpo schema` takes no arguments, and {arguments[0]!r} is given.")
    print(json.dumps(build_schema(), indent=1))
    return 0


def build_schema(options: Sequence[type] | None = None) -> dict[str, Any]:
    """A JSON schema (draft 7, which editors know) of a recipe."""
    from mt_grpo.app.recipe import DATACLASSES, RecipeParser
    from mt_grpo.rewards import REWARDS
    from mt_grpo.tools.loading import TOOLS
    from mt_grpo.training.config import registered_names

    options = DATACLASSES if options is None else options
    items = {"tools": list(TOOLS), "turn_reward_funcs": list(REWARDS), "outcome_reward_funcs": list(REWARDS)}
    actions = {action.dest: action for action in reversed(RecipeParser(options)._actions)}
    properties = {}
    for holder in options:
        hints, ours = get_type_hints(holder), options_of(holder)
        for field in fields(holder):
            if field.init:
                owner = next(base for base in holder.__mro__ if field.name in vars(base).get("__annotations__", {}))
                described = ours.get(field.name) or OF_LIBRARIES.get(field.name, Option())
                properties[field.name] = {
                    **_property(field, hints[field.name], actions[field.name], described),
                    "x-owner": "mt_grpo" if field.name in ours else owner.__module__.split(".")[0],
                }
    for name, known in registered_names().items():
        properties[name]["examples"] = known
    for name, known in items.items():
        properties[name]["items"]["examples"] = known
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of mt-grpo",
        "x-versions": {library: version(library) for library in LIBRARIES},
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _property(field: Field[Any], hint: Any, action: argparse.Action, described: Option) -> dict[str, Any]:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    default = json.loads(json.dumps(default.value if isinstance(default, enum.Enum) else default, default=str))
    kinds, item = _types(hint)
    flag, many = action.nargs == "?", action.nargs == "+"
    if item == "string":  # one name stands for a list of one
        kinds.append("string")
    kinds += [described.also] if described.also and not item else []
    kinds += ["null"] * (default is None) + ["boolean"] * flag
    takes = list(dict.fromkeys(kinds))
    texts = [described.description, *([] if field.metadata.get("help") == described.description else [action.help])]
    option: dict[str, Any] = {
        "description": " ".join(" ".join(filter(None, texts)).replace("%%", "%").split()),
        "type": takes[0] if len(takes) == 1 else takes,
        "default": default,
    }
    if item:
        option["items"] = {"type": [item, described.also] if described.also else item}
    choices = described.names or action.choices
    if choices:
        option["enum"] = [*choices, *([None] if "null" in takes else [])]
    marks = {"x-flag": flag, "x-many": many, "x-group": described.group, "x-of-server": described.of_server}
    return option | {name: value for name, value in marks.items() if value}


def _types(hint: Any) -> tuple[list[str], str | None]:
    """The JSON types of a type hint, and the type of its items where it may be a list."""
    schema = TypeAdapter(hint).json_schema()

    def resolved(part: dict[str, Any]) -> dict[str, Any]:
        return schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part

    parts = [resolved(part) for part in schema.get("anyOf", [schema])]
    items = next((resolved(part["items"])["type"] for part in parts if "items" in part), None)
    return list(dict.fromkeys(part.get("type", "object") for part in parts)), items
