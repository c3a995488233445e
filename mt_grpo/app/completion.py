"""`mt-grpo completion`: a script that completes the command line in a shell, written by shtab. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import shtab

from mt_grpo.app.recipes_command import accelerate_configs, shipped
from mt_grpo.app.request import OWN_OPTIONS
from mt_grpo.app.schema import SchemaOption, load_schema
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean

FORMS = ("messages", "sharegpt", "tokens", "preferences", "dataset", "jsonl", "openinference", "trackio")
"""Those of `mt_grpo.runlog.export`, which takes longer to import than a shell should take to start."""

SHELLS = ("bash", "zsh", "fish")

YAML = {"bash": "_mt_grpo_yaml", "zsh": "_files -g '*.yaml'", "fish": "(__fish_complete_suffix .yaml)"}
"""What completes the path of a recipe in each shell."""

LAUNCHED = {"bash": "_mt_grpo_accelerate", "zsh": "_mt_grpo_accelerate", "fish": "(_mt_grpo_accelerate)"}
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

USAGE = """usage: mt-grpo completion bash | zsh | fish

prints a script that completes commands and options; load it where the shell starts:

  source <(mt-grpo completion bash)       in ~/.bashrc
  source <(mt-grpo completion zsh)        in ~/.zshrc, after compinit
  mt-grpo completion fish | source        in ~/.config/fish/config.fish
"""


def run(arguments: list[str]) -> int:
    """`mt-grpo completion bash | zsh | fish`: prints the script."""
    match arguments:
        case ["-h" | "--help"]:
            print(USAGE, end="")
        case [shell] if shell in SHELLS:
            configs = " ".join(accelerate_configs())
            preamble = {name: text.replace("@CONFIGS@", configs) for name, text in _PREAMBLE.items()}
            script = shtab.complete(_command_line(), shell, preamble=preamble)
            # shtab knows `eval "$(...)"` in zsh; `source <(...)` is the other way to load a script at once
            print(script.replace("$zsh_eval_context[-1] == eval ", "$zsh_eval_context[-1] == (eval|file) "))
        case [shell]:
            raise ConfigError(
                f"There is no completion for {shell!r}{did_you_mean(shell, SHELLS)}: write one of {', '.join(SHELLS)}."
            )
        case _:
            raise ConfigError(f"`mt-grpo completion` needs one shell behind it: {', '.join(SHELLS)}.")
    return 0


def _command_line() -> argparse.ArgumentParser:
    """The commands and their options, as a parser that only shtab reads."""
    parser = argparse.ArgumentParser("mt-grpo")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    recipes = load_schema().options
    for name, own in OWN_OPTIONS.items():
        command = commands.add_parser(name, help=name)
        _completed(command.add_argument("recipe", nargs="?"), YAML)
        _completed(command.add_argument("--config"), YAML)
        command.add_argument("--help-all", action="store_true")
        for option, described in {**recipes, **own}.items():
            _add_option(command, option, described)
    view = commands.add_parser("view", help="view")
    _completed(view.add_argument("run"), shtab.DIRECTORY)
    for option in ("--port", "--filter"):
        view.add_argument(option)
    _completed(view.add_argument("--export"), shtab.FILE)
    for flag in ("--no_browser", "--overwrite"):
        view.add_argument(flag, action="store_true")
    export = commands.add_parser("export", help="export")
    _completed(export.add_argument("run"), shtab.DIRECTORY)
    export.add_argument("--to", choices=FORMS)
    export.add_argument("--filter")
    _completed(export.add_argument("--output"), shtab.FILE)
    export.add_argument("--overwrite", action="store_true")
    credit = commands.add_parser("credit", help="credit")
    _completed(credit.add_argument("run"), shtab.DIRECTORY)
    for option in ("--step", "--max_groups"):
        credit.add_argument(option)
    _completed(credit.add_argument("--model_name_or_path"), shtab.DIRECTORY)
    credit.add_argument("--json", action="store_true")
    actions = commands.add_parser("recipes", help="recipes").add_subparsers()
    actions.add_parser("ls", help="ls")
    actions.add_parser("cp", help="cp").add_argument("name", choices=list(shipped()))
    commands.add_parser("completion", help="completion").add_argument("shell", choices=SHELLS)
    for name in ("env", "schema"):
        commands.add_parser(name, help=name)
    return parser


def _add_option(command: argparse.ArgumentParser, name: str, described: SchemaOption) -> None:
    said = described.summary
    if described.flag:
        command.add_argument(f"--{name}", action="store_true", help=said)
        return
    option = command.add_argument(f"--{name}", nargs="+" if described.many else None, help=said)
    if name == "accelerate_config":
        _completed(option, LAUNCHED)
    else:
        option.choices = described.words or None


def _completed(argument: argparse.Action, by: Mapping[str, str]) -> None:
    argument.complete = by  # type: ignore[attr-defined]
