"""
Reads recipes, those of users and those that ship with the package, without torch. What the `config.yaml` of a run
would execute, or send a key to, is asked about where it is a stranger's.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.errors import ConfigError, refuse_first
from mt_grpo.imports import in_home
from mt_grpo.options.table import OPTIONS, Values
from mt_grpo.options.values import TYPES, VERIFIERS, is_bare, parse_mapping, with_env_options
from mt_grpo.servers import vllm_environment

CONFIG = "config.yaml"
"""The recipe of a run, in the run's folder."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes the later of two equal keys, and `1e-3` for a text; here it is an error, and a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"The key {key.value!r} stands in {self.name} twice, in lines {lines[key.value]} and {line}: "
                    "leave one out."
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_file(path: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Reads a recipe: its options, and the line of each."""
    what = f"The recipe {path!r}"
    return read_mapping(
        Path(path),
        what,
        f"{what} is empty: it needs at least `model_name_or_path` and `dataset_name`, each with a value.",
        f"{what} is not a mapping of options to values: write lines `option: value`.",
    )


def read_mapping(path: Traversable, what: str, if_empty: str, if_other: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping that a YAML file holds, and the line of each key. `what` begins sentences about it."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        loader.name = str(path)
        loader.deep_construct = True  # which refuses what refers to itself
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {_unreadable(Path(str(path)), error)}.") from None
    except ConfigError:
        raise
    # beside PyYAML's own, what it does not catch of numbers, dates, tags and depths
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid YAML: {' '.join(str(error).split())}.") from error
    refuse_first((content is None, if_empty), (not isinstance(content, dict), if_other))
    return content, {key.value: key.start_mark.line + 1 for key, _ in node.value}


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> str:
    """What is wrong with a recipe that cannot be read."""
    match error:
        case FileNotFoundError():
            return f"does not exist{_beside(path)}"
        case IsADirectoryError():
            found = recipes_in(path)
            example = f", such as {str(found[0])!r}" if found else ", which holds none"
            return f"is a folder: give a YAML file in it{example}"
        case UnicodeDecodeError():
            return "is no text in UTF-8: give a YAML file"
    return f"cannot be read: {error.strerror}"


_CLUSTER = "cluster"  # folder of what starts a run on several nodes, which is YAML of others


def shipped() -> dict[str, Traversable]:
    """The files by name, which is their path in the folder `recipes`, e.g. `Qwen/gsm8k.yaml`."""
    return dict(sorted(_walk(files("mt_grpo") / "recipes", "")))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != _CLUSTER:
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name, entry


def recipes_in(folder: Path) -> list[Path]:
    """The YAML files in a folder."""
    return sorted(path for path in folder.glob("*.y*ml") if path.is_file())


def _beside(path: Path) -> str:
    """The recipe beside a missing one that has nearly its name, as a clause."""
    names = {recipe.stem: recipe for recipe in recipes_in(path.parent)}
    near = difflib.get_close_matches(path.stem, names, n=1)
    if near:
        return f"; the nearest is {str(names[near[0]])!r}"
    name = next((name for name in shipped() if Path(name).name == path.name), None)
    if name is not None:
        return f"; one of that name ships with the package: `mt-grpo recipes cp {name}`"
    return ""


# What a configuration executes; nothing is imported


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
