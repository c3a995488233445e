"""`mt-grpo completion`: a script that completes the command line in a shell."""

from __future__ import annotations

from mt_grpo.app.request import OWN_OPTIONS
from mt_grpo.app.schema import load_schema
from mt_grpo.app.shipped import accelerate_configs, shipped
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean

WORD_COMMANDS = {
    "export": (),
    "recipes": ("ls", "cp"),
    "completion": ("bash", "zsh", "fish"),
    "env": (),
    "schema": (),
    "view": (),
}
"""The commands that take no recipe, with the words that may follow them."""

COMMANDS = (*OWN_OPTIONS, *WORD_COMMANDS)

VIEW = ("--port", "--no_browser", "--export", "--filter", "--help")
"""Options of `view`, which takes the folder of a run."""

_BASH = """\
# Completes mt-grpo in bash: source <(mt-grpo completion bash)
_mt_grpo() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words="" paths="" folders=""
    case $COMP_CWORD:${COMP_WORDS[1]}:$previous:$current in
        1:*) words="@COMMANDS@ --help --version" ;;
        *:train:--accelerate_config:* | *:doctor:--accelerate_config:*) words="@CONFIGS@" paths=yes ;;
        3:recipes:cp:*) words="@RECIPES@" ;;
        *:export:--to:*) words="@FORMS@" ;;
        *:export:*:-*) words="--to --output" ;;
        *:export:*) paths=yes ;;
@OPTIONS@
        *:train:* | *:rollout:* | *:serve:* | *:doctor:*) paths=yes ;;
        *:view:*:-*) words="@VIEW@" ;;
        *:view:*) folders=yes ;;
@WORDS@
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    local IFS=$'\\n'
    if [[ $paths ]]; then
        COMPREPLY+=($(compgen -f -X '!*.yaml' -- "$current"))
    fi
    if [[ $paths$folders ]]; then
        compopt -o filenames 2>/dev/null
        COMPREPLY+=($(compgen -d -- "$current"))
    fi
}
complete -F _mt_grpo mt-grpo
"""

_ZSH = """\
#compdef mt-grpo
# Completes mt-grpo in zsh, after compinit: source <(mt-grpo completion zsh)
_mt_grpo() {
    case $((CURRENT - 1)):$words[2]:$words[CURRENT-1]:$PREFIX in
        1:*) compadd -- @COMMANDS@ --help --version ;;
        *:train:--accelerate_config:* | *:doctor:--accelerate_config:*) compadd -- @CONFIGS@; _files -g '*.yaml' ;;
        3:recipes:cp:*) compadd -- @RECIPES@ ;;
        *:export:--to:*) compadd -- @FORMS@ ;;
        *:export:*:-*) compadd -- --to --output ;;
        *:export:*) _files ;;
@OPTIONS@
        *:train:* | *:rollout:* | *:serve:* | *:doctor:*) _files -g '*.yaml' ;;
        *:view:*:-*) compadd -- @VIEW@ ;;
        *:view:*) _files -/ ;;
@WORDS@
    esac
}
compdef _mt_grpo mt-grpo
"""

_FISH = """\
# Completes mt-grpo in fish: mt-grpo completion fish | source
complete -c mt-grpo -f
complete -c mt-grpo -n __fish_use_subcommand -a '@COMMANDS@'
complete -c mt-grpo -n __fish_use_subcommand -l help
complete -c mt-grpo -n __fish_use_subcommand -l version
complete -c mt-grpo -n '__fish_seen_subcommand_from train rollout serve doctor' -a '(__fish_complete_suffix .yaml)'
complete -c mt-grpo -n '__fish_seen_subcommand_from train doctor' -l accelerate_config -x -a '@CONFIGS@ (__fish_complete_suffix .yaml)'
complete -c mt-grpo -n '__fish_seen_subcommand_from view' -a '(__fish_complete_directories) @VIEW@'
complete -c mt-grpo -n '__fish_seen_subcommand_from cp' -a '@RECIPES@'
complete -c mt-grpo -n '__fish_seen_subcommand_from export' -a '(__fish_complete_directories)'
complete -c mt-grpo -n '__fish_seen_subcommand_from export' -l to -x -a '@FORMS@'
complete -c mt-grpo -n '__fish_seen_subcommand_from export' -l output -r
@OPTIONS@
@WORDS@
"""  # noqa: E501


def run(arguments: list[str]) -> int:
    """
    `mt-grpo completion bash | zsh | fish`: prints the script.

    Raises:
        ConfigError: For any other argument.
    """
    shells = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    match arguments:
        case ["-h" | "--help"]:
            print("usage: mt-grpo completion bash | zsh | fish\n\nprints a script; its first lines say how to load it")
        case [shell] if shell in shells:
            print(shells[shell](), end="")
        case [shell]:
            raise ConfigError(
                f"There is no completion for {shell!r}{did_you_mean(shell, shells)}: write one of {', '.join(shells)}."
            )
        case _:
            raise ConfigError(f"`mt-grpo completion` needs one shell behind it: {', '.join(shells)}.")
    return 0


def _options() -> dict[str, list[str]]:
    """What may follow each command that takes a recipe."""
    fields = load_schema().properties
    return {
        command: sorted(f"--{name}" for name in {*fields, *own, "config", "help", "help-all"})
        for command, own in OWN_OPTIONS.items()
    }


def _fill(script: str, options: list[str], words: list[str]) -> str:
    values = {
        "COMMANDS": " ".join(COMMANDS),
        "CONFIGS": " ".join(accelerate_configs()),
        "RECIPES": " ".join(shipped()),
        "VIEW": " ".join(VIEW),
        "FORMS": "jsonl dataset trackio openinference",
        "OPTIONS": "\n".join(options),
        "WORDS": "\n".join(words),
    }
    for name, value in values.items():
        script = script.replace(f"@{name}@", value)
    return script


def _bash() -> str:
    options = [f'        *:{command}:*:-*) words="{" ".join(all_)}" ;;' for command, all_ in _options().items()]
    words = [f'        2:{command}:*) words="{" ".join(all_)}" ;;' for command, all_ in WORD_COMMANDS.items()]
    return _fill(_BASH, options, words)


def _zsh() -> str:
    options = [f"        *:{command}:*:-*) compadd -- {' '.join(all_)} ;;" for command, all_ in _options().items()]
    words = [f"        2:{command}:*) compadd -- {' '.join(all_)} ;;" for command, all_ in WORD_COMMANDS.items()]
    return _fill(_ZSH, options, words)


def _fish() -> str:
    seen = "complete -c mt-grpo -n '__fish_seen_subcommand_from"
    options = [
        f"{seen} {command}' -l {option.removeprefix('--')}"
        for command, all_ in _options().items()
        for option in all_
        if option != "--accelerate_config"
    ]
    words = [f"{seen} {command}' -a '{' '.join(all_)}'" for command, all_ in WORD_COMMANDS.items() if all_]
    return _fill(_FISH, options, words)
