"""Programs that are forked with what they need imported behave as those that are started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from support.forked import Forked, run_processes
from support.loopback import free_port
from support.servers import ServerProcess
from support.waiting import until

pytestmark = pytest.mark.slow


def main(what: str) -> None:
    """The program. It says each line in one write, since ranks share the file."""
    print(f"mode: {os.environ.get('MODE')} rank: {os.environ.get('RANK')} {os.getcwd()}\n", end="", flush=True)
    if what == "fails" and os.environ.get("RANK") == "1":
        raise RuntimeError("no more")
    if what == "exits":
        sys.exit(3)
    if what != "meets":
        time.sleep(600)
    dist.init_process_group("gloo")
    seen = [None, None]
    dist.all_gather_object(seen, dist.get_rank())
    print(f"met: {seen}\n", end="", flush=True)
    dist.destroy_process_group()


def test_a_forked_program_has_its_own_status_and_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = Forked(["-m", "test_forked", "exits"], tmp_path / "log", {**os.environ, "MODE": "own"})
    assert program.wait(120) == program.poll() == 3
    assert (tmp_path / "log").read_text() == f"mode: own rank: None {tmp_path}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_forked_program_as_any_other(tmp_path, number):
    log = tmp_path / "log"
    program = Forked(["-m", "test_forked", "waits"], log)
    until(lambda: log.exists() and log.read_text(), lambda: program.poll() is None)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.01)
    os.killpg(program.pid, number)
    assert program.wait(120) == -number
    assert ("KeyboardInterrupt" in log.read_text()) == (number == signal.SIGINT)


def test_forked_ranks_meet(tmp_path):
    run_processes(["-m", "test_forked", "meets"], 2, tmp_path / "log", {})
    assert (tmp_path / "log").read_text().count("met: [0, 1]\n") == 2


def test_a_forked_rank_that_fails_ends_all(tmp_path):
    with pytest.raises(AssertionError, match="RuntimeError: no more"):
        run_processes(["-m", "test_forked", "fails"], 2, tmp_path / "log", {})


SHARES = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.shared_memory import SharedMemory


class Up(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


memory = SharedMemory(create=True, size=8)
print(memory.name, flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Up).serve_forever()
"""


def test_a_killed_server_leaves_no_shared_memory(tmp_path):
    port, log = free_port(), tmp_path / "log"
    server = ServerProcess([sys.executable, "-c", SHARES, str(port)], port, log).start()
    memory = Path("/dev/shm", log.read_text().split()[0])
    os.killpg(server.pid, signal.SIGKILL)
    server._process.wait()
    assert memory.exists()
    server.stop()
    assert not memory.exists()


if __name__ == "__main__":
    main(sys.argv[1])
