"""`mt-grpo train --accelerate_config`: accelerate launches the same command in as many processes as it is told."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from contextlib import ExitStack
from importlib.resources import as_file
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils import patch_environment
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from mt_grpo.app.interrupt import tell
from mt_grpo.app.meeting import MOST, Hosts
from mt_grpo.app.request import OF_LAUNCHER, Request
from mt_grpo.app.shipped import accelerate_configs, read_accelerate_config
from mt_grpo.errors import ConfigError, UserError, libraries_may_refuse
from mt_grpo.imports import did_you_mean
from mt_grpo.preemption import FOLDER, SIGNALS, STATUS, left, listening

PATIENCE = 30.0
"""Seconds that processes have to end by themselves; torch gives those that it starts as many."""


def launch(request: Request) -> int:
    """Runs `mt-grpo train` under accelerate, and returns when all of its processes have ended."""
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
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # processes say themselves why they end
    given = {name: request.own[name] for name in OF_LAUNCHER if request.own[name] is not None}
    with libraries_may_refuse(f"The accelerate configuration {path} cannot be launched"), ExitStack() as stack:
        content = read_accelerate_config(path)
        hosts = Hosts.of({**content, **given})
        file = _check(path, content, hosts, given)
        if file is not None:
            path = Path(stack.enter_context(TemporaryDirectory()), path.name)
            path.write_text(yaml.safe_dump(file), encoding="utf-8")
            stack.enter_context(patch_environment(accelerate_use_cpu="true"))
        command = ["--config_file", str(path)]
        command += [word for name, value in given.items() for word in (f"--{name}", str(value))]
        if hosts.number > 1:
            # no host waits longer for another one than processes would
            seconds = min(MOST, int(request.values.get("ddp_timeout", MOST)))
            restarts = bool(request.own["max_restarts"])
            if restarts:
                # hosts that begin again have to meet in a store of their own: torch's has what the last ones left
                stack.enter_context(patch_environment(torch_disable_share_rdzv_tcp_store="1"))
            command += hosts.options(restarts, seconds)
            stack.enter_context(hosts.meeting(seconds))
        command += ["--module", "mt_grpo", "train", *([] if request.path is None else [request.path])]
        command += [*request.arguments, *(f"--{name}" for name in ("dry_run", "trust") if request.own[name])]
        words = launch_command_parser().parse_args(command)
        told = Path(stack.enter_context(TemporaryDirectory()))  # the processes look into it between steps
        stack.enter_context(patch_environment(**{FOLDER: str(told)}))
        for number in SIGNALS if request.values.get("enable_jit_checkpoint") else SIGNALS[:1]:
            stack.enter_context(listening(number, on_first=(told / signal.Signals(number).name).touch))
            if number == signal.SIGTERM:
                words.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # at SIGTERM torch ends processes after 30 seconds
        try:
            launch_command(words)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:  # else it has said why by itself
                tell(UserError(_killed(rank, -failure.exitcode)))
            return _status(failure.exitcode)
        except subprocess.CalledProcessError as error:
            return _status(error.returncode)
        except SignalException as error:
            _end_processes(error.sigval)
            raise KeyboardInterrupt(error.sigval) from None
        except KeyboardInterrupt as error:
            _end_processes(error.args[0] if error.args else signal.SIGINT)
            raise
        return STATUS if left(told) else 0


def _killed(rank: int, number: int) -> str:
    name = signal.Signals(number).name
    memory = ", as a system does that has no memory left" if number == signal.SIGKILL else ""
    return (
        f"Process {rank} was ended by {name}{memory}: run the same command with `--resume_from_checkpoint auto` to go "
        "on from the last checkpoint."
    )


def _check(path: Path, content: dict[str, Any], hosts: Hosts, given: dict[str, Any]) -> dict[str, Any] | None:
    """
    One sentence for what would otherwise be a traceback of each process that finds no device, or of a reader of YAML.
    """
    config = load_config_from_file(str(path))
    wanted, there = given.get("num_processes", config.num_processes), torch.accelerator.device_count()
    if not config.use_cpu and hosts.number == 1 and wanted > there:
        raise ConfigError(
            f"The accelerate configuration {path.stem} takes {wanted} GPUs, a process each, and this machine has "
            f"{there}: give `--num_processes`, or a configuration with `use_cpu: true`."
        )
    if hosts.number > 1:
        hosts.check(wanted)
    if config.use_cpu and content.get("distributed_type") == "FSDP":
        raise ConfigError(
            f"The accelerate configuration {path.stem} has `distributed_type: FSDP` and `use_cpu: true`, and "
            "accelerate shards on GPUs only: write `distributed_type: MULTI_CPU`, which trains whole copies."
        )
    if not config.use_cpu or wanted == 1:
        return None
    return {**content, "use_cpu": False, "distributed_type": "MULTI_GPU"}


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
