"""What the `config.yaml` of a run would execute: asked about before a stranger's is run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mt_grpo.app.recipe_file import read_file
from mt_grpo.errors import ConfigError
from mt_grpo.option_rules import VERIFIERS, is_bare
from mt_grpo.options import OPTIONS

CONFIG = "config.yaml"
RECORDS = ("metrics.jsonl", "summary.json", "rollouts")
"""What a run leaves beside its `CONFIG`."""

PATHS = tuple(name for name, option in OPTIONS.items() if option.executes == "path")
"""Options that name code, by the paths of files or of modules, or by names in a registry."""
FILES = tuple(name for name, option in OPTIONS.items() if option.executes == "file")
"""Options that name files, which name code and commands."""
SHOWN = 4
"""Things that are named in the question."""


def check_trust(path: str, recipe: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
    """
    Whether a recipe may run without a question: it is no run's configuration, or all code that it names is of this
    package or in the current folder, and not in the run's. Nothing is imported.

    Args:
        path (`str`): The recipe's file.
        recipe (`Mapping`): Its options, less those that the command line replaces.
        variables (`Mapping`): The environment variables that it sets.

    Raises:
        ConfigError: If the user has to say that the configuration is trusted; names what would run.
    """
    folder = Path(path).resolve().parent
    of_run = any((folder / name).exists() for name in RECORDS)
    if not of_run and Path(path).name != CONFIG:
        return
    found = list(dict.fromkeys(_executed(recipe, folder if of_run else None)))
    found += [f"`env: {name}`" for name in variables]
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ConfigError(
            f"{path} is the configuration of a run, and would execute what is not of the current folder: "
            f"{', '.join(found[:SHOWN])}{more}. Read it, and add `--trust` if you trust whoever wrote it."
        )


def asks_for_trust(path: str) -> bool:
    """Whether a configuration is asked about where it is run from the current folder."""
    try:
        check_trust(path, read_file(path)[0], {})
    except ConfigError:
        return True
    return False


def _executed(options: Mapping[str, Any], run: Path | None) -> Iterator[str]:
    for option in PATHS:
        for text in _texts(options.get(option)):
            if text.startswith(VERIFIERS) or not (is_bare(text) or _is_own(text, run)):
                yield f"`{option}: {text}`"
    for option in FILES:
        for text in _texts(options.get(option)):
            if not _is_inside(Path(text), run):
                yield f"`{option}: {text}`"
    agent = _parsed(options.get("agent"))
    if isinstance(agent, Mapping) and agent.get("command"):
        yield f"`agent: {agent['command']}`"
    else:
        function = agent.get("function") if isinstance(agent, Mapping) else agent
        yield from (f"`agent: {text}`" for text in _texts(function) if not _is_own(text, run))
    environments = _parsed(options.get("environments"))
    for given in environments.values() if isinstance(environments, Mapping) else ():
        yield from _executed(given if isinstance(given, Mapping) else {"env": given}, run)
    user = _parsed(options.get("simulated_user"))
    if isinstance(user, Mapping) and user.get("api_key_env"):
        yield f"`simulated_user: api_key_env: {user['api_key_env']}`, sent to {user.get('base_url')}"
    yield from _of_model(options)
    yield from _of_model(_parsed(options.get("model_init_kwargs")) or {}, "model_init_kwargs: ")


def _of_model(options: Any, place: str = "") -> Iterator[str]:
    if not isinstance(options, Mapping):
        return
    if str(options.get("trust_remote_code", False)).lower() not in ("false", "no", "0", "none"):
        yield f"`{place}trust_remote_code`, the code of the model"
    if "/" in str(options.get("attn_implementation")):  # a kernel of the Hub
        yield f"`{place}attn_implementation: {options['attn_implementation']}`"


def _parsed(value: Any) -> Any:
    """A mapping that is given as JSON; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            return json.loads(value)
        except ValueError:  # refused where it is read
            return value
    return value


def _texts(value: Any) -> Iterator[str]:
    """Names and paths in a value: itself, those of a list, `name` of a mapping with options, or all of a mapping."""
    value = _parsed(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(value["name"] if "name" in value else list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _is_own(text: str, run: Path | None) -> bool:
    """Whether a path leads to code of this package or of the user's, or to none at all."""
    module = text.rpartition(":")[0] if ":" in text else text
    if module.endswith(".py") or "/" in module:
        return _is_inside(Path(module), run)
    first = module.partition(".")[0]
    if first == "mt_grpo" or not first.isidentifier():
        return True
    if first in sys.stdlib_module_names:
        return False
    found = PathFinder.find_spec(first, [str(Path.cwd()), *sys.path])  # in the order of `mt_grpo.imports`
    if found is None:  # which is refused where it is looked for
        return True
    return all(_is_inside(Path(place), run) for place in found.submodule_search_locations or [found.origin])


def _is_inside(path: Path, run: Path | None) -> bool:
    """Whether a file is in the current folder, and neither in the run's nor in that of installed packages."""
    try:
        real = path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, no such home, a NUL in the name
        return False
    foreign = [Path(sys.prefix).resolve(), *([] if run is None else [run])]
    return real.is_relative_to(Path.cwd().resolve()) and not any(map(real.is_relative_to, foreign))
