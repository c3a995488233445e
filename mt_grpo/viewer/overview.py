"""
A run at a glance: curves over its steps, the numbers on top of them, and what is worth a look, each with a link to its
conversations. Apart from `queries`, which knows the open run; here are functions of its columns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mt_grpo.errors import UserError
from mt_grpo.runlog import Run, files
from mt_grpo.runlog.files import read_state
from mt_grpo.runlog.findings import BAD, WARN, find_in_run, plural
from mt_grpo.runlog.schema import FOLDER, INDEX, Row
from mt_grpo.trajectory import StopReason
from mt_grpo.viewer.columns import REWARD, SIGNAL, Columns, parse_filter, short_name

POINTS = 400  # most points of a curve; with more steps, a point is the mean of several

_ENDED = (StopReason.ANSWERED, StopReason.ENV_DONE)  # stop reasons of conversations that nothing cut off
_PARTS = ("sampling", "rewards", "sync", "training")  # where the time of a step goes
_EDGE = 5  # steps at each end of a run that are compared, at most


def overview(columns: Columns, steps: list[Row], metrics: list[Row]) -> Row:
    """Curves of the training batches."""
    train = np.flatnonzero(columns.is_text("mode", "train"))
    step = columns.numbers("step")[train]
    axis, place = np.unique(step, return_inverse=True)

    def mean(values: np.ndarray) -> np.ndarray:
        return _means(values, place, len(axis))

    number = {name: columns.numbers(name)[train] for name in ("reward", "turns", "errors", "mismatch", "entropy")}
    stops = {}
    for reason in StopReason:
        share = mean(columns.is_text("stop", reason.value)[train].astype(float))
        if reason not in _ENDED and np.nansum(share):
            stops[reason.value] = share
    # by the steps taken before; `metrics.jsonl` counts the step itself
    norms = {row["step"] - 1: row["grad_norm"] for row in metrics if row.get("grad_norm") is not None}
    health = {
        "groups without signal": mean(1 - columns.numbers(SIGNAL)[train]),  # NaN for conversations without a group
        "engine − trainer": mean(number["mismatch"]),
        "tokens clipped": mean(columns.numbers("clipped")[train]),
        "entropy": mean(number["entropy"]),
        "gradient norm": np.array([norms.get(int(step), np.nan) for step in axis], float),
        "with a failed turn": mean((number["errors"] > 0).astype(float)),
    }
    first, last = _bins(axis)
    silent = health["groups without signal"]
    silent_most = float(np.nan_to_num(silent).max(initial=0.0))
    return {
        "steps": len(axis),
        "silent": {"steps": int((silent > 0).sum()), "of": int((~np.isnan(silent)).sum()), "most": silent_most},
        "step": first,
        "last": last,
        "distribution": _quantiles(number["reward"], step, first, last),
        "reward": _points(mean(number["reward"])),
        "rewards": {
            short_name(name): _points(mean(columns.numbers(REWARD + name)[train])) for name in columns.rewards
        },
        "turns": _points(mean(number["turns"])),
        "stops": {name: _points(share) for name, share in stops.items()},
        "health": {name: _points(values) for name, values in health.items()},
        "time": {
            "step": _bins(np.array([each["step"] for each in steps], float))[0],
            **{name: _points(np.array([each[name] for each in steps], float)) for name in _PARTS},
        },
        "held_out": _held_out(columns),
        # sampled in training, and computed for it: those of the token trees
        "tokens": {name: int(columns.numbers(name)[train].sum()) for name in ("tokens", "unique")},
    }


def _first_and_last(values: list[float | None]) -> tuple[float, float] | None:
    """Means of the first and of the last steps of a curve; `None` where it has none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    few = max(1, min(_EDGE, len(known) // 3))
    return float(np.mean(known[:few])), float(np.mean(known[-few:]))


def _means(values: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.bincount(place, np.where(known, values, 0.0), size) / np.bincount(place, known, size)


def _held_out(columns: Columns) -> list[Row]:
    """Each evaluation: `step`, mean `reward`, the share `right`, and of how many `questions`."""
    mask = columns.is_text("mode", "eval")
    step = columns.numbers("step")
    points = []
    for at in np.unique(step[mask]):
        here = mask & (step == at)
        point: Row = {"step": int(at)}
        for name in ("reward", "right"):
            values = columns.numbers(name)[here]
            known = values[~np.isnan(values)]
            point[name] = float(known.mean()) if len(known) else None
        judged = here & ~np.isnan(columns.numbers("right"))
        points.append({**point, "questions": len(np.unique(columns.groups[judged]))})
    return points


def metric_curves(metrics: list[Row]) -> Row:
    """Every number of `metrics.jsonl` as a curve."""
    found: dict[str, dict[int, float]] = {}
    for line in metrics:
        for name, value in line.items():
            if name not in ("step", "epoch") and isinstance(value, int | float) and np.isfinite(value):
                before = line["step"] if name.startswith("eval_") else max(0, line["step"] - 1)
                found.setdefault(name, {})[before] = float(value)
    curves = {}
    for name, points in found.items():
        axis, values = (np.array(part, float) for part in zip(*sorted(points.items()), strict=True))
        curves[name] = {"step": _bins(axis)[0], "values": _points(values)}
    return {"curves": curves}


_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Of the rewards of a step: the lowest, the middle and the highest among them."""


def _quantiles(values: np.ndarray, step: np.ndarray, first: list[int], last: list[int]) -> list[list[float | None]]:
    """A list per quantile, with a value per point."""
    known = ~np.isnan(values)
    order = np.argsort(step[known], kind="stable")
    values, step = values[known][order], step[known][order]
    begins, ends = np.searchsorted(step, first), np.searchsorted(step, last, side="right")
    rows = [
        np.quantile(values[i:j], _QUANTILES).tolist() if j > i else None for i, j in zip(begins, ends, strict=True)
    ]
    return [[None if row is None else row[place] for row in rows] for place in range(len(_QUANTILES))]


def _bins(axis: np.ndarray) -> tuple[list[int], list[int]]:
    """The first and the last step of each point, see `_points`."""
    if len(axis) <= POINTS:
        return axis.astype(int).tolist(), axis.astype(int).tolist()
    edges = np.linspace(0, len(axis), POINTS + 1).astype(int)
    return axis[edges[:-1]].astype(int).tolist(), axis[edges[1:] - 1].astype(int).tolist()


def _points(values: np.ndarray) -> list[float | None]:
    """As JSON, at most `POINTS` of them."""
    if len(values) > POINTS:
        edges = np.linspace(0, len(values), POINTS + 1).astype(int)
        values = _means(values, np.repeat(np.arange(POINTS), np.diff(edges)), POINTS)
    return [None if np.isnan(value) else float(value) for value in values]


_GOOD = "ok"

_LIMITS = {"groups without signal": 0.5, "tokens clipped": 0.2, "with a failed turn": 0.3}
"""Shares above which a curve is worth a look."""

_TIMES_USUAL = 4  # how many times its median a curve may reach
_EXPLORES = 0.02  # nats per token below which a policy hardly explores


_SHARES = {
    "groups without signal": ("No turn has an advantage:", "groups", "signal=0"),
    "with a failed turn": ("A turn failed:", "conversations", "errors>0"),
}
"""Curves of shares: the words of a finding, what is counted, and the filter that finds it."""


def limits(view: Row) -> dict[str, float]:
    """The limit of each curve of `health`. It is worth a look above the limit, and the entropy below."""
    found = dict(_LIMITS)
    for name in ("engine − trainer", "gradient norm"):
        known = [value for value in view["health"][name] if value is not None]
        if known:
            found[name] = _TIMES_USUAL * float(np.median(known))
    return {**found, "entropy": _EXPLORES}


def findings(view: Row, columns: Columns, compared: Row | None, about: Row | None = None) -> list[Row]:
    """The list, worst first."""
    shared = find_in_run(columns.rows, about)
    found = {finding.kind for finding in shared}
    ours = (_finding(one.level, one.strong, one.text, "show them", view="find", q=one.query) for one in shared)
    rules = [*_broken(compared), *ours, *_stops(view, found), *_health(view, columns), *_reward(view)]
    return sorted(rules, key=lambda finding: (BAD, WARN, _GOOD).index(finding["level"]))


def ended(status: Row) -> Iterator[Row]:
    """How a run ended that did not end by itself, of `mt_grpo.viewer.overview.status`."""
    if status["status"] == "failed":
        yield _finding(BAD, "The run failed:", status["reason"] or "it does not say why.", "its state", view="run")
    elif status["status"] == "died":
        text = "its process is gone, and did not say why."
        yield _finding(BAD, "The run died:", text, "its state", view="run")


def _finding(level: str, strong: str, text: str, label: str = "", **link: object) -> Row:
    return {"level": level, "strong": strong, "text": text, "label": label, "link": link or None}


def _broken(compared: Row | None) -> Iterator[Row]:
    if compared and compared["counts"]["broken"]:
        number, all_ = compared["counts"]["broken"], sum(compared["counts"].values())
        text = f"held-out questions were right at step {compared['from']} and are wrong at step {compared['to']}."
        yield _finding(BAD, f"{number} of {all_}", text, "compare", view="compare", show="broken")


def _stops(view: Row, found: set[str]) -> Iterator[Row]:
    """How the shares of limits changed, without the limits in `found`, which have a finding of the whole run."""
    for name, shares in view["stops"].items():
        first, last = _first_and_last(shares) or (0.0, 0.0)
        if last > 0.1 and not name.endswith("_error") and name not in found:
            text = f"{last:.0%} of the last steps ({first:.0%} of the first) were cut off there."
            asked = f"mode=train stop={name}"
            yield _finding(WARN, f"Stop reason {name}:", text, "show them", view="find", q=asked, sort="-step")
        elif first > 0.1 and last < first / 2:
            yield _finding(_GOOD, f"Stop reason {name}:", f"{first:.0%} → {last:.0%}.")


def _health(view: Row, columns: Columns) -> Iterator[Row]:
    for name, (strong, of, query) in _SHARES.items():
        both = _first_and_last(view["health"][name])
        if both is None:
            continue
        first, last = both
        if last > _LIMITS[name]:
            text = f"{last:.0%} of the {of} of the last steps, {first:.0%} of the first."
            yield _finding(WARN, strong, text, "show them", view="find", q=f"mode=train {query}", sort="-step")
        elif first > 0.1 and last < first / 2:
            yield _finding(_GOOD, strong, f"{first:.0%} → {last:.0%} of the {of}.")
    entropy = _first_and_last(view["health"]["entropy"])
    if entropy and entropy[1] < min(_EXPLORES, entropy[0] / 4):
        yield _finding(WARN, f"Entropy {entropy[0]:.2g} → {entropy[1]:.2g}", "nats: exploration is nearly gone.")
    yield from _bursts(view, columns)


def _bursts(view: Row, columns: Columns) -> Iterator[Row]:
    """Consecutive steps at which engine and trainer differ more than usual."""
    values = np.array([np.nan if value is None else value for value in view["health"]["engine − trainer"]])
    if np.isnan(values).all():
        return
    usual = float(np.nanmedian(values))
    high = np.flatnonzero(values > _TIMES_USUAL * usual)
    runs = np.split(high, np.flatnonzero(np.diff(high) > 1) + 1) if len(high) else []
    for run in sorted(runs, key=lambda run: -float(values[run].max()))[:2]:
        first, last = view["step"][run[0]], view["last"][run[-1]]
        where = f"step={first}" if first == last else f"step>={first} step<={last}"
        asked = f"mode=train {where} mismatch>{_TIMES_USUAL * usual:.2g}"
        number = int(columns.where(parse_filter(asked)).sum())
        text = f"engine and trainer differ {values[run].max() / usual:.0f}× as much as usual." if usual else "differ."
        strong = f"Step {first}:" if first == last else f"Steps {first}–{last}:"
        label = plural(number, "conversation")
        yield _finding(WARN, strong, text, label, view="find", q=asked, sort="-mismatch")


def _reward(view: Row) -> Iterator[Row]:
    both = _first_and_last(view["reward"])
    if both is None or len(view["reward"]) < 3:
        return
    first, last = both
    if last - first > 0.02 * max(abs(first), abs(last)):
        yield _finding(_GOOD, f"Reward {first:.2f} → {last:.2f}", "in the training batches.")
    else:
        text = f"in {view['steps']} steps: it has not risen so far."
        asked = {"view": "find", "q": "mode=train", "sort": "reward"}
        yield _finding(WARN, f"Reward {first:.2f} → {last:.2f}", text, "the lowest", **asked)


_MAX_DRAWN = 512  # conversations of a step that are drawn

CONFIG = "config.yaml"

_NAMED = {"model": "model_name_or_path", "estimator": "advantage_estimator", "group_size": "num_generations"}
"""Fields of the index's line of kind `run`, and the options of `config.yaml` that they are."""


def status(state: Row | None, seconds: float | None, folder: Path) -> Row:
    """How a run is."""
    if state is None:
        written = [folder / "metrics.jsonl", folder / FOLDER / INDEX]
        beat = max((path.stat().st_mtime for path in written if path.is_file()), default=None)
        unknown = dict.fromkeys(("reason", "of", "started", "left"))
        return {"status": "unknown" if seconds is None else "finished", **unknown, "seconds": seconds, "beat": beat}
    running = state["state"] == "running"
    took = (time.time() if running else state["beat"]) - state["started"]
    done = state["step"] - state.get("first", 0)
    left = took / done * (state["of"] - state["step"]) if running and done > 0 else None
    known = {name: state[name] for name in ("reason", "of", "started", "beat")}
    return {"status": state["state"], **known, "seconds": took, "left": left}


def configured(folder: Path) -> Row:
    """What `config.yaml` says of a run that has no index yet, as fields of the index's line of kind `run`."""
    try:
        options = json.loads(files.to_json(yaml.safe_load(files.read(folder, CONFIG) or b"")))  # may hold itself
    # beside PyYAML's own, what it does not catch of tags, and keys that JSON has not; the page shows its text
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}
    found = {name: options.get(option) for name, option in _NAMED.items()} if isinstance(options, dict) else {}
    return {name: value for name, value in found.items() if isinstance(value, str | int | dict)}


def panel(run: Run, columns: Columns, seconds: float | None) -> Row:
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


def waterfall(run: Run, columns: Columns, step: int, mode: str) -> Row:
    """When each conversation of a step sampled, ran tools and waited; those that ended last come first."""
    places = np.flatnonzero((columns.numbers("step") == step) & columns.is_text("mode", mode))
    chosen = [row for row in columns.rows.at(places) if row["start"] is not None]
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
    return {"step": step, "seconds": span, "conversations": len(chosen), "shares": shares, "rows": rows[:_MAX_DRAWN]}


def _parts(record: Row, begin: float) -> list[list[Any]]:
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
