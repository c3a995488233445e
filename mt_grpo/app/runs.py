"""
The commands that read folders of runs: `mt-grpo view` and `export` of one, `runs` and `compare` of several. Import no
torch.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import time
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mt_grpo.app.request import read_words, whole_number
from mt_grpo.errors import ConfigError, UserError
from mt_grpo.imports import did_you_mean
from mt_grpo.processes import belong_to_parent
from mt_grpo.runlog import Run, files, open_run
from mt_grpo.runlog.export import FORMS
from mt_grpo.runlog.export import export as export_run
from mt_grpo.runlog.findings import Estimate, bootstrap, over_steps
from mt_grpo.runlog.index import Each, evaluated
from mt_grpo.runlog.schema import FOLDER, INDEX, METRICS, STATE, Row
from mt_grpo.trajectory import visible
from mt_grpo.viewer.columns import Columns, Condition, FilterError, cached, compare_numbers, equal_text, parse_filter
from mt_grpo.viewer.overview import CONFIG
from mt_grpo.viewer.queries import Queries, evaluations, questions, selected
from mt_grpo.viewer.runs import Runs, about_run
from mt_grpo.viewer.server import PORT, Answers, Server
from mt_grpo.viewer.server import export as export_page

USAGE = {
    "view": f"""usage: mt-grpo view RUN_DIR [--port N] [--no_browser]
       mt-grpo view FOLDER                        of several runs: a list, and one run against another
       mt-grpo view RUN_DIR --export FILE.html [--filter 'stop=timeout reward<0.5'] [--overwrite]

shows the conversations of a run, finished or not: what the agent did, and which credit it got

  --port N        the port on this machine; without it the first free one from {PORT} on
  --no_browser    open no browser
  --export FILE   write one file that opens without a server, instead of serving
  --filter TEXT   the conversations that the file gets, in the language of the page's filter
  --overwrite     replace the file if it is there
""",
    "export": """usage: mt-grpo export RUN --to FORM [--filter TEXT] [--output PATH] [--overwrite]

writes the conversations of the run in the folder RUN (its `output_dir`) as FORM:

  messages       a line per conversation with `messages` and `tools`, as TRL's trainers take them
  sharegpt       a line per conversation with `conversations`, as LLaMA-Factory takes them
  tokens         a line per sequence of token ids as sampled, with a mask of what is trained, for TRL's SFTTrainer
  preferences    a line per pair of a group's conversations, the better one chosen, for TRL's DPOTrainer
  dataset        a folder for `datasets.load_dataset`, with `prompt`, `completion` and `tools`
  jsonl          a line per conversation, with its messages, token tree, log-probs and rewards
  openinference  a trace per conversation in OTLP's JSON, with OpenInference's attributes
  trackio        metrics and tables of conversations, for `trackio show`

  --filter TEXT  the conversations to write, in the language of the page's filter: 'mode=train right=1'
  --output PATH  a file, or a folder for `dataset` and `trackio`; without it a place in RUN, and trackio's own folder
  --overwrite    replace what is at PATH
""",
    "runs": """usage: mt-grpo runs [FOLDER] [--sort COLUMN] [--filter TEXT] [--json]

lists the runs in FOLDER (`runs` where none is given) and in folders of it, the latest first; `reward` is the mean of
the last five steps, `eval` the reward of the last evaluation

  --sort COLUMN  run, model, rule and state from A to Z, step, reward and eval from the largest, age from the smallest
  --filter TEXT  the runs to list: 'state=finished reward>0.5 qwen'; age is in hours
  --json         print JSON
""",
    "compare": """usage: mt-grpo compare A B [...] [--json]

compares runs with the first one: the options that differ, the questions of the last evaluation that all were asked,
and the metrics of the last third of the steps that all took (20 at least), each difference with a 95 % interval

  --json         print JSON, with every metric that all runs have
""",
}


def view(arguments: list[str]) -> int:
    """`mt-grpo view RUN_DIR`."""
    (name,), options = read_words("view", arguments, one="the `output_dir` of a run or one with several")
    if "--filter" in options and "--export" not in options:
        raise ConfigError("`--filter` belongs to `--export FILE`; in the page, write it into the field of Find.")
    port = whole_number(options, "--port", 0, 65535)
    folder = Path(name)
    if folder.is_dir() and not any((folder / name).exists() for name in (FOLDER, METRICS, STATE)):
        if "--export" in options:
            raise ConfigError(f"`--export` takes the folder of one run, and {folder} is none: name one in it.")
        with _parallel_map() as each:
            return _serve(Runs(folder, each), name, port, options)
    exports = "--export" in options
    queries = Queries(_open_run_parallel(name, begun=not exports), None if exports else cached(folder))
    if exports:
        path = Path(options["--export"])
        number = export_page(queries, path, options.get("--filter", ""), "--overwrite" in options)
        print(f"{path}: {number} conversations, {path.stat().st_size / 1e6:.1f} MB")
        return 0
    return _serve(queries, name, port, options)


def _serve(answers: Answers, folder: str, port: int | None, options: dict[str, str]) -> int:
    with Server(answers, port) as server:
        print(f"{folder} is at {server.url} (Ctrl-C ends this)", flush=True)
        screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if "--no_browser" not in options and screen:  # without one, a text browser would open in this terminal
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def export(arguments: list[str]) -> int:
    """`mt-grpo export RUN --to FORM [--filter TEXT] [--output PATH] [--overwrite]`."""
    folders, options = read_words("export", arguments)
    if len(folders) != 1 or "--to" not in options:
        raise ConfigError(f"Write `mt-grpo export RUN --to FORM`, where FORM is one of {', '.join(FORMS)}.")
    run = _open_run_parallel(folders[0])
    rows = selected(run, options.get("--filter", ""))
    print(export_run(run, options["--to"], options.get("--output"), rows, "--overwrite" in options))
    return 0


# A long index is read by several processes, which are gone when the run is open

LONG_INDEX = 2**24
"""Bytes of an index that one process takes a third of a second or more to read."""

_MAX_PROCESSES = 4  # processes: more would wait for this one, which puts together what they read


def _open_run_parallel(folder: str, begun: bool = False) -> Run:
    """The run in a folder, with `begun` also one without conversations so far; call it before there are threads."""
    size = sum(path.lstat().st_size for path in (Path(folder) / FOLDER).glob("index*.jsonl"))
    gc.disable()  # what is read stays: looking for garbage in it would take a third of the time
    try:
        if size < LONG_INDEX:
            return open_run(folder, begun=begun)
        with _parallel_map() as each:
            return open_run(folder, each, begun)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _parallel_map() -> Iterator[Each]:
    """`map` in other processes, which begin at once: call it before there are threads. Linux alone has them."""
    if sys.platform != "linux":
        yield map
        return
    # forks: all is imported here already, and the only thread of this process is this one
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(_MAX_PROCESSES, len(os.sched_getaffinity(0))), context, belong_to_parent)
    try:
        list(pool.map(abs, [0]))
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)  # waits: the end of this process and that of the pool would meet


# `mt-grpo runs` and `mt-grpo compare`

_TEXTS, _NUMBERS = ("run", "model", "rule", "state"), ("step", "reward", "eval", "age")
_METRICS = (
    "reward",
    "rewards/",
    "turns/mean",
    "completions/mean_length",
    "tools/",
    "stop/",
    "entropy",
    "kl",
    "step_time",
)
"""Metrics that are shown, in order; those with a slash at the end are beginnings."""
_APART = ("output_dir", "overwrite_output_dir", "run_name", "resume_from_checkpoint")
"""Options of which no difference is told."""
_WIDEST = 60  # characters of an option's value that are shown


def runs(arguments: list[str]) -> int:
    """`mt-grpo runs [FOLDER]`."""
    folders, options = read_words("runs", arguments)
    if len(folders) > 1:
        raise ConfigError("`mt-grpo runs` takes one folder, with runs in it: `mt-grpo runs runs`.")
    folder, key = Path(*folders or ["runs"]), options.get("--sort")
    if key is not None and key not in (*_TEXTS, *_NUMBERS):
        raise ConfigError(f"`--sort` takes a column, and {key[:40]!r} is none: {', '.join((*_TEXTS, *_NUMBERS))}.")
    found = [_listed(run, folder) for run in Runs(folder).answer("runs", {})["runs"]]
    conditions = parse_filter(options.get("--filter", ""))
    found = [run for run in found if all(_holds(run, condition) for condition in conditions)]
    if key in _TEXTS:
        found.sort(key=lambda run: (run[key] or "").casefold())
    elif key is not None:
        sign = 1 if key == "age" else -1
        found.sort(key=lambda run: (run[key] is None, sign * (run[key] or 0)))
    if "--json" in options:
        print(json.dumps(found, indent=1))
        return 0
    if not found:
        print(f"No run in {folder} fulfils the filter.")
        return 0
    names = ("run", "model", "rule", "step", "reward", "eval", "state", "age")
    _print_table([names, *([_cell(run, name) for name in names] for run in found)])
    for run in found:
        if run["reason"]:
            print(f"{visible(run['run'])}: {visible(run['reason'])}")
    return 0


def _listed(run: Row, folder: Path) -> Row:
    """What is shown of a run, from what the page has of it."""
    seen = run.get("beat") or run.get("started")
    return {
        "run": folder.resolve().name if run["name"] == "." else run["name"],
        **{name: run.get(name) for name in ("model", "rule", "step", "of")},
        "reward": run.get("last"),
        "eval": run.get("eval"),
        "state": run.get("status", "damaged"),
        "reason": run.get("error") or run.get("reason"),
        "age": None if seen is None else (time.time() - seen) / 3600,
    }


def _holds(run: Row, condition: Condition) -> bool:
    name = condition.name
    if not name:
        return any(condition.value.casefold() in (run[text] or "").casefold() for text in _TEXTS)
    if name in _TEXTS:
        return equal_text(condition)(run[name] or "") == (condition.sign == "=")
    if name in _NUMBERS:
        return bool(compare_numbers(condition, np.array([run[name]], float))[0])
    columns = (*_TEXTS, *_NUMBERS)
    raise FilterError(
        f"There is no column {name!r}{did_you_mean(name, columns) or ': there are ' + ', '.join(columns)}."
    )


def _cell(run: Row, name: str) -> str:
    value = run[name]
    if value is not None and name == "age":
        return f"{60 * value:.0f} min" if value < 1 else f"{value:.0f} h" if value < 48 else f"{value / 24:.0f} days"
    if value is not None and name == "step":
        return f"{value}/{run['of']}" if run["of"] else str(value)
    return _short(value)


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}…"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    shown = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


# Runs against the first one


_FEWEST = 6  # rows: five that all differ in one direction do so by chance in one of sixteen comparisons


def _in_words(difference: Estimate) -> str:
    if difference.low == difference.high == 0:
        return "equal"
    if difference.low is None or difference.high is None or difference.rows < _FEWEST:
        return f"{difference.mean:+.3g}, too few to tell"
    shown = "higher" if difference.low > 0 else "lower" if difference.high < 0 else "not shown to differ"
    return f"{difference.mean:+.3g} ({difference.low:+.3g} to {difference.high:+.3g}), {shown}"


def compare(arguments: list[str]) -> int:
    """`mt-grpo compare A B [...]`."""
    folders, words = read_words("compare", arguments)
    if len(set(folders)) < 2 or len(set(folders)) < len(folders):
        raise ConfigError("`mt-grpo compare` takes the folders of two runs or more: `mt-grpo compare runs/A runs/B`.")
    for folder in folders:
        if not (Path(folder) / FOLDER / INDEX).is_file():
            open_run(folder, begun=True)  # which refuses what is no run's folder
    options = {folder: _options(Path(folder)) for folder in folders}
    differing = {
        name: [of.get(name) for of in options.values()]
        for name in sorted(set().union(*options.values()) - set(_APART))
        if len({json.dumps(of.get(name), sort_keys=True, default=str) for of in options.values()}) > 1
    }
    held_out, asked = _of_questions(folders)
    metrics, steps = _of_steps(folders)
    if "--json" in words:
        found = {
            "runs": folders,
            "options": differing,
            "evaluations": {"questions": asked, "metrics": _as_json(held_out)},
            "training": {"steps": steps, "metrics": _as_json(metrics)},
        }
        print(json.dumps(found, indent=1, default=str))
        return 0
    last = [Path(folder).resolve().name for folder in folders]
    names = last if len(set(last)) == len(last) else folders
    print("Options that differ" if differing else "No option differs.")
    if differing:
        _print_table([("", *names), *((f"  {name}", *map(_short, values)) for name, values in differing.items())])
    if held_out:
        print(f"\n{asked} questions of the last evaluation, paired by question")
        _print_differences(names, held_out)
    else:
        print("\nNo question was asked of all these runs in their last evaluation.")
    shown = {
        name: metrics[name]
        for begin in _METRICS
        for name in metrics
        if name == begin or (begin.endswith("/") and name.startswith(begin) and not name.endswith("/std"))
    }
    if shown:
        print(f"\nTraining, paired by step: {len(steps)} steps, {steps[0]} to {steps[-1]}")
        _print_differences(names, shown)
    else:
        print("\nNo step was logged by all these runs.")
    if held_out or shown:
        print(
            "\n95 % intervals, over questions and steps of these runs. They say nothing of other seeds: compare runs "
            "of several seeds before you call an option better."
        )
    return 0


def _options(folder: Path) -> Row:
    """The options of a run: of its `config.yaml`, or what its index has of a run from Python."""
    text = files.read(folder, CONFIG)
    if text is None:
        about = about_run(folder)
        known = {"model_name_or_path": about.get("model"), "advantage_estimator": about.get("rule")}
        return {**(about.get("options") or {}), **known}
    try:
        options = json.loads(files.to_json(yaml.safe_load(text)))  # which has keys that can be put in order
    except (yaml.YAMLError, TypeError, ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise UserError(f"{folder / CONFIG} is damaged: bring it back, or remove it to compare the rest.")
    return options


Paired = tuple[list[float], list[Estimate]]
"""The mean of each run, and the difference of each run after the first from it."""


def _paired(values: Mapping[str, list[np.ndarray]], estimate: Callable[[np.ndarray], Estimate]) -> dict[str, Paired]:
    found = {}
    for name, each in values.items():
        there = ~np.isnan(np.array(each)).any(axis=0)
        known = [of[there] for of in each]
        if there.any():
            found[name] = [float(of.mean()) for of in known], [estimate(other - known[0]) for other in known[1:]]
    return found


def _of_questions(folders: list[str]) -> tuple[dict[str, Paired], int]:
    """Rewards and right answers at the questions of the last evaluations that all runs were asked."""
    sides = []
    for folder in folders:
        columns = Columns(evaluated(Path(folder)))
        at = evaluations(columns)
        sides.append(questions(columns, at[-1]) if at else {})
    common = [key for key in sides[0] if all(key in side for side in sides[1:])]

    def means(found: Iterable[list[float]]) -> np.ndarray:
        return np.array([np.mean(each) if each else np.nan for each in found])

    values = {
        "right": [means(side[key].right for key in common) for side in sides],
        "reward": [means(side[key].rewards for key in common) for side in sides],
    }
    return (_paired(values, bootstrap) if common else {}), len(common)


def _of_steps(folders: list[str]) -> tuple[dict[str, Paired], list[int]]:
    """The metrics of the last third of the steps that all runs logged, twenty at least."""
    sides = [{row["step"]: _numbers(row) for row in Run.metrics_of(Path(each)) if "loss" in row} for each in folders]
    steps = sorted(set(sides[0]).intersection(*sides[1:]))
    steps = steps[-max(20, len(steps) // 3) :]
    names = dict.fromkeys(name for side in sides for row in side.values() for name in row)
    values = {
        name: [np.array([side[step].get(name, np.nan) for step in steps], float) for side in sides] for name in names
    }
    return (_paired(values, over_steps) if steps else {}), steps


def _numbers(row: Row) -> Row:
    """What is measured in a line of metrics."""
    kinds = {name: type(value) for name, value in row.items() if name not in ("step", "epoch")}
    return {name: row[name] for name, kind in kinds.items() if kind in (int, float)}


def _as_json(found: Mapping[str, Paired]) -> Row:
    return {
        name: {"means": means, "differences": [asdict(each) for each in differences]}
        for name, (means, differences) in found.items()
    }


def _print_differences(names: list[str], found: Mapping[str, Paired]) -> None:
    others = [f"{name} - {names[0]}" for name in names[1:]]
    rows = [
        (f"  {name}", *map(_short, means), *map(_in_words, differences))
        for name, (means, differences) in found.items()
    ]
    _print_table([("", *names, *others), *rows])
