"""
Trims the records of a run to a checkpoint. Apart from the writer, since it works once, before anything is written.

The index is replaced before files go that it spoke of, so that a process which is killed in between leaves a sound
folder, and the next one finishes the work.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from mt_grpo.runlog.files import written_whole
from mt_grpo.runlog.schema import FOLDER
from mt_grpo.runlog.writer import RunLogError

LOGS = ("metrics.jsonl", "audit.jsonl")
"""Files whose lines count the steps that were taken."""
_SAMPLED = re.compile(r"(?:credit-)?(train|eval|discarded)-(\d+)-")
_UPDATES = re.compile(r"updates-(\d+)\.")


def trim(folder: Path, steps: int) -> int:
    """
    Removes what a run recorded after a number of optimiser steps. What it recorded up to there stays byte for byte, an
    evaluation after the last of these steps too.
    """
    last = steps

    def logged(line: dict[str, Any]) -> bool:
        nonlocal last
        last = max(last, line["step"])
        return line["step"] <= steps

    try:
        for path in sorted((folder / FOLDER).glob("index*.jsonl")):
            _keep(path, lambda line: _indexed(line, steps))
        for path in (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ():
            if not _stays(path.name, steps) or path.suffix == ".partial":
                path.unlink()
        for name in LOGS:
            _keep(folder / name, logged)
        for path in folder.glob(".*.partial"):  # of a process that was killed while it wrote one of these
            path.unlink()
    except OSError as error:
        raise RunLogError(
            f"The records of {folder} after step {steps}, from which the run goes on, cannot be removed: "
            f"{error.strerror or error}. Mend the folder, or choose another `output_dir`."
        ) from error
    return last


def _keep(path: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    """Writes a file of JSON lines anew, if some do not stay; half a line at its end goes too."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        if all(_stands(raw, stays) for raw in lines):
            return
        lines.seek(0)
        with written_whole(path) as partial, partial.open("wb") as kept:
            kept.writelines(raw for raw in lines if _stands(raw, stays))


def _stands(raw: bytes, stays: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        return raw.endswith(b"\n") and stays(orjson.loads(raw))
    except (orjson.JSONDecodeError, KeyError, TypeError):  # damage, which a reader names
        return True


def _indexed(line: dict[str, Any], steps: int) -> bool:
    """Whether a line of the index stays."""
    kind = line["kind"]
    if kind == "file":
        return _stays(line["file"], steps)
    if kind in ("rollout", "credit"):
        return _stays(line["session"], steps)
    return kind not in ("update", "step") or line["step"] < steps


def _stays(name: str, steps: int) -> bool:
    """Whether a file or a session stays; both begin with their mode and the steps that were taken before."""
    if found := _SAMPLED.match(name):
        return int(found[2]) < steps or (found[1] == "eval" and int(found[2]) == steps)
    found = _UPDATES.match(name)
    return found is None or int(found[1]) < steps
