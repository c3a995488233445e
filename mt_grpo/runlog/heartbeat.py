"""
Signs of life. `state.json` is what a run is at, written every few seconds while it goes on: so a run that was killed
is told from one that goes on, and conversations under way are seen before they are in the index. `Silence` prints how
far work is that takes long.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from mt_grpo.preemption import PreemptedError
from mt_grpo.runlog.files import read_shaped, to_json, written_whole
from mt_grpo.runlog.schema import STATE, Row

_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0  # seconds without a sign of life after which a run on another machine counts as dead
QUIET = 8.0  # seconds without output after which work that takes long says how far it is, by default
_RUNNING, _FINISHED, _STOPPED, _FAILED, _DIED = "running", "finished", "stopped", "failed", "died"


class Heartbeat:
    """Writes a run's state while it goes on."""

    def __init__(self, folder: str | Path, look: Callable[[], Row]) -> None:
        self._path, self._look = Path(folder, STATE), look
        process = psutil.Process()
        self._about = {
            "pid": process.pid,
            "host": socket.gethostname(),
            "process_started": round(process.create_time(), 2),
            "started": round(time.time(), 3),
        }
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
        record = {"state": state, "reason": reason, **self._about, "beat": round(time.time(), 3), **self._look()}
        with suppress(OSError):  # a full disk ends the run where it writes conversations, with a sentence
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self._path) as partial:
                partial.write_text(to_json(record), encoding="utf-8", errors="replace")


def read_state(folder: Path) -> Row | None:
    """A run's state as last written, or `"died"` where its process is gone; `None` without one."""
    state = read_shaped(folder, STATE, "state", "remove it; a run that goes on writes it again")
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
