"""`mt-grpo view` and `mt-grpo export`: a run's conversations for people and for other programs. Imports no torch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.runlog import Run, open_run
from mt_grpo.runlog.export import FORMS
from mt_grpo.runlog.export import export as export_run
from mt_grpo.runlog.index import Each
from mt_grpo.runlog.schema import FOLDER, METRICS, STATE
from mt_grpo.viewer.queries import Queries, selected
from mt_grpo.viewer.runs import Runs
from mt_grpo.viewer.search import cached
from mt_grpo.viewer.server import PORT, Answers, Server
from mt_grpo.viewer.server import export as export_page

_VIEW = f"""usage: mt-grpo view RUN_DIR [--port N] [--no_browser]
       mt-grpo view FOLDER                        of several runs: a list, and one run against another
       mt-grpo view RUN_DIR --export FILE.html [--filter 'stop=timeout reward<0.5'] [--overwrite]

shows the conversations of a run, finished or not: what the agent did, and which credit it got

  --port N        the port on this machine; without it the first free one from {PORT} on
  --no_browser    open no browser
  --export FILE   write one file that opens without a server, instead of serving
  --filter TEXT   the conversations that the file gets, in the language of the page's filter
  --overwrite     replace the file if it is there
"""

_EXPORT = """usage: mt-grpo export RUN --to FORM [--filter TEXT] [--output PATH] [--overwrite]

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
"""


def view(arguments: list[str]) -> int:
    """`mt-grpo view RUN_DIR`."""
    if {"-h", "--help"}.intersection(arguments):
        print(_VIEW, end="")
        return 0
    folders, options = read_words(
        "view", arguments, values=("--port", "--export", "--filter"), flags=("--no_browser", "--overwrite")
    )
    if len(folders) != 1:
        raise ConfigError(
            "`mt-grpo view` takes one folder, the `output_dir` of a run or one with several: `mt-grpo view runs/NAME`."
        )
    if "--filter" in options and "--export" not in options:
        raise ConfigError("`--filter` belongs to `--export FILE`; in the page, write it into the field of Find.")
    port = _port(options["--port"]) if "--port" in options else None
    folder = Path(folders[0])
    if folder.is_dir() and not any((folder / name).exists() for name in (FOLDER, METRICS, STATE)):
        if "--export" in options:
            raise ConfigError(f"`--export` takes the folder of one run, and {folder} is none: name one in it.")
        with parallel_map() as each:
            return _serve(Runs(folder, each), folders[0], port, options)
    exports = "--export" in options
    queries = Queries(open_run_parallel(folders[0], begun=not exports), None if exports else cached(folder))
    if exports:
        path = Path(options["--export"])
        number = export_page(queries, path, options.get("--filter", ""), "--overwrite" in options)
        print(f"{path}: {number} conversations, {path.stat().st_size / 1e6:.1f} MB")
        return 0
    return _serve(queries, folders[0], port, options)


def _serve(answers: Answers, folder: str, port: int | None, options: dict[str, str]) -> int:
    with Server(answers, port) as server:
        print(f"{folder} is at {server.url} (Ctrl-C ends this)", flush=True)
        if "--no_browser" not in options and _has_a_screen():
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def export(arguments: list[str]) -> int:
    """`mt-grpo export RUN --to FORM [--filter TEXT] [--output PATH] [--overwrite]`."""
    if {"-h", "--help"}.intersection(arguments):
        print(_EXPORT, end="")
        return 0
    folders, options = read_words("export", arguments, values=("--to", "--output", "--filter"), flags=("--overwrite",))
    if len(folders) != 1 or "--to" not in options:
        raise ConfigError(f"Write `mt-grpo export RUN --to FORM`, where FORM is one of {', '.join(FORMS)}.")
    run = open_run_parallel(folders[0])
    rows = selected(run, options.get("--filter", ""))
    print(export_run(run, options["--to"], options.get("--output"), rows, "--overwrite" in options))
    return 0


def read_words(
    command: str, arguments: Sequence[str], values: Sequence[str], flags: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The folders that stand on a command line, and its options with their values; a flag's is empty."""
    folders, options = [], {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            folders.append(word)
        elif name in flags and not equals:
            options[name] = ""
        elif name in values:
            options[name] = value if equals else next(words, "")
            if not options[name]:
                raise ConfigError(f"`mt-grpo {command}` needs a value after `{name}`.")
        else:
            raise ConfigError(f"`mt-grpo {command}` has no option {word}{did_you_mean(word, (*values, *flags))}.")
    return folders, options


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise ConfigError(f"`--port` is a number up to 65535; {text[:40]!r} is none.")
    return int(text)


def _has_a_screen() -> bool:
    """Whether there is a screen. Without one, a text browser would open in this terminal."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


# A long index is read by several processes, which are gone when the run is open

LONG_INDEX = 2**24
"""Bytes of an index that one process takes a third of a second or more to read."""

_MAX_PROCESSES = 4
"""Processes: more would wait for this one, which puts together what they read."""


def open_run_parallel(folder: str, begun: bool = False) -> Run:
    """The run in a folder, with `begun` also one without conversations so far; call it before there are threads."""
    size = sum(path.lstat().st_size for path in (Path(folder) / FOLDER).glob("index*.jsonl"))
    gc.disable()  # what is read stays: looking for garbage in it would take a third of the time
    try:
        if size < LONG_INDEX:
            return open_run(folder, begun=begun)
        with parallel_map() as each:
            return open_run(folder, each, begun)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def parallel_map() -> Iterator[Each]:
    """`map` in other processes, which begin at once: call it before there are threads. Linux alone has them."""
    if sys.platform != "linux":
        yield map
        return
    # forks: all is imported here already, and the only thread of this process is this one
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(_MAX_PROCESSES, len(os.sched_getaffinity(0))), context, _start_worker)
    try:
        list(pool.map(abs, [0]))
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)  # waits: the end of this process and that of the pool would meet


def _start_worker() -> None:
    for number in (signal.SIGINT, signal.SIGUSR1):  # they are for the process that made this one
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
