"""What a recipe names: registered names, dotted paths, `module:attribute`, attributes of a Python file, data files."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from mt_grpo.errors import ConfigError, UserError, find_fault

T = TypeVar("T")

_NAME = re.compile(r"[\w-]+")

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""The files that a dataset can be, each with the name of its reader in `datasets`."""


class ImportPathError(UserError, ValueError):
    """A path in a recipe does not lead to an object. The message is one sentence fit for the user."""


class RegistrationError(UserError, ValueError):
    """A thing cannot be registered under a name. The message is one sentence fit for the user."""


def check_name(name: object, what: str) -> None:
    """Refuses what is not a name, such as the function below a decorator without parentheses."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RegistrationError(
            f"A {what} is registered under a name of letters, digits, `_` and `-`, in parentheses behind the "
            f"decorator; {name!r} is none."
        )


class Registry(Mapping[str, T]):
    """Things by the names that recipes give them; each registers itself in a module that is imported on demand."""

    def __init__(self, what: str, module: str) -> None:
        self._what = what
        self._module = module
        self._discovered = False
        self._entries: dict[str, T] = {}
        self._files: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers a function or a class under a name."""
        check_name(name, self._what)

        def add(thing: T) -> T:
            return self.add(name, thing, thing.__module__)

        return add

    def add(self, name: str, thing: T, module: str) -> T:
        """Registers what `module` defines. If a file or a notebook cell runs again, it replaces its own entry."""
        file = _file_of(module)
        if self._files.get(name, file) != file:
            raise RegistrationError(
                f"The {self._what} {name!r} of {file} has the name of one in {self._files[name]}: choose another."
            )
        self._entries[name], self._files[name] = thing, file
        return thing

    def __getitem__(self, name: str) -> T:
        self._discover()
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._discover()
        return len(self._entries)

    def _discover(self) -> None:
        if not self._discovered:
            place = importlib.import_module(self._module)
            for module in pkgutil.iter_modules(vars(place).get("__path__", ())):
                importlib.import_module(f"{self._module}.{module.name}")
            self._discovered = True


def import_object(path: str, *, what: str = "object") -> Any:
    """Imports what a recipe names."""
    module_name, _, attribute = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise ImportPathError(
            f"The {what} {path!r} is not a path: write `package.module.name` or `folder/file.py:name`."
        )
    module = _imported(module_name, f"The {what} {path!r}")
    if attribute not in vars(module):
        hint = did_you_mean(attribute, vars(module))
        raise ImportPathError(f"The {what} {path!r} does not exist: {module_name} has no {attribute!r}{hint}.")
    return vars(module)[attribute]


def import_file(path: str) -> ModuleType:
    """Imports a Python file, so that recipes can name what it registers. Raises `ImportPathError` if that fails."""
    if not path.endswith(".py"):  # `check_trust` takes a word without a dot for no path
        raise ImportPathError(f"The plugin {path!r} is no Python file: write `folder/file.py`.")
    return _imported(path, f"The plugin {path!r}")


def _imported(module: str, label: str) -> ModuleType:
    _check_place(module, label)
    try:
        return _load_file(module) if module.endswith(".py") else importlib.import_module(module)
    except (Exception, SystemExit) as error:  # of the user's code: a script may read a command's words, and exit
        raise ImportPathError(f"{label} does not import: {_import_failure(error)}.") from error


def check_place(path: str, what: str) -> None:
    """Whether there is a file or a module where a recipe names an object, found without running any of it."""
    module_name, _, attribute = path.rpartition(":") if ":" in path else path.rpartition(".")
    if module_name and attribute:
        _check_place(module_name, f"The {what} {path!r}")


def _check_place(module: str, label: str) -> None:
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise ImportPathError(f"{label} does not import: there is no file {module!r} (from {Path.cwd()}).")
        return
    first = module.partition(".")[0]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _offer_peers()
    if first not in sys.modules and first.isidentifier() and importlib.util.find_spec(first) is None:
        raise ImportPathError(
            f"{label} does not import: there is no module {first!r}, neither in the current folder ({Path.cwd()}) "
            "nor installed."
        )


def did_you_mean(name: object, known: Iterable[object], cutoff: float = 0.6) -> str:
    """A clause that names the closest of the known names, or nothing where none is as close as `cutoff` (up to 1)."""
    matches = difflib.get_close_matches(str(name), [str(item) for item in known], n=1, cutoff=cutoff)
    return f"; the nearest is {matches[0]!r}" if matches else ""


def unknown_option(owner: str, option: object, known: Sequence[str]) -> str:
    """The sentence about an option that its owner does not have."""
    has = f"its options are {', '.join(known)}" if known else "it has none"
    return f"{owner} has no option {option!r}{did_you_mean(option, known)}: {has}."


def _file_of(module: str) -> str:
    """The file of a module, which may be imported under two names; its name if it has no file (a notebook)."""
    file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
    return module if file is None else str(Path(file).resolve())


def _load_file(path: str) -> ModuleType:
    _offer_peers()
    place = hashlib.blake2b(os.fsencode(Path(path).resolve()), digest_size=8).hexdigest()
    name = f"mt_grpo_plugin_{Path(path).stem}_{place}"
    if name in sys.modules:
        return sys.modules[name]
    if (folder := str(Path(path).resolve().parent)) not in sys.path:
        sys.path.append(folder)  # for the modules beside it, as in a script
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the path ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def choose(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises `ConfigError` if the value of an option is none of the known names."""
    known = list(known)
    if value not in known:
        raise ConfigError(f"`{name}` is {value!r}{did_you_mean(value, known)}: choose one of {', '.join(known)}.")


def need_library(name: str, what: str, install: str) -> None:
    """Refuses `what` where the library that it needs is not installed, or cannot be imported."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        why = "is not installed" if getattr(error, "name", None) == name else f"cannot be imported ({error})"
        raise ConfigError(f"{what} needs `{name}`, which {why}: `pip install {install}`.") from error


def in_home(path: str) -> Path:
    """A path whose `~` is somebody's folder; as it is where there is nobody of that name."""
    return Path(os.path.expanduser(path))


def looks_like_path(name: str) -> bool:
    """Whether a name can only be that of a file or a folder, and not a Hub id."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


# the modules of ms-swift and verl by their own names, so that files written for them run unchanged

SWIFT, VERL, TOOLS = "mt_grpo.integrations.swift", "mt_grpo.integrations.verl", "mt_grpo.tools.loading"
_MODULES: dict[str, dict[str, Sequence[str]]] = {
    "swift.infer_engine": {SWIFT: ("InferRequest", "RequestConfig", "TransformersEngine")},
    "swift.infer_engine.protocol": {
        SWIFT: (
            *("ChatCompletionResponse", "ChatCompletionResponseChoice", "ChatMessage", "RequestConfig"),
            *("RolloutInferRequest", "RolloutOutput"),
        )
    },
    "swift.rewards": {SWIFT: ("ORM", "AsyncORM", "MultiTurnScheduler", "multi_turns", "orms", "rm_plugins")},
    "swift.rewards.orm": {SWIFT: ("ORM", "AsyncORM", "MathAccuracy", "orms")},
    "swift.rewards.rm_plugin": {SWIFT: ("DefaultRMPlugin", "rm_plugins")},
    "swift.rollout": {SWIFT: ("Env", "MultiTurnScheduler", "RolloutScheduler", "envs", "multi_turns")},
    "swift.rollout.gym_env": {SWIFT: ("Env", "envs")},
    "swift.rollout.multi_turn": {
        SWIFT: (
            *("GYMScheduler", "Messages", "MultiTurnScheduler", "OpenEnvScheduler", "RolloutScheduler"),
            *("envs", "multi_turns"),
        )
    },
    "swift.rollout.openenv_wrapper": {SWIFT: ("OpenEnvWrapper",)},
    "swift.template": {SWIFT: ("Messages", "Template")},
    "swift.utils": {SWIFT: ("get_logger", "remove_response", "to_device")},
    "verl.interactions.base": {VERL: ("BaseInteraction",)},
    "verl.interactions.gsm8k_interaction": {VERL: ("Gsm8kInteraction",)},
    "verl.interactions.weather_interaction": {VERL: ("WeatherInteraction",)},
    "verl.tools.base_tool": {TOOLS: ("BaseTool", "OpenAIFunctionToolSchema", "ToolResponse")},
    "verl.tools.geo3k_tool": {VERL: ("Geo3kTool",)},
    "verl.tools.gsm8k_tool": {VERL: ("Gsm8kTool",)},
    "verl.tools.mcp_base_tool": {"mt_grpo.tools.mcp": ("MCPBaseTool",)},
    "verl.tools.mcp_search_tool": {VERL: ("MCPSearchTool",)},
    "verl.tools.sandbox_fusion_tools": {VERL: ("SandboxFusionTool",)},
    "verl.tools.schemas": {
        TOOLS: (
            *("OpenAIFunctionParametersSchema", "OpenAIFunctionPropertySchema", "OpenAIFunctionSchema"),
            *("OpenAIFunctionToolSchema", "ToolResponse"),
        )
    },
    "verl.tools.search_tool": {VERL: ("SearchTool",)},
    "verl.utils.reward_score.geo3k": {VERL: ("acc_reward", "compute_score=geo3k_score", "format_reward")},
    "verl.utils.reward_score.gsm8k": {VERL: ("compute_score", "extract_solution")},
    "verl.utils.rollout_trace": {VERL: ("rollout_trace_op",)},
}
"""The names in each module of theirs, by our module that defines them; `theirs=ours` where the names differ."""

_PACKAGES = {name.rpartition(".")[0] for name in _MODULES} | {"swift", "verl", "verl.utils"}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """
    Makes these modules. Python asks it first: classes of an installed package, or of a clone in the current folder,
    are none that a run knows. A package that is there too is run as far as what it needs is installed, and its other
    modules stay its own.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PACKAGES:
            return importlib.machinery.ModuleSpec(name, self) if name in _MODULES else None
        others = [finder for finder in sys.meta_path if finder is not self]
        theirs = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        origin = None if theirs is None else theirs.origin
        spec = importlib.machinery.ModuleSpec(name, self, origin=origin, loader_state=theirs, is_package=True)
        if theirs is not None and theirs.submodule_search_locations is not None:
            spec.submodule_search_locations = theirs.submodule_search_locations
            spec.has_location = origin is not None
        return spec

    def exec_module(self, module: ModuleType) -> None:
        theirs = module.__spec__ and module.__spec__.loader_state
        if theirs is not None and theirs.loader is not None:
            with contextlib.suppress(Exception):  # what it needs is not installed
                theirs.loader.exec_module(module)
        made = sys.modules[module.__name__]  # a package may put another object in its own place
        for source, names in _MODULES.get(module.__name__, {}).items():
            found = importlib.import_module(source)
            for name in names:
                theirs, _, own = name.partition("=")
                setattr(made, theirs, getattr(found, own or theirs))


_FINDER = _Finder()


def _import_failure(error: BaseException) -> str:
    """What an import failed with, and where; where a peer's module is missing, which ones there are."""
    told = str(error).rstrip(".") if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if where := find_fault(error).where:
        told += f" ({where})"
    if not isinstance(error, ModuleNotFoundError):
        return told
    package = (error.name or "").rpartition(".")[0]
    if package not in _PACKAGES or getattr(sys.modules[package].__spec__, "loader", None) is not _FINDER:
        return told
    start = f"{package}."
    here = sorted({name.removeprefix(start).partition(".")[0] for name in _MODULES if name.startswith(start)})
    peer = {"verl": "verl", "swift": "ms-swift"}[package.partition(".")[0]]
    return f"{told}; without {peer}, `{package}` has {', '.join(here)}: install {peer} for others"


def _offer_peers() -> None:
    """Makes ms-swift's and verl's modules ours, as far as `_MODULES` has them."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
