"""
The rows of an index by column: half a million conversations take some hundred megabytes, and are filtered and sorted
without a loop over them. A row is made when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from operator import index, itemgetter
from typing import Any, SupportsIndex, overload

import numpy as np

Row = dict[str, Any]

WHOLES = ("step", "k", "rank", "group", "member", "turns", "context", "unique", "forks", "calls", "row")

COUNTS = ("raised", "failed", "refused", "shared_turns")
"""Whole numbers that old indices lack; 0 there."""

FLOATS = ("reward", "start", "seconds", "mismatch", "entropy", "clipped", "right", "sampled")
"""Numbers, some of which a row may lack."""

TEXTS = (
    *("mode", "prompt", "stop", "error", "answer", "file", "where"),
    *("first_raised", "first_failed", "first_refused", "branch_of"),
)

LISTS = {
    "tokens": np.int32,
    "errors": np.int32,
    "turn_rewards": np.float64,
    "turn_seconds": np.float64,
    "tool_seconds": np.float64,
    "advantages": np.float64,
    "rewards": np.float64,
}
"""Fields with a number per turn, and the rewards in the order of their names."""

_PER_TURN = ("tokens", "errors", "turn_rewards", "turn_seconds", "tool_seconds")

_REQUIRED = (
    *WHOLES,
    *("reward", "start", "seconds", "right"),
    *("mode", "prompt", "stop", "error", "answer", "file"),
    *_PER_TURN,
    "rewards",
)
"""Fields that every line of kind `rollout` has; the others may be left out, or come with other lines."""

ROOM = 1024
"""Rows that there is room for at first."""

_NEVER = -1


def is_copy(row: Row) -> bool:
    """Whether a conversation is another one once more: a branch of one that ended before it branched."""
    return row["branch_of"] is not None and row["shared_turns"] == row["turns"]


Block = dict[str, Any]
"""Lines of a kind by column: numbers as arrays, texts as their codes and values, lists as their sizes and numbers."""


def block_of(kind: str, lines: Sequence[Row]) -> Block:
    """The columns of lines of kind `rollout`, `credit` or `update`. Small, so that another process may send them."""
    return _BLOCKS[kind](lines) | {"session": [line["session"] for line in lines]}


def _rollouts(lines: Sequence[Row]) -> Block:
    values = zip(*map(itemgetter(*_REQUIRED), lines), strict=True)
    columns: dict[str, Sequence[Any]] = dict(zip(_REQUIRED, values, strict=True))
    for name in (*FLOATS, *TEXTS):
        if name not in columns:
            columns[name] = [line.get(name) for line in lines]
    block: Block = {name: np.array(columns[name], np.int32) for name in WHOLES}
    block |= {name: np.array([line.get(name, 0) for line in lines], np.int32) for name in COUNTS}
    block |= {name: np.array(columns[name], float) for name in FLOATS}
    block |= {name: _coded(columns[name]) for name in TEXTS}
    block |= {name: _flattened(columns[name], LISTS[name]) for name in _PER_TURN}
    block["names"] = _coded(map(tuple, columns["rewards"]))
    block["rewards"] = _flattened([each.values() for each in columns["rewards"]], float)
    return block


def _credit(lines: Sequence[Row]) -> Block:
    advantages = _flattened([line["advantages"] for line in lines], float)
    return {"advantages": advantages, **_where(lines)}


def _updates(lines: Sequence[Row]) -> Block:
    numbers = {name: np.array([line[name] for line in lines], float) for name in _OF_UPDATES}
    return {"step": np.array([line["step"] for line in lines], np.int32), **numbers, **_where(lines)}


def _where(lines: Sequence[Row]) -> Block:
    rows = np.array([line["row"] for line in lines], np.int32)
    return {"file": _coded(line["file"] for line in lines), "row": rows}


_BLOCKS = {"rollout": _rollouts, "credit": _credit, "update": _updates}

_OF_UPDATES = ("mismatch", "entropy", "clipped")


class _Codes(dict[Any, int]):
    """A number for each text, from 0 in the order in which they are asked for; 0 is none."""

    def __missing__(self, text: Any) -> int:
        code = self[text] = len(self)
        return code


def _coded(texts: Iterable[Any]) -> tuple[np.ndarray, list[Any]]:
    known = _Codes({None: 0})
    codes = np.array(list(map(known.__getitem__, texts)), np.int32)
    return codes, list(known)


def _flattened(lists: Sequence[Collection[float | None]], kind: type) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.array(list(map(len, lists)), np.int32)
    return sizes, np.array(list(chain.from_iterable(lists)), kind)


class Table(Sequence[Row]):
    """
    A row per conversation, in the order in which they were first added.

    Attributes:
        sessions (`list[str]`): The name of each row.
        places (`dict[str, int]`): Where each session's row is.
    """

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.places: dict[str, int] = {}
        self._size = self._room = 0
        self._wholes = {name: np.zeros(0, np.int32) for name in (*WHOLES, *COUNTS, "credit_row", "last_update")}
        self._floats = {name: np.zeros(0) for name in FLOATS}
        self._texts = {name: _Texts() for name in (*TEXTS, "credit_file", "names")}
        self._lists = {name: _Lists(kind) for name, kind in LISTS.items()}
        self._updates = _Updates()

    # Rows

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: SupportsIndex | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self._row(each) for each in range(*place.indices(self._size))]
        number = index(place)
        if not -self._size <= number < self._size:
            raise IndexError(f"there are {self._size} rows")
        return self._row(number % self._size)

    def _row(self, place: int) -> Row:
        row: Row = {"session": self.sessions[place]}
        for name in (*WHOLES, *COUNTS):
            row[name] = self._wholes[name].item(place)
        for name, column in self._floats.items():
            value = column.item(place)
            row[name] = value if value == value else None
        row["right"] = None if row["right"] is None else bool(row["right"])
        row["sampled"] = None if row["sampled"] is None else int(row["sampled"])
        for name in (*TEXTS, "credit_file"):
            row[name] = self._texts[name].at(place)
        for name, lists in self._lists.items():
            row[name] = lists.at(place)
        row["rewards"] = dict(zip(self._texts["names"].at(place), row["rewards"], strict=True))
        row["credit_row"] = None if row["credit_file"] is None else self._wholes["credit_row"].item(place)
        row["updates"] = self._updates.of(place)
        return row

    # Columns

    def numbers(self, name: str) -> np.ndarray:
        """A field of `WHOLES`, `COUNTS` or `FLOATS`, of shape `(rows,)`; NaN where a row has none."""
        column = self._floats[name] if name in self._floats else self._wholes[name]
        return column[: self._size]

    def codes(self, name: str) -> tuple[np.ndarray, list[str | None]]:
        """A field of `TEXTS`: which text each row has, of shape `(rows,)`, and the texts."""
        texts = self._texts[name]
        return texts.codes[: self._size], texts.values

    @property
    def copies(self) -> np.ndarray:
        """As `is_copy`, of shape `(rows,)`."""
        return (self.codes("branch_of")[0] > 0) & (self.numbers("shared_turns") == self.numbers("turns"))

    def flat(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A field of `LISTS`: of each number in any of its lists the row, and the number; NaN where it is null."""
        return self._lists[name].flat(self._size)

    def totals(self, name: str) -> np.ndarray:
        """The sum of each list of a field of `LISTS`, of shape `(rows,)`."""
        places, values = self.flat(name)
        return np.bincount(places, values, self._size)

    @property
    def reward_names(self) -> list[str]:
        """Names of the rewards that any row has, in the order in which they were first seen."""
        return list(dict.fromkeys(name for names in self._texts["names"].values for name in names or ()))

    def reward(self, name: str) -> np.ndarray:
        """One reward of each row, of shape `(rows,)`; NaN where it has none."""
        codes, shapes = self.codes("names")
        column = np.full(self._size, np.nan)
        for code, names in enumerate(shapes):
            if names and name in names:
                places = np.flatnonzero(codes == code)
                column[places] = self._lists["rewards"].nth(places, names.index(name))
        return column

    # Adding

    def add(self, kind: str, block: Block) -> np.ndarray:
        """
        Adds lines of kind `rollout`, `credit` or `update`, each of another session.

        A row replaces the one that its session has, and the credit and the updates of that. Credit and updates of
        sessions without a row are passed over. A step that is taken again replaces the updates of it and of later
        ones.

        Args:
            kind (`str`): What the lines are.
            block (`dict`): Their columns: `block_of`.

        Returns:
            `np.ndarray` of ints: The places of the rows that are added or changed.
        """
        if kind == "rollout":
            return self._add_rollouts(block)
        found = np.array([self.places.get(session, _NEVER) for session in block["session"]], np.int64)
        there = np.flatnonzero(found >= 0)
        places = found[there]
        if kind == "credit":
            sizes, values = block["advantages"]
            self._lists["advantages"].put(places, *_of_lists(sizes, values, there))
            self._texts["credit_file"].put(places, block["file"][0][there], block["file"][1])
            self._wholes["credit_row"][places] = block["row"][there]
        else:
            self._add_updates(places, block, there)
        return places

    def _add_rollouts(self, block: Block) -> np.ndarray:
        known, sessions = self.places, self.sessions
        for session in block["session"]:
            if session not in known:
                known[session] = len(sessions)
                sessions.append(session)
        places = np.array(list(map(known.__getitem__, block["session"])), np.int64)
        self._make_room(len(sessions))
        for name in (*WHOLES, *COUNTS):
            self._wholes[name][places] = block[name]
        for name in FLOATS:
            self._floats[name][places] = block[name]
        for name in (*TEXTS, "names"):
            self._texts[name].put(places, *block[name])
        for name in (*_PER_TURN, "rewards"):
            self._lists[name].put(places, *block[name])
        replaced = places[places < self._size]
        if len(replaced):
            self._lists["advantages"].clear(replaced)
            self._texts["credit_file"].codes[replaced] = 0
            self._wholes["last_update"][replaced] = _NEVER
            self._updates.forget(replaced)
        self._size = len(sessions)
        return places

    def _add_updates(self, places: np.ndarray, block: Block, there: np.ndarray) -> None:
        last, steps = self._wholes["last_update"], block["step"][there]
        again = steps <= last[places]
        for place, step in zip(places[again].tolist(), steps[again].tolist(), strict=True):
            last[place] = self._updates.forget_from(place, step)
        first = last[places] == _NEVER
        for name in ("mismatch", "entropy"):
            self._floats[name][places[first]] = block[name][there][first]
        self._floats["clipped"][places] = block["clipped"][there]
        last[places] = steps
        codes, files = block["file"]
        self._updates.add(places, steps, codes[there], files, block["row"][there])

    def _make_room(self, size: int) -> None:
        if size <= self._room:
            return
        self._room = max(2 * self._room, size, ROOM)
        for name, column in self._wholes.items():
            self._wholes[name] = _longer(column, self._room, _NEVER if name == "last_update" else 0)
        for name, numbers in self._floats.items():
            self._floats[name] = _longer(numbers, self._room, np.nan)
        for texts in self._texts.values():
            texts.codes = _longer(texts.codes, self._room, 0)
        for lists in self._lists.values():
            lists.make_room(self._room)


class _Texts:
    """A column of texts, each of which is kept once; the first is none."""

    def __init__(self) -> None:
        self.codes = np.zeros(0, np.int32)
        self.values: list[Any] = [None]
        self._known: dict[Any, int] = {None: 0}

    def put(self, places: np.ndarray, codes: np.ndarray, texts: list[Any]) -> None:
        self.codes[places] = self.coded(texts)[codes]

    def coded(self, texts: list[Any]) -> np.ndarray:
        """The codes of texts, which are kept."""
        for text in texts:
            if text not in self._known:
                self._known[text] = len(self.values)
                self.values.append(text)
        return np.array([self._known[text] for text in texts], np.int32)

    def at(self, place: int) -> Any:
        return self.values[self.codes.item(place)]


class _Lists:
    """A column of lists of numbers, one after the other."""

    def __init__(self, kind: type) -> None:
        self._starts = np.zeros(0, np.int64)
        self._sizes = np.zeros(0, np.int32)  # -1: none
        self._values: np.ndarray = np.zeros(0, kind)
        self._used = 0

    def make_room(self, room: int) -> None:
        self._starts, self._sizes = _longer(self._starts, room, 0), _longer(self._sizes, room, -1)

    def put(self, places: np.ndarray, sizes: np.ndarray, values: np.ndarray) -> None:
        used = self._used + len(values)
        if used > len(self._values):
            self._values = _longer(self._values, max(2 * len(self._values), used), 0)
        self._values[self._used : used] = values
        self._starts[places] = self._used + np.cumsum(sizes, dtype=np.int64) - sizes
        self._sizes[places], self._used = sizes, used

    def clear(self, places: np.ndarray) -> None:
        self._sizes[places] = -1

    def at(self, place: int) -> list[Any] | None:
        size = self._sizes.item(place)
        if size < 0:
            return None
        start = self._starts.item(place)
        return [value if value == value else None for value in self._values[start : start + size].tolist()]

    def nth(self, places: np.ndarray, number: int) -> np.ndarray:
        """The number at this place of each of some lists."""
        return self._values[self._starts[places] + number]

    def flat(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        sizes = np.maximum(self._sizes[:size], 0)
        places = np.repeat(np.arange(size), sizes)
        before = np.cumsum(sizes, dtype=np.int64) - sizes
        return places, self._values[np.arange(len(places)) + (self._starts[:size] - before)[places]]


class _Updates:
    """The updates of all rows, in the order in which they were added."""

    def __init__(self) -> None:
        self._numbers = np.zeros((4, 0), np.int32)
        """Of each the row, its step, its file and the row there."""
        self._used = 0
        self._files = _Texts()
        self._order: np.ndarray | None = None

    def add(
        self, places: np.ndarray, steps: np.ndarray, codes: np.ndarray, files: list[Any], rows: np.ndarray
    ) -> None:
        used = self._used + len(places)
        if used > self._numbers.shape[1]:
            self._numbers = _longer(self._numbers, max(2 * self._numbers.shape[1], used), 0)
        self._numbers[:, self._used : used] = places, steps, self._files.coded(files)[codes], rows
        self._used, self._order = used, None

    def of(self, place: int) -> list[Row]:
        """Those of a row, as the index has them."""
        found = self._numbers[1:, self._of(place)].T.tolist()
        return [{"step": step, "file": self._files.values[file], "row": row} for step, file, row in found]

    def forget(self, places: np.ndarray) -> None:
        """Removes those of some rows."""
        of_rows = self._numbers[0, : self._used]
        of_rows[np.isin(of_rows, places)] = _NEVER
        self._order = None

    def forget_from(self, place: int, step: int) -> int:
        """Removes those of a row from a step on. Returns the step of the last that stays, -1 if there is none."""
        found = np.flatnonzero(self._numbers[0, : self._used] == place)
        later = self._numbers[1, found] >= step
        self._numbers[0, found[later]] = _NEVER
        self._order = None
        return _NEVER if later.all() else int(self._numbers[1, found[~later][-1]])

    def _of(self, place: int) -> np.ndarray:
        of_rows = self._numbers[0, : self._used]
        if self._order is None:
            self._order = np.argsort(of_rows, kind="stable")
        order = self._order
        begin, end = np.searchsorted(of_rows, [place, place + 1], sorter=order)
        return order[begin:end]


def _of_lists(sizes: np.ndarray, values: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Some of the lists that `_flattened` made."""
    if len(chosen) == len(sizes):
        return sizes, values
    inside = np.zeros(len(sizes), bool)
    inside[chosen] = True
    return sizes[chosen], values[np.repeat(inside, sizes)]


def _longer(column: np.ndarray, room: int, fill: float) -> np.ndarray:
    """A column, or several, with room for more."""
    longer = np.full((*column.shape[:-1], room), fill, column.dtype)
    longer[..., : column.shape[-1]] = column
    return longer
