"""What a run is and what it is at: its state, what it was started with, and where a step's time went."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mt_grpo.errors import UserError
from mt_grpo.runlog import Run, files
from mt_grpo.runlog.schema import FOLDER, INDEX
from mt_grpo.runlog.state import read_state
from mt_grpo.viewer.columns import Columns

MOST = 512
"""Conversations of a step that are drawn."""

CONFIG = "config.yaml"

NAMED = {"model": "model_name_or_path", "estimator": "advantage_estimator", "group_size": "num_generations"}
"""Fields of the index's line of kind `run`, and the options of `config.yaml` that they are."""


def status(state: dict[str, Any] | None, seconds: float | None, folder: Path) -> dict[str, Any]:
    """How a run is."""
    if state is None:
        written = [folder / "metrics.jsonl", folder / FOLDER / INDEX]
        beat = max((path.stat().st_mtime for path in written if path.is_file()), default=None)
        unknown = dict.fromkeys(("reason", "of", "started", "left"))
        return {"status": "unknown" if seconds is None else "finished", **unknown, "seconds": seconds, "beat": beat}
    running = state["state"] == "running"
    took = (time.time() if running else state["beat"]) - state["started"]
    left = took / state["step"] * (state["of"] - state["step"]) if running and state["step"] else None
    known = {name: state[name] for name in ("reason", "of", "started", "beat")}
    return {"status": state["state"], **known, "seconds": took, "left": left}


def configured(folder: Path) -> dict[str, Any]:
    """What `config.yaml` says of a run that has no index yet, as fields of the index's line of kind `run`."""
    try:
        options = yaml.safe_load(files.read(folder, CONFIG) or b"")
    except (yaml.YAMLError, ValueError, RecursionError):  # the page shows its text
        return {}
    found = {name: options.get(option) for name, option in NAMED.items()} if isinstance(options, dict) else {}
    return {name: value for name, value in found.items() if isinstance(value, str | int | dict)}


def panel(run: Run, columns: Columns, seconds: float | None) -> dict[str, Any]:
    """The run's panel."""
    state = read_state(run.folder)
    now = time.time()
    running = state is not None and state["state"] == "running"
    under_way = [
        {**each, "seconds": None if each["start"] is None else now - each["start"]}
        for each in (state["under_way"] if state is not None and running else [])
    ]
    config = files.read(run.folder, CONFIG)
    return {
        "status": status(state, seconds, run.folder),
        "step": state["step"] if state else len(run.steps()),
        "waits_for": state["waits_for"] if state is not None and running else None,
        "under_way": under_way,
        "about": run.about or configured(run.folder),
        "config": None if config is None else config.decode("utf-8", "replace"),
        "steps": np.unique(columns.numbers("step")[columns.is_text("mode", "train")]).astype(int).tolist(),
    }


def waterfall(run: Run, columns: Columns, step: int, mode: str) -> dict[str, Any]:
    """When each conversation of a step sampled, ran tools and waited; those that ended last come first."""
    places = np.flatnonzero((columns.numbers("step") == step) & columns.is_text("mode", mode))
    chosen = [row for place in places.tolist() if (row := columns.rows[place])["start"] is not None]
    if not chosen:
        raise UserError(f"Step {step} has no conversation ({mode}).")
    begin = min(row["start"] for row in chosen)
    span = max(row["start"] + row["seconds"] for row in chosen) - begin
    rows = []
    spent = {"sampling": 0.0, "tools": 0.0, "waiting": 0.0}
    for row, record in run.records(chosen):
        parts = _parts(record, begin)
        start, end = row["start"] - begin, row["start"] - begin + row["seconds"]
        sampling, tools = (_covered([part for part in parts if part[0] == kind]) for kind in ("sampling", "tools"))
        spent["sampling"] += sampling
        spent["tools"] += tools
        spent["waiting"] += max(0.0, row["seconds"] - sampling - tools)
        known = {name: row[name] for name in ("session", "group", "member", "prompt")}
        rows.append({**known, "start": start, "end": end, "parts": parts})
    rows.sort(key=lambda row: -row["end"])
    whole = max(span * len(chosen), 1e-9)
    shares = {name: seconds / whole for name, seconds in spent.items()}
    shares["done"] = max(0.0, 1 - sum(shares.values()))
    return {"step": step, "seconds": span, "conversations": len(chosen), "shares": shares, "rows": rows[:MOST]}


def _parts(record: dict[str, Any], begin: float) -> list[list[Any]]:
    parts: list[list[Any]] = []
    for turn in record["turns"]:
        if turn["start"] is not None:
            parts.append(["sampling", turn["start"] - begin, turn["seconds"], f"turn {turn['index'] + 1}"])
        for call in turn["tool_calls"]:
            if call["start"] is not None:
                parts.append(["tools", call["start"] - begin, call["seconds"], call["name"]])
    return parts


def _covered(parts: list[list[Any]]) -> float:
    """Seconds in which any of some parts went on: calls of a turn may run at once."""
    total, until = 0.0, -np.inf
    for _, start, seconds, _ in sorted(parts, key=lambda part: part[1]):
        total += max(0.0, start + seconds - max(start, until))
        until = max(until, start + seconds)
    return float(total)
