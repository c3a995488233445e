"""Interleaved timing, peak memory and the workloads of the benchmarks of the forward."""

from __future__ import annotations

import ctypes
import functools
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def interleave(
    functions: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each function, in turns, so that what disturbs one disturbs all. Call each once before."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = clock()
            function()
            seconds[name].append(clock() - start)
    return seconds


class DoesNotFit(RuntimeError):
    """One side of a comparison ran out of the GPU's memory. The message is a sentence that says which."""


def within_memory(functions: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """The same functions, which raise `DoesNotFit` where they run out of memory."""

    def guarded(name: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except torch.OutOfMemoryError as error:
            words = ". ".join(str(error).split(". ")[:2])  # what ran out, and how much was asked for
            raise DoesNotFit(f"{name} ran out of memory, so that nothing is compared: {words}.") from error

    return {name: functools.partial(guarded, name, function) for name, function in functions.items()}


def free_memory() -> None:
    """Lets go of what a workload that did not fit has left on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ratio(seconds: dict[str, list[float]], theirs: str, ours: str) -> dict[str, float]:
    """Theirs over ours: of the medians, and of the minima."""
    return {
        "median": statistics.median(seconds[theirs]) / statistics.median(seconds[ours]),
        "minimum": min(seconds[theirs]) / min(seconds[ours]),
    }


def peak_memory(function: Callable[[], Any], device: str) -> int:
    """MiB a call adds at its peak to what was in use before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) >> 20
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is no room for this call
    CLEAR.write_text("5")  # resets the peak
    before = _status("VmRSS")
    function()
    return (_status("VmHWM") - before) >> 10


def _status(field: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(field))


# Workloads: rows of (tokens, trained), each one sequence, in groups that share a prompt

Row = tuple[np.ndarray, np.ndarray]


def extension_rows(
    prompt: int, group: int, turns: int, seed: int = 0, action: int = 57, result: int = 56, vocabulary: int = 2000
) -> list[list[Row]]:
    """Trajectories whose history only grows: one sequence each."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocabulary, prompt)
    rows = []
    for _ in range(group):
        tokens, trained = [shared], [np.zeros(prompt, dtype=bool)]
        for turn in range(turns):
            sizes = [_vary(rng, action), _vary(rng, result) if turn < turns - 1 else 0]
            tokens.append(rng.integers(0, vocabulary, sum(sizes)))
            trained.append(np.arange(sum(sizes)) < sizes[0])
        rows.append([(np.concatenate(tokens), np.concatenate(trained))])
    return rows


def stripped_rows(
    prompt: int,
    group: int,
    turns: int,
    seed: int = 0,
    thinking: int = 100,
    answer: int = 24,
    result: int = 32,
    vocabulary: int = 2000,
) -> list[list[Row]]:
    """Trajectories whose past thinking is stripped: each turn is a sequence of its own."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocabulary, prompt)
    rows = []
    for _ in range(group):
        context, sequences = shared, []
        for _ in range(turns):
            thought, said = (rng.integers(0, vocabulary, _vary(rng, size)) for size in (thinking, answer))
            tokens = np.concatenate([context, thought, said])
            sequences.append((tokens, np.arange(len(tokens)) >= len(context)))
            context = np.concatenate([context, said, rng.integers(0, vocabulary, _vary(rng, result))])
        rows.append(sequences)
    return rows


def _vary(rng: np.random.Generator, size: int) -> int:
    return int(rng.integers(size * 3 // 4, size * 5 // 4 + 1))


WORKLOADS: dict[str, Callable[[], list[list[Row]]]] = {
    "prompt 512, group 8, 4 turns, extension holds": lambda: extension_rows(512, 8, 4),
    "prompt 2048, group 8, 2 turns": lambda: extension_rows(2048, 8, 2),
    "prompt 512, group 4, 4 turns, thinking stripped": lambda: stripped_rows(512, 4, 4),
    "same, 12 turns": lambda: stripped_rows(512, 4, 12),
    "prompt 4096, group 16, 2 turns": lambda: extension_rows(4096, 16, 2),
}
