"""The command line: `mt-grpo COMMAND`."""

from __future__ import annotations

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
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from mt_grpo import __version__
from mt_grpo.app.interrupt import ends_at_once, print_error, run_interruptibly
from mt_grpo.app.request import OWN_OPTIONS, Request, check_new, check_places, check_processes, read_request
from mt_grpo.errors import ConfigError, UserError
from mt_grpo.imports import did_you_mean
from mt_grpo.options.rules import check_served
from mt_grpo.preemption import PreemptedError, leave, listening
from mt_grpo.trajectory import visible

if TYPE_CHECKING:
    from mt_grpo.app.recipe import Recipe

_SHOWN_PROMPTS = 4
"""Prompts that `mt-grpo rollout` answers without another number."""

COMMANDS = {
    "train": ("train an agent", "mt_grpo.cli:train"),
    "rollout": ("show what the agent does on a few prompts, or make data of what a model does", "mt_grpo.cli:rollout"),
    "eval": ("compare models on a recipe's held-out rows", "mt_grpo.cli:evaluate"),
    "serve": (
        "start the vLLM server that a recipe's trainer needs, or that serves a run's model",
        "mt_grpo.cli:serve",
    ),
    "view": ("show a run's conversations and their credit in the browser", "mt_grpo.app.view:view"),
    "runs": ("list the runs in a folder, with what they are at and what they earn", "mt_grpo.app.runs:runs"),
    "compare": ("compare runs: options that differ, and metrics with intervals", "mt_grpo.app.runs:compare"),
    "export": ("write a run's conversations for other programs", "mt_grpo.app.view:export"),
    "credit": ("compare the credit rules on a run's conversations", "mt_grpo.advisor:credit"),
    "chat": ("talk in the terminal with what a run trained, in its environment", "mt_grpo.cli:chat"),
    "merge": ("write the model that a run trained as one that loads without the run", "mt_grpo.app.merge:merge"),
    "doctor": ("tell whether a run can begin and fits, and how long a step takes", "mt_grpo.cli:doctor"),
    "recipes": ("list the recipes that ship with mt-grpo, or copy one", "mt_grpo.app.commands:recipes"),
    "env": ("print versions and devices, for a bug report", "mt_grpo.app.commands:env"),
    "schema": ("print the JSON schema of recipes, for editors", "mt_grpo.cli:schema"),
    "completion": ("print a script that completes commands and options in a shell", "mt_grpo.app.help:completion"),
}
"""Each command: what it does, in one line, and the function that does it, imported when the command is called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mt-grpo` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's is none
            stream.reconfigure(errors="replace")  # a model's words on a terminal without UTF-8
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if arguments else 1
    name, *arguments = arguments
    if name == "--version":
        print(f"mt-grpo {__version__}")
        return 0
    if name not in COMMANDS:
        print(
            f"mt-grpo: the command {name!r} is unknown; the commands are {', '.join(COMMANDS)}"
            f"{did_you_mean(name, COMMANDS)}.",
            file=sys.stderr,
        )
        return 1
    line, path = COMMANDS[name]
    wanted = {"-h", "--help", "--help-all"}.intersection(arguments)
    if wanted and name in OWN_OPTIONS:  # the others parse their arguments by themselves
        from mt_grpo.app.help import command_help

        print(command_help(name, line, "--help-all" in wanted), end="")
        return 0
    module, function = path.split(":")
    try:
        with ends_at_once():
            command = vars(importlib.import_module(module))[function]
        return command(arguments)
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever reads has enough, as `head` has
        return 1


def usage() -> str:
    """The text of `mt-grpo --help`."""
    lines = [f"  {name:<10} {line}\n" for name, (line, _) in COMMANDS.items()]
    return (
        "usage: mt-grpo COMMAND ...\n\n"
        f"commands:\n{''.join(lines)}\n"
        f"{', '.join(OWN_OPTIONS)}: mt-grpo COMMAND RECIPE.yaml [--option value ...]\n"
        "`mt-grpo COMMAND --help` explains a command, `mt-grpo --version` prints the version.\n"
    )


def _interruptible(command: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Ctrl-C and SIGTERM end a command with one line and the conventional status, after what it began was ended."""

    @functools.wraps(command)
    def run(arguments: list[str]) -> int:
        sys.excepthook = _show_traceback
        return run_interruptibly(command, arguments)

    return run


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own, less what the words of a model or a tool in it would do to a terminal."""
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))


@_interruptible
def train(arguments: list[str]) -> int:
    """`mt-grpo train`: trains an agent from a recipe, in this process or in those that accelerate launches."""
    with listening(signal.SIGUSR1):  # from now on, though the first step may be far away
        try:
            return _train(read_request(arguments, "train"))
        except PreemptedError:  # which the trainer has told
            return leave()


def _train(request: Request) -> int:
    check_places(request.values, "train")
    if request.own["accelerate_config"] is not None:
        with ends_at_once():
            from mt_grpo.app.launch import launch

        return launch(request)
    check_processes(request)
    warnings.simplefilter("ignore", FutureWarning)
    with ends_at_once():
        from mt_grpo.app.build import finish_dry_run
        from mt_grpo.app.train import leave_group, run_training
        from mt_grpo.training.ranks import says_who_is_gone

    dry_run = request.own["dry_run"]
    with says_who_is_gone(
        request.values.get("output_dir") or "the `output_dir`"
    ):  # from the forming of their group to its end
        trainer, resolved = _prepare(request, writes=not dry_run)
        accelerator = trainer.accelerator
        if dry_run:
            finish_dry_run(trainer, resolved)
        else:
            run_training(trainer, resolved, _console(quiet=not accelerator.is_main_process))
        del trainer
        leave_group(accelerator)
    return 0


@_interruptible
def rollout(arguments: list[str]) -> int:
    """`mt-grpo rollout`: prints conversations with their rewards, or makes data of many."""
    request = read_request(arguments, "rollout")
    check_places(request.values, "rollout")
    if request.own["model"] or request.own["keep"] is not None or request.own["difficulty"]:
        return _make_data(request)
    for name in ("api_key_env", "prices"):
        if request.own[name] is not None:
            raise ConfigError(f"`--{name}` is of the endpoint that `--model` names: name one, or leave it out.")
    audits, folder = request.own["audit"], request.own["save"]
    if request.own["num_generations"] is not None and folder is None and not audits:
        raise ConfigError(
            "`--num_generations` is of conversations that are kept or audited, and one of each prompt is shown: add "
            "`--save FOLDER` or `--audit`, or leave it out."
        )
    if folder is not None:
        check_new(folder)
    trainer, resolved = _prepare(request, trains=False)
    from mt_grpo.app.rollout import audit_conversations, find_in_conversations, save_conversations, show_audit
    from mt_grpo.viewer import render_trajectory

    console = _console()
    generations = 1 if folder is None and not audits else request.own["num_generations"] or trainer.num_generations
    trajectories = trainer.rollout(request.own["num_prompts"] or _SHOWN_PROMPTS, generations)
    for number, trajectory in enumerate(trajectories[::generations]):  # of a group, its first member stands for all
        console.rule(f"conversation {number + 1}")
        console.print(render_trajectory(trajectory, trainer.processing_class, console.is_terminal))
    for finding in find_in_conversations(trainer):
        console.print(finding.sentence, highlight=False, markup=False)
    if audits:
        show_audit(audit_conversations(trainer), console)
    if folder is not None:
        saved = save_conversations(trainer, {**resolved, "num_generations": generations}, folder)
        console.print(saved, highlight=False, markup=False)
    return int(all(trajectory.failed for trajectory in trajectories))  # what failed is told of


def _make_data(request: Request) -> int:
    warnings.simplefilter("ignore", FutureWarning)
    with ends_at_once():
        from transformers.utils.logging import disable_progress_bar

        from mt_grpo.app.rollout import make_data

    disable_progress_bar()
    return make_data(request)


@_interruptible
def evaluate(arguments: list[str]) -> int:
    """`mt-grpo eval`: samples and scores a recipe's held-out rows with one or several models."""
    request = read_request(arguments, "eval")
    check_places(request.values, "eval")
    warnings.simplefilter("ignore", FutureWarning)
    with ends_at_once():
        from transformers.utils.logging import disable_progress_bar

        from mt_grpo.app import evaluate as evaluation

    disable_progress_bar()
    return evaluation.evaluate(request)


def serve(arguments: list[str]) -> int:
    """
    `mt-grpo serve`: becomes the vLLM server that the recipe's trainer needs, or starts several and waits; of a run,
    one for its trained model.
    """
    request = read_request(arguments, "serve")
    if request.run is None:
        check_served(request.values)
    check_places(request.values, "serve")
    warnings.simplefilter("ignore", FutureWarning)
    with ends_at_once():
        from mt_grpo.app import serve as server

    recipe, replicas, metrics = _trained(request), request.own["replicas"], request.own["metrics_address"]
    if request.run is None:
        return server.serve(recipe, replicas, metrics)
    if replicas is not None:
        raise ConfigError("`--replicas` starts servers for a trainer: for a trained model start one on each port.")
    if metrics is not None:
        raise ConfigError(server.OF_SEVERAL)
    return server.serve_trained(recipe, request.run)


@_interruptible
def chat(arguments: list[str]) -> int:
    """`mt-grpo chat`: talks with an agent."""
    request = read_request(arguments, "chat")
    check_places(request.values, "chat")
    warnings.simplefilter("ignore", FutureWarning)
    with ends_at_once():
        from transformers.utils.logging import disable_progress_bar

        from mt_grpo.app import chat as talk

    disable_progress_bar()
    return talk.chat(_trained(request), request.own["server"])


def _trained(request: Request) -> Recipe:
    """The recipe of a request; of a run with the model that it trained."""
    from mt_grpo.app.recipe import build_recipe
    from mt_grpo.training.checkpoint import find_trained

    recipe = build_recipe(request)
    if request.run is not None:
        recipe.model.model_name_or_path = str(find_trained(Path(request.run), request.own["checkpoint"]))
    return recipe


@_interruptible
def doctor(arguments: list[str]) -> int:
    """`mt-grpo doctor`: checks a recipe, or one that it writes, plans memory and time; 1 where something fails."""
    request = read_request(arguments, "doctor")
    if request.own["gpu"] is not None:
        importlib.import_module("mt_grpo.doctor").named_gpu(request.own["gpu"])
    check_places(request.values, "doctor")
    warnings.simplefilter("ignore", FutureWarning)
    with ends_at_once():
        checks = importlib.import_module("mt_grpo.doctor.checks")
    if request.own["suggest"] is not None:
        request = importlib.import_module("mt_grpo.doctor.suggest").suggest(request)
    return checks.diagnose(request)


_SCHEMA = """usage: mt-grpo schema

Print the JSON schema of a recipe, with the options of the TRL and transformers that are installed. An editor completes
and checks a recipe by it where the recipe's first line names a file that holds it:

  mt-grpo schema > recipe.schema.json

  # yaml-language-server: $schema=recipe.schema.json
"""


def schema(arguments: list[str]) -> int:
    """`mt-grpo schema`: prints the schema of the installed libraries."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_SCHEMA, end="")
        return 0
    if arguments:
        raise ConfigError(f"`mt-grpo schema` takes no arguments, and {arguments[0]!r} is given.")
    from mt_grpo.app.recipe import build_schema

    print(json.dumps(build_schema(), indent=1))
    return 0


def _console(quiet: bool = False):
    from rich.console import Console

    return Console(soft_wrap=True, quiet=quiet)


def _prepare(request: Request, trains: bool = True, writes: bool = True):
    """The trainer of a recipe and its resolved options."""
    warnings.simplefilter("ignore", FutureWarning)  # libraries' notes to each other, not to the user
    with ends_at_once():
        from transformers.utils.logging import disable_progress_bar

        from mt_grpo.app.build import build_trainer
        from mt_grpo.app.recipe import build_recipe

    if not sys.stderr.isatty():  # a bar in a file is a heap of lines
        disable_progress_bar()
    recipe = build_recipe(request)
    resolved = recipe.resolved()
    trainer = build_trainer(recipe, trains, writes)
    disable_progress_bar()  # a run has a bar of its own
    return trainer, resolved
