"""Processes that programs are forked from: of tests, and of vLLM. All who share the tests share them."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

FORKS, VLLM_FORKS = "MT_GRPO_FORKS", "MT_GRPO_VLLM_FORKS"
"""Environment variables: a socket of the process that programs are forked from."""
SERVER_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
OTHER_PROCESSOR = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Variables with which our side computes as another processor. vLLM does not: its kernels, and what torch compiles for
it, go by the processor that is there, and its engine ends where they disagree."""
_LIBC = ctypes.CDLL(None)
_WAITING = """
import os, select, sys
if 0 not in select.select([0, int(sys.argv[1])], [], [])[0]:
    os.execv(sys.argv[2], [*sys.argv[2:], sys.argv[1]])
"""


def begin_forks() -> None:
    """Both processes begin when they are asked first. They end with this one; what this one starts asks them too."""
    _begin(FORKS, [sys.executable, "-m", "support.forking", "support.forked"])
    _begin(VLLM_FORKS, [str(SERVER_PYTHON), "-m", "support.forking", "support.vllm_forks"], without=OTHER_PROCESSOR)


def _begin(variable: str, command: list[str], without: Sequence[str] = ()) -> None:
    if variable in os.environ:
        return
    folder = tempfile.TemporaryDirectory()  # nobody else may ask
    path = f"/proc/{os.getpid()}/fd/{os.open(folder.name, os.O_RDONLY)}/forks"  # a socket's has 107 characters at most
    with socket.socket(socket.AF_UNIX) as listening, open(f"{path}.log", "wb") as log:
        listening.bind(path)
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _WAITING, str(listening.fileno()), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[listening.fileno()],
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in without},
        )
    os.environ[variable] = path

    def end() -> None:
        process.communicate()
        folder.cleanup()

    atexit.register(end)


def ask_forks(variable: str, request: object) -> int:
    """The process that was forked, for a `Forked`; the status of one that has ended, for its number."""
    if variable not in os.environ:
        begin_forks()
    answer = ""
    with socket.socket(socket.AF_UNIX) as asking, suppress(ConnectionError):  # it may have ended
        asking.connect(os.environ[variable])
        asking.sendall(json.dumps(request).encode() + b"\n")
        answer = asking.makefile().readline()
    assert answer, Path(f"{os.environ[variable]}.log").read_text(errors="replace")
    return int(answer)


class Forked:
    """
    A program in a session of its own, with the methods of `subprocess.Popen`.

    Args:
        arguments: What comes after `python` on its command line: a script, or `-m` and a module.
        log: File that takes its output.
        environment: All of its environment variables.
        of: Names the process that it is forked from.
    """

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        environment: dict[str, str] | None = None,
        of: str = FORKS,
    ) -> None:
        request = {
            "arguments": arguments,
            "log": str(log),
            "environment": dict(os.environ) if environment is None else environment,
            "folder": os.getcwd(),
        }
        log.touch()
        self._ask = partial(ask_forks, of)
        self.pid: int = self._ask(request)
        self.returncode: int | None = None
        self._ends = os.pidfd_open(self.pid)
        self.store: object = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ends], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ends], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            os.close(self._ends)
            self.returncode = os.waitstatus_to_exitcode(self._ask(self.pid))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def requests() -> Iterator[tuple[str, int]]:
    """Of all who ask, at the socket whose descriptor is the last argument, until standard input ends."""
    listening = socket.socket(fileno=int(sys.argv[-1]))
    listening.set_inheritable(False)  # what is forked may become another program
    while sys.stdin not in select.select([sys.stdin, listening], [], [])[0]:
        asking = listening.accept()[0].detach()
        with os.fdopen(os.dup(asking)) as lines:
            line = lines.readline()
        if line:  # whoever asked may have ended
            yield line, asking
        os.close(asking)


def serve_forks(requests: Iterable[tuple[str, int]], asked: Sequence[int] = ()) -> None:
    """
    Forks until there are no more requests, or, once it is `asked` to end, until what it has forked has ended.

    Args:
        requests: Lines of JSON, each with the descriptor that its answer is written to.
        asked: See above.
    """
    gc.collect()
    gc.freeze()  # what is imported is neither searched nor copied by the garbage collector of every fork
    running = set()
    for line, answers in requests:
        request = json.loads(line)
        if isinstance(request, int):  # one that has ended
            answer = os.waitpid(request, 0)[1]
            running.remove(request)
        elif (answer := os.fork()) == 0:
            os.close(answers)
            return _become(**request)
        else:
            running.add(answer)
        with suppress(BrokenPipeError):
            os.write(answers, f"{answer}\n".encode())
        if asked and not running:
            break
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _become(arguments: list[str], log: str, environment: dict[str, str], folder: str) -> None:
    os.setsid()
    listen()
    for last in (_LIBC._exit, _LIBC.fcloseall):  # from last to first: libraries in C are not taken apart either
        _LIBC.on_exit(last, None)
    for number, path in ((0, os.devnull), (1, log), (2, log)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # of the other one requests were read
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path += [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    run_python(arguments)


def _leave_libraries() -> None:
    """Libraries are not taken apart at a program's end, for which most imports would be copied first; ours are."""
    found = [name for name, module in sys.modules.items() if "/site-packages/" in str(vars(module).get("__file__"))]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object([sys.modules.pop(name) for name in found]))  # for ever


def listen() -> None:
    """Signals are heard as by a program in a terminal, whatever the shell that runs the tests ignores."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run_python(arguments: list[str]) -> None:
    """Runs what `python` would run with these arguments."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":  # a module that says what to import, and a socket's descriptor
    atexit.register(_leave_libraries)
    importlib.import_module(sys.argv[1]).prepare()
    serve_forks(requests())
