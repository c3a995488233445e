"""
Search in what was said: prompts, turns, thinking, calls and results, in an index of sqlite's FTS5 that a thread builds
beside everything else. It is kept in the user's cache, so that a run is read once.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.runlog import Run
from mt_grpo.runlog.conversation import words
from mt_grpo.runlog.index import Table
from mt_grpo.runlog.schema import Row

_BATCH = 64  # conversations that are added at once: a search waits for no more

_FORM = 1  # of the index; one of another form is built anew

_PART = "\ue000"  # stands between parts: a word that nobody writes, so that no phrase goes from one part into the next

_COLUMNS = ("said", "tool", "error")

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")

_BEFORE, _AFTER = 24, 120  # characters shown around a hit
_MOST_HITS = 2  # hits shown of a conversation

_UNSPACED = re.compile("([\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af])")
"""Characters of scripts that put no space between words: each counts as a word."""


_Key = tuple[Any, ...]  # a conversation as it was written: session, file, row, and the file's checksum


class SearchIndex:
    """The words of a run's conversations."""

    def __init__(self, run: Run, path: Path | None = None) -> None:
        self._run = run
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._following = threading.Lock()
        self._thread: threading.Thread | None = None  # while there is something to read
        self._more = False  # whether rows were given since it last began to read
        self._rows = Table()
        self._places: dict[int, int] = {}  # of the documents that count
        self._documents: dict[_Key, int] = {}
        self.problem: str | None = None  # why not every word is read, where a file is damaged
        try:
            self._connect(path)
        except sqlite3.OperationalError:  # a full disk, say: it is not kept
            self._connect(None)
        except sqlite3.DatabaseError:  # damaged, or of another form
            assert path is not None
            path.unlink(missing_ok=True)
            self._connect(path)

    def _connect(self, path: Path | None) -> None:
        self._database = sqlite3.connect("" if path is None else path, check_same_thread=False, isolation_level=None)
        for pragma in ("journal_mode=OFF" if path is None else "journal_mode=WAL", "synchronous=OFF"):
            self._database.execute(f"PRAGMA {pragma}")
        if self._database.execute("PRAGMA user_version").fetchone()[0] not in (0, _FORM):
            raise sqlite3.DatabaseError("another form")
        columns = ", ".join(_COLUMNS)
        self._database.execute(
            f"CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5({columns}, content='', tokenize='unicode61')"
        )
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS documents (id INTEGER PRIMARY KEY, session TEXT, file TEXT, row INTEGER, crc)"
        )
        self._database.execute(f"PRAGMA user_version={_FORM}")
        known = self._database.execute("SELECT session, file, row, crc, id FROM documents")
        self._documents = {tuple(key): number for *key, number in known}

    # Reading

    def follow(self, rows: Table) -> None:
        """Reads, in its thread, what these rows have and the index lacks. They may grow, and rows may be replaced."""
        self._rows = rows
        with self._following:
            self._more = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mt-grpo-search", daemon=True)
                self._thread.start()

    def read_all(self, rows: Table) -> None:
        """Reads what these rows have and the index lacks, before it returns."""
        self._rows = rows
        try:
            self._catch_up()
        except sqlite3.OperationalError:  # a full disk, or another viewer's: it is not kept
            self._connect(None)
            self._catch_up()

    @property
    def read(self) -> int:
        """Conversations that are read."""
        return len(self._places)

    def _work(self) -> None:
        while self._goes_on():
            try:
                self._catch_up()
                self.problem = None
            except (UserError, sqlite3.Error, OSError) as error:
                self.problem = str(error)

    def _goes_on(self) -> bool:
        """Whether there is more to read; the thread ends where there is not."""
        with self._following:
            more, self._more = self._more, False
            if not more:
                self._thread = None
            return more

    def _catch_up(self) -> None:
        with self._reading:
            rows, missing = self._rows, []
            places: dict[int, int] = {}
            for place, key in enumerate(self._keys(rows)):
                number = self._documents.get(key)
                if number is None:
                    missing.append((place, key))
                else:
                    places[number] = place
            self._places = places
            for begin in range(0, len(missing), _BATCH):
                if self._rows is not rows:
                    return  # another run in the same folder
                self._add(rows, missing[begin : begin + _BATCH])

    def _keys(self, rows: Table) -> Iterator[_Key]:
        size = len(rows)
        codes, files = rows.codes("file")
        checksums = [str(self._run.checksum(file)) if file is not None else "" for file in files]
        for place, file, row in zip(range(size), codes.tolist(), rows.numbers("row").tolist(), strict=False):
            yield rows.sessions[place], files[file], row, checksums[file]

    def _add(self, rows: Table, missing: list[tuple[int, _Key]]) -> None:
        chosen = rows.at([place for place, _ in missing])
        texts = [_columns(record) for _, record in self._run.records(chosen)]
        known: dict[_Key, int] = {}
        with self._lock, self._database:  # which takes all of it back where it fails
            self._database.execute("BEGIN")
            for (_, key), columns in zip(missing, texts, strict=True):
                cursor = self._database.execute(
                    "INSERT INTO documents (session, file, row, crc) VALUES (?, ?, ?, ?)", key
                )
                known[key] = cursor.lastrowid or 0
                self._database.execute(
                    "INSERT INTO words (rowid, said, tool, error) VALUES (?, ?, ?, ?)", (known[key], *columns)
                )
        self._documents |= known
        self._places |= {known[key]: place for place, key in missing}

    # Asking

    def where(self, text: str, column: str, size: int) -> np.ndarray:
        """Which rows have a text, of those that are read."""
        mask = np.zeros(size, dtype=bool)
        phrase = " ".join(_spaced(text).replace('"', " ").replace("\0", " ").split())
        if not re.search(r"\w", phrase):
            return mask
        with self._lock:
            found = self._database.execute("SELECT rowid FROM words WHERE words MATCH ?", (f'{column} : "{phrase}"*',))
            numbers = [number for (number,) in found]
        places = [place for number in numbers if (place := self._places.get(number)) is not None and place < size]
        mask[places] = True
        return mask


def _columns(record: Row) -> tuple[str, ...]:
    calls = [call for turn in record["turns"] for call in turn["tool_calls"]]
    errors = [record["error"], *(turn["error"] for turn in record["turns"]), *(call["error"] for call in calls)]
    said = [text for _, _, text in _parts(record)]
    texts = (said, [call["name"] for call in calls], [error for error in errors if error])
    return tuple(_spaced(f" {_PART} ".join(each)).encode("utf-8", "replace").decode() for each in texts)


def _parts(record: Row) -> Iterator[tuple[int | None, str, str]]:
    """What was said in a conversation: the turn from 0 (`None`: before the first), which part it is, its text."""
    for message in record["prompt"]:
        yield None, message["role"], words(message)
    for turn in record["turns"]:
        index, message = turn["index"], turn["message"]
        for message_before in turn.get("given") or []:
            yield index, "given", words(message_before)
        for name in _THOUGHTS:
            if message.get(name):
                yield index, "thinking", str(message[name])
        yield index, "turn", words(message)
        for call in turn["tool_calls"]:
            yield index, "call", " ".join([call["name"], *map(str, call["arguments"].values()), call["error"] or ""])
        for reply in turn["replies"]:
            yield index, "result" if turn["tool_calls"] else "reply", words(reply)


def hits(record: Row, texts: list[str]) -> list[Row]:
    """
    The first places of a conversation where any of some texts stands: `turn` (from 1; `None` for the prompt), `part`,
    and the line in pieces: `before`, `hit` and `after`.
    """
    patterns = [re.escape(word) for text in texts if (word := " ".join(text.split()))]
    if not patterns:
        return []
    pattern = re.compile("|".join(each.replace("\\ ", r"\W+") for each in patterns), re.IGNORECASE)
    found = []
    for turn, part, text in _parts(record):
        match = pattern.search(text)
        if match is not None:
            begin, end = match.span()
            before, after = text[max(0, begin - _BEFORE) : begin], text[end : end + _AFTER]
            shown = {"before": " ".join(before.split(" ")), "hit": match.group(), "after": after}
            found.append({"turn": None if turn is None else turn + 1, "part": part, **shown})
            if len(found) == _MOST_HITS:
                break
    return found


def _spaced(text: str) -> str:
    return _UNSPACED.sub(r" \1 ", text)


def cached(folder: Path) -> Path | None:
    """Where the index of a run is kept; `None` where the user's cache cannot be written."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mt-grpo" / "search"
    name = hashlib.blake2b(str(folder.resolve()).encode(errors="replace"), digest_size=12).hexdigest()
    try:
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=base):
            return base / f"{name}.sqlite"
    except OSError:
        return None
