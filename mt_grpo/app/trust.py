"""
What the `config.yaml` of a run would execute, or send a key to: a stranger's is asked about. Nothing is imported.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mt_grpo.app.recipe_file import CONFIG, read_file
from mt_grpo.errors import ConfigError
from mt_grpo.imports import in_home
from mt_grpo.options.table import OPTIONS, Values
from mt_grpo.options.values import TYPES, VERIFIERS, is_bare, parse_mapping, with_env_options
from mt_grpo.servers import vllm_environment

_RECORDS = ("metrics.jsonl", "summary.json", "rollouts")  # what a run leaves beside its `CONFIG`

_PATHS = tuple(name for name, option in OPTIONS.items() if option.executes == "path")
"""Options that name code, by the paths of files or of modules, or by names in a registry."""
_FILES = tuple(name for name, option in OPTIONS.items() if option.executes == "file")
"""Options that name files, which name code and commands."""
_MAX_NAMED = 4  # things that are named in the question


def check_trust(path: str, recipe: Values, variables: Values) -> None:
    """Asks for `--trust` where a run's configuration names foreign code or sends a key; nothing is imported."""
    folder = Path(path).resolve().parent
    of_run = any((folder / name).exists() for name in _RECORDS)
    if not of_run and Path(path).name != CONFIG:
        return
    here = Path.cwd().resolve()
    theirs: Path | None = folder
    if folder == here and not of_run:
        theirs = None
    elif folder != here and folder.is_relative_to(here):  # what was unpacked here has code beside the run's folder too
        theirs = here / folder.relative_to(here).parts[0]
    found = list(dict.fromkeys([*_executed(with_env_options(recipe), theirs), *_told(recipe)]))
    found += [f"`env: {name}`" for name in variables]
    if theirs == here == vllm_environment().parent:
        found += ["`.venv-vllm`, whose Python starts servers"] * vllm_environment().exists()
    if found:
        more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        raise ConfigError(
            f"{path} is the configuration of a run, and would execute what is not of the current folder, or send a "
            f"key: {', '.join(found[:_MAX_NAMED])}{more}. Read it, and add `--trust` if you trust whoever wrote it."
        )


def pop_variables(recipe: dict[str, Any]) -> dict[str, Any]:
    """Takes TRL's block of environment variables, an `env` without a `type`, out of a recipe."""
    env = recipe.get("env")
    return recipe.pop("env") if isinstance(env, dict) and "type" not in env else {}


def needs_trust_confirmation(path: str) -> bool:
    """Whether a configuration is asked about where it is run from the current folder."""
    try:
        recipe, _ = read_file(path)
        check_trust(path, recipe, pop_variables(recipe))
    except ConfigError:
        return True
    return False


def _executed(options: Values, run: Path | None) -> Iterator[str]:
    for option in _PATHS:
        value = _parsed(options.get(option))
        if option == "environment_factory" and isinstance(value, Mapping):  # one of its names may be `name`
            value = list(value.values())
        if option == "env" and isinstance(value, Mapping):
            kind, given = TYPES[value["type"]], value
            value = [given[name] for name in kind.paths if name in given]
            folders = ((name, text) for name in kind.folders for text in _texts(given.get(name)))
            others = ((name, text) for name, text in folders if text != "embedded" and not _is_inside(Path(text), run))
            yield from (f"`env: {name}: {text}`" for name, text in others)
        for text in _texts(value):
            if text.startswith(VERIFIERS) or not (is_bare(text) or _is_own(text, run)):
                yield f"`{option}: {text}`"
    for option in _FILES:
        for text in _texts(options.get(option)):
            if not _is_inside(Path(text), run):
                yield f"`{option}: {text}`"
    agent = _parsed(options.get("agent"))
    if isinstance(agent, Mapping) and agent.get("command"):
        yield f"`agent: {agent['command']}`"
    else:
        function = agent.get("function") if isinstance(agent, Mapping) else agent
        yield from (f"`agent: {text}`" for text in _texts(function) if not _is_own(text, run))
    environments = _mapping(options.get("environments"))
    for given in environments.values() if isinstance(environments, Mapping) else ():
        yield from _executed(given if isinstance(given, Mapping) else {"env": given}, run)
    teacher = _parsed(options.get("teacher"))
    for text in _texts(teacher.get("gate") if isinstance(teacher, Mapping) else None):
        if not (is_bare(text) or _is_own(text, run)):
            yield f"`teacher: gate: {text}`"
    user = _mapping(options.get("simulated_user"))
    if isinstance(user, Mapping) and user.get("api_key_env"):
        yield f"`simulated_user: api_key_env: {user['api_key_env']}`, sent to {user.get('base_url')}"
    yield from _of_model(options)
    yield from _of_model(_parsed(options.get("model_init_kwargs")) or {}, "model_init_kwargs: ")


def _told(options: Values) -> Iterator[str]:
    """Other machines that get a key: that of vLLM's servers, which is in the environment, and that of the Hub."""
    space = options.get("trackio_space_id")
    if "/" in str(space):  # of somebody by name: trackio sends it the token that proves whose the metrics are
        yield f"`trackio_space_id: {space}`, which gets the token of the Hub"
    if not os.environ.get("VLLM_API_KEY"):
        return
    teacher = _parsed(options.get("teacher"))
    servers = {option: options.get(option) for option in ("vllm_server_host", "vllm_server_base_url")}
    servers["teacher: server"] = teacher.get("server") if isinstance(teacher, Mapping) else None
    for option, addresses in servers.items():
        for text in _texts(addresses):
            if not all(_OF_THIS_MACHINE.fullmatch(address.strip()) for address in text.split(",")):
                yield f"`{option}: {text}`, which gets VLLM_API_KEY"


_OF_THIS_MACHINE = re.compile(r"(https?://)?(127\.0\.0\.1|localhost|0\.0\.0\.0|\[?::1\]?)(:\d+)?/?")


def _of_model(options: object, place: str = "") -> Iterator[str]:
    if not isinstance(options, Mapping):
        return
    if str(options.get("trust_remote_code", False)).lower() not in ("false", "no", "0", "none"):
        yield f"`{place}trust_remote_code`, the code of the model"
    if "/" in str(options.get("attn_implementation")):  # a kernel of the Hub
        yield f"`{place}attn_implementation: {options['attn_implementation']}`"


def _mapping(value: object) -> Any:
    """A mapping that is written as text, parsed as the option is; any other value as it is."""
    with contextlib.suppress(ConfigError):  # refused where it is read
        return parse_mapping(value, "")
    return value


def _parsed(value: object) -> Any:
    """As `_mapping`, where the option takes plain text too."""
    return _mapping(value) if isinstance(value, str) and value.lstrip().startswith(("{", "[")) else value


def _texts(value: object) -> Iterator[str]:
    """Names and paths in a value: of a list its items', of a mapping those of `name` and `import_path`, or all."""
    value = _parsed(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([value["name"], value.get("import_path")] if "name" in value else list(value.values()))
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
        real = in_home(str(path)).resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, a NUL in the name
        return False
    foreign = [Path(sys.prefix).resolve(), *([] if run is None else [run])]
    return real.is_relative_to(Path.cwd().resolve()) and not any(map(real.is_relative_to, foreign))
