"""The options of the shipped schema, laid out: for `mt-grpo COMMAND --help`, and in tables for the docs."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping

from mt_grpo.app.request import OF_HOSTS, OWN_OPTIONS
from mt_grpo.app.schema import SchemaOption, load_schema
from mt_grpo.options.table import GROUPS, OPTIONS, Option

NAME_WIDTH = 24
"""Columns for the name of an option; a longer name moves its own words."""

_VALUES = {"integer": "N", "number": "X", "boolean": "true|false", "object": "MAPPING", "string": "TEXT"}


def command_help(command: str, line: str, everything: bool = False) -> str:
    """The help of a command that takes a recipe."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 119)
    text = [
        f"usage: mt-grpo {command} RECIPE.yaml [--option value ...]",
        "",
        f"{line[0].upper()}{line[1:]}.",
        "",
        *textwrap.wrap(
            "RECIPE.yaml holds options as `option: value`; `--config RECIPE.yaml` is the same. An option on the "
            "command line wins over the recipe: `--option value`, `--option=value`, `--list one two`, and mappings as "
            "JSON.",
            width,
        ),
    ]
    if OWN_OPTIONS[command]:
        own = {name: option for name, option in OWN_OPTIONS[command].items() if everything or name not in OF_HOSTS}
        text += ["", f"Options of {command}:", *_lines(own, width)]
    options = load_schema().options
    if everything:
        ours = {name: option for name, option in options.items() if option.owner == "mt_grpo"}
        rest = {name: options[name] for name in sorted(options.keys() - ours.keys())}
        for title, group in (("Options of mt-grpo", ours), ("Options of TRL and transformers", rest)):
            text += ["", f"{title}:", *(part for name in group for part in _paragraph(name, group[name], width))]
        return "\n".join(text) + "\n"
    for title, group in _groups(options, command).items():
        text += ["", f"{title}:", *_lines(group, width)]
    text += ["", f"`mt-grpo {command} --help-all` lists all {len(options)} options of a recipe."]
    return "\n".join(text) + "\n"


def _groups(options: dict[str, SchemaOption], command: str) -> dict[str, dict[str, SchemaOption]]:
    """The options that `--help` shows, by the titles of their groups, in the order of the table."""
    listed = {name: options[name] for name in dict.fromkeys([*OPTIONS, *options])}
    if command == "serve":
        return {"The server": {name: option for name, option in listed.items() if option.of_server}}
    return {title: {name: option for name, option in listed.items() if option.group == title} for title in GROUPS}


def _lines(options: dict[str, SchemaOption], width: int) -> list[str]:
    """A line for each option, and a second one where a narrow terminal needs it."""
    lines = []
    for name, option in options.items():
        lines += textwrap.wrap(
            option.summary + _default(option),
            width,
            initial_indent=f"  {f'--{name}':<{NAME_WIDTH}} ",
            subsequent_indent=" " * (NAME_WIDTH + 3),
        )
    return lines


def _paragraph(name: str, option: SchemaOption, width: int) -> list[str]:
    takes = "{" + ",".join(option.words) + "}" if option.words else "|".join(_takes(option))
    head = textwrap.wrap(f"--{name} {takes}{_default(option)}", width, initial_indent="  ", subsequent_indent="    ")
    indent = " " * 8
    return [*head, *textwrap.wrap(option.description, width, initial_indent=indent, subsequent_indent=indent)]


def _takes(option: SchemaOption) -> list[str]:
    if option.many and option.items is not None:
        return [f"{_VALUES[option.items.kinds[0]]} ..."]
    return [_VALUES[kind] for kind in option.kinds if kind in _VALUES]


def _default(option: SchemaOption) -> str:
    default = option.default
    if default in (None, "", [], {}) and default is not False:
        return ""
    return f" ({str(default).lower() if isinstance(default, bool) else default})"


_TABLE = re.compile(r"(<!-- options: (.+?) -->)\n.*?\n(<!-- end of options -->)", re.DOTALL)


def fill_tables(page: str, table: Mapping[str, Option] = OPTIONS) -> str:
    """
    A page of the docs with its tables of options made again: each stands between `<!-- options: GROUP -->` and
    `<!-- end of options -->`.
    """
    groups = _groups(load_schema().options, "train")

    def fill(found: re.Match[str]) -> str:
        rows = ["| option | default | |", "| --- | --- | --- |"]
        for name, option in groups[found[2]].items():
            described, default = table[name], _default(option).strip(" ()")
            more = f" [More]({described.page})." if described.page else ""
            rows.append(f"| `{name}` | {f'`{default}`' if default else ''} | {described.help}{more} |")
        return "\n".join([found[1], *rows, found[3]])

    return _TABLE.sub(fill, page)
