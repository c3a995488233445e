"""The command line: `mt-grpo COMMAND`."""

from __future__ import annotations

import errno
import functools
import importlib
import io
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mt_grpo import __version__
from mt_grpo.app.request import OWN_OPTIONS, Request, check_new, check_places, read_request
from mt_grpo.errors import ConfigError, UserError, refuse_first
from mt_grpo.imports import did_you_mean
from mt_grpo.options.rules import check_served
from mt_grpo.preemption import PreemptedError, ends_at_once, leave, listening, print_error, run_interruptibly, speaks
from mt_grpo.trajectory import visible

if TYPE_CHECKING:
    from mt_grpo.app.build import Recipe

COMMANDS = {
    "train": ("train an agent", "mt_grpo.cli:_train"),
    "rollout": (
        "show what the agent does on a few prompts, or make data of what a model does",
        "mt_grpo.cli:_rollout",
    ),
    "eval": ("compare models on a recipe's held-out rows", "mt_grpo.cli:_evaluate"),
    "serve": (
        "start the vLLM server that a recipe's trainer needs, or that serves a run's model",
        "mt_grpo.cli:_serve",
    ),
    "view": ("show a run's conversations and their credit in the browser", "mt_grpo.app.runs:view"),
    "runs": ("list the runs in a folder, with what they are at and what they earn", "mt_grpo.app.runs:runs"),
    "compare": ("compare runs: options that differ, and metrics with intervals", "mt_grpo.app.runs:compare"),
    "export": ("write a run's conversations for other programs", "mt_grpo.app.runs:export"),
    "credit": ("compare the credit rules on a run's conversations", "mt_grpo.advisor:credit"),
    "chat": ("talk in the terminal with what a run trained, in its environment", "mt_grpo.cli:_chat"),
    "merge": ("write the model that a run trained as one that loads without the run", "mt_grpo.app.merge:merge"),
    "doctor": ("tell whether a run can begin and fits, and how long a step takes", "mt_grpo.cli:_doctor"),
    "recipes": ("list the recipes that ship with mt-grpo, or copy one", "mt_grpo.app.commands:recipes"),
    "env": ("print versions and devices, for a bug report", "mt_grpo.app.commands:env"),
    "schema": ("print the JSON schema of recipes, for editors", "mt_grpo.cli:_schema"),
    "completion": ("print a script that completes commands and options in a shell", "mt_grpo.app.commands:completion"),
}
"""
Each command: what it does, in one line, and the function that does it, imported when the command is called. `USAGE` of
its module has the help of a command that takes no recipe.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mt-grpo` command."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # a notebook's is none, and one that was read from stays as it is
        if isinstance(stream, io.TextIOWrapper):
            with suppress(io.UnsupportedOperation):
                stream.reconfigure(errors="replace")  # a person's words in another encoding, a model's on a terminal
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(), end="")
        return 0 if arguments else 1
    name, *arguments = arguments
    if name == "--version":
        print(f"mt-grpo {__version__}")
        return 0
    if name not in COMMANDS:
        known = f"the commands are {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}"
        print(f"mt-grpo: the command {name!r} is unknown; {known}.", file=sys.stderr)
        return 1
    line, path = COMMANDS[name]
    wanted = {"-h", "--help", "--help-all"}.intersection(arguments)
    if wanted and name in OWN_OPTIONS:
        from mt_grpo.app.commands import command_help

        print(command_help(name, line, "--help-all" in wanted), end="")
        return 0
    module, function = path.split(":")
    try:
        with ends_at_once():
            place = vars(importlib.import_module(module))
        if {"-h", "--help"} & wanted:
            print(place["USAGE"][name], end="")
            return 0
        status = place[function](arguments)
        if name not in OWN_OPTIONS:
            print(end="", flush=True)  # what cannot be written is told below, and not at the end of Python
        return status
    except UserError as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        if name in OWN_OPTIONS:
            raise
        print("mt-grpo: interrupted by Ctrl-C.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if name in OWN_OPTIONS:  # may be of a server or a tool
            raise
        _drop_output()  # whoever reads has enough, as `head` has
        return 1
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"mt-grpo: {str(error.filename)[:60]!r}... is too long for the name of a file.", file=sys.stderr)
            return 1
        if name in OWN_OPTIONS or error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _drop_output()
        said = f"the output of `mt-grpo {name}` cannot be written ({error.strerror}): free some."
        print(f"mt-grpo: {said}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """What is not yet written to standard output, and cannot be, is left out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage() -> str:
    """The text of `mt-grpo --help`."""
    lines = [f"  {name:<10} {line}\n" for name, (line, _) in COMMANDS.items()]
    return (
        "usage: mt-grpo COMMAND ...\n\n"
        f"commands:\n{''.join(lines)}\n"
        f"{', '.join(OWN_OPTIONS)}: mt-grpo COMMAND RECIPE.yaml [--option value ...]\n"
        "`mt-grpo COMMAND --help` explains a command, `mt-grpo --version` prints the version.\n"
    )


def _interruptible(command: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Ctrl-C, SIGTERM and SIGHUP end what a command began, and it: with one line and the conventional status."""

    @functools.wraps(command)
    def run(arguments: list[str]) -> int:
        sys.excepthook = _show_traceback
        return run_interruptibly(command, arguments)

    return run


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own, less what the words of a model or a tool in it would do to a terminal; of a kind one process's."""
    if speaks(kind.__name__):
        sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))


def _read(arguments: list[str], command: str) -> Request:
    request = read_request(arguments, command)
    check_places(request.values, command)
    return request


def _load(module: str) -> Any:
    """A module that imports torch, while a signal ends the process at once."""
    warnings.simplefilter("ignore", FutureWarning)  # libraries' notes to each other, not to the user
    with ends_at_once():
        return importlib.import_module(f"mt_grpo.{module}")


def _load_quietly(module: str) -> Any:
    """The same for a command that shows no bars of libraries."""
    with ends_at_once():
        from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return _load(module)


@_interruptible
def _train(arguments: list[str]) -> int:
    """`mt-grpo train`: trains an agent from a recipe, in this process or in those that accelerate launches."""
    with listening(signal.SIGUSR1):  # from now on, though the first step may be far away
        try:
            request = _read(arguments, "train")
            if request.own["accelerate_config"] is not None:
                return _load("app.launch").launch(request)
            request.check_processes()
            return _train_here(request)
        except PreemptedError:  # which the trainer has told
            return leave()


def _train_here(request: Request) -> int:
    ending, training = _load("training.ranks"), _load("app.train")
    dry_run, folder = request.own["dry_run"], request.values.get("output_dir") or "the `output_dir`"
    with ending.says_who_is_gone(folder):  # from the forming of their group to its end
        trainer, resolved = _prepare(request, writes=not dry_run)
        accelerator = trainer.accelerator
        if dry_run:
            _load("app.build").finish_dry_run(trainer, resolved)
        else:
            training.run_training(trainer, resolved, _console(quiet=not accelerator.is_main_process))
        del trainer
        training.leave_group(accelerator)
    return 0


@_interruptible
def _rollout(arguments: list[str]) -> int:
    """`mt-grpo rollout`: prints conversations with their rewards, or makes data of many."""
    request = _read(arguments, "rollout")
    own, folder = request.own, request.own["save"]
    makes_data = own["model"] or own["keep"] is not None or own["difficulty"]
    refuse_first(
        (
            own["again"] is None and (own["conversation"] is not None or own["turn"] is not None),
            "`--conversation` and `--turn` say of which run with `--again RUN`: add it, or leave them out.",
        ),
        (
            own["again"] is not None and (own["conversation"] is None or own["turn"] is None),
            "`--again` takes one conversation from one of its turns on: add `--conversation NAME --turn N`.",
        ),
        (
            own["again"] is not None and (makes_data or own["num_prompts"] is not None),
            "`--again` goes on with one conversation, by the recipe's own model: leave `--num_prompts`, `--model`, "
            "`--keep` and `--difficulty` out.",
        ),
    )
    if makes_data:
        return _load_quietly("app.rollout").make_data(request)
    of_endpoint = "is of the endpoint that `--model` names: name one, or leave it out."
    refuse_first(
        (own["api_key_env"] is not None, f"`--api_key_env` {of_endpoint}"),
        (own["prices"] is not None, f"`--prices` {of_endpoint}"),
        (
            own["num_generations"] is not None and folder is None and not own["audit"] and own["again"] is None,
            "`--num_generations` is of conversations that are kept or audited, and one of each prompt is shown: add "
            "`--save FOLDER` or `--audit`, or leave it out.",
        ),
    )
    if folder is not None:
        check_new(folder)
    rollouts = _load("app.rollout")  # while nothing has begun, since a signal ends the process at once
    again = own["again"], own["conversation"], own["turn"]
    recorded = None if own["again"] is None else rollouts.read_recorded(*again)
    trainer, resolved = _prepare(request, trains=False)
    return rollouts.show(trainer, resolved, own, _console(), recorded)


@_interruptible
def _evaluate(arguments: list[str]) -> int:
    """`mt-grpo eval`: samples and scores a recipe's held-out rows with one or several models."""
    request = _read(arguments, "eval")
    return _load_quietly("app.evaluate").evaluate(request)


def _serve(arguments: list[str]) -> int:
    """`mt-grpo serve`: becomes the vLLM server of a recipe's trainer, or starts several; of a run, of its model."""
    request = read_request(arguments, "serve")
    if request.run is None:
        check_served(request.values)
    check_places(request.values, "serve")
    return _load("app.serve").serve(_trained(request), request)


@_interruptible
def _chat(arguments: list[str]) -> int:
    """`mt-grpo chat`: talks with an agent."""
    request = _read(arguments, "chat")
    return _load_quietly("app.serve").chat(_trained(request), request.own["server"])


def _trained(request: Request) -> Recipe:
    """The recipe of a request; of a run with the model that it trained."""
    from mt_grpo.app.build import build_recipe
    from mt_grpo.training.checkpoint import find_trained

    recipe = build_recipe(request)
    if request.run is not None:
        recipe.model.model_name_or_path = str(find_trained(Path(request.run), request.own["checkpoint"]))
    return recipe


@_interruptible
def _doctor(arguments: list[str]) -> int:
    """`mt-grpo doctor`: checks a recipe, or one that it writes, plans memory and time; 1 where something fails."""
    request = read_request(arguments, "doctor")
    if request.own["gpu"] is not None:
        importlib.import_module("mt_grpo.doctor").GPU.named(request.own["gpu"])
    check_places(request.values, "doctor")
    checks = _load("doctor.checks")
    if request.own["suggest"] is not None:
        request = _load("doctor.suggest").suggest(request)
    return checks.diagnose(request)


USAGE = {
    "schema": """usage: mt-grpo schema

Print the JSON schema of a recipe, with the options of the TRL and transformers that are installed. An editor completes
and checks a recipe by it where the recipe's first line names a file that holds it:

  mt-grpo schema > recipe.schema.json

  # yaml-language-server: $schema=recipe.schema.json
"""
}


def _schema(arguments: list[str]) -> int:
    """`mt-grpo schema`: prints the schema of the installed libraries."""
    if arguments:
        raise ConfigError(f"`mt-grpo schema` takes no arguments, and {arguments[0]!r} is given.")
    from mt_grpo.app.build import build_schema

    print(json.dumps(build_schema(), indent=1))
    return 0


def _console(quiet: bool = False):
    from rich.console import Console

    return Console(soft_wrap=True, quiet=quiet)


def _prepare(request: Request, trains: bool = True, writes: bool = True):
    """The trainer of a recipe and its resolved options."""
    build = _load("app.build")
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():  # a bar in a file is a heap of lines
        disable_progress_bar()
    recipe = build.build_recipe(request)
    resolved = recipe.resolved()
    trainer = build.build_trainer(recipe, trains, writes)
    disable_progress_bar()  # a run has a bar of its own
    return trainer, resolved
