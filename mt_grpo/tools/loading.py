"""
Tools as a recipe names them: by registered name, dotted path or callable (`tools`), and in a YAML file of verl's form
(`tools_config_file`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from mt_grpo.concurrency import ConcurrencyLimit
from mt_grpo.errors import UserError
from mt_grpo.imports import Registry, did_you_mean, import_object
from mt_grpo.options.rules import unknown_tool
from mt_grpo.options.values import is_bare, read_yaml
from mt_grpo.processes import Processes
from mt_grpo.tools.function import Tool, ToolDefinitionError, ToolOptions
from mt_grpo.tools.stateful import BaseTool, OpenAIFunctionToolSchema, StatefulTool

TOOLS: Registry[Callable[..., Any]] = Registry("tool", "mt_grpo.tools")  # the tools a recipe can list by bare name


def tool(
    name: str | None = None,
    *,
    concurrency: int | None = None,
    max_result_size: int | None = None,
    ends_episode: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Gives options to a tool, and perhaps a name for recipes. The tool is a function, a method, or a class that starts
    without arguments and has one public method.

    Args:
        name (`str`, *optional*): Registers it under this name. The model calls it by the name of the function or
            method.
        concurrency (`int`, *optional*), max_result_size (`int`, *optional*), ends_episode (`bool`, *optional*): See
            `Tool`. A concurrency limit above a method is one for all objects of its class.

    Raises:
        RegistrationError: If the name is no word, or another file has registered it.
    """
    limit = None if concurrency is None else ConcurrencyLimit(concurrency)
    options = ToolOptions(concurrency, max_result_size, ends_episode, limit)
    register = None if name is None and options != ToolOptions() else TOOLS.register(name or "")

    def decorate(thing: Callable[..., object]) -> Callable[..., Any]:
        if options != ToolOptions():
            thing.tool_options = options  # type: ignore[attr-defined]  # functions and classes take attributes
        return thing if register is None else register(thing)

    return decorate


def load_tools(entries: list[str | Callable[..., Any] | Tool]) -> list[Tool]:
    """
    Makes tools of what a recipe or a script lists: names of registered tools, dotted paths, functions, bound methods,
    callable objects, classes (started without arguments), objects with one public method, `BaseTool`s and `Tool`s.
    """
    tools: dict[str, Tool] = {}
    for entry in entries:
        source = _named(entry) if isinstance(entry, str) else entry
        cls = source if isinstance(source, type) else type(source)
        tool = _as_tool(source, repr(entry) if isinstance(entry, str) else f"An object of {cls.__name__!r}")
        if tool.name in tools:
            raise ToolDefinitionError(f"Two tools are named {tool.name!r}: rename one, since the model calls by name.")
        tools[tool.name] = tool
    return list(tools.values())


def in_processes(entries: Sequence[str | Callable[..., object] | Tool], size: int) -> list[Tool]:
    """
    Tools, as `load_tools` takes them, whose calls run in `size` processes of their own, and so many at once; waiting
    counts toward no timeout. What is no plain function is left as it is; one has to be.
    """
    tools = load_tools(list(entries))
    plain = [tool for tool in tools if inspect.isfunction(tool.function) and not tool.is_async]
    if not plain:
        raise ToolDefinitionError(
            f"`tool_processes` is {size}, and no tool is a plain function that a process can call (the tools are: "
            f"{', '.join(tool.name for tool in tools) or 'none'}): leave it out."
        )
    processes, limit = Processes(size), ConcurrencyLimit(size)
    processes.start([tool.function for tool in plain])
    return [_in(processes, limit, tool) if tool in plain else tool for tool in tools]


def _in(processes: Processes, limit: ConcurrencyLimit, tool: Tool) -> Tool:
    async def call(**arguments: object) -> object:
        return await processes.call(tool.function, arguments)

    own = limit if tool.limit is None or tool.limit.size > limit.size else tool.limit
    return replace(tool, function=call, is_async=True, limit=own, concurrency=own.size)


def _named(entry: str) -> object:
    if not is_bare(entry):
        return import_object(entry, what="tool")
    if entry not in TOOLS:
        raise ToolDefinitionError(unknown_tool(entry, TOOLS))
    return TOOLS[entry]


def _as_tool(source: object, label: str) -> Tool:
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
        wraps = callable(getattr(source, "func", None))  # as a tool of LangChain's does
        raise ToolDefinitionError(
            f"{label} is no tool: it is not callable and has {len(methods)} public methods instead of one; name "
            f"{'the function that it wraps, its `func`' if wraps else 'a function or a bound method'}."
        )
    return Tool.from_function(getattr(source, methods[0]))


def _started(cls: type) -> object:
    try:
        return cls()
    except UserError:
        raise
    except Exception as error:  # whatever the user's class raises
        raise ToolDefinitionError(
            f"The tool class {cls.__name__!r} does not start without arguments ({type(error).__name__}: {error}): "
            "make an object of it in a Python file and name that."
        ) from error


TYPES = ("native", "mcp")

Made = TypeVar("Made", bound=BaseTool)


def load_tools_file(path: str) -> list[Tool]:
    """
    Makes the tools of a file, and starts the MCP servers it names.

        tools:
          - class_name: "my_tools.Counter"      # a subclass of `BaseTool`
            config: {type: native}              # the class gets all of it
            tool_schema: {type: function, function: {name: ..., description: ..., parameters: ...}}
          - class_name: ""                      # or a subclass of `MCPBaseTool`
            config: {type: mcp, timeout: 30, rate_limit: 10}
            mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}

    Paths in it are relative to the current folder.
    """
    what = f"The file of tools {path!r}"
    if not Path(path).is_file():
        raise ToolDefinitionError(f"{what} (`tools_config_file`) does not exist.")
    content = read_yaml(Path(path), what, ToolDefinitionError)
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ToolDefinitionError(f"{what} lists no tools: write a list under `tools:`.")
    return [tool for number, entry in enumerate(entries, 1) for tool in _tools(entry, f"Tool {number} in {path}")]


def _tools(entry: dict[str, Any], where: str) -> list[Tool]:
    _check_keys(entry, ("class_name", "config", "tool_schema", "mcp"), where)
    config = entry.get("config")
    if not isinstance(config, dict) or config.get("type") not in TYPES:
        raise ToolDefinitionError(f"{where} does not say what it is: write `config: {{type: native}}` or `type: mcp`.")
    return [_native(entry, config, where)] if config["type"] == "native" else _mcp(entry, config, where)


def _native(entry: dict[str, Any], config: dict[str, Any], where: str) -> Tool:
    if "mcp" in entry:
        raise ToolDefinitionError(f"{where} has `mcp` beside `type: native`: write `type: mcp`, or leave it out.")
    tool_class = _tool_class(entry.get("class_name"), BaseTool, where)
    schema = entry.get("tool_schema")
    try:
        schema = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
    except ValidationError as error:
        first = error.errors()[0]
        raise ToolDefinitionError(
            f"{where} has a wrong `tool_schema` at {'.'.join(map(str, first['loc']))!r}: {first['msg']}."
        ) from error
    return StatefulTool.of(_made(tool_class, config, schema, where))


def _mcp(entry: dict[str, Any], config: dict[str, Any], where: str) -> list[Tool]:
    options = entry.get("mcp")
    if not isinstance(options, dict) or not isinstance(options.get("mcp_servers_config_path"), str):
        raise ToolDefinitionError(
            f"{where} names no file of MCP servers: write `mcp: {{mcp_servers_config_path: servers.json}}`."
        )
    _check_keys(options, ("mcp_servers_config_path", "tool_selected_list"), f"{where}, `mcp`,")
    faults = []
    for name, unit in (("timeout", "seconds for a call"), ("rate_limit", "calls a second")):
        value = config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            faults.append(f"the `{name}` {value!r}: give {unit}, above 0, or leave it out")
    selected = options.get("tool_selected_list") or []
    if not isinstance(selected, list) or not all(isinstance(name, str) for name in selected):
        faults.append(f"a `tool_selected_list` that is no list of names: {selected!r}")
    if faults:
        raise ToolDefinitionError(f"{where} has {faults[0]}.")
    from mt_grpo.tools.mcp import MCPBaseTool, mcp_tools, remote_tools  # loaded for runs that have such servers

    arguments = (options["mcp_servers_config_path"], selected, config.get("timeout"), config.get("rate_limit"))
    if not entry.get("class_name"):
        return mcp_tools(*arguments)
    tool_class = _tool_class(entry["class_name"], MCPBaseTool, where)
    tools: list[Tool] = []
    for remote in remote_tools(*arguments):
        base = _made(tool_class, config, OpenAIFunctionToolSchema.model_validate(remote.schema), where)
        base.remote = remote
        tools.append(StatefulTool.of(base))
    return tools


def _tool_class(name: object, kind: type[Made], where: str) -> type[Made]:
    fault = "no class: write `class_name: my_tools.Counter`"
    if isinstance(name, str) and name:
        tool_class = import_object(name, what="tool class")
        if isinstance(tool_class, type) and issubclass(tool_class, kind):
            return tool_class
        base = kind.__name__
        fault = (
            f"{name}, which is no subclass of `{base}`: subclass it, imported by `from mt_grpo.tools import {base}`"
        )
    raise ToolDefinitionError(f"{where} names {fault}.")


def _made(tool_class: type[Made], config: dict[str, Any], schema: OpenAIFunctionToolSchema | None, where: str) -> Made:
    try:
        return tool_class(config=config, tool_schema=schema)
    except ToolDefinitionError:
        raise
    except Exception as error:  # whatever the user's class raises
        raise ToolDefinitionError(
            f"{where}: the class {tool_class.__name__!r} does not start from `config` and `tool_schema` "
            f"({type(error).__name__}: {error})."
        ) from error


def _check_keys(value: object, known: tuple[str, ...], where: str) -> None:
    unknown = [key for key in value if key not in known] if isinstance(value, dict) else []
    if unknown or not isinstance(value, dict):
        fault = "is no mapping of keys to values"
        if unknown:
            fault = f"has the unknown key {unknown[0]!r}{did_you_mean(unknown[0], known)}"
        raise ToolDefinitionError(f"{where} {fault}.")
