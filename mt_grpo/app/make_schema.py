"""The JSON schema of recipes, made from the dataclasses that hold their options."""

from __future__ import annotations

import argparse
import enum
import json
import types
from dataclasses import MISSING, Field, fields
from importlib.metadata import version
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mt_grpo.app.recipe import OPTIONS, RecipeParser
from mt_grpo.options import HISTORIES, LOSS_TYPES, SCALES
from mt_grpo.rewards import REWARDS
from mt_grpo.tools.loading import TOOLS
from mt_grpo.training.config import registered_names

LIBRARIES = ("trl", "transformers")
"""Whose options are among those of a recipe."""

ALSO = {"resume_from_checkpoint": "boolean", "scale_rewards": "boolean", "env": "object"}
"""What an option takes beside its annotated type; a mapping `env` is TRL's block of variables."""

WITH_OPTIONS = ("turn_reward_funcs", "outcome_reward_funcs")
"""Lists of names each of which may be a mapping of the name and its options."""

CLOSED = ("forward", "tokenization_sanity_check_mode")
"""Options whose names nobody can add to."""

_JSON = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def build_schema() -> dict[str, Any]:
    """A JSON schema (draft 7, which editors know) of a recipe."""
    actions = {action.dest: action for action in reversed(RecipeParser(OPTIONS)._actions)}
    properties = {}
    for options in OPTIONS:
        hints = get_type_hints(options)
        for field in fields(options):
            if field.init:
                owner = next(base for base in options.__mro__ if field.name in vars(base).get("__annotations__", {}))
                properties[field.name] = {
                    **_property(field, hints[field.name], actions[field.name]),
                    "x-owner": owner.__module__.split(".")[0],
                }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of mt-grpo",
        "x-versions": {library: version(library) for library in LIBRARIES},
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _property(field: Field, hint: Any, action: argparse.Action) -> dict[str, Any]:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    default = json.loads(json.dumps(default.value if isinstance(default, enum.Enum) else default, default=str))
    takes, items = _types(hint)
    if items and items["type"] == "string":  # one name stands for a list of one
        takes.append("string")
    if default is None:
        takes.append("null")
    if field.name in ALSO:
        takes.append(ALSO[field.name])
    if action.nargs == "?":
        takes.append("boolean")
    takes = list(dict.fromkeys(takes))
    option = {
        "description": " ".join((action.help or "").replace("%%", "%").split()),
        "type": takes[0] if len(takes) == 1 else takes,
        "default": default,
    }
    if items:
        option["items"] = items | _names_of_items(field.name)
        if field.name in WITH_OPTIONS:
            option["items"]["type"] = ["string", "object"]
    choices = _choices(field.name, action)
    if choices:
        option["enum"] = [*choices, *([None] if "null" in takes else [])]
    elif field.name in registered_names():
        option["examples"] = registered_names()[field.name]
    if action.nargs == "?":
        option["x-flag"] = True
    if action.nargs == "+":
        option["x-many"] = True
    return option


def _types(hint: Any) -> tuple[list[str], dict[str, Any] | None]:
    """The JSON types of a type hint, and the schema of its items where it may be a list."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        parts = [_types(part) for part in get_args(hint)]
        items = next((items for _, items in parts if items), None)
        return list(dict.fromkeys(kind for kinds, _ in parts for kind in kinds)), items
    if origin is Literal:
        return [_JSON[type(value)] for value in get_args(hint)], None
    if hint is type(None):
        return ["null"], None
    if origin is list:
        return ["array"], {"type": _types(get_args(hint)[0])[0][0]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ["string"], None
    return [_JSON.get(origin or hint, "object")], None


def _choices(name: str, action: argparse.Action) -> list[Any]:
    """All values of an option that has few: those the parser knows, and those that are looked at only later."""
    later = {"history": HISTORIES, "loss_type": LOSS_TYPES, "scale_rewards": (*SCALES, True, False)}
    if name in CLOSED:
        return registered_names()[name]
    return list(later.get(name, action.choices or ()))


def _names_of_items(name: str) -> dict[str, Any]:
    known = {"tools": TOOLS, "turn_reward_funcs": REWARDS, "outcome_reward_funcs": REWARDS}
    return {"examples": list(known[name])} if name in known else {}
