"""
The options of the shipped schema, laid out: for `mt-grpo COMMAND --help`, in tables for the docs, and for a shell that
completes them (`mt-grpo completion`, whose script shtab writes). Imports no torch.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

from mt_grpo.app.commands import accelerate_configs, shipped
from mt_grpo.app.request import OF_HOSTS, OWN_OPTIONS
from mt_grpo.app.schema import SchemaOption, load_schema
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.options.table import GROUPS, OPTIONS, Option

_NAME_WIDTH = 24
"""Columns for the name of an option; a longer name moves its own words."""

_VALUES = {"integer": "N", "number": "X", "boolean": "true|false", "object": "MAPPING", "string": "TEXT"}


_TAKES = {"serve": "RECIPE.yaml|RUN", "chat": "RUN|RECIPE.yaml"}


def command_help(command: str, line: str, everything: bool = False) -> str:
    """The help of a command that takes a recipe."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 119)
    text = [
        f"usage: mt-grpo {command} {_TAKES.get(command, 'RECIPE.yaml')} [--option value ...]",
        "",
        f"{line[0].upper()}{line[1:]}.",
        "",
        *textwrap.wrap(
            f"{'RUN is the folder of a run, or of a model that was merged. ' if command in _TAKES else ''}"
            "RECIPE.yaml holds options as `option: value`; `--config RECIPE.yaml` is the same. An option on the "
            "command line wins over the recipe: `--option value`, `--option=value`, `--list one two`, and mappings as "
            "JSON.",
            width,
        ),
    ]
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
        often = {name: option for name, option in group.items() if name not in OPTIONS or not OPTIONS[name].seldom}
        text += ["", f"{title}:", *_lines(often, width)]
    text += ["", f"`mt-grpo {command} --help-all` lists all {len(options)} options of a recipe."]
    return "\n".join(text) + "\n"


def _groups(options: dict[str, SchemaOption], command: str) -> dict[str, dict[str, SchemaOption]]:
    """The options of the table, by the titles of their groups, in its order."""
    listed = {name: options[name] for name in dict.fromkeys([*OPTIONS, *options])}
    if command == "serve":
        return {"The server": {name: option for name, option in listed.items() if option.of_server}}
    return {title: {name: option for name, option in listed.items() if option.group == title} for title in GROUPS}


def _lines(options: dict[str, SchemaOption], width: int) -> list[str]:
    """A line for each option, and a second one where a narrow terminal needs it."""
    lines = []
    for name, option in options.items():
        first, rest = f"  {f'--{name}':<{_NAME_WIDTH}} ", " " * (_NAME_WIDTH + 3)
        text = option.summary + _default(option)
        lines += textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest)
    return lines


def _paragraph(name: str, option: SchemaOption, width: int) -> list[str]:
    if option.words:
        takes = "{" + ",".join(option.words) + "}"
    elif option.many and option.items is not None:
        takes = f"{_VALUES[option.items.kinds[0]]} ..."
    else:
        takes = "|".join(_VALUES[kind] for kind in option.kinds if kind in _VALUES)
    head = textwrap.wrap(f"--{name} {takes}{_default(option)}", width, initial_indent="  ", subsequent_indent="    ")
    indent = " " * 8
    return [*head, *textwrap.wrap(option.description, width, initial_indent=indent, subsequent_indent=indent)]


def _default(option: SchemaOption) -> str:
    default = option.default
    if default in (None, "", [], {}) and default is not False:
        return ""
    return f" ({str(default).lower() if isinstance(default, bool) else default})"


_TABLE = re.compile(r"(<!-- options: (.+?) -->)\n.*?\n(<!-- end of options -->)", re.DOTALL)


def fill_tables(page: str, table: Mapping[str, Option] = OPTIONS) -> str:
    """A page of the docs with its tables of options made again, each between its two comments."""
    groups = _groups(load_schema().options, "train")

    def fill(found: re.Match[str]) -> str:
        rows = []
        for name, option in groups[found[2]].items():
            described, default = table[name], _default(option).strip(" ()")
            more = f" [More]({described.page})." if described.page else ""
            rows.append(f"- `{name}{f': {default}' if default else ''}`: {described.help}{more}")
        return "\n".join([found[1], "", *rows, "", found[3]])

    return _TABLE.sub(fill, page)


# Completion

_FORMS = ("messages", "sharegpt", "tokens", "preferences", "dataset", "jsonl", "openinference", "trackio")
"""Those of `mt_grpo.runlog.export`, which takes longer to import than a shell should take to start."""

_SHELLS = ("bash", "zsh", "fish")
_YAML = {"bash": "_mt_grpo_yaml", "zsh": "_files -g '*.yaml'", "fish": "(__fish_complete_suffix .yaml)"}
"""What completes the path of a recipe in each shell."""
_LAUNCHED = {"bash": "_mt_grpo_accelerate", "zsh": "_mt_grpo_accelerate", "fish": "(_mt_grpo_accelerate)"}
"""What completes the name or the path of a configuration of accelerate."""

_PREAMBLE = {
    "bash": """\
_mt_grpo_yaml() {
    compgen -f -X '!*.yaml' -- "$1"
    compgen -d -- "$1"
}
_mt_grpo_accelerate() {
    compgen -W "@CONFIGS@" -- "$1"
    _mt_grpo_yaml "$1"
}
""",
    "zsh": """\
_mt_grpo_accelerate() {
    compadd -- @CONFIGS@
    _files -g '*.yaml'
}
""",
    "fish": """\
function _mt_grpo_accelerate
    string split ' ' '@CONFIGS@'
    __fish_complete_suffix .yaml
end
""",
}

_USAGE = """usage: mt-grpo completion bash | zsh | fish

prints a script that completes commands and options; load it where the shell starts:

  source <(mt-grpo completion bash)       in ~/.bashrc
  source <(mt-grpo completion zsh)        in ~/.zshrc, after compinit
  mt-grpo completion fish | source        in ~/.config/fish/config.fish
"""


def completion(arguments: list[str]) -> int:
    """`mt-grpo completion bash | zsh | fish`: prints the script."""
    match arguments:
        case ["-h" | "--help"]:
            print(_USAGE, end="")
        case [shell] if shell in _SHELLS:
            import shtab  # not for `--help`

            configs = " ".join(accelerate_configs())
            preamble = {name: text.replace("@CONFIGS@", configs) for name, text in _PREAMBLE.items()}
            script = shtab.complete(_command_line(shtab.FILE, shtab.DIRECTORY), shell, preamble=preamble)
            # shtab knows `eval "$(...)"` in zsh; `source <(...)` is the other way to load a script at once
            print(script.replace("$zsh_eval_context[-1] == eval ", "$zsh_eval_context[-1] == (eval|file) "))
        case [shell]:
            raise ConfigError(
                f"There is no completion for {shell!r}{did_you_mean(shell, _SHELLS)}: write one of "
                f"{', '.join(_SHELLS)}."
            )
        case _:
            raise ConfigError(f"`mt-grpo completion` needs one shell behind it: {', '.join(_SHELLS)}.")
    return 0


def _command_line(file: Mapping[str, str], folder: Mapping[str, str]) -> argparse.ArgumentParser:
    """The commands and their options, as a parser that only shtab reads; `file` and `folder` complete a path."""
    parser = argparse.ArgumentParser("mt-grpo")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()

    def add(command: argparse.ArgumentParser, *name: str, by: Mapping[str, str] | None = None, **options: Any) -> None:
        argument = command.add_argument(*name, **options)
        if by is not None:
            argument.complete = by  # type: ignore[attr-defined]

    recipes = load_schema().options
    for name, own in OWN_OPTIONS.items():
        command = commands.add_parser(name, help=name)
        add(command, "recipe", nargs="?", by=folder if name == "chat" else _YAML)
        add(command, "--config", by=_YAML)
        add(command, "--help-all", action="store_true")
        for option, described in {**recipes, **own}.items():
            takes: dict[str, Any] = {"nargs": "+" if described.many else None, "choices": described.words or None}
            if option == "accelerate_config":
                takes = {"by": _LAUNCHED}
            elif described.flag:
                takes = {"action": "store_true"}
            add(command, f"--{option}", help=described.summary, **takes)
    for name, values, paths, flags in (
        ("view", ("--port", "--filter"), {"--export": file}, ("--no_browser", "--overwrite")),
        ("runs", ("--sort", "--filter"), {}, ("--json",)),
        ("compare", (), {}, ("--json",)),
        ("export", ("--filter",), {"--output": file}, ("--overwrite",)),
        ("merge", ("--checkpoint",), {"--to": folder}, ()),
        ("credit", ("--step", "--max_groups"), {"--model_name_or_path": folder}, ("--json",)),
    ):
        command = commands.add_parser(name, help=name)
        add(command, "run", nargs="*" if name == "compare" else None, by=folder)
        for option in values:
            add(command, option)
        for option, by in paths.items():
            add(command, option, by=by)
        for option in flags:
            add(command, option, action="store_true")
        if name == "export":
            add(command, "--to", choices=_FORMS)
    actions = commands.add_parser("recipes", help="recipes").add_subparsers()
    actions.add_parser("ls", help="ls")
    add(actions.add_parser("cp", help="cp"), "name", choices=list(shipped()))
    add(commands.add_parser("completion", help="completion"), "shell", choices=_SHELLS)
    for name, flags in (("env", ("--clean", "--all")), ("schema", ())):
        command = commands.add_parser(name, help=name)
        for option in flags:
            add(command, option, action="store_true")
    return parser
