"""The command line: `mt-grpo train | rollout | serve`."""

from __future__ import annotations

import argparse
import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType

from mt_grpo.app.interrupt import run_interruptibly
from mt_grpo.errors import UserError

USAGE = """usage: mt-grpo COMMAND --config RECIPE.yaml [--field value ...]

commands:
  train      train an agent; every field of the recipe can be set on the command line
  rollout    show what the agent does on --num_prompts N prompts (4); trains nothing
  serve      start the vLLM server that the recipe's trainer needs
"""


def main(argv: Sequence[str] | None = None) -> int:
    """
    Entry point of the `mt-grpo` command.

    Returns:
        `int`: Exit status: 0, or 1 after one sentence about what is wrong with the input.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {"train": train, "rollout": rollout, "serve": serve}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 1
    if arguments[0] not in commands:
        print(
            f"mt-grpo: the command {arguments[0]!r} is unknown; the commands are {', '.join(commands)}.",
            file=sys.stderr,
        )
        return 1
    return commands[arguments[0]](arguments[1:])


def _interruptible(command: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Ctrl-C and SIGTERM end a command with one line and the conventional status, after what it began was ended."""

    @functools.wraps(command)
    def run(arguments: list[str]) -> int:
        sys.excepthook = _show_traceback
        return run_interruptibly(command, arguments)

    return run


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own, less what the words of a model or a tool in it would do to a terminal."""
    from mt_grpo.viewer import visible

    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))


@_interruptible
def train(arguments: list[str]) -> int:
    """`mt-grpo train`: trains an agent from a recipe."""
    trainer, resolved = _prepare(arguments)
    if trainer is None:
        return 1
    from mt_grpo.app.train import leave_group, run_training

    accelerator = trainer.accelerator
    try:
        run_training(trainer, resolved, _console(quiet=not accelerator.is_main_process))
    except UserError as error:
        return _refuse(error)
    del trainer
    leave_group(accelerator)
    return 0


@_interruptible
def rollout(arguments: list[str]) -> int:
    """`mt-grpo rollout`: prints conversations with their rewards."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_prompts", type=int, default=4)
    options, rest = parser.parse_known_args(arguments)
    trainer, _ = _prepare(rest, trains=False)
    if trainer is None:
        return 1
    from mt_grpo.viewer import render_trajectory

    console = _console()
    try:
        trajectories = trainer.rollout(options.num_prompts)
    except UserError as error:
        return _refuse(error)
    for number, trajectory in enumerate(trajectories):
        console.rule(f"conversation {number + 1}")
        console.print(render_trajectory(trajectory, trainer.processing_class, console.is_terminal))
    return 0


def serve(arguments: list[str]) -> int:
    """`mt-grpo serve`: becomes the vLLM server that the recipe's trainer needs; returns only where it cannot."""
    warnings.simplefilter("ignore", FutureWarning)
    from mt_grpo.app import serve as server
    from mt_grpo.app.recipe import parse_recipe

    try:
        server.serve(parse_recipe(arguments))
    except UserError as error:
        return _refuse(error)
    return 1


def _refuse(error: UserError) -> int:
    from mt_grpo.viewer import visible

    print(f"mt-grpo: {visible(' '.join(str(error).split()))}", file=sys.stderr)
    return 1


def _console(quiet: bool = False):
    from rich.console import Console

    return Console(soft_wrap=True, quiet=quiet)


def _prepare(arguments: list[str], trains: bool = True):
    """The trainer of a recipe and its resolved options; `(None, None)` after saying what is wrong with the input."""
    warnings.simplefilter("ignore", FutureWarning)  # libraries' notes to each other, not to the user
    from mt_grpo.app.build import build_trainer
    from mt_grpo.app.recipe import parse_recipe

    try:
        recipe = parse_recipe(arguments)
        resolved = recipe.resolved()
        return build_trainer(recipe, trains), resolved
    except UserError as error:
        _refuse(error)
        return None, None
