"""The runs of a comparison: each leaves a file, in processes that take one after another, and is not run twice."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol, TypeVar

import datasets
import torch
from common import machine
from processes import ended_by_sigterm

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Of the processes that run."""
PATIENCE = 600.0
"""Seconds in which a busy machine does not change what is sampled."""

Row = dict[str, Any]


class Job(Protocol):
    """One run: a named tuple of what tells it from the others."""

    def file(self, folder: Path) -> Path:
        """Where it leaves its measures."""


JobT = TypeVar("JobT", bound=Any)


def prepare() -> None:
    """What a process of runs needs once."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()


def run_all(
    work: Callable[..., Job],
    waiting: Sequence[Job],
    *given: Any,
    folder: Path,
    workers: int,
    prepare: Callable[[], None] = prepare,
) -> None:
    """
    Runs jobs.

    Args:
        work (`Callable`): Runs a job, given it, `given` and the folder, and writes its file; returns it.
        waiting (`Sequence[Job]`): The jobs, in their order.
        folder (`Path`): Where they leave their files.
        workers (`int`): Processes; with 0 this one runs them.
        prepare (`Callable`, *optional*): Called in each process at its start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(ENVIRONMENT)
    began = time.perf_counter()

    def tell(number: int, job: Job) -> None:
        left = (time.perf_counter() - began) / number * (len(waiting) - number)
        print(f"{' '.join(map(str, job))}: {number} of {len(waiting)}, {left:.0f} s left", flush=True)

    if not workers:
        prepare()
        for number, job in enumerate(waiting, 1):
            tell(number, work(job, *given, folder))
        return
    context = multiprocessing.get_context("spawn")
    with ended_by_sigterm(), ProcessPoolExecutor(workers, mp_context=context, initializer=prepare) as pool:
        try:
            futures = [pool.submit(work, job, *given, folder) for job in waiting]
            for number, future in enumerate(as_completed(futures), 1):
                tell(number, future.result())
        except BaseException:
            for process in multiprocessing.active_children():  # the pool would wait for jobs of minutes
                process.terminate()
            raise


def finished(given: Sequence[Job], folder: Path, **made_with: Any) -> list[Row]:
    """
    The measures of the jobs that have a file.

    Args:
        given (`Sequence[Job]`): The jobs.
        folder (`Path`): Where their files are.
        **made_with: What all of them were made with, as the files have it.

    Raises:
        SystemExit: If one was made with something else.
    """
    rows = []
    for job in given:
        file = job.file(folder)
        if file.exists():
            row = json.loads(file.read_text())
            for name, value in made_with.items():
                if (made := row.pop(name)) != value:
                    raise SystemExit(f"{file} was made with the {name} {made}: name another --folder.")
            rows.append(row)
    return rows


def rows_of(result: Path) -> list[Row]:
    """The rows of committed results."""
    return json.loads(result.read_text())["rows"] if result.exists() else []


def missing(given: Sequence[JobT], known: Sequence[Row]) -> list[JobT]:
    """The jobs that results have no row of."""
    have = {tuple(row[name] for name in type(job)._fields) for job in given[:1] for row in known}
    return [job for job in given if tuple(job) not in have]


def keep(result: Path, whole: Sequence[Any], known: Sequence[Row], found: Sequence[Row], **made_with: Any) -> None:
    """Writes the rows that are known and those that were found, in the order of all runs."""
    rows = {tuple(row[name] for name in whole[0]._fields): row for row in (*known, *found)}
    if rows:
        write_rows(result, [rows[tuple(job)] for job in whole if tuple(job) in rows], **made_with)


def write_rows(path: Path, rows: Sequence[Row], **made_with: Any) -> None:
    """Writes results: the machine, what all were made with, and a line for each run."""
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = json.dumps({"machine": machine(), **made_with}, indent=2)
    path.write_text(f'{head[:-2]},\n  "rows": [\n{lines}\n  ]\n}}\n')
