"""
Recipes: a YAML file and command-line options over it, as dataclasses; and the JSON schema that is made from these.
"""

from __future__ import annotations

import argparse
import enum
import json
from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields
from importlib.metadata import version
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from trl import ModelConfig, ScriptArguments, TrlParser

from mt_grpo.app.request import Request
from mt_grpo.errors import ConfigError, libraries_may_refuse
from mt_grpo.options.table import OF_LIBRARIES, DataOptions, Option, options_of, with_options_in_docstring
from mt_grpo.options.values import parse_dataset_filter, parse_eval_datasets, parse_mapping, refuse_unknown
from mt_grpo.rewards import REWARDS
from mt_grpo.tools.loading import TOOLS
from mt_grpo.training.config import MTGRPOConfig, registered_names


@with_options_in_docstring
@dataclass
class MTGRPOScriptArguments(DataOptions, ScriptArguments):
    """TRL's script arguments; `dataset_name` is `embedded`, `triviaqa`, `gsm8k`, a file, a folder or a Hub id."""


@dataclass
class Recipe:
    """A recipe and its command line, parsed."""

    script: MTGRPOScriptArguments
    training: MTGRPOConfig
    model: ModelConfig

    def init_options(self) -> dict[str, Any]:
        """The options with which the model is loaded."""
        model = self.model
        named = {"revision": model.model_revision, "attn_implementation": model.attn_implementation}
        return {**named, "dtype": model.dtype, **(self.training.model_init_kwargs or {})}

    def resolved(self) -> dict[str, Any]:
        """
        Every option with its value, as plain YAML types, secrets masked as transformers does: a recipe of the same
        run. `generation_batch_size` follows from the others, and TRL refuses it beside `steps_per_generation`.
        """
        options = {**asdict(self.script), **asdict(self.model), **self.training.to_dict()}
        del options["generation_batch_size"]
        return json.loads(json.dumps(options, default=str))


DATACLASSES = (MTGRPOScriptArguments, MTGRPOConfig, ModelConfig)
"""The dataclasses that hold the options of a recipe."""


class _Parser(TrlParser):
    """TRL's parser, whose errors are the user's to mend."""

    def error(self, message: str) -> None:
        raise ConfigError(message[0].upper() + message[1:] + ".")


def build_recipe(request: Request) -> Recipe:
    """The options of a request, as TRL's parser and the dataclasses take them."""
    parser = _Parser(DATACLASSES, allow_abbrev=False)
    known = {action.dest for action in parser._actions}
    for key in request.recipe:
        refuse_unknown(key, f"The key {key!r} in {request.path}", known)
    for argument in request.arguments:
        option = argument.split("=")[0]
        if option.startswith("--"):
            refuse_unknown(option, f"The option {option!r}", parser._option_string_actions)
    parser.set_defaults_with_config(**request.recipe)
    with libraries_may_refuse("The options do not fit together", TypeError, AttributeError, OverflowError):
        script, training, model = parser.parse_args_into_dataclasses(request.arguments)
    layers: Any = model.lora_target_modules
    if isinstance(layers, str) and layers.isidentifier():  # TRL makes a pattern of whole paths of a single name
        model.lora_target_modules = [layers]
    script.column_mapping = _columns(script.column_mapping)
    script.eval_datasets = parse_eval_datasets(script.eval_datasets)
    script.dataset_filter = parse_dataset_filter(script.dataset_filter)
    if script.eval_datasets and not training.do_eval:
        raise ConfigError("`eval_datasets` are measured where `do_eval` is true: set it, or leave them out.")
    return Recipe(script, training, model)


def _columns(given: object) -> dict[str, str] | None:
    """The columns to rename, as a recipe or a command line gives them."""
    mapping = parse_mapping(given, "column_mapping")
    if mapping is None:
        return None
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in (*mapping, *mapping.values())):
        raise ConfigError(
            f"`column_mapping` is {given!r}: give a mapping from the wanted column to the one that is there, such as "
            "`{prompt: question}`."
        )
    return mapping


# The JSON schema that is made from the dataclasses

_LIBRARIES = ("trl", "transformers")  # whose options are among those of a recipe


def build_schema(options: Sequence[type] = DATACLASSES) -> dict[str, Any]:
    """A JSON schema (draft 7, which editors know) of a recipe."""
    items = {"tools": list(TOOLS), "turn_reward_funcs": list(REWARDS), "outcome_reward_funcs": list(REWARDS)}
    actions = {action.dest: action for action in reversed(_Parser(options)._actions)}
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
        "x-versions": {library: version(library) for library in _LIBRARIES},
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
