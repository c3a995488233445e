"""Options of `mt-grpo train` that are no fields of a recipe: they say how it is run, not what."""

from __future__ import annotations

import argparse

from mt_grpo.errors import ConfigError

DRY_RUN = "--dry_run"
TRAIN_OPTIONS = (DRY_RUN, "--accelerate_config", "--num_processes")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(f"{message[0].upper()}{message[1:]}.")


def _truth(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{value!r} is neither 'true' nor 'false'")
    return value.lower() == "true"


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is no number of processes")
    return int(value)


def train_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """
    Takes the options of the command out of its arguments.

    Returns:
        `argparse.Namespace`: with `dry_run` (`bool`), `accelerate_config` (`str` or `None`) and `num_processes` (`int`
        or `None`).
        `list[str]`: the other arguments, which are the recipe's.

    Raises:
        ConfigError: For a wrong or missing value, or `--num_processes` without `--accelerate_config`.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(DRY_RUN, type=_truth, default=False)
    parser.add_argument("--accelerate_config")
    parser.add_argument("--num_processes", type=_count)
    options, rest = parser.parse_known_args(_with_a_value(arguments))
    if options.num_processes is not None and options.accelerate_config is None:
        raise ConfigError("`--num_processes` needs `--accelerate_config` beside it, e.g. `--accelerate_config zero3`.")
    return options, rest


def _with_a_value(arguments: list[str]) -> list[str]:
    """`--dry_run` alone means `--dry_run true`; what follows it may be the recipe."""
    result = list(arguments)
    for index, argument in enumerate(arguments):
        following = arguments[index + 1 : index + 2]
        if argument == DRY_RUN and (not following or following[0].lower() not in ("true", "false")):
            result[index] = f"{DRY_RUN}=true"
    return result
