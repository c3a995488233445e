"""`mt-grpo train --accelerate_config`: accelerate launches the same command in as many processes as it is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from importlib.resources import as_file
from pathlib import Path

import psutil
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from mt_grpo.app.request import Request
from mt_grpo.app.shipped import accelerate_configs, read_accelerate_config
from mt_grpo.errors import ConfigError, libraries_may_refuse
from mt_grpo.imports import did_you_mean

PATIENCE = 30.0
"""Seconds that processes have to end by themselves; torch gives those that it starts as many."""


def launch(request: Request) -> int:
    """
    Runs `mt-grpo train` under accelerate, and returns when all of its processes have ended.

    Args:
        request (`Request`): Its `accelerate_config` is the name of a configuration in `recipes/accelerate`, or the
            path of one, and its `num_processes` replaces the number of the configuration. Everything else goes to each
            process.

    Returns:
        `int`: Exit status of the first process that failed, else 0.

    Raises:
        ConfigError: If there is no such configuration, or it does not fit this machine.
        KeyboardInterrupt: After a signal has ended the processes; with its number.
    """
    if "LOCAL_RANK" in os.environ:
        raise ConfigError(
            "`--accelerate_config` launches processes, and this is one that was launched: leave it out under "
            "`accelerate launch` and `torchrun`."
        )
    config, shipped = request.own["accelerate_config"], accelerate_configs()
    if config in shipped:
        with as_file(shipped[config]) as path:
            return _launch(path, request)
    if not Path(config).is_file():
        raise ConfigError(
            f"The accelerate configuration {config!r} is unknown{did_you_mean(config, shipped)}: give one of "
            f"{', '.join(shipped)}, or the path of a file."
        )
    return _launch(Path(config), request)


def _launch(path: Path, request: Request) -> int:
    number = request.own["num_processes"]
    command = ["--config_file", str(path), *([] if number is None else ["--num_processes", str(number)]), "--module"]
    command += ["mt_grpo", "train", *([] if request.path is None else [request.path]), *request.arguments]
    command += [f"--{name}" for name in ("dry_run", "trust") if request.own[name]]
    try:
        with libraries_may_refuse(f"The accelerate configuration {path} cannot be launched"):
            _check(path, number)
            launch_command(launch_command_parser().parse_args(command))
    except ChildFailedError as error:
        return _status(error.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as error:
        return _status(error.returncode)
    except SignalException as error:
        _end_processes(error.sigval)
        raise KeyboardInterrupt(error.sigval) from None
    except KeyboardInterrupt as error:
        _end_processes(error.args[0] if error.args else signal.SIGINT)
        raise
    return 0


def _check(path: Path, num_processes: int | None) -> None:
    """
    One sentence for what would otherwise be a traceback of each process that finds no device, or of a reader of YAML.
    """
    read_accelerate_config(path)
    config = load_config_from_file(str(path))
    wanted, there = num_processes or config.num_processes, torch.accelerator.device_count()
    if not config.use_cpu and config.num_machines == 1 and wanted > there:
        raise ConfigError(
            f"The accelerate configuration {path.stem} takes {wanted} GPUs, a process each, and this machine has "
            f"{there}: give `--num_processes`, or a configuration with `use_cpu: true`."
        )


def _status(code: int) -> int:
    """As a shell has it, which adds 128 to the signal that ended a process."""
    return code if code >= 0 else 128 - code


def _end_processes(number: int) -> None:
    """
    Waits until every process that was launched has ended. A single one is not ended by accelerate: Ctrl-C in a
    terminal reaches it by itself, and must not come twice; any other signal is handed on.
    """
    for impatient in (signal.SIGINT, signal.SIGTERM):
        signal.signal(impatient, signal.SIG_IGN)
    processes = psutil.Process().children(recursive=True)
    if number == signal.SIGINT:
        _, processes = psutil.wait_procs(processes, PATIENCE)
    for last in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(last)
        _, processes = psutil.wait_procs(processes, PATIENCE)
