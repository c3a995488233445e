"""Opens a run for a command. A long index is read by several processes, which are gone when the run is open."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from mt_grpo.runlog import Run, open_run
from mt_grpo.runlog.index import Each
from mt_grpo.runlog.schema import FOLDER

LONG = 2**24
"""Bytes of an index that one process takes a third of a second or more to read."""

MOST = 4
"""Processes: more would wait for this one, which puts together what they read."""


def opened(folder: str, begun: bool = False) -> Run:
    """The run in a folder, with `begun` also one without conversations so far; call it before there are threads."""
    size = sum(path.lstat().st_size for path in (Path(folder) / FOLDER).glob("index*.jsonl"))
    gc.disable()  # what is read stays: looking for garbage in it would take a third of the time
    try:
        if size < LONG:
            return open_run(folder, begun=begun)
        with processes() as each:
            return open_run(folder, each, begun)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def processes() -> Iterator[Each]:
    """`map` in other processes, which begin at once: call it before there are threads. Linux alone has them."""
    if sys.platform != "linux":
        yield map
        return
    # forks: all is imported here already, and the only thread of this process is this one
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(MOST, len(os.sched_getaffinity(0))), context, _begin)
    try:
        list(pool.map(abs, [0]))
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)  # waits: the end of this process and that of the pool would meet


def _begin() -> None:
    for number in (signal.SIGINT, signal.SIGUSR1):  # they are for the process that made this one
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
