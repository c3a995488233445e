"""Several runs in one folder: a list, their curves over each other, and the questions that all of them were asked."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.imports import did_you_mean
from mt_grpo.runlog import Run, files, open_run
from mt_grpo.runlog.files import read_state
from mt_grpo.runlog.index import Each, evaluated, lines_of
from mt_grpo.runlog.schema import FOLDER, INDEX, METRICS, STATE, Row
from mt_grpo.viewer.columns import Columns, cached
from mt_grpo.viewer.overview import CONFIG, configured, status
from mt_grpo.viewer.queries import BadQuestion, Parameters, Queries, Questions, enough_of, evaluations, questions

_DEEP = 3  # folders below the one that is named in which runs are looked for
_HEAD = 2**20  # bytes at the beginning of an index in which a run is described

POINTS = 60  # points of the small curve beside a run

_LAST = 5  # steps that the last reward is the mean of
_MAX_RUNS = 8  # runs that are compared at once

_AXES = ("step", "time", "tokens")

_INDEX_FILE = f"{FOLDER}/{INDEX}"

_HELD_OUT = re.compile("eval_(.+_)?reward")  # of one set, or of a named one
_RUN = re.compile(rb'^\{"kind":"run".*$', re.MULTILINE)


def _find_runs(folder: Path) -> dict[str, Path]:
    """The runs in a folder, by their path in it. It looks into no folder of a run, and follows no links."""
    found: dict[str, Path] = {}
    for root, folders, names in os.walk(folder):
        here = Path(root)
        if METRICS in names or STATE in names or (here / _INDEX_FILE).is_file():
            found[here.relative_to(folder).as_posix()] = here
            folders.clear()
        depth = len(here.relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if depth < _DEEP and not name.startswith("."))
    return found


class Runs:
    """Answers questions about the runs in a folder. A run is opened when somebody asks about its conversations."""

    def __init__(self, folder: str | Path, each: Each = map) -> None:
        self.folder, self._each = Path(folder), each
        self._opened: dict[str, Queries] = {}
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}  # of each run: a long one keeps nobody waiting for another
        self._known: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        if not _find_runs(self.folder):
            raise UserError(
                f"{self.folder} is not the folder of a run and has none in it: name the `output_dir` of a run, or a "
                "folder with several."
            )

    def answer(self, question: str, asked: Parameters) -> Row:
        """Answers a question about a run, which `run` names, or one about several: `runs`, `curves` or `questions`."""
        asked = dict(asked)
        if question == "runs":
            found = sorted((self._summary(*each) for each in _find_runs(self.folder).items()), key=_newest_first)
            return {"folder": self.folder.name, "runs": found}
        if question == "curves":
            return self._curves(_names(asked), asked.get("metric") or "reward", asked.get("by") or "step")
        if question == "questions":
            return self._questions(_names(asked))
        name = asked.pop("run", "")
        answer = self.queries(name).answer(question, asked)
        return {**answer, "name": name} if question == "run" else answer

    def note(self, asked: Parameters, star: bool, note: str) -> Row:
        """As `Queries.note`, in the run that `run` names."""
        asked = dict(asked)
        return self.queries(asked.pop("run", "")).note(asked, star, note)

    def export(self, form: str, asked: Parameters) -> Iterator[str]:
        """As `Queries.export`, of the run that `run` names."""
        asked = dict(asked)
        return self.queries(asked.pop("run", "")).export(form, asked)

    def queries(self, name: str) -> Queries:
        """The questions of one run. Raises `UserError` if there is no such run, or its folder is damaged."""
        with self._lock:
            lock = self._opening.setdefault(name, threading.Lock())
        with lock:
            if name not in self._opened:
                run = open_run(self._folder(name), self._each, begun=True)
                self._opened[name] = Queries(run, cached(run.folder))
            return self._opened[name]

    def _read(self, what: Callable[[Path], object], folder: Path, *names: str) -> Any:
        """What a function makes of some files of a run; it is called again once one of them is another."""
        state: list[tuple[int, ...] | None] = []
        for name in names:
            try:
                about = (folder / name).stat()
                state.append((about.st_ino, about.st_size, about.st_mtime_ns))
            except OSError:
                state.append(None)
        key = what, folder
        if self._known.get(key, (None, None))[0] != state:
            self._known[key] = state, what(folder)
        return self._known[key][1]

    def _folder(self, name: str) -> Path:
        found = _find_runs(self.folder)
        if name not in found:
            raise BadQuestion(f"There is no run {name!r} in {self.folder}{did_you_mean(name, list(found))}.")
        return found[name]

    def _summary(self, name: str, folder: Path) -> Row:
        try:
            curve = self._read(_of_metrics, folder, METRICS)
            about = self._read(about_run, folder, _INDEX_FILE) or self._read(configured, folder, CONFIG)
            return {"name": name, **_summary(folder, curve, about)}
        except UserError as error:
            return {"name": name, "error": str(error)}

    def _curves(self, names: list[str], metric: str, by: str) -> Row:
        if by not in _AXES:
            raise BadQuestion(f"`by` is one of {', '.join(_AXES)}; {by[:40]!r} is none.")
        curves, known = {}, {"reward": None}
        for name in names:
            folder = self._folder(name)
            metrics = self._read(Run.metrics_of, folder, METRICS)
            known |= dict.fromkeys(key for row in metrics for key, value in row.items() if _is_number(value))
            ends = self._read(_ends, folder, _INDEX_FILE) if by == "time" else {}
            axis = _axis(metrics, by, ends)
            curves[name] = [
                [x, row[metric]]
                for row, x in zip(metrics, axis, strict=True)
                if x is not None and _is_number(row.get(metric))
            ]
        return {"metric": metric, "by": by, "metrics": sorted(known.keys() - {"step"}), "curves": curves}

    def _questions(self, names: list[str]) -> Row:
        """The questions of the last evaluation of each run that all were asked, and how each run fared."""
        sides: dict[str, tuple[Questions, Columns]] = {}
        steps = {}
        for name in names:
            columns = self._read(_evaluated, self._folder(name), _INDEX_FILE)
            asked = evaluations(columns)
            if not asked:
                raise BadQuestion(f"{name} has no evaluation, so that its held-out questions cannot be compared.")
            steps[name] = asked[-1]
            sides[name] = questions(columns, asked[-1]), columns
        return {"steps": steps, **_compared(sides)}


def _names(asked: Parameters) -> list[str]:
    names = list(dict.fromkeys(filter(None, asked.get("runs", "").split("\n"))))
    if not 1 <= len(names) <= _MAX_RUNS:
        raise BadQuestion(f"`runs` names 1 to {_MAX_RUNS} runs, a line each.")
    return names


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _compared(sides: dict[str, tuple[Questions, Columns]]) -> Row:
    found = [each for each, _ in sides.values()]
    enough = enough_of(found)
    counts: Counter[str] = Counter()
    rows = []
    for key in found[0]:
        if not all(key in each for each in found):
            continue
        cells = []
        for each, columns in sides.values():
            one = each[key]
            codes, answers = columns.rows.codes("answer")
            cells.append(
                {
                    "session": one.session,
                    "right": one.is_right(enough),
                    "answer": answers[codes[columns.rows.places[one.session]]],
                    "reward": one.mean,
                    "rights": f"{sum(one.right):.0f} of {len(one.right)}" if len(one.right) > 1 else "",
                }
            )
        rights = [cell["right"] for cell in cells]
        kind = "all" if all(rights) else "none" if not any(rights) else "some"
        counts[kind] += 1
        for name, right in zip(sides, rights, strict=True):
            counts[f"only {name}"] += right and sum(rights) == 1 and len(rights) > 1
        rows.append({"prompt": key[0], "kind": kind, "cells": cells})
    order = ("some", "none", "all")
    rows.sort(key=lambda row: order.index(row["kind"]))
    return {"counts": dict(counts), "asked": len(rows), "rows": rows}


def _newest_first(run: Row) -> tuple[bool, float, str]:
    """A sorting key of summaries; those without a time come last."""
    begun = run.get("started") or run.get("beat")
    return begun is None, -(begun or 0.0), run["name"]


def _evaluated(folder: Path) -> Columns:
    return Columns(evaluated(folder))


def _of_metrics(folder: Path) -> Row:
    """What the list shows of `metrics.jsonl`."""
    metrics = Run.metrics_of(folder)
    rewards, took = (
        [row[name] for row in metrics if _is_number(row.get(name))] for name in ("reward", "train_runtime")
    )
    ends = {name: row[name] for row in metrics for name in row if _HELD_OUT.fullmatch(name) and _is_number(row[name])}
    of_sets = [ends["eval_reward"]] if "eval_reward" in ends else [*ends.values()]
    return {
        "seconds": took[-1] if took else None,
        "step": max((row["step"] for row in metrics), default=0),
        "reward": _thinned(rewards),
        "last": float(np.mean(rewards[-_LAST:])) if rewards else None,
        "eval": sum(of_sets) / len(of_sets) if of_sets else None,  # of several sets the mean
    }


def _summary(folder: Path, metrics: Row, about: Row) -> Row:
    """A run at a glance, from the ends of its files: its index is not read as a whole."""
    state = read_state(folder)
    options = about.get("options") or {}
    rule = about.get("rule") or about.get("estimator")
    return {
        **metrics,
        **status(state, metrics["seconds"], folder),
        "step": max(metrics["step"], (state or {}).get("step", 0)),
        "rule": rule.get("name") if isinstance(rule, dict) else rule,
        "model": _model_name(about.get("model"), options),
    }


def _model_name(model: Any, options: Row) -> str | None:
    """The last part of a model's name, with LoRA where an adapter is trained."""
    if not isinstance(model, str):
        return None
    parts = model.rstrip("/").split("/")
    name = "/".join(parts[-2:] if parts[-1] == "model" else parts[-1:])  # the embedded model's folder says little
    return name + (", LoRA" if options.get("use_peft") else "")


def about_run(folder: Path) -> Row:
    """The line of kind `run` at the beginning of a run's index; empty where there is none yet."""
    path = files.find(folder, _INDEX_FILE)
    if path is None:
        return {}
    with path.open("rb") as file:
        found = _RUN.search(file.read(_HEAD))
    line, wrong = files.parse(found[0], "run") if found else ({}, None)
    return line if wrong is None else {}  # opening the run names the line


def _ends(folder: Path) -> dict[int, float]:
    """When each step ended, by the number that `metrics.jsonl` gives it."""
    return {line["step"] + 1: line["start"] + line["seconds"] for line in lines_of(folder, b'{"kind":"step"')}


def _axis(metrics: list[Row], by: str, ends: dict[int, float]) -> list[float | None]:
    """The x of each line of metrics."""
    if by == "step":
        return [row["step"] for row in metrics]
    if by == "tokens":
        return [row.get("num_tokens") for row in metrics]
    begin = min(ends.values(), default=0.0)
    return [ends[row["step"]] - begin if row["step"] in ends else None for row in metrics]


def _thinned(values: list[float]) -> list[float]:
    if len(values) <= POINTS:
        return values
    return [float(part.mean()) for part in np.array_split(np.array(values), POINTS)]
