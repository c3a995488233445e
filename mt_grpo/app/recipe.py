"""Recipes: a YAML file and command-line options over it, every key checked."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from trl import ModelConfig, ScriptArguments, TrlParser

from mt_grpo.app.libraries import libraries_may_refuse
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.training.config import MTGRPOConfig

_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


@dataclass
class MTGRPOScriptArguments(ScriptArguments):
    """
    TRL's script arguments; `dataset_name` is `embedded`, `triviaqa`, `gsm8k`, a file, a folder or a Hub id.

    Args:
        column_mapping (`dict`, *optional*): Columns to rename, as `{wanted: present}`, e.g. `{prompt: question}`.
    """

    column_mapping: dict[str, str] | str | None = field(
        default=None, metadata={"help": "Columns to rename, as {wanted: present}."}
    )


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


class _Parser(TrlParser):
    def error(self, message: str) -> None:
        raise ConfigError(message[0].upper() + message[1:] + ".")


def parse_recipe(arguments: list[str]) -> Recipe:
    """
    Parses `--config R.yaml --field value ...`.

    Args:
        arguments (`list[str]`): The command line, program name excluded.

    Raises:
        ConfigError: For an unknown key (naming the nearest), `--config=FILE`, a file that is not a YAML mapping, or a
            wrong value.
    """
    parser = _Parser((MTGRPOScriptArguments, MTGRPOConfig, ModelConfig), allow_abbrev=False)
    known = {action.dest for action in parser._actions}
    arguments = list(arguments)
    for argument in arguments:
        name = argument.split("=")[0]
        if name == "--config" and "=" in argument:
            raise ConfigError(f"Write `--config {argument.split('=', 1)[1]}` with a space: `--config=` is not read.")
        if name.startswith("--") and name != "--config" and name not in parser._option_string_actions:
            raise ConfigError(f"The option {name!r} is unknown{did_you_mean(name, parser._option_string_actions)}.")
    if "--config" in arguments:
        index = arguments.index("--config")
        if index + 1 == len(arguments):
            raise ConfigError("`--config` needs the path of a recipe behind it.")
        recipe = read_recipe(arguments[index + 1], known)
        del arguments[index : index + 2]
        parser.set_defaults_with_config(**recipe)
    with libraries_may_refuse("The options do not fit together"):
        script, training, model = parser.parse_args_into_dataclasses(arguments)
    if isinstance(script.column_mapping, str):
        script.column_mapping = yaml.safe_load(script.column_mapping)
    if not model.model_name_or_path:
        raise ConfigError("The recipe names no model: set `model_name_or_path`.")
    if not script.dataset_name:
        raise ConfigError("The recipe names no dataset: set `dataset_name`.")
    return Recipe(script, training, model)


def read_recipe(path: str, known: set[str]) -> dict[str, Any]:
    """
    Reads a YAML recipe: keys checked, numbers such as `1e-3` read as numbers, an `env:` block of variables set in the
    process as TRL does (an `env:` string is the environment's class).
    """
    if not Path(path).is_file():
        raise ConfigError(f"The recipe {path!r} does not exist.")
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"The recipe {path!r} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(recipe, dict):
        raise ConfigError(f"The recipe {path!r} is not a mapping of options to values.")
    for key in recipe:
        if key not in known:
            raise ConfigError(f"The key {key!r} in {path} is unknown{did_you_mean(key, known)}.")
    if isinstance(recipe.get("env"), dict):
        os.environ.update({name: str(value) for name, value in recipe.pop("env").items()})
    return _numbers(recipe)


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` as text; inside nested options nothing else would turn it into a number."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and _FLOAT.fullmatch(value):
        return float(value)
    return value
