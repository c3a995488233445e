"""
`rollouts/index.jsonl`: a JSON object per line, appended once the files that it speaks of are whole.

Every line has `kind`, and the fields that `schema` lists for it. Readers pass over other kinds and fields. The last
field of each line, `crc`, is the CRC-32 of the line's bytes before `,"crc":`, as eight hexadecimal digits.

The reader merges the lines of a session into one row: the fields of `rollout`; `advantages`, `credit_file` and
`credit_row` of `credit` (null before it is there); `mismatch`, `entropy` and `clipped` of `update` (`mismatch` and
`entropy` of the first update of the conversation, `clipped` of the latest; null before), and `updates`, a list of
`{"step", "file", "row"}`. A step that is taken again replaces the updates of it and of later ones. Rows are kept by
column, in Arrow: half a million take some hundred megabytes, and are filtered and sorted without a loop over them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from types import NoneType
from typing import Any, SupportsIndex, get_args, get_origin, get_type_hints, overload
from zlib import crc32

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from mt_grpo.errors import UserError
from mt_grpo.runlog import files
from mt_grpo.runlog.files import to_json
from mt_grpo.runlog.schema import FOLDER, SHAPES, Row, misfit

_PART = 2**23  # bytes that are read at a time
_NEAR = 2**16  # bytes at a time in which the end of a line is looked for

Each = Callable[[Callable, Iterable], Iterable]  # `map`, or that of a pool of processes

_TEXT, _NUMBER = pa.dictionary(pa.int32(), pa.string()), pa.float64()
_TYPES = {int: pa.int32(), float: _NUMBER, bool: pa.bool_()}
_COUNTS = ("raised", "failed", "refused", "shared_turns")  # whole numbers that old indices lack; 0 there


def _arrow_type(kind: Any) -> pa.DataType:
    """The column of a field of a shape."""
    of = get_args(kind)
    if NoneType in of:  # any column may have nulls
        return _arrow_type(of[0])
    if get_origin(kind) is dict:
        return pa.map_(pa.string(), _arrow_type(of[1]))
    return pa.list_(_arrow_type(of[0])) if get_origin(kind) is list else _TYPES.get(kind, _TEXT)


def _columns_of(kind: str) -> pa.Schema:
    types = {name: _arrow_type(each) for name, each in get_type_hints(SHAPES[kind]).items()}
    return pa.schema(types | {"session": pa.string(), **({"sampled": pa.int64()} if "sampled" in types else {})})


_LINES = {kind: _columns_of(kind) for kind in ("rollout", "credit", "update")}
"""Columns of the lines that rows are merged from."""

_OF_CREDIT = {"advantages": "advantages", "credit_file": "file", "credit_row": "row"}
_OF_UPDATES = ("mismatch", "entropy", "clipped")
_MOST_CHUNKS = 64  # parts of a column, after which they are put together


def is_copy(row: Row) -> bool:
    """Whether a conversation is another one once more: a branch of one that ended before it branched."""
    return row["branch_of"] is not None and row["shared_turns"] == row["turns"]


class Table(Sequence[Row]):
    """A row per conversation, in the order in which they were added: `sessions` names them, `places` finds them."""

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.places: dict[str, int] = {}
        self._lines = {kind: schema.empty_table() for kind, schema in _LINES.items()}
        self._latest = {kind: np.zeros(0, np.int64) for kind in ("rollout", "credit")}
        """Of each row, which of these lines counts; -1 for none."""
        self._updated = np.zeros(0, np.int64)  # of each update the row; -1 for one that was replaced
        self._columns: dict[str, pa.Array] = {}
        self._codes: dict[str, tuple[np.ndarray, list[str | None]]] = {}
        self._lock = threading.RLock()  # a search reads rows in a thread of its own, while others are added

    def __len__(self) -> int:
        return len(self.sessions)

    @overload
    def __getitem__(self, place: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: SupportsIndex | slice) -> Row | list[Row]:
        found = np.arange(len(self))[place]
        return self.at(found) if isinstance(place, slice) else self.at(np.array([found]))[0]

    def __iter__(self) -> Iterator[Row]:
        for begin in range(0, len(self), 1000):
            yield from self[begin : begin + 1000]

    def at(self, places: Sequence[int] | np.ndarray) -> list[Row]:
        """The rows at some places; several at once are made faster than one by one."""
        with self._lock:
            return self._at(np.asarray(places, np.int64))

    def _at(self, places: np.ndarray) -> list[Row]:
        columns: dict[str, list] = {}
        for name in (*_LINES["rollout"].names, *_OF_CREDIT, *_OF_UPDATES):
            column = self._column(name)
            if name == "session":
                columns[name] = [self.sessions[place] for place in places.tolist()]
            elif pa.types.is_dictionary(column.type):
                codes, texts = self.codes(name)
                columns[name] = [texts[code] for code in codes[places].tolist()]
            else:
                columns[name] = _as_list(column.take(places))
        columns["updates"] = self._updates(places)
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def numbers(self, name: str) -> np.ndarray:
        """A field with a number, of shape `(rows,)`; NaN where a row has none."""
        return _as_numbers(self._column(name))

    def codes(self, name: str) -> tuple[np.ndarray, list[str | None]]:
        """A field with a text: which text each row has, of shape `(rows,)`, and the texts; the first is none."""
        with self._lock:
            if name not in self._codes:
                column = self._column(name)
                codes = column.indices.fill_null(-1).to_numpy() + 1
                self._codes[name] = codes, [None, *column.dictionary.to_pylist()]
            return self._codes[name]

    @property
    def copies(self) -> np.ndarray:
        """As `is_copy`, of shape `(rows,)`."""
        return (self.codes("branch_of")[0] > 0) & (self.numbers("shared_turns") == self.numbers("turns"))

    def flat(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A field with lists: of each number in any of its lists the row, and the number; NaN where it is null."""
        column = self._column(name)
        values = _as_numbers(column.flatten())
        return pc.list_parent_indices(column).to_numpy(), values

    def totals(self, name: str) -> np.ndarray:
        """The sum of each list of a field, of shape `(rows,)`."""
        return np.bincount(*self.flat(name), len(self))

    @property
    def reward_names(self) -> list[str]:
        """Names of the rewards that any row has, in the order in which they were first seen."""
        return self._rewards()[1].unique().to_pylist()

    def reward(self, name: str) -> np.ndarray:
        """One reward of each row, of shape `(rows,)`; NaN where it has none."""
        places, names, values = self._rewards()
        column, found = np.full(len(self), np.nan), pc.equal(names, name).to_numpy(zero_copy_only=False)
        column[places[found]] = values[found]
        return column

    def _rewards(self) -> tuple[np.ndarray, pa.Array, np.ndarray]:
        """Of each reward of any row the row, its name, and the number."""
        column = self._column("rewards")
        begin, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        places = np.repeat(np.arange(len(column)), np.diff(column.offsets.to_numpy()))
        values = _as_numbers(column.items[begin:end])
        return places, column.keys[begin:end], values

    def _column(self, name: str) -> pa.Array:
        """A field of all rows."""
        with self._lock:
            if name not in self._columns:
                self._columns[name] = self._made(name)
            return self._columns[name]

    def _made(self, name: str) -> pa.Array:
        if name in _OF_UPDATES:
            values, column = self._of_updates(name), np.full(len(self), np.nan)
            lines = np.flatnonzero(self._updated >= 0)
            lines = lines if name == "clipped" else lines[::-1]  # numpy keeps the last of several
            column[self._updated[lines]] = values[lines]
            return pa.array(column, from_pandas=True)
        kind = "credit" if name in _OF_CREDIT else "rollout"
        column = self._lines[kind].column(_OF_CREDIT.get(name, name)).unify_dictionaries().combine_chunks()
        latest = self._latest[kind]
        if len(latest) < len(column) or kind == "credit":
            column = column.take(pa.array(latest, mask=latest < 0))
        return column.fill_null(0) if name in _COUNTS else column

    def _of_updates(self, name: str) -> np.ndarray:
        return self._lines["update"].column(name).to_numpy()

    def _updates(self, places: np.ndarray) -> list[list[Row]]:
        """The updates of some rows, as the index has them."""
        order = np.argsort(self._updated, kind="stable")
        begin, end = (np.searchsorted(self._updated, places, side, order) for side in ("left", "right"))
        chosen = order[np.concatenate([np.arange(0), *map(np.arange, begin, end)])]
        found = iter(self._lines["update"].select(["step", "file", "row"]).take(chosen).to_pylist())
        return [list(islice(found, number)) for number in (end - begin).tolist()]

    def add(self, kind: str, lines: Sequence[Row] | pa.Table) -> np.ndarray:
        """
        Adds lines of one kind, each of another session, to the rows that are there. A row replaces the one of its
        session. Returns the places of the rows that are added or changed.
        """
        block = lines if isinstance(lines, pa.Table) else pa.Table.from_pylist(list(lines), _LINES[kind])
        with self._lock:
            return self._add(kind, block)

    def _add(self, kind: str, block: pa.Table) -> np.ndarray:
        sessions = block.column("session").to_pylist()
        if kind == "rollout":
            for session in sessions:
                if session not in self.places:
                    self.places[session] = len(self.sessions)
                    self.sessions.append(session)
        places = np.array([self.places.get(session, -1) for session in sessions], np.int64)
        there = places >= 0
        block, places = block if there.all() else block.filter(there), places[there]
        if kind == "rollout":
            new = np.full(len(self) - len(self._latest[kind]), -1, np.int64)
            self._latest = {name: np.concatenate([latest, new]) for name, latest in self._latest.items()}
            self._latest["credit"][places] = -1
            self._forget_updates(places, np.full(len(places), -1))
        elif kind == "update":
            self._forget_updates(places, block.column("step").to_numpy())
            self._updated = np.concatenate([self._updated, places])
        before = self._lines[kind]
        if kind != "update":
            self._latest[kind][places] = np.arange(len(before), len(before) + len(block))
        joined = pa.concat_tables([before, block])
        few = joined.column(0).num_chunks <= _MOST_CHUNKS
        self._lines[kind] = joined if few else joined.unify_dictionaries().combine_chunks()
        self._columns.clear()
        self._codes.clear()
        return places

    def _forget_updates(self, places: np.ndarray, steps: np.ndarray) -> None:
        """Forgets those of rows from a step on."""
        begin = np.full(len(self) + 1, np.iinfo(np.int64).max)  # the last is that of no row
        begin[places] = steps
        self._updated[self._of_updates("step") >= begin[self._updated]] = -1


def _as_numbers(array: pa.Array) -> np.ndarray:
    if array.null_count or pa.types.is_boolean(array.type):
        array = array.cast(_NUMBER)
    return array.to_numpy(zero_copy_only=False)


def _as_list(array: pa.Array) -> list:
    """As `to_pylist`, which takes ten times as long; a map as a dictionary."""
    if pa.types.is_list(array.type) or pa.types.is_map(array.type):
        offsets = array.offsets.to_numpy()
        if pa.types.is_map(array.type):
            items = array.items.slice(offsets[0], offsets[-1] - offsets[0])
            values = list(zip(array.keys.slice(offsets[0], len(items)).to_pylist(), _as_list(items), strict=True))
            make: Callable = dict
        else:
            values, make = _as_list(array.values.slice(offsets[0], offsets[-1] - offsets[0])), list
        bounds = (offsets - offsets[0]).tolist()
        lists = [make(values[begin:end]) for begin, end in pairwise(bounds)]
    elif pa.types.is_boolean(array.type):
        return array.to_pylist()
    else:
        lists = array.fill_null(0).to_numpy(zero_copy_only=False).tolist()
    if not array.null_count:
        return lists
    return [each if there else None for each, there in zip(lists, array.is_valid().to_numpy(False), strict=True)]


_CHECKSUM = len(b',"crc":"01234567"}')
_ENDED = re.compile(rb',"crc":"[0-9a-f]{8}"\}.', re.DOTALL)  # a whole line that something else than a line feed ends


def written(line: Row) -> bytes:
    """A line as it stands in an index, with its checksum."""
    head = to_json(line, separators=(",", ":"))[:-1].encode()
    return head + b',"crc":"%08x"}\n' % crc32(head)


def _parsed(raw: bytes) -> Row:
    line = orjson.loads(raw)
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        raise ValueError("it has no `kind`")
    checksum = line.pop("crc", None)
    if checksum is not None and raw[-_CHECKSUM:] != b',"crc":"%08x"}' % crc32(raw[:-_CHECKSUM]):
        raise ValueError("its checksum is another")
    if (wrong := misfit(line["kind"], line)) is not None:
        raise ValueError(wrong)
    return line


_Said = tuple[str, Row | pa.Table]
"""What a part of an index says: a line of another kind as it is, or lines to add to a `Table`, with their kind."""


def _read_part(folder: Path, name: str, bounds: tuple[int, int, int]) -> tuple[int, list[_Said]]:
    """A part of a file of an index, which another process may read."""
    begin, end, size = bounds
    added = files.read(folder, name, begin, end - begin) or b""
    whole = added.rfind(b"\n") + 1  # the last line may be half written
    return begin + whole, list(_blocks(_parsed_lines(folder / name, added, whole, end >= size)))


def _bounds(folder: Path, name: str, begin: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The parts of a file from `begin` on; each but the last ends with a line."""
    while begin < size:
        end = begin + _PART
        while end < size:
            near = files.read(folder, name, end, _NEAR) or b""
            found = near.find(b"\n")
            end += len(near) if found < 0 else found + 1
            if found >= 0 or not near:
                break
        yield begin, min(end, size), size
        begin = end


def lines_of(folder: Path, head: bytes) -> Iterator[Row]:
    """The lines of an index that begin with `head`; parsing takes most of the time, so others are not."""
    for path in sorted((folder / FOLDER).glob("index*.jsonl")):
        data = files.read(folder, f"{FOLDER}/{path.name}") or b""
        yield from _parsed_lines(path, data, data.rfind(b"\n") + 1, False, head)


def evaluated(folder: Path) -> Table:
    """The rows of a run's evaluations alone. Raises `UserError` as `lines_of`."""
    index = Index()
    index.merge(_blocks(lines_of(folder, b'{"kind":"rollout","session":"eval-')))
    return index.rows


def _parsed_lines(path: Path, added: bytes, whole: int, last: bool, head: bytes = b"") -> Iterator[Row]:
    """The lines in the first `whole` bytes of what was added to an index, or of its last part, that begin so."""
    raws = [raw for raw in added[:whole].splitlines() if raw.startswith(head)]
    if last and _ENDED.search(added, whole):  # the last line is whole, and only its line feed is damaged
        raws.append(added[whole:])
    for raw in raws:
        try:
            yield _parsed(raw)
        except ValueError as error:
            raise UserError(
                f"{path} has a damaged line ({error}), which begins with {raw[:40].decode(errors='replace')!r}: "
                "remove it; the conversations stay in the Parquet files beside it."
            ) from None


def _blocks(lines: Iterable[Row]) -> Iterator[_Said]:
    waiting: dict[str, dict[str, Row]] = {kind: {} for kind in _LINES}

    def together() -> Iterator[_Said]:
        for kind, of_kind in waiting.items():
            if of_kind:
                yield kind, pa.Table.from_pylist(list(of_kind.values()), _LINES[kind])
                of_kind.clear()

    for line in lines:
        kind = line.pop("kind")
        if kind not in waiting:
            yield kind, line
            continue
        session = line["session"]
        # a row replaces what was said of its session before; a block has one line of a session
        if session in waiting[kind] or (kind == "rollout" and any(session in each for each in waiting.values())):
            yield from together()
        waiting[kind][session] = line
    yield from together()


@dataclass
class Index:
    """The lines of an index, merged. `read` reads only what was added since it was called last."""

    rows: Table = field(default_factory=Table)
    steps: list[Row] = field(default_factory=list)
    run: Row = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    _offsets: dict[str, int] = field(default_factory=dict)
    _inodes: dict[str, int] = field(default_factory=dict)

    def read(self, folder: Path, each: Each = map) -> np.ndarray:
        """
        Reads what was added to the index files of a folder, and returns the places of rows that are added or changed;
        everything is read again where a file is another or shorter.
        """
        changed = [np.zeros(0, np.int64)]
        names = [f"{FOLDER}/{path.name}" for path in sorted((folder / FOLDER).glob("index*.jsonl"))]
        found = {name: path.stat() for name in names if (path := files.find(folder, name)) is not None}
        sizes = {name: about.st_size for name, about in found.items()}
        inodes = {name: about.st_ino for name, about in found.items()}
        others = [name for name, inode in self._inodes.items() if inodes.get(name) != inode]
        if others or any(sizes[name] < offset for name, offset in self._offsets.items()):
            self.rows, self.steps, self.run, self.files, self._offsets = Table(), [], {}, {}, {}
        self._inodes = inodes
        for name, size in sizes.items():
            # part by part: lines take several times as much memory as their bytes
            bounds = list(_bounds(folder, name, self._offsets.get(name, 0), size))
            for end, part in (each if len(bounds) > 1 else map)(partial(_read_part, folder, name), bounds):
                changed += self.merge(part)
                self._offsets[name] = end
        return np.unique(np.concatenate(changed))

    def merge(self, part: Iterable[_Said]) -> list[np.ndarray]:
        """Takes in what a part of an index says."""
        changed = []
        for kind, found in part:
            if kind in _LINES:
                changed.append(self.rows.add(kind, found))
            elif kind == "step":
                while self.steps and self.steps[-1]["step"] >= found["step"]:  # a resumed run takes them again
                    self.steps.pop()
                self.steps.append(found)
            elif kind == "run":
                self.run = {name: value for name, value in found.items() if value is not None}
            elif kind == "file":
                self.files[found["file"]] = found["size"], found["crc32"]
        return changed
