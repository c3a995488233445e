"""
Tools that a model can call; the file that lists them (`tools_config_file`, a YAML file of verl's form); and the
calculator, exact for whole numbers and bounded, so that no expression hangs a rollout.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from mt_grpo.errors import refuse_first, users_code
from mt_grpo.imports import did_you_mean, import_object
from mt_grpo.options.values import read_yaml
from mt_grpo.tools.function import Tool, ToolDefinitionError
from mt_grpo.tools.loading import (
    BaseTool,
    OpenAIFunctionToolSchema,
    StatefulTool,
    ToolResponse,
    ToolSession,
    in_processes,
    load_tools,
    tool,
)

if TYPE_CHECKING:
    from mt_grpo.tools.mcp import MCPBaseTool

__all__ = ["BaseTool", "MCPBaseTool", "OpenAIFunctionToolSchema", "Tool", "ToolDefinitionError", "ToolResponse"]
__all__ += ["ToolSession", "calculator", "in_processes", "load_tools", "load_tools_file", "tool"]


def __getattr__(name: str) -> object:
    """Loads what belongs to MCP servers where it is asked for."""
    if name != "MCPBaseTool":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("mt_grpo.tools.mcp").MCPBaseTool


# The file of tools

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
    config, mcp = entry.get("config"), entry.get("mcp")
    kind = config.get("type") if isinstance(config, dict) else None
    path = mcp.get("mcp_servers_config_path") if isinstance(mcp, dict) else None
    refuse_first(
        (
            kind not in ("native", "mcp"),
            f"{where} does not say what it is: write `config: {{type: native}}` or `type: mcp`.",
        ),
        (
            kind == "native" and "mcp" in entry,
            f"{where} has `mcp` beside `type: native`: write `type: mcp`, or leave it out.",
        ),
        (
            kind == "mcp" and not isinstance(path, str),
            f"{where} names no file of MCP servers: write `mcp: {{mcp_servers_config_path: servers.json}}`.",
        ),
        error=ToolDefinitionError,
    )
    return _mcp(entry, mcp, config, where) if kind == "mcp" else [_native(entry, config, where)]  # type: ignore[arg-type]


def _native(entry: dict[str, Any], config: dict[str, Any], where: str) -> Tool:
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


def _mcp(entry: dict[str, Any], mcp: dict[str, Any], config: dict[str, Any], where: str) -> list[Tool]:
    _check_keys(mcp, ("mcp_servers_config_path", "tool_selected_list"), f"{where}, `mcp`,")
    selected = mcp.get("tool_selected_list") or []
    refuse_first(
        *(
            (
                isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0,
                f"{where} has the `{name}` {value!r}: give {unit}, above 0, or leave it out.",
            )
            for name, unit in (("timeout", "seconds for a call"), ("rate_limit", "calls a second"))
            if (value := config.get(name)) is not None
        ),
        (
            not isinstance(selected, list) or not all(isinstance(name, str) for name in selected),
            f"{where} has a `tool_selected_list` that is no list of names: {selected!r}.",
        ),
        error=ToolDefinitionError,
    )
    from mt_grpo.tools.mcp import MCPBaseTool, mcp_tools, remote_tools  # loaded for runs that have such servers

    arguments = (mcp["mcp_servers_config_path"], selected, config.get("timeout"), config.get("rate_limit"))
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
    what = f"{where}: the class {tool_class.__name__!r} does not start from `config` and `tool_schema`"
    with users_code(what, ToolDefinitionError):
        return tool_class(config=config, tool_schema=schema)


def _check_keys(value: object, known: tuple[str, ...], where: str) -> None:
    unknown = [key for key in value if key not in known] if isinstance(value, dict) else []
    if unknown or not isinstance(value, dict):
        fault = "is no mapping of keys to values"
        if unknown:
            fault = f"has the unknown key {unknown[0]!r}{did_you_mean(unknown[0], known)}"
        raise ToolDefinitionError(f"{where} {fault}.")


# Arithmetic

_MAX_CHARACTERS = 500
_MAX_BITS = 4096  # size of the largest whole number: some 1,200 digits, below Python's limit for writing one as text
_MAX_DECIMALS = 100

_MALFORMED = re.compile(r"[\d.](?![eE][-+]?\d)[^\W\d_]|\\")
"""A letter right after a number, and a backslash: Python's parser would print a warning for them."""

_Number = int | float
_TOO_LARGE, _NOT_REAL = "The result is too large.", "The result is not a real number."
_FAULTS: dict[type[Exception], str] = {
    ZeroDivisionError: "Division by zero.",
    OverflowError: _TOO_LARGE,
    RecursionError: "The expression is nested too deeply.",
}


@tool("calculator")
def calculator(expression: str) -> str:
    """
    Evaluate an arithmetic expression.

    Args:
        expression: The expression, with numbers, + - * / // % ** and parentheses, and the functions sqrt, abs, round,
            min and max, for example (3 + 4) * 1,200 / 7.

    Returns:
        The value.

    Raises:
        ValueError: If the expression is malformed, has no real value, or a value that is too large.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"The expression is longer than {_MAX_CHARACTERS} characters.")
    try:
        if _MALFORMED.search(expression):
            raise SyntaxError
        tree = ast.parse(_without_thousands_separators(expression.strip()), mode="eval")
    except (SyntaxError, MemoryError, RecursionError, ValueError) as error:
        raise ValueError(f"Not an arithmetic expression: {expression!r}.") from error
    try:
        return _written(_value(tree.body))
    except (ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ValueError(_FAULTS[type(error)]) from error


def _without_thousands_separators(expression: str) -> str:
    """Joins 1,234,567; directly inside a function's parentheses a comma separates arguments."""
    in_arguments: list[bool] = []  # for each open parenthesis: does it belong to a function?

    def join(match: re.Match[str]) -> str:
        token = match.group()
        if token.endswith("("):
            in_arguments.append(token != "(")
        elif token == ")":
            del in_arguments[-1:]
        elif in_arguments[-1:] != [True]:
            return token.replace(",", "")
        return token

    return re.sub(r"(?:[a-z]+\s*)?\(|\)|(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)", join, expression)


def _value(node: ast.expr) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(op=ast.BitXor()):
            raise ValueError("Write ** for a power; ^ is not supported.")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            function, fewest, most = _FUNCTIONS[name]
            if not fewest <= len(arguments) <= most:
                raise ValueError(f"{name} does not take {len(arguments)} argument{'s' * (len(arguments) != 1)}.")
            return _bounded(function(*[_value(argument) for argument in arguments]))
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name):
            raise ValueError(f"Unknown name {name!r}; the functions are {', '.join(_FUNCTIONS)}.")
    raise ValueError(f"Not arithmetic: {ast.unparse(node)!r}.")


def _bounded(value: _Number) -> _Number:
    if isinstance(value, complex):
        raise ValueError(_NOT_REAL)
    if value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value):
        raise OverflowError
    return value


def _divide(left: _Number, right: _Number) -> _Number:
    if isinstance(left, int) and isinstance(right, int) and right != 0 and left % right == 0:
        return left // right
    return left / right


def _power(base: _Number, exponent: _Number) -> _Number:
    if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * exponent > _MAX_BITS:
        raise OverflowError  # known before it is computed: |base| >= 2 ** (bits - 1)
    return base**exponent


def _sqrt(value: _Number) -> _Number:
    if value < 0:
        raise ValueError(_NOT_REAL)
    if isinstance(value, int) and math.isqrt(value) ** 2 == value:
        return math.isqrt(value)
    return math.sqrt(value)


def _round(value: _Number, decimals: _Number = 0) -> _Number:
    if not isinstance(decimals, int) or abs(decimals) > _MAX_DECIMALS:
        raise ValueError(f"round takes a whole number of decimals between -{_MAX_DECIMALS} and {_MAX_DECIMALS}.")
    return round(value, decimals)


def _written(value: _Number) -> str:
    """Fifteen significant digits, which hide the error of binary fractions: 0.1 + 0.2 is 0.3."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.15g}"


_OPERATORS: dict[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, tuple[Callable[..., _Number], int, float]] = {
    "sqrt": (_sqrt, 1, 1),
    "abs": (abs, 1, 1),
    "round": (_round, 1, 2),
    "min": (lambda *values: min(values), 1, math.inf),
    "max": (lambda *values: max(values), 1, math.inf),
}
