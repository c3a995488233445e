"""Servers that are started together end together, and none ends another."""

import shlex
import signal
import subprocess
import sys

import pytest
from support.own_process import TERMINAL

SUPERVISOR = f"""{TERMINAL}
from mt_grpo.servers.start import Replica, run_replicas
commands = [[sys.executable, "-c", code] for code in sys.argv[1:]]
sys.exit(run_replicas([Replica(f"http://server{{n}}", each, {{"NUMBER": str(n)}}) for n, each in enumerate(commands)]))
"""
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
    """A supervisor of servers, once those that serve are up."""
    command = [sys.executable, "-c", SUPERVISOR, *programs]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    read_until(process, *(["up"] * sum("up" in program for program in programs)))
    return process


def read_until(process: subprocess.Popen, *lines: str) -> None:
    left = list(lines)
    while left:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if line.strip() in left:
            left.remove(line.strip())


def status(process: subprocess.Popen) -> int:
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_every_server_finish(number):
    process = supervised(SERVES, SERVES)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and {"finished 0", "finished 1"} <= set(out.split("\n")) and not err


def test_servers_end_with_a_supervisor_that_is_killed():
    process = supervised(SERVES, SERVES)
    process.kill()
    read_until(process, "finished 0", "finished 1")
    assert status(process) == -signal.SIGKILL  # once they too have let go of its output


def test_a_second_signal_ends_what_does_not_finish():
    process = supervised(STAYS)
    process.send_signal(signal.SIGTERM)
    read_until(process, "finished 0")
    process.send_signal(signal.SIGTERM)
    assert status(process) == 0


def test_a_server_that_ends_by_itself_ends_no_other(monkeypatch):
    """It is said how to start it again, on a node of Slurm too."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "node3")
    process = supervised("raise SystemExit(3)", SERVES)
    said = process.stderr.readline()
    assert said.startswith("mt-grpo: the server at http://server0 has ended with status 3. The run goes on")
    command = shlex.split(said.rpartition("started again here: ")[2])
    assert command[:7] == ["srun", "--jobid=7", "--nodelist=node3", "--ntasks=1", "--overlap", "env", "NUMBER=0"]
    assert subprocess.run(command[5:], check=False).returncode == 3  # the part that it gives to Slurm
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert status(process) == 0


def test_servers_that_all_end_by_themselves_are_a_failure():
    process = supervised("raise SystemExit(3)", "raise SystemExit(4)")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and len(err.splitlines()) == 2
