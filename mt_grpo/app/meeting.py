"""How the hosts of a run meet before they launch processes, and what is said where they do not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError

from mt_grpo.errors import ConfigError

MOST = 900
"""Seconds that hosts wait for each other: a cluster starts them one by one. A shorter `ddp_timeout` holds here too."""
PATIENCE = 10.0
"""Seconds that a first host has, at least, to answer as one."""
AGAIN = 1.0
"""Seconds between two attempts to reach the first host."""
PORT = 29500
"""accelerate's."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, as accelerate's configuration or the options of the command have them."""

    number: int
    rank: int
    address: str | None
    port: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Hosts:
        """Those of a configuration of accelerate, options of the command among it."""
        port = options.get("main_process_port")
        return cls(
            options.get("num_machines") or 1,
            options.get("machine_rank") or 0,
            options.get("main_process_ip"),
            PORT if port is None else port,
        )

    def check(self, processes: int) -> None:
        """Whether they are told what they have to know, and `processes` can be shared out to them."""
        if self.rank >= self.number:
            raise ConfigError(
                f"`--machine_rank {self.rank}` is none of {self.number} hosts: they count from 0 to {self.number - 1}."
            )
        if processes % self.number:
            raise ConfigError(
                f"`--num_processes {processes}`, those of all hosts together, is no multiple of `--num_machines "
                f"{self.number}`: give each host as many."
            )
        if not self.address:
            raise ConfigError(
                f"`--num_machines {self.number}` needs `--main_process_ip`, the address of the host with "
                "`--machine_rank 0`."
            )
        if not self.port:
            raise ConfigError(
                "`main_process_port: 0` lets each host choose a port of its own: give all of them the same with "
                "`--main_process_port`."
            )

    def options(self, restarts: bool, seconds: int) -> list[str]:
        """Options of accelerate's launcher: how they meet, and how long they wait for each other."""
        if not restarts:
            return ["--rdzv_conf", f"timeout={seconds}"]
        first = int(self.rank == 0)
        return ["--rdzv_backend", "c10d", "--rdzv_conf", f"is_host={first},join_timeout={seconds},timeout={seconds}"]

    @contextmanager
    def meeting(self, seconds: int) -> Iterator[None]:
        """
        Waits until the first host can be reached from this one. Within it, torch's ways to say that hosts did not meet
        are one sentence.
        """
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
                socket.create_connection((self.address, self.port), timeout=max(AGAIN, left)).close()
                break
            except OSError as error:  # no such name, no route, nobody listens
                if left <= AGAIN:
                    raise ConfigError(
                        f"The first host of the run cannot be reached at {self.address}:{self.port} within {seconds} "
                        f"s ({error.strerror or error}): start the same command there with `--machine_rank 0`, and "
                        "see that `--main_process_ip` and `--main_process_port` are right and this host has a route."
                    ) from None
            time.sleep(AGAIN)
        # torch would wait for ever for a store's answer from anything else
        join = threading.Thread(target=self._join, args=(seconds,), daemon=True)
        join.start()
        join.join(max(PATIENCE, end - time.monotonic()))
        if join.is_alive():
            raise ConfigError(
                f"Something else than the first host of the run listens at {self.address}:{self.port}: give all hosts "
                "another `--main_process_port`."
            )

    def _join(self, seconds: int) -> None:
        with contextlib.suppress(DistError):  # the first host has gone again, which torch's launcher will find
            TCPStore(str(self.address), self.port, wait_for_workers=False, timeout=timedelta(seconds=seconds))
