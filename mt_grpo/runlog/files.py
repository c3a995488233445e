"""
How files of a run are written and read: whole or absent, as JSON that every reader takes. `state.json` is what a run
is at, written every few seconds while it goes on: so a run that was killed is told from one that goes on, and
conversations under way are seen before they are in the index. `Silence` prints how far work is that takes long.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import psutil

from mt_grpo.errors import UserError
from mt_grpo.preemption import PreemptedError
from mt_grpo.runlog.schema import STATE, Row, misfit

_MAX_BYTES = 2**32  # of a file that is read as a whole
_NOTES = "notes.json"
_MAX_NOTE = 4000  # characters
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def find(folder: Path, name: str) -> Path | None:
    """A regular file of a run's folder."""
    path = folder / name
    try:
        real = path.resolve(strict=True)
        kind = stat.S_IFMT(real.stat().st_mode)
        outside = not real.is_relative_to(folder.resolve())
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        fault = f"{path} is a link to what is not there: bring back what it leads to"
    except NotADirectoryError:
        fault = f"{path.parent} is a file, where a run has a folder: name the `output_dir` of a run"
    except (OSError, RuntimeError) as error:  # the latter for links that lead to each other
        fault = f"{path} cannot be read: {_reason(error)}"
    else:
        if not outside and kind == stat.S_IFREG:
            return real
        fault = f"{path} is {_KINDS.get(kind, 'no file')}, where a run has a file: remove it, or bring it back"
        if outside:
            fault = f"{path} leads out of the run's folder, to {real}: replace the link by the file"
    raise UserError(f"{fault}.")


def read(folder: Path, name: str, offset: int = 0, most: int = -1) -> bytes | None:
    """A file's bytes from `offset` on, at most `most` where given; `None` where it is not there."""
    path = find(folder, name)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2) - offset
            if size > _MAX_BYTES:
                raise UserError(f"{path} has {size / 1e9:.0f} GB, more than a run writes there: bring the file back.")
            file.seek(offset)
            return file.read(most)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}.") from None


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives a path to write at, which is moved to `path` when whole, and removed if writing fails."""
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")  # a name that nobody can have put a link at
    try:
        yield partial
        partial.replace(path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)


@contextmanager
def folders_made(folder: Path) -> Iterator[None]:
    """Makes a folder and those above it; if what follows fails, those that were not there are removed again."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
        raise


@contextmanager
def written_for_users(path: Path, overwrite: bool) -> Iterator[Path]:
    """As `written_whole`, with a sentence for what goes wrong. A link may lead to any file of the user's: it stays."""
    if not path.name:  # `.` or `/`
        raise UserError(f"{path} is a folder: name a file or another folder in it.")
    try:
        if path.is_symlink():
            raise UserError(
                f"{path} is a link, and what it leads to is not overwritten: remove it, or give another place."
            )
        if path.exists() and not overwrite:
            raise UserError(f"{path} is there already: give another place, or `--overwrite` to replace it.")
        with folders_made(path.parent), written_whole(path) as partial:
            yield partial
    except OSError as error:
        raise UserError(f"{path} cannot be written: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def to_json(record: object, **options: Any) -> str:
    """A record as JSON: NaN and infinity become `null`, and a value without a JSON form its text."""
    options = {"default": str, "ensure_ascii": False, **options}
    try:
        return json.dumps(record, allow_nan=False, **options)
    except ValueError:  # a number is not finite; looking at every number of a long record first would cost more
        return json.dumps(_finite(record), allow_nan=False, **options)


def whole(text: str) -> str:
    """Text with a question mark for each half character (a lone surrogate), which no encoding has."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse(data: bytes, kind: str) -> tuple[Any, str | None]:
    """What is written as JSON, and as a clause why it does not have a shape."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return None, str(error)
    return value, misfit(kind, value)


def _read_shaped(folder: Path, file: str, kind: str, mend: str) -> Any:
    """What a JSON file of a run holds; `None` where there is none."""
    data = read(folder, file)
    if data is None:
        return None
    value, wrong = parse(data, kind)
    if wrong is not None:
        raise UserError(f"{folder / file} is damaged ({wrong}): {mend}.")
    return value


def read_notes(folder: Path) -> dict[str, Row]:
    """By session `star` (`bool`) and `note` (`str`), of conversations that have one of them."""
    mend = "bring it back, or remove it to go on without notes"
    return _read_shaped(folder, _NOTES, "notes", mend) or {}


def write_note(folder: Path, session: str, star: bool, note: str) -> dict[str, Row]:
    """Puts a star and a note on a conversation, or takes them off. Returns all notes of the run."""
    if len(note) > _MAX_NOTE:
        raise UserError(f"The note has {len(note)} characters, and may have {_MAX_NOTE}: shorten it.")
    notes = read_notes(folder)
    notes.pop(session, None)
    if star or note.strip():
        notes[session] = {"star": star, "note": whole(note.strip())}
    with written_for_users(folder / _NOTES, overwrite=True) as partial:
        partial.write_text(to_json(notes, indent=1) + "\n", encoding="utf-8")
    return notes


_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0  # seconds without a sign of life after which a run on another machine counts as dead
QUIET = 8.0  # seconds without output after which work that takes long says how far it is, by default
_RUNNING, _FINISHED, _STOPPED, _FAILED, _DIED = "running", "finished", "stopped", "failed", "died"


# Signs of life


class Heartbeat:
    """Writes a run's state while it goes on."""

    def __init__(self, folder: str | Path, look: Callable[[], Row]) -> None:
        self._path, self._look = Path(folder, STATE), look
        self._started = round(time.time(), 3)
        self._ended = threading.Event()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Writes the state every five seconds within the block, and how it ended."""
        self._write(_RUNNING)
        thread = threading.Thread(target=self._beat, name="mt-grpo-heartbeat", daemon=True)
        thread.start()
        state, reason = _STOPPED, None
        try:
            yield
            at = self._look()
            state = _FINISHED if at["step"] >= at["of"] else _STOPPED
        except KeyboardInterrupt as error:
            number = error.args[0] if isinstance(next(iter(error.args), None), int) else signal.SIGINT
            reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            raise
        except PreemptedError:
            reason = "preempted"
            raise
        except BaseException as error:
            state, reason = _FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            raise
        finally:
            self._ended.set()
            thread.join()
            self._write(state, reason)

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            self._write(_RUNNING)

    def _write(self, state: str, reason: str | None = None) -> None:
        process = psutil.Process()  # which began at another time once the clock was set
        record = {
            "state": state,
            "reason": reason,
            "pid": process.pid,
            "host": socket.gethostname(),
            "process_started": round(process.create_time(), 2),
            "started": self._started,
            "beat": round(time.time(), 3),
            **self._look(),
        }
        with suppress(OSError):  # a full disk ends the run where it writes conversations, with a sentence
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self._path) as partial:
                partial.write_text(to_json(record), encoding="utf-8", errors="replace")


def read_state(folder: Path) -> Row | None:
    """A run's state as last written, or `"died"` where its process is gone; `None` without one."""
    state = _read_shaped(folder, STATE, "state", "remove it; a run that goes on writes it again")
    if state is None:
        return None
    if state["state"] == _RUNNING and not _lives(state):
        state["state"] = _DIED
    return state


def _lives(state: Row) -> bool:
    if state["host"] != socket.gethostname():
        return time.time() - state["beat"] < _SILENT_SECONDS
    if state["pid"] == os.getpid():
        return True
    try:
        process = psutil.Process(state["pid"])
        same = abs(process.create_time() - state["process_started"]) < 2.0  # or another has its number
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Silence:
    """Says how far work is whenever nothing was said for a while, from a thread, as long as the block runs."""

    def __init__(self, say: Callable[[], object], seconds: float | None = None) -> None:
        self._say, self._seconds = say, QUIET if seconds is None else seconds
        self._heard = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    @property
    def watched(self) -> bool:
        """Whether the block runs."""
        return self._thread is not None

    def broken(self) -> None:
        """Notes that something was said."""
        self._heard.set()

    def __enter__(self) -> Silence:
        self._over = False
        self._thread = threading.Thread(target=self._watch, name="silence", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._heard.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        while not self._over:
            self._heard.clear()
            if not self._heard.wait(self._seconds) and not self._over:
                self._say()
