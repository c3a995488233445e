"""Docstrings in the styles people write: Google, numpy, reStructuredText, and `name (type): text`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from transformers.utils.chat_template_utils import parse_google_format_docstring

ARGUMENTS = r"Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments|Other Parameters"
OTHERS = r"Returns?|Yields?|Raises|Throws"
HEADER = re.compile(rf"^\s*(?:(?P<arguments>{ARGUMENTS})|{OTHERS})\s*:?\s*$", re.IGNORECASE)
UNDERLINE = re.compile(r"^\s*-{3,}\s*$")
SECTION = re.compile(r"^[A-Z]\w*( \w+)?:$")
"""Any other section of Google's style, such as `Note:`."""
FIELD = re.compile(r"^\s*[:@](?P<kind>\w+)(?:\s+[^:]*?)??(?:\s+\*{0,2}(?P<name>\w+))?\s*:(?!\w)\s*(?P<text>.*)$")
PARAMETER_FIELDS = ("param", "parameter", "arg", "argument", "key", "keyword")
TYPE = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
ITEM = re.compile(
    rf"^(?P<indent>\s*)(?:[-*]\s+)?\*{{0,2}}`{{0,2}}(?P<name>\w+)`{{0,2}}\s*(?:{TYPE})?\s*:\s*(?P<text>.*)$"
)
NUMPY_ITEM = re.compile(r"^(?P<indent>\s*)(?P<names>\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """
    Reads a docstring, its indentation removed as `inspect.getdoc` does.

    Returns:
        What the function does, and the descriptions of its arguments by name.
    """
    lines = text.expandtabs().split("\n")
    end = next((index for index in range(len(lines)) if _begins(lines, index)), len(lines))
    arguments: dict[str, list[str]] = {}
    index = end
    while index < len(lines):
        if (field := FIELD.match(lines[index])) and field["kind"] in PARAMETER_FIELDS and field["name"]:
            index = _read_field(lines, index, arguments.setdefault(field["name"], [field["text"]]))
        elif (header := HEADER.match(lines[index])) and header["arguments"] and _begins(lines, index):
            numpy = index + 1 < len(lines) and bool(UNDERLINE.match(lines[index + 1]))
            index = _read_items(lines, index + 1 + numpy, NUMPY_ITEM if numpy else ITEM, arguments)
        else:
            index += 1
    described = {name: " ".join(" ".join(parts).split()) for name, parts in arguments.items()}
    return "\n".join(lines[:end]).strip(), {name: words for name, words in described.items() if words}


def in_google_style(function: Callable[..., Any], text: str, names: list[str]) -> Callable[..., Any]:
    """
    The function for `transformers.utils.get_json_schema`, which reads Google's style without types alone: as it is
    where that is its style, else with its docstring rewritten.

    Args:
        function (`Callable`): The function or bound method.
        text (`str`): Its docstring.
        names (`list[str]`): Its parameters.
    """
    _, documented, _ = parse_google_format_docstring(text)
    other = any(_is_numpy_or_field(text.split("\n"), index) for index in range(text.count("\n") + 1))
    if all(name in documented for name in names) and not other:
        return function
    description, arguments = read_docstring(text)

    def stand_in() -> None: ...

    update_wrapper(stand_in, function)
    lines = [f"    {name}: {arguments[name]}" for name in names if name in arguments]
    stand_in.__doc__ = "\n".join([description, "", "Args:", *lines]) if lines else description
    return stand_in


def _begins(lines: list[str], index: int) -> bool:
    """Whether what says of arguments, results or errors begins in a line."""
    header = HEADER.match(lines[index])
    return _is_numpy_or_field(lines, index) or bool(header and lines[index].rstrip().endswith(":"))


def _is_numpy_or_field(lines: list[str], index: int) -> bool:
    field = FIELD.match(lines[index])
    if field and field["kind"] in (*PARAMETER_FIELDS, "type", "return", "returns", "rtype", "raise", "raises"):
        return True
    underlined = index + 1 < len(lines) and UNDERLINE.match(lines[index + 1])
    return bool(underlined and HEADER.match(lines[index]))


def _read_field(lines: list[str], index: int, parts: list[str]) -> int:
    """Reads the lines that go on with a field; returns where the next begins."""
    index += 1
    while index < len(lines) and lines[index].strip() and not FIELD.match(lines[index]):
        parts.append(lines[index])
        index += 1
    return index


def _read_items(lines: list[str], index: int, pattern: re.Pattern[str], arguments: dict[str, list[str]]) -> int:
    """Reads the items of a section; returns where the next section begins."""
    indent: int | None = None
    parts: list[list[str]] = []
    while index < len(lines) and not _begins(lines, index):
        line = lines[index]
        item = pattern.match(line)
        if not line.strip():
            index += 1
            continue
        if item and (indent is None or len(item["indent"]) == indent) and not SECTION.match(line):
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
