"""
The index of a run as columns, so that 50,000 conversations are filtered and sorted at once, and the language of
filters: `stop=timeout reward<0.5 mismatch>.1 "text"`.

Texts are searched for in what was said (prompts, turns, thinking, calls and results), in an index of sqlite's FTS5
that a thread builds beside everything else. It is kept in the user's cache, so that a run is read once.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.imports import did_you_mean
from mt_grpo.runlog import Run
from mt_grpo.runlog.conversation import words
from mt_grpo.runlog.index import Table
from mt_grpo.runlog.schema import Row

_NUMBERS = (
    *("step", "k", "group", "turns", "calls", "context", "unique", "forks", "refused"),
    *("seconds", "reward", "right", "mismatch", "entropy", "clipped"),
    *("member", "tokens", "errors", "copy"),
)
"""Columns of numbers. Every reward has a further column, and so have `SPREAD` and `SIGNAL`."""

_TEXTS = ("mode", "stop", "prompt", "answer", "error", "session")  # columns of text

SPREAD = "spread"
"""Standard deviation (n − 1, as credit rules have it) of the reward in the group, of which copies do not count."""

SIGNAL = "signal"
"""
1 for the conversations of a group that teaches something, else 0; NaN for one without others. It does if a turn of the
group has an advantage, or, where none is recorded as in an evaluation, if members earned differently.
"""

TOOL = "tool"  # the tools that a conversation called

_NOTES = ("star", "note")  # what people put on a conversation

_PER_TURN = {"turn_reward": "turn_rewards", "advantage": "advantages"}
"""Columns with a number per turn: a comparison holds where it holds for one of them."""

REWARD = "rewards/"  # comes before the name of a reward, to make the name of its column


def short_name(reward: str) -> str:
    """The name of a reward without the endings `_reward` and `_func`."""
    return reward.removesuffix("_func").removesuffix("_reward") or reward


class Columns:
    """Conversations in the order in which they were written, by column."""

    def __init__(self, rows: Table) -> None:
        self.rows = rows
        self._size = len(rows)
        self._made: dict[str, np.ndarray] = {}
        self._searched: dict[str, list[str]] = {}
        self.notes: dict[str, Row] = {}  # stars and notes, by session
        self._turns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.said: Callable[[str, str, int], np.ndarray] | None = None
        """Which of the first rows have a text in what was said, in the tools called, or in errors."""

    def change(self) -> None:
        """Takes in the rows that were added or changed."""
        self._size = len(self.rows)
        self._made.clear()
        self._turns.clear()

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards that any row has."""
        return self.rows.reward_names

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers of shape `(rows,)`, NaN for a row without one."""
        if name not in self._made:
            self._made[name] = self._numbers(name)
        return self._made[name]

    def _numbers(self, name: str) -> np.ndarray:
        if name == SPREAD:
            return self._spread()
        if name == SIGNAL:
            return self._signal()
        if name.startswith(REWARD):
            return self.rows.reward(name.removeprefix(REWARD))
        if name == "copy":
            return self.rows.copies.astype(float)
        if name in ("tokens", "errors"):
            return self.rows.totals(name)
        return self.rows.numbers(name).astype(float) + (name == "member")

    def texts(self, name: str) -> np.ndarray:
        """A column of text as the rank of each value among the sorted values; of the shape `(rows,)`."""
        key = f"rank of {name}"
        if key not in self._made:
            if name == "session":
                sessions = self.rows.sessions
                ranks = np.empty(self._size, np.int64)
                ranks[sorted(range(self._size), key=sessions.__getitem__)] = np.arange(self._size)
            else:
                codes, values = self.rows.codes(name)
                places = {text: rank for rank, text in enumerate(sorted({text or "" for text in values}))}
                ranks = np.array([places[text or ""] for text in values])[codes]
            self._made[key] = ranks
        return self._made[key]

    def is_text(self, name: str, value: str) -> np.ndarray:
        """Whether a column of text has this value; of the shape `(rows,)`, of bool."""
        return self._where_text(name, lambda text: text == value)

    def _where_text(self, name: str, holds: Callable[[str], bool]) -> np.ndarray:
        """Of which rows the text fulfils a condition, which is asked once of each text."""
        if name == "session":
            return np.fromiter(map(holds, self.rows.sessions[: self._size]), bool, self._size)
        codes, values = self.rows.codes(name)
        return np.fromiter((holds(text or "") for text in values), bool, len(values))[codes]

    @property
    def groups(self) -> np.ndarray:
        """A whole number per row, equal for the members of a group, in the order in which groups were sampled."""
        if "groups" not in self._made:
            key = np.zeros(self._size, np.int64)
            parts = [self.texts("mode"), *map(self.numbers, ("step", "k", "group"))]
            for part in parts:
                key = key * (int(part.max(initial=0)) + 1) + part.astype(np.int64)
            self._made["groups"] = key
        return self._made["groups"]

    def resolve(self, name: str) -> str:
        """The column that a name in a filter means. Rewards may be given by their short names."""
        if name in _NUMBERS or name in _TEXTS or name in (SPREAD, SIGNAL, TOOL, *_NOTES, *_PER_TURN):
            return name
        name = name.removeprefix("reward.").removeprefix(REWARD)
        for known in self.rewards:
            if name in (known, short_name(known)):
                return REWARD + known
        names = [*_NUMBERS, SPREAD, SIGNAL, *_TEXTS, TOOL, *_NOTES, *_PER_TURN, *map(short_name, self.rewards)]
        near = did_you_mean(name, names)
        raise FilterError(f"There is no column {name!r}{near or ': there are ' + ', '.join(names)}.")

    def where(self, conditions: list[Condition]) -> np.ndarray:
        """Which rows fulfil all conditions."""
        mask = np.ones(self._size, dtype=bool)
        for condition in conditions:
            mask &= self._holds(condition)
        return mask

    def order(self, places: np.ndarray, name: str, descending: bool) -> np.ndarray:
        """Sorts rows by a column, rows without a value last, and equal ones as they were written."""
        name = self.resolve(name)
        if name in (TOOL, *_NOTES, *_PER_TURN):
            raise FilterError(f"The table is not sorted by {name}: choose a column with one value per row.")
        values = self.texts(name)[places].astype(float) if name in _TEXTS else self.numbers(name)[places]
        return places[np.argsort(-values if descending else values, kind="stable")]

    def _holds(self, condition: Condition) -> np.ndarray:
        if not condition.name:
            there = self._contains("prompt", condition.value) | self._contains("answer", condition.value)
            return there | self._said(condition.value, "said")
        name = self.resolve(condition.name)
        if name in _PER_TURN:
            return self._of_turns(name, condition)
        if name not in (TOOL, *_NOTES, *_TEXTS):
            return compare_numbers(condition, self.numbers(name))
        is_equal = equal_text(condition)
        if name == TOOL:
            equal = np.zeros(self._size, bool)
            for part in condition.value.split(","):
                equal |= self._said(part, TOOL)
        elif name in _NOTES:
            equal = self._noted(name, condition.value.casefold())
        else:
            equal = self._where_text(name, is_equal)
        if name == "error":  # the index has the conversation's own alone
            equal |= self._said(condition.value, "error")
        return equal if condition.sign == "=" else ~equal

    def _contains(self, name: str, text: str) -> np.ndarray:
        codes, values = self.rows.codes(name)
        folded, wanted = self._searched.setdefault(name, []), text.casefold()
        folded += [(value or "").casefold() for value in values[len(folded) :]]
        return np.fromiter((wanted in value for value in folded), bool, len(folded))[codes]

    def _said(self, text: str, column: str) -> np.ndarray:
        return np.zeros(self._size, bool) if self.said is None else self.said(text, column, self._size)

    def _noted(self, name: str, wanted: str) -> np.ndarray:
        """`star=1`, and `note=` with a part of the note; `note!=""` is any note."""
        has = np.zeros(self._size, bool)
        for session, noted in self.notes.items():
            if (place := self.rows.places.get(session)) is not None:
                text = noted["note"].casefold()
                has[place] = noted["star"] if name == "star" else bool(text) and wanted in text
        without = ("0", "no", "false") if name == "star" else ("",)
        return ~has if wanted in without else has

    def _of_turns(self, name: str, condition: Condition) -> np.ndarray:
        """Which rows have a turn of which a condition holds."""
        places, values = self._flat(name)
        mask = np.zeros(self._size, bool)
        mask[places[compare_numbers(condition, values)]] = True
        return mask

    def _flat(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A column of `_PER_TURN`: for each turn its row, and its value."""
        if name not in self._turns:
            self._turns[name] = self.rows.flat(_PER_TURN[name])
        return self._turns[name]

    def _spread(self) -> np.ndarray:
        if not self._size:
            return np.zeros(0)
        groups = np.unique(self.groups, return_inverse=True)[1]
        reward = self.numbers("reward")
        there = ~np.isnan(reward) & (self.numbers("copy") == 0)
        count = np.bincount(groups, there)
        total = np.bincount(groups, np.where(there, reward, 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / count
            square = np.bincount(groups, np.where(there, (reward - mean[groups]) ** 2, 0.0))
            spread = np.sqrt(square / (count - 1))
        spread = np.where(spread < 1e-9, 0.0, spread)
        return np.where(count < 2, np.nan, spread)[groups]  # one reward has nothing to differ from

    def _signal(self) -> np.ndarray:
        if not self._size:
            return np.zeros(0)
        groups = np.unique(self.groups, return_inverse=True)[1]
        places, advantages = self._flat("advantage")
        credited, moved = np.zeros(self._size, bool), np.zeros(self._size, bool)
        credited[places] = True
        moved[places[np.abs(advantages) > 0]] = True
        known, has, differ = (np.bincount(groups, each) > 0 for each in (credited, moved, self.numbers(SPREAD) > 0))
        signal = np.where(known, has, differ).astype(float)
        return np.where(np.bincount(groups) < 2, np.nan, signal)[groups]


_TERM = re.compile(
    r"""\s*(?:
        (?P<name>[A-Za-z_][\w./-]*)(?P<sign><=|>=|!=|=|<|>)(?:"(?P<quoted>[^"]*)"|(?P<value>[^\s"]+))
      | "(?P<text>[^"]*)"
      | (?P<word>[^\s"<>=!]+)
    )(?=\s|$)""",
    re.VERBOSE,
)


class FilterError(UserError, ValueError):
    """A filter that cannot be read. The message is one sentence fit for the user."""


@dataclass(frozen=True)
class Condition:
    """One term of a filter; all terms of a filter must hold."""

    name: str
    sign: str
    value: str

    @property
    def written(self) -> str:
        """As it may be written again."""
        value = f'"{self.value}"' if not self.sign or re.search(r"\s", self.value) or not self.value else self.value
        return f"{self.name}{self.sign}{value}"


def compare_numbers(condition: Condition, values: np.ndarray) -> np.ndarray:
    """Of which numbers a condition holds: `=` and `!=` take several, between commas."""
    try:
        asked = [float(part.replace("−", "-")) for part in condition.value.split(",")]  # as the page writes it
    except ValueError:
        raise FilterError(f"`{condition.written}` compares with no number: {condition.name} is one.") from None
    if condition.sign in ("=", "!="):
        equal = np.isclose(values[:, None], np.array(asked), rtol=1e-6, atol=1e-9).any(axis=1)
        return equal if condition.sign == "=" else ~equal & ~np.isnan(values)
    if len(asked) > 1:
        raise FilterError(f"`{condition.written}` compares with several numbers: give one.")
    compare = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}[condition.sign]
    return compare(values, asked[0])


def equal_text(condition: Condition) -> Callable[[str], bool]:
    """Whether a text is the one that a condition names, or one of several between commas; for `!=` too."""
    if condition.sign not in ("=", "!="):
        raise FilterError(f"`{condition.written}` makes no sense: compare {condition.name} with `=` or `!=`.")
    values = {condition.value.casefold(), *(part.strip().casefold() for part in condition.value.split(","))}
    return lambda text: text.casefold() in values


def parse_filter(text: str) -> list[Condition]:
    """Reads a filter: terms between spaces, each a comparison, or text (in quotes if it has spaces) to find."""
    conditions, at = [], 0
    text = text.strip()
    while at < len(text):
        found = _TERM.match(text, at)
        if found is None:
            rest = text[at:].strip()
            if rest.count('"') % 2:
                raise FilterError(f"The filter has a quote that is not closed: `{rest}`.")
            raise FilterError(
                f"The filter cannot be read from `{rest}` on: write terms such as `stop=timeout`, `reward<0.5` or "
                '`"text"`, with a space between two.'
            )
        at = found.end()
        if found["name"]:
            value = found["value"] if found["quoted"] is None else found["quoted"]
            conditions.append(Condition(found["name"], found["sign"], value))
        else:
            conditions.append(Condition("", "", found["word"] if found["text"] is None else found["text"]))
    return conditions


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
    The first places of a conversation where any of some texts stands: `turn` (from 1, if any), `part`, and the line.
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
