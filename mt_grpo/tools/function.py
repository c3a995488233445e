"""A Python function as a tool: what its docstring says of it, the check of a call, the reading of a result."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import numbers
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import update_wrapper
from typing import Any, NamedTuple

from jsonschema import ValidationError
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    parse_google_format_docstring,
)

from mt_grpo.concurrency import ConcurrencyLimit
from mt_grpo.errors import UserError, describe_error
from mt_grpo.media import (
    decode_for_model,
    has_media,
    is_image,
    is_medium,
    part_text,
    read_parts,
    returned_parts,
    snapshot_parts,
)
from mt_grpo.tools.argument_check import ArgumentCheck, UnsoundSchema, names_in, read_schema
from mt_grpo.trajectory import Arguments, ToolSchema

logger = logging.getLogger(__name__)

_EXPLAINED = 2000
"""Characters of what is wrong with a call's arguments: a schema may list as many values as its author likes."""

_PARTS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas")
"""Keywords of JSON schema whose schemas are about the same arguments."""

_JSON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


class ToolDefinitionError(UserError, ValueError):
    """A tool that cannot be offered to a model. The message is one sentence fit for the user."""


@dataclass(frozen=True)
class ToolOptions:
    """The options that `@tool` gives a function; for the fields see `Tool`."""

    concurrency: int | None = None
    max_result_size: int | None = None
    ends_episode: bool = False
    limit: ConcurrencyLimit | None = None

    @staticmethod
    def of(fn: object) -> ToolOptions:
        """The options written above a function, a method or a class; the method's before its class's."""
        for source in (fn, getattr(fn, "__self__", None)):
            options = getattr(source, "tool_options", None)
            if isinstance(options, ToolOptions):  # a proxy may have any attribute
                return options
        return ToolOptions()


@dataclass
class Tool:
    """
    Something the model may call.

    Args:
        name (`str`): Name the model calls it by.
        description (`str`): What it does, for the model.
        parameters (`dict`): JSON schema of its arguments, an object.
        function (`Callable`): Takes the arguments by name.
        is_async (`bool`, *optional*, defaults to `False`): Whether `function` returns an awaitable; an `async def`
            is recognised without it.
        concurrency (`int`, *optional*): Calls that run at once, in all conversations of the process; further ones
            wait, which counts toward no timeout.
        max_result_size (`int`, *optional*): Characters of a result that the model is shown; the rest is cut off with
            a note of how much.
        ends_episode (`bool`, *optional*, defaults to `False`): Whether the conversation ends after the turn in which
            a call of it succeeded.
        keeps_state (`bool`, *optional*, defaults to `False`): Whether what a call does is remembered by something that
            a forked conversation has no copy of.
        limit (`ConcurrencyLimit`, *optional*): Shared by the tools that are limited together; made from `concurrency`
            where it is not given.

    Raises:
        ToolDefinitionError: If `parameters` is not a JSON schema of an object, or a limit is not 1 or more.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]
    is_async: bool = False
    concurrency: int | None = None
    max_result_size: int | None = None
    ends_episode: bool = False
    limit: ConcurrencyLimit | None = field(default=None, repr=False, compare=False)
    keeps_state: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.is_async = self.is_async or inspect.iscoroutinefunction(self.function)
        for name, unit in (("concurrency", "calls at once"), ("max_result_size", "characters")):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ToolDefinitionError(
                    f"The tool {self.name!r} has `{name}` {value!r}; it counts {unit}, so give 1 or more, or `None` "
                    "for no limit."
                )
        if self.concurrency is None:
            self.limit = None
        elif self.limit is None or self.limit.size != self.concurrency:
            self.limit = ConcurrencyLimit(self.concurrency)
        try:
            unmatchable = read_schema(self.parameters)
        except UnsoundSchema as error:
            where = f" at {error.where!r}" if error.where else ""
            raise ToolDefinitionError(
                f"The tool {self.name!r} has parameters that are no JSON schema{where}: {error}."
            ) from error
        if not isinstance(self.parameters, dict) or self.parameters.get("type") != "object":
            raise ToolDefinitionError(f"The tool {self.name!r} has parameters that are not of `type: object`.")
        for pattern, reason in unmatchable.items():
            _say_unmatchable(self.name, pattern, reason)

    @classmethod
    def from_function(cls, fn: Callable[..., object]) -> Tool:
        """Describes a function, bound method or callable object by its name, docstring and type hints."""
        name = getattr(fn, "__name__", type(fn).__name__)
        function = fn if inspect.isroutine(fn) else fn.__call__  # type: ignore[operator]  # an object with `__call__`
        described = _refuse_undescribed(name, function)
        try:
            schema = get_json_schema(described)["function"]
        except (TypeHintParsingException, NameError, DocstringParsingException, json.JSONDecodeError) as error:
            fault, mend = "has a type hint that has no JSON form", "one of JSON's types, as in `query: str`"
            if isinstance(error, DocstringParsingException):
                fault = "has a docstring that cannot be read"
                mend = "Google's style, an `Args:` section with a line `name: text` for each argument"
            elif isinstance(error, json.JSONDecodeError):
                fault, mend = "lists `(choices: ...)` that are not JSON", 'them as in `(choices: ["tea", "coffee"])`'
            said = " ".join(str(error).split())
            raise ToolDefinitionError(f"The tool {name!r} {fault} ({said}): write {mend}.") from error
        return cls(name, schema["description"], schema["parameters"], function, **vars(ToolOptions.of(fn)))

    @property
    def schema(self) -> ToolSchema:
        """The description in the form chat templates and OpenAI's interface take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def check(self, arguments: object) -> str | None:
        """What is wrong with a call's arguments, as a sentence the model can act on; `None` where they are good."""
        if not isinstance(arguments, dict):
            return f"{self.name}: the arguments must be a JSON object, not {_json_type(arguments)}"
        try:
            errors = self._argument_check.errors(arguments)
        except ValueError as error:
            return f"{self.name}: the arguments cannot be checked ({error})"
        if not errors:
            return None
        return cut(f"{self.name}: {self._explain(min(errors, key=_urgency), arguments)}", _EXPLAINED)

    def read(self, returned: object) -> Result:
        """What a call returned, as the model and rewards get it; see `_read_result`."""
        return _read_result(returned, self.max_result_size)

    def describe(self, error: Exception) -> str:
        """What a call raised, in words."""
        return describe_error(error)

    @classmethod
    def failure(cls, error: str) -> str:
        """The result that tells the model of an error."""
        return f"Error: {error}"

    def _explain(self, error: ValidationError, arguments: Arguments) -> str:
        known = list(self.parameters.get("properties", {}))
        if not error.absolute_path and error.validator == "additionalProperties":
            unknown = [argument for argument in arguments if argument not in known]
            return f"unknown argument{_plural(unknown)} {_listing(unknown)}; it takes {_listing(known) or 'none'}"
        if not error.absolute_path and error.validator == "required":
            missing = [argument for argument in error.validator_value if argument not in arguments]
            return f"missing argument{_plural(missing)} {_listing(missing)}"
        subject = f"argument {error.json_path.removeprefix('$.')!r}" if error.absolute_path else "the arguments"
        if error.validator == "type":
            types = error.validator_value if isinstance(error.validator_value, list) else [error.validator_value]
            return f"{subject} must be of type {' or '.join(types)}, not {_json_type(error.instance)}"
        return f"{subject} must satisfy {render({error.validator: error.validator_value})}"

    @functools.cached_property
    def _argument_check(self) -> ArgumentCheck:
        schema = _with_null(self.parameters)
        # what is known only from a part of the schema does not count for `additionalProperties`
        is_whole = not names_in({key: schema[key] for key in _PARTS if key in schema}) & {"properties", "$ref"}
        return ArgumentCheck({"additionalProperties": False, **schema} if is_whole else schema)


@functools.lru_cache(maxsize=1024)  # once, not for every conversation that makes its tools
def _say_unmatchable(name: str, pattern: str, reason: str) -> None:
    logger.warning(
        "The tool %r has the pattern %r, which cannot be matched in linear time (%s): arguments are not held against "
        "it before the call.",
        name,
        pattern,
        reason,
    )


def _refuse_undescribed(name: str, function: Callable[..., object]) -> Callable[..., Any]:
    """Refuses a function that cannot be described to a model; returns it with a docstring in Google's style."""
    text = inspect.getdoc(function) or ""
    described = _in_google_style(function, text, list(inspect.signature(function).parameters))
    description, documented, _ = parse_google_format_docstring(inspect.getdoc(described) or "")
    parameters = inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if not description:
        fault = (
            "has no docstring: begin it with one that says what the tool does, with an `Args:` section that describes "
            "each argument"
        )
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        fault = "is a generator, which the model would be shown in place of what it yields: return one result"
    elif nameless := [str(parameter) for parameter in parameters if parameter.kind not in by_name]:
        fault = (
            f"has the argument{_plural(nameless)} {_listing(nameless)}, which cannot be given by name: write out each "
            "argument, without `*` and `/`"
        )
    elif unhinted := [parameter.name for parameter in parameters if parameter.annotation is inspect.Parameter.empty]:
        fault = f"has no type hint for {_listing(unhinted)}: write one, as in `{unhinted[0]}: str`"
    elif undocumented := [parameter.name for parameter in parameters if not documented.get(parameter.name)]:
        fault = (
            f"does not describe {_listing(undocumented)} in its docstring: add a line `{undocumented[0]}: what it is` "
            "under `Args:`"
        )
    else:
        return described
    raise ToolDefinitionError(f"The tool {name!r} {fault}.")


def _urgency(error: ValidationError) -> int:
    """A wrong name explains a missing one, and both come before wrong values."""
    order = ["additionalProperties", "required"]
    return order.index(error.validator) if not error.absolute_path and error.validator in order else len(order)


def _with_null(schema: object) -> Any:
    """Rewrites `nullable: true`, which transformers writes for `X | None` and JSON schema does not know."""
    if isinstance(schema, list):
        return [_with_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _with_null(value) for key, value in schema.items()}
    if schema.get("nullable") is not True:
        return schema
    if "type" in schema:
        schema["type"] = [*([schema["type"]] if isinstance(schema["type"], str) else schema["type"]), "null"]
    if "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    if "anyOf" in schema:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return schema


def _json_type(value: object) -> str:
    return _JSON_TYPES.get(type(value), type(value).__name__)


def _listing(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _plural(names: list[str]) -> str:
    return "s" if len(names) > 1 else ""


_MAX_DEPTH = 100  # most levels of nested lists and dictionaries in data, since code that handles it is recursive


class Result(NamedTuple):
    """What a tool returned."""

    text: str  # what the model reads; an image or a sound is a word in it
    data: dict[str, Any] | None = None  # data beside it, for rewards
    parts: list[dict[str, Any]] | None = None
    """What the model is shown, where that is more than text: the parts of a content."""
    returned: list[Any] | None = None  # what TRL's reward functions get in its place


def _read_result(result: object, max_size: int | None) -> Result:
    """Reads what a tool returned, or a pair of that and data for rewards."""
    data = None
    if type(result) is tuple and len(result) == 2 and isinstance(result[1], dict):
        if isinstance(result[0], str) or has_media(result[0]):
            result, data = result
            # so that a reward sees the same in the run and when it reads what the run has written
            data = json.loads(json.dumps(data, default=_plain))
            check_data(data, "the data of the result")
    if not has_media(result):
        return Result(cut(render(result), max_size), data)
    parts = [
        {**part, "text": cut(render(part["text"]), max_size)} if "text" in part else part
        for part in read_parts(snapshot_parts(returned_parts(result)))
    ]
    decode_for_model(parts)
    return Result("\n".join(map(part_text, parts)), data, parts)


def render(result: object) -> str:
    """The text of a result: text as it is, bytes as text, everything else as JSON."""
    if isinstance(result, (bytes, bytearray, memoryview)):
        return _decoded(result)
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)
    return text.encode("utf-8", "replace").decode("utf-8")  # tokenizers refuse lone surrogates


def cut(text: str, max_size: int | None) -> str:
    """The text, or its first `max_size` characters and a note of how much is missing."""
    if max_size is None or len(text) <= max_size:
        return text
    return f"{text[:max_size]}\n[{len(text) - max_size:,} of {len(text):,} characters were cut off.]"


def check_data(value: object, what: str) -> None:
    """Refuses data that a run cannot write."""
    if too_deep(value):
        raise ValueError(f"{what} goes more than {_MAX_DEPTH} levels deep, or has no end: give less nested data.")
    try:
        json.dumps(value, default=str)
    except BaseException as error:  # the values are the user's objects, and `__str__` user's code
        raise ValueError(f"{what} cannot be written as JSON ({describe_error(error)}): give plain data.") from error


def finite(value: object, what: str) -> float:
    """A number as a float; raises `TypeError` or `ValueError` if it is no finite number."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} is {type(value).__name__}: give a finite number.")
    try:
        number = float(value)
    except OverflowError:  # a whole number that no float holds
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}: give a finite number.")
    return number


def too_deep(value: object) -> bool:
    """Whether lists and dictionaries are nested deeper than `_MAX_DEPTH`, or endlessly."""
    level, depth = [value], 0
    # each once: what holds itself twice would double with every level
    while level := list({id(item): item for container in level for item in _items(container)}.values()):
        depth += 1
        if depth > _MAX_DEPTH:
            return True
    return False


def _items(container: object) -> Iterable[Any]:
    if isinstance(container, dict):
        return container.values()
    return container if isinstance(container, (list, tuple)) else ()


def _decoded(value: bytes | bytearray | memoryview) -> str:
    content = bytes(value)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return f"[{len(content):,} bytes that are not text]"


def _plain(value: object) -> Any:
    """A JSON form of a value that has none: for `json.dumps(default=...)`."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)  # the order of a set of strings differs from run to run
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _decoded(value)
    if is_medium(value):  # not its place in memory, which differs from run to run
        return part_text({"type": "image" if is_image(value) else "audio"})
    for method in ("model_dump", "tolist"):  # pydantic models; numpy arrays and numbers
        if callable(getattr(value, method, None)):
            return getattr(value, method)()
    return str(value)


_ARGUMENTS = r"Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments|Other Parameters"
_OTHERS = r"Returns?|Yields?|Raises|Throws"
_HEADER = re.compile(rf"^\s*(?:(?P<arguments>{_ARGUMENTS})|{_OTHERS})\s*:?\s*$", re.IGNORECASE)
_UNDERLINE = re.compile(r"^\s*-{3,}\s*$")
_SECTION = re.compile(r"^[A-Z]\w*( \w+)?:$")  # any other section of Google's style, such as `Note:`
_FIELD = re.compile(r"^\s*[:@](?P<kind>\w+)(?:\s+[^:]*?)??(?:\s+\*{0,2}(?P<name>\w+))?\s*:(?!\w)\s*(?P<text>.*)$")
_PARAMETER_FIELDS = ("param", "parameter", "arg", "argument", "key", "keyword")
_TYPE = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_ITEM = re.compile(
    rf"^(?P<indent>\s*)(?:[-*]\s+)?\*{{0,2}}`{{0,2}}(?P<name>\w+)`{{0,2}}\s*(?:{_TYPE})?\s*:\s*(?P<text>.*)$"
)
_NUMPY_ITEM = re.compile(r"^(?P<indent>\s*)(?P<names>\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Reads a docstring, its indentation removed as `inspect.getdoc` does."""
    lines = text.expandtabs().split("\n")
    end = next((index for index in range(len(lines)) if _begins(lines, index)), len(lines))
    arguments: dict[str, list[str]] = {}
    index = end
    while index < len(lines):
        if (field := _FIELD.match(lines[index])) and field["kind"] in _PARAMETER_FIELDS and field["name"]:
            index = _read_field(lines, index, arguments.setdefault(field["name"], [field["text"]]))
        elif (header := _HEADER.match(lines[index])) and header["arguments"] and _begins(lines, index):
            numpy = index + 1 < len(lines) and bool(_UNDERLINE.match(lines[index + 1]))
            index = _read_items(lines, index + 1 + numpy, _NUMPY_ITEM if numpy else _ITEM, arguments)
        else:
            index += 1
    described = {name: " ".join(" ".join(parts).split()) for name, parts in arguments.items()}
    return "\n".join(lines[:end]).strip(), {name: words for name, words in described.items() if words}


def _in_google_style(function: Callable[..., object], text: str, names: list[str]) -> Callable[..., Any]:
    """The function with a docstring in Google's style without types, which transformers reads."""
    _, documented, _ = parse_google_format_docstring(text)
    other = any(_is_numpy_or_field(text.split("\n"), index) for index in range(text.count("\n") + 1))
    if all(name in documented for name in names) and not other:
        return function
    description, arguments = _read_docstring(text)

    def stand_in() -> None: ...

    update_wrapper(stand_in, function)
    lines = [f"    {name}: {arguments[name]}" for name in names if name in arguments]
    stand_in.__doc__ = "\n".join([description, "", "Args:", *lines]) if lines else description
    return stand_in


def _begins(lines: list[str], index: int) -> bool:
    """Whether a section about arguments, results or errors begins in a line."""
    header = _HEADER.match(lines[index])
    return _is_numpy_or_field(lines, index) or bool(header and lines[index].rstrip().endswith(":"))


def _is_numpy_or_field(lines: list[str], index: int) -> bool:
    field = _FIELD.match(lines[index])
    if field and field["kind"] in (*_PARAMETER_FIELDS, "type", "return", "returns", "rtype", "raise", "raises"):
        return True
    underlined = index + 1 < len(lines) and _UNDERLINE.match(lines[index + 1])
    return bool(underlined and _HEADER.match(lines[index]))


def _read_field(lines: list[str], index: int, parts: list[str]) -> int:
    """Reads the further lines of a field. Returns the index of the line after it."""
    index += 1
    while index < len(lines) and lines[index].strip() and not _FIELD.match(lines[index]):
        parts.append(lines[index])
        index += 1
    return index


def _read_items(lines: list[str], index: int, pattern: re.Pattern[str], arguments: dict[str, list[str]]) -> int:
    """Reads the items of a section. Returns the index of the line after it."""
    indent: int | None = None
    parts: list[list[str]] = []
    while index < len(lines) and not _begins(lines, index):
        line = lines[index]
        item = pattern.match(line)
        if not line.strip():
            index += 1
            continue
        if item and (indent is None or len(item["indent"]) == indent) and not _SECTION.match(line):
            indent = len(item["indent"])
            names = item["names"].split(",") if "names" in item.groupdict() else [item["name"]]
            text = [] if "names" in item.groupdict() else [item["text"]]
            parts = [arguments.setdefault(name.strip(" *"), list(text)) for name in names]
        elif indent is not None and len(line) - len(line.lstrip()) <= indent:
            return index  # another section, or text
        else:
            for part in parts:
                part.append(line)
        index += 1
    return index
