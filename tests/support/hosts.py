"""Hosts on one machine: network namespaces on a switch of their own, each with a folder that the others do not see."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pyroute2 import NetNS, netns

from support.forked import Forked, fork_what_is_launched
from support.forking import run_python

ADDRESS = "10.77.0.{}"
_SWITCH = "switch"
CLONE_NEWNS, CLONE_NEWUTS = 0x20000, 0x4000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


class Hosts:
    """
    Args:
        number: How many there are; host `n` has the address 10.77.0.(n + 1).
        folder: A folder that each has for itself.
        place: Where each host keeps it.
    """

    def __init__(self, number: int, folder: Path, place: Path) -> None:
        self.folder, self.place = folder, place
        self._names = [f"host{n}-{os.getpid()}" for n in range(number)]
        folder.mkdir(exist_ok=True)
        place.mkdir()
        self._known = place / "hosts"
        self._known.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{ADDRESS.format(n + 1)} host{n}\n" for n in range(number))
        )
        with _namespace(f"{_SWITCH}-{os.getpid()}") as switch:
            switch.link("add", ifname="bridge", kind="bridge")
            bridge = switch.link_lookup(ifname="bridge")[0]
            switch.link("set", index=bridge, state="up")
            for n, name in enumerate(self._names):
                (place / str(n)).mkdir(parents=True, exist_ok=True)
                with _namespace(name) as host:
                    switch.link("add", ifname=f"port{n}", kind="veth", peer={"ifname": "eth0", "net_ns_fd": name})
                    port = switch.link_lookup(ifname=f"port{n}")[0]
                    switch.link("set", index=port, master=bridge, state="up")
                    for interface in ("lo", "eth0"):
                        index = host.link_lookup(ifname=interface)[0]
                        if interface == "eth0":
                            host.addr("add", index=index, address=ADDRESS.format(n + 1), prefixlen=24)
                        host.link("set", index=index, state="up")

    def start(self, n: int, arguments: list[str], log: Path, **environment: str) -> Forked:
        """`python` with these arguments on host `n`."""
        mounts = {str(self.place / str(n)): str(self.folder), str(self._known): "/etc/hosts"}
        enter = ["-m", "support.hosts", self._names[n], f"host{n}", json.dumps(mounts)]
        log.unlink(missing_ok=True)
        return Forked([*enter, *arguments], log, {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **environment})

    def unplug(self, n: int) -> None:
        """Takes a host's network away: it has no route to another one, nor an answer from it."""
        with _namespace(self._names[n]) as host:
            host.link("set", index=host.link_lookup(ifname="eth0")[0], state="down")

    def kill(self, n: int) -> None:
        """What a host does that loses its power."""
        inside = os.stat(f"/run/netns/{self._names[n]}").st_ino
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (process / "ns/net").stat().st_ino == inside:
                    os.kill(int(process.name), signal.SIGKILL)

    def close(self) -> None:
        for n, name in enumerate(self._names):
            self.kill(n)
            netns.remove(name)
        netns.remove(f"{_SWITCH}-{os.getpid()}")


@contextmanager
def _namespace(name: str) -> Iterator[NetNS]:
    with NetNS(name, flags=os.O_CREAT) as namespace:
        yield namespace


@contextmanager
def hosts(number: int, folder: Path, place: Path) -> Iterator[Hosts]:
    """Hosts for a test, which is skipped where a process may not make them."""
    try:
        made = Hosts(number, folder, place)
    except PermissionError:
        pytest.skip("only root makes network namespaces")
    try:
        yield made
    finally:
        made.close()


def main(namespace: str, name: str, mounts: str, *arguments: str) -> None:
    """Becomes a program on a host."""
    netns.setns(namespace)
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    socket.sethostname(name)
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    for source, place in json.loads(mounts).items():
        _check(libc.mount(os.fsencode(source), os.fsencode(place), None, MS_BIND, None))
    fork_what_is_launched()
    run_python([*arguments])


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main(*sys.argv[1:])
