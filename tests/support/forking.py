"""Forks programs from this process, which has imported what they need. It needs nothing itself."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
from collections.abc import Iterable, Sequence


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
        os.write(answers, f"{answer}\n".encode())
        if asked and not running:
            break
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _become(arguments: list[str], log: str, environment: dict[str, str], folder: str) -> None:
    os.setsid()
    listen()
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
