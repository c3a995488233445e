"""`mt-grpo view`: a run's conversations in the browser, or in one file. Imports no torch."""

from __future__ import annotations

import gc
import os
import sys
import webbrowser
from pathlib import Path

from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.runlog import Run, open_run
from mt_grpo.viewer.export import export
from mt_grpo.viewer.queries import Queries
from mt_grpo.viewer.server import PORT, Server

USAGE = f"""usage: mt-grpo view RUN_DIR [--port N] [--no_browser]
       mt-grpo view RUN_DIR --export FILE.html [--filter 'stop=timeout reward<0.5']

shows the conversations of a run, finished or not: what the agent did, and which credit it got

  --port N        the port on this machine; without it the first free one from {PORT} on
  --no_browser    open no browser
  --export FILE   write one file that opens without a server, instead of serving
  --filter TEXT   the conversations that the file gets, in the language of the page's filter
"""

VALUES = ("--port", "--export", "--filter")
FLAGS = ("--no_browser",)


def run(arguments: list[str]) -> int:
    """
    `mt-grpo view RUN_DIR`.

    Raises:
        ConfigError: For a wrong option.
        UserError: If the folder is none of a run, the port is taken, or the filter cannot be read.
    """
    if {"-h", "--help"}.intersection(arguments):
        print(USAGE, end="")
        return 0
    folder, options = _read(arguments)
    if "--filter" in options and "--export" not in options:
        raise ConfigError("`--filter` belongs to `--export FILE`; in the page, write it into the field of Find.")
    port = _port(options["--port"]) if "--port" in options else None
    queries = Queries(_opened(folder))
    if "--export" in options:
        path = Path(options["--export"])
        number = export(queries, path, options.get("--filter", ""))
        print(f"{path}: {number} conversations, {path.stat().st_size / 1e6:.1f} MB")
        return 0
    with Server(queries, port) as server:
        print(f"{folder} is at {server.url} (Ctrl-C ends this)", flush=True)
        if "--no_browser" not in options and _has_a_screen():
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _opened(folder: str) -> Run:
    """The run. Its index is many objects that stay: to look for garbage among them would take a third of the time."""
    gc.disable()
    try:
        return open_run(folder)
    finally:
        gc.freeze()
        gc.enable()


def _read(arguments: list[str]) -> tuple[str, dict[str, str]]:
    folders, options = [], {}
    words = list(arguments)
    while words:
        word, equals, value = words.pop(0).partition("=")
        if word in FLAGS and not equals:
            options[word] = ""
        elif word in VALUES:
            if not equals and not words:
                raise ConfigError(f"`{word}` needs a value behind it.")
            options[word] = value if equals else words.pop(0)
        elif word.startswith("-"):
            raise ConfigError(f"The option {word} is unknown{did_you_mean(word, (*VALUES, *FLAGS))}.")
        else:
            folders.append(word + equals + value)
    if len(folders) != 1:
        raise ConfigError("`mt-grpo view` takes one folder, the `output_dir` of a run: `mt-grpo view runs/NAME`.")
    return folders[0], options


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise ConfigError(f"`--port` is a number up to 65535; {text[:40]!r} is none.")
    return int(text)


def _has_a_screen() -> bool:
    """Where there is none, a browser for terminals would take this one."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
