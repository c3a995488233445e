"""Objects named in a recipe: dotted paths, `module:attribute`, and attributes of a Python file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from mt_grpo.errors import UserError


class ImportPathError(UserError, ValueError):
    """A path in a recipe does not lead to an object. The message is one sentence fit for the user."""


def import_object(path: str, *, what: str = "object") -> Any:
    """
    Imports what a recipe names.

    Args:
        path (`str`): `package.module.attribute`, `package.module:attribute` or `folder/file.py:attribute`. The
            current folder is importable.
        what (`str`): What the path stands for, for the error.

    Raises:
        ImportPathError: If the module does not import or lacks the attribute.
    """
    module_name, _, attribute = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise ImportPathError(
            f"The {what} {path!r} is not a path: write `package.module.name` or `folder/file.py:name`."
        )
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else _load_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ImportPathError(f"The {what} {path!r} does not import: {type(error).__name__}: {error}.") from error
    if attribute not in vars(module):
        hint = did_you_mean(attribute, vars(module))
        raise ImportPathError(f"The {what} {path!r} does not exist: {module_name} has no {attribute!r}{hint}.")
    return vars(module)[attribute]


def import_file(path: str) -> Any:
    """Imports a Python file, so that what it registers can be named. Raises `ImportPathError` where that fails."""
    try:
        return _load_file(path)
    except Exception as error:  # whatever the user's file raises while it is imported
        raise ImportPathError(f"The plugin {path!r} does not import: {type(error).__name__}: {error}.") from error


def did_you_mean(name: str, known: Any) -> str:
    """A clause that names the closest of the known names, or nothing where none is close."""
    matches = difflib.get_close_matches(name, [str(item) for item in known], n=1)
    return f"; the nearest is {matches[0]!r}" if matches else ""


def _load_module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _load_file(path: str) -> Any:
    name = "mt_grpo_plugin_" + str(Path(path).resolve()).replace(os.sep, "_").removesuffix(".py")
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
