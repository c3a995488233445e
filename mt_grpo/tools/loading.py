"""Tools as a recipe names them: registered names, dotted paths, callables."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mt_grpo.errors import UserError
from mt_grpo.imports import Registry, import_object
from mt_grpo.options import is_bare, unknown_tool
from mt_grpo.tools.concurrency import ConcurrencyLimit
from mt_grpo.tools.function import Tool, ToolDefinitionError, ToolOptions
from mt_grpo.tools.stateful import BaseTool, StatefulTool

TOOLS: Registry[Callable[..., Any]] = Registry("tool", "mt_grpo.tools")
"""The tools a recipe can list by bare name."""


def tool(
    name: str | None = None,
    *,
    concurrency: int | None = None,
    max_result_size: int | None = None,
    ends_episode: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Says what holds for a tool: a function, a method, or a class that starts without arguments and has one public
    method.

    Args:
        name (`str`, *optional*): Registers it under this name, for recipes. The model calls it by the name of the
            function or method. Without a name it is not registered.
        concurrency (`int`, *optional*), max_result_size (`int`, *optional*), ends_episode (`bool`, *optional*): See
            `Tool`. A concurrency limit above a method is one for all objects of its class.

    Raises:
        RegistrationError: If the name is no word, or another file has registered it.
    """
    limit = None if concurrency is None else ConcurrencyLimit(concurrency)
    options = ToolOptions(concurrency, max_result_size, ends_episode, limit)
    register = None if name is None and options != ToolOptions() else TOOLS.register(name or "")

    def mark(thing: Callable[..., Any]) -> Callable[..., Any]:
        if options != ToolOptions():
            thing.tool_options = options  # type: ignore[attr-defined]  # functions and classes take attributes
        return thing if register is None else register(thing)

    return mark


def load_tools(entries: list[str | Callable[..., Any] | Tool]) -> list[Tool]:
    """
    Makes tools of what a recipe or a script lists.

    Args:
        entries (`list`): Each one the name of a registered tool, a path for `mt_grpo.imports.import_object`, a
            function, bound method or callable object, a class (started without arguments), an object with one public
            method, a `BaseTool`, or a `Tool`.

    Raises:
        ToolDefinitionError: If an entry is no tool, or two tools have the same name.
        ImportPathError: If a path does not lead to an object.
    """
    tools: dict[str, Tool] = {}
    for entry in entries:
        tool = _as_tool(_named(entry) if isinstance(entry, str) else entry)
        if tool.name in tools:
            raise ToolDefinitionError(f"Two tools are named {tool.name!r}: rename one, since the model calls by name.")
        tools[tool.name] = tool
    return list(tools.values())


def _named(entry: str) -> Any:
    if not is_bare(entry):
        return import_object(entry, what="tool")
    if entry not in TOOLS:
        raise ToolDefinitionError(unknown_tool(entry, TOOLS))
    return TOOLS[entry]


def _as_tool(source: Any) -> Tool:
    if isinstance(source, Tool):
        return source
    if isinstance(source, BaseTool):
        return StatefulTool.of(source)
    if isinstance(source, type):
        source = _started(source)
    if callable(source):
        return Tool.from_function(source)
    methods = [name for name, _ in inspect.getmembers(type(source), inspect.isroutine) if not name.startswith("_")]
    if len(methods) != 1:
        raise ToolDefinitionError(
            f"A {type(source).__name__} is no tool: it is not callable and has {len(methods)} public methods instead "
            "of one; name a function or a bound method."
        )
    return Tool.from_function(getattr(source, methods[0]))


def _started(cls: type) -> Any:
    try:
        return cls()
    except UserError:
        raise
    except Exception as error:  # whatever the user's class raises
        raise ToolDefinitionError(
            f"The tool class {cls.__name__!r} does not start without arguments ({type(error).__name__}: {error}): "
            "make an object of it in a Python file and name that."
        ) from error
