"""
`mt-grpo train --accelerate_config`: accelerate launches the same command in as many processes as it is told, on one
host or, after a rendezvous, on several.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
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
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from mt_grpo.app.commands import find_accelerate_config, read_accelerate_config
from mt_grpo.app.request import OF_LAUNCHER, Request
from mt_grpo.errors import ConfigError, UserError, libraries_may_refuse, refuse_first
from mt_grpo.options.table import Values
from mt_grpo.preemption import FOLDER, SIGNALS, STATUS, left, listening, print_error

_RENDEZVOUS_SECONDS = 900
"""Seconds that hosts wait for each other: a cluster starts them one by one. A shorter `ddp_timeout` holds here too."""
ANSWER_SECONDS = 10.0
"""Seconds that a first host has, at least, to answer as one."""
_RETRY_SECONDS = 1.0  # seconds between two attempts to reach the first host
_PORT = 29500  # accelerate's


@dataclass(frozen=True)
class _HostGroup:
    """The hosts of a run, as accelerate's configuration or the options of the command have them."""

    number: int
    rank: int
    address: str | None
    port: int

    @classmethod
    def of(cls, options: Values) -> _HostGroup:
        """Those of a configuration of accelerate, options of the command among it."""
        port = options.get("main_process_port")
        return cls(
            options.get("num_machines") or 1,
            options.get("machine_rank") or 0,
            options.get("main_process_ip"),
            _PORT if port is None else port,
        )

    def check(self, processes: int) -> None:
        """Refuses hosts that lack an address or a rank, or that cannot share `processes` evenly."""
        refuse_first(
            (
                self.rank >= self.number,
                f"`--machine_rank {self.rank}` must be from 0 to {self.number - 1}, one for each host.",
            ),
            (
                processes % self.number,
                f"`--num_processes {processes}`, those of all hosts together, is no multiple of `--num_machines "
                f"{self.number}`: give each host as many.",
            ),
            (
                not self.address,
                f"`--num_machines {self.number}` needs `--main_process_ip`, the address of the host with "
                "`--machine_rank 0`.",
            ),
            (
                not self.port,
                "`main_process_port: 0` lets each host choose a port of its own: give all of them the same with "
                "`--main_process_port`.",
            ),
        )

    def options(self, restarts: bool, seconds: int) -> list[str]:
        """Options of accelerate's launcher: how they meet, and how long they wait for each other."""
        if not restarts:
            return ["--rdzv_conf", f"timeout={seconds}"]
        first = int(self.rank == 0)
        return ["--rdzv_backend", "c10d", "--rdzv_conf", f"is_host={first},join_timeout={seconds},timeout={seconds}"]

    @contextmanager
    def rendezvous(self, seconds: int) -> Iterator[None]:
        """Waits until the first host can be reached; in it, torch's ways to say that none met are one sentence."""
        if self.rank > 0:
            self._reach(seconds)
        try:
            yield
        except (DistError, RendezvousError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise ConfigError(
                f"The {self.number} hosts of the run did not meet at {self.address}:{self.port} within {seconds} s "
                f"({why}): run the same command on every host, each with its own `--machine_rank`, and all "
                "with the same `--main_process_ip` and `--main_process_port`."
            ) from error

    def _reach(self, seconds: int) -> None:
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            try:
                socket.create_connection((self.address, self.port), timeout=max(_RETRY_SECONDS, left)).close()
                break
            except OSError as error:  # no such name, no route, nobody listens
                if left <= _RETRY_SECONDS:
                    raise ConfigError(
                        f"The first host of the run cannot be reached at {self.address}:{self.port} within {seconds} "
                        f"s ({error.strerror or error}): start the same command there with `--machine_rank 0`, and "
                        "see that `--main_process_ip` and `--main_process_port` are right and this host has a route."
                    ) from None
            time.sleep(_RETRY_SECONDS)
        # torch would wait for ever for a store's answer from anything else
        join = threading.Thread(target=self._join, args=(seconds,), daemon=True)
        join.start()
        join.join(max(ANSWER_SECONDS, end - time.monotonic()))
        if join.is_alive():
            raise ConfigError(
                f"Something else than the first host of the run listens at {self.address}:{self.port}: give all hosts "
                "another `--main_process_port`."
            )

    def _join(self, seconds: int) -> None:
        with contextlib.suppress(DistError):  # the first host has gone again, which torch's launcher will find
            TCPStore(str(self.address), self.port, wait_for_workers=False, timeout=timedelta(seconds=seconds))


_EXIT_SECONDS = 30.0  # seconds that processes have to end by themselves; torch gives those that it starts as many


def launch(request: Request) -> int:
    """Runs `mt-grpo train` under accelerate, and returns when all of its processes have ended."""
    if "LOCAL_RANK" in os.environ:
        raise ConfigError(
            "`--accelerate_config` launches processes, and this is one that was launched: leave it out under "
            "`accelerate launch` and `torchrun`."
        )
    with as_file(find_accelerate_config(request.own["accelerate_config"])) as path:
        return _launch(path, request)


def _launch(path: Path, request: Request) -> int:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # processes say themselves why they end
    given = {name: request.own[name] for name in OF_LAUNCHER if request.own[name] is not None}
    with libraries_may_refuse(f"The accelerate configuration {path} cannot be launched"), ExitStack() as stack:
        content = read_accelerate_config(path)
        hosts = _HostGroup.of({**content, **given})
        file = _check(path, content, hosts, given)
        if file is not None:
            path = Path(stack.enter_context(TemporaryDirectory()), path.name)
            path.write_text(yaml.safe_dump(file), encoding="utf-8")
            stack.enter_context(patch_environment(accelerate_use_cpu="true"))
        command = ["--config_file", str(path)]
        command += [word for name, value in given.items() for word in (f"--{name}", str(value))]
        if hosts.number > 1:
            # no host waits longer for another one than processes would
            seconds = min(_RENDEZVOUS_SECONDS, int(request.values.get("ddp_timeout", _RENDEZVOUS_SECONDS)))
            restarts = bool(request.own["max_restarts"])
            if restarts:
                # hosts that begin again have to meet in a store of their own: torch's has what the last ones left
                stack.enter_context(patch_environment(torch_disable_share_rdzv_tcp_store="1"))
            command += hosts.options(restarts, seconds)
            stack.enter_context(hosts.rendezvous(seconds))
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
                name = signal.Signals(-failure.exitcode).name
                memory = ", as a system does that has no memory left" if name == "SIGKILL" else ""
                mend = "run the same command with `--resume_from_checkpoint auto` to go on from the last checkpoint."
                print_error(UserError(f"Process {rank} was ended by {name}{memory}: {mend}"))
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


def _check(path: Path, content: dict[str, Any], hosts: _HostGroup, given: dict[str, Any]) -> dict[str, Any] | None:
    """One sentence for what would be a traceback of each process that finds no device, or of a reader of YAML."""
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
    """Waits for all launched processes; of a single one, which gets Ctrl-C itself, passes on other signals."""
    for impatient in (signal.SIGINT, signal.SIGTERM):
        signal.signal(impatient, signal.SIG_IGN)
    processes = psutil.Process().children(recursive=True)
    if number == signal.SIGINT:
        _, processes = psutil.wait_procs(processes, _EXIT_SECONDS)
    for last in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(last)
        _, processes = psutil.wait_procs(processes, _EXIT_SECONDS)
