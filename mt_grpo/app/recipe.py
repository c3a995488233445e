"""Recipes: a YAML file and command-line options over it, as dataclasses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from trl import ModelConfig, ScriptArguments, TrlParser

from mt_grpo.app.request import Request
from mt_grpo.errors import ConfigError, libraries_may_refuse
from mt_grpo.options.names import refuse_unknown
from mt_grpo.options.table import DataOptions, with_options_in_docstring
from mt_grpo.options.values import parse_mapping
from mt_grpo.training.config import MTGRPOConfig


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


class RecipeParser(TrlParser):
    """TRL's parser, whose errors are the user's to mend."""

    def error(self, message: str) -> None:
        raise ConfigError(message[0].upper() + message[1:] + ".")


def build_recipe(request: Request) -> Recipe:
    """The options of a request, as TRL's parser and the dataclasses take them."""
    parser = RecipeParser(DATACLASSES, allow_abbrev=False)
    known = {action.dest for action in parser._actions}
    for key in request.recipe:
        refuse_unknown(key, f"The key {key!r} in {request.path}", known)
    for argument in request.arguments:
        option = argument.split("=")[0]
        if option.startswith("--"):
            refuse_unknown(option, f"The option {option!r}", parser._option_string_actions)
    parser.set_defaults_with_config(**request.recipe)
    with libraries_may_refuse("The options do not fit together"):
        script, training, model = parser.parse_args_into_dataclasses(request.arguments)
    script.column_mapping = _columns(script.column_mapping)
    return Recipe(script, training, model)


def _columns(given: object) -> dict[str, str] | None:
    """The columns to rename, as a recipe or a command line gives them."""
    mapping = parse_mapping(given, "column_mapping")
    if mapping is None:
        return None
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for pair in mapping.items() for name in pair):
        raise ConfigError(
            f"`column_mapping` is {given!r}: give a mapping from the wanted column to the one that is there, such as "
            "`{prompt: question}`."
        )
    return mapping
