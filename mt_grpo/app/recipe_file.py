"""
Reads recipes, those of users and those that ship with the package, without torch: their options, as the shipped JSON
schema has them; and what the `config.yaml` of a run would execute, or send a key to, which is asked about where it is
a stranger's.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from mt_grpo.errors import ConfigError, refuse_first
from mt_grpo.imports import choose, in_home
from mt_grpo.options.table import OPTIONS, Values
from mt_grpo.options.values import TYPES, VERIFIERS, is_bare, parse_mapping, with_env_options
from mt_grpo.servers import vllm_environment

# The options of recipes

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


# Files

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

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        value = super().construct_scalar(node)
        try:  # JSON writes a character as two escapes, which PyYAML takes for two characters
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            line = node.start_mark.line + 1
            raise ConfigError(f"The text {value!r} in {self.name}, line {line}, has half a character.") from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def as_json(text: str) -> str:
    """A mapping in YAML, as recipes and the docs have it, in JSON; any other text as it is."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, yaml.YAMLError, TypeError, RecursionError):
            try:
                json.loads(text)
            except ValueError:
                return json.dumps(yaml.load(text, _Loader))
    return text


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
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
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
            for name, text in folders:  # one that is not there may be a dataset that is fetched
                if text != "embedded" and not (_is_inside(Path(text), run) and in_home(text).exists()):
                    yield f"`env: {name}: {text}`"
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
