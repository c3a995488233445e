"""Servers that are started together end together, and none ends another."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys

import pytest
from support.own_process import TERMINAL

SUPERVISOR = (
    TERMINAL
    + """
from mt_grpo.servers.start import Replica, run_replicas
child = [sys.executable, "-c"]
programs = sys.argv[1:]
replicas = [Replica(f"http://server{n}", [*child, code], {"NUMBER": str(n)}) for n, code in enumerate(programs)]
sys.exit(run_replicas(replicas))
"""
)
# one write a line: the servers share a pipe, and the two writes of an unbuffered `print` mix with those of another
SERVES = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # it waits where it comes before `sigwait`
os.write(1, b"up\\n")
signal.sigwait({signal.SIGTERM})
os.write(1, f"finished {os.environ['NUMBER']}\\n".encode())
"""
STAYS = SERVES + "signal.pause()"


def supervised(*programs: str) -> subprocess.Popen:
    command = [sys.executable, "-c", SUPERVISOR, *programs]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_until(process, *lines: str) -> None:
    left = list(lines)
    while left:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if line.strip() in left:
            left.remove(line.strip())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_every_server_finish(number):
    process = supervised(SERVES, SERVES)
    read_until(process, "up", "up")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and {"finished 0", "finished 1"} <= set(out.split("\n")) and not err


def test_servers_end_with_a_supervisor_that_is_killed():
    process = supervised(SERVES, SERVES)
    read_until(process, "up", "up")
    process.kill()
    read_until(process, "finished 0", "finished 1")
    process.communicate(timeout=60)  # they have the other end of its output
    assert process.returncode == -signal.SIGKILL


def test_a_second_signal_ends_what_does_not_finish():
    process = supervised(STAYS)
    read_until(process, "up")
    process.send_signal(signal.SIGTERM)
    read_until(process, "finished 0")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_server_that_ends_by_itself_ends_no_other(monkeypatch):
    """It is said how to start it again, on a node of Slurm too."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "node3")
    process = supervised("raise SystemExit(3)", SERVES)
    read_until(process, "up")
    said = process.stderr.readline()
    assert said.startswith("mt-grpo: the server at http://server0 has ended with status 3. The run goes on")
    command = shlex.split(said.rpartition("started again here: ")[2])
    assert command[:7] == ["srun", "--jobid=7", "--nodelist=node3", "--ntasks=1", "--overlap", "env", "NUMBER=0"]
    again = subprocess.run(command[5:], check=False)  # the part that it gives to Slurm
    assert again.returncode == 3
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_servers_that_all_end_by_themselves_are_a_failure():
    process = supervised("raise SystemExit(3)", "raise SystemExit(4)")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and len(err.splitlines()) == 2
