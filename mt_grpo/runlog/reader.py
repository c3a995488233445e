"""Reads a run's folder: its index as columns, whole conversations, steps and metrics. Imports no torch."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from mt_grpo.errors import UserError
from mt_grpo.imports import did_you_mean
from mt_grpo.runlog import files, schema
from mt_grpo.runlog.conversation import CorruptRecord, Said, StoredConversation, check_credit, messages_of, ways, words
from mt_grpo.runlog.index import Each, Index, Table
from mt_grpo.runlog.schema import METRICS, STATE, Row
from mt_grpo.token_tree import TokenTree

_NUMBERS = (
    *("step", "k", "rank", "group", "member", "turns", "context", "unique", "forks", "calls", "row"),
    *("reward", "start", "seconds", "mismatch", "entropy", "clipped"),
)
"""Fields of a row that become arrays; the others become lists."""

_READS = threading.Lock()
"""
Held while pyarrow has a file open: a thread that the interpreter's end stops in there would abort the process.
"""
atexit.register(_READS.acquire)  # the interpreter waits for the read under way, and no thread begins another

_MOST_BYTES = 2**29  # bytes of a row group once they are unpacked; fewer packed ones can be made to fill the memory
_MOST_VALUES = 2**26  # entries of a column of a row group

_MOST_NAMES, _MOST_SHOWN = 1000, 80
"""Conversations among which the nearest to a wrong name is looked for, and characters of it that are repeated."""


def open_run(folder: str | Path, each: Each = map, begun: bool = False) -> Run:
    """
    Opens the folder of a run, which may still go on.

    Args:
        folder (`str` or `Path`): The run's `output_dir`.
        each (`Callable`, *optional*): Reads the parts of a long index: `map`, or that of a pool of processes.
        begun (`bool`, *optional*): Whether a run is opened that has written its state or metrics, and no conversation.

    Raises:
        UserError: If it is no folder, no run's folder, or one without conversations.
    """
    folder = Path(folder)
    try:
        there = folder.is_dir()
    except (OSError, ValueError) as error:  # the latter for a name with a NUL in it
        raise UserError(f"The folder {str(folder)!r} cannot be read: {error}.") from None
    index = f"{schema.FOLDER}/{schema.INDEX}"
    if not there:
        fault = f"There is no folder {folder}: name the `output_dir` of a run."
    elif files.find(folder, index) is not None:
        return Run(folder, each)
    elif any(folder.glob("trajectories*.jsonl")):
        fault = (
            f"{folder} has its conversations in trajectories.jsonl, the form of earlier versions, which is not read "
            "here: look at them with the version that wrote them."
        )
    elif begun and any(files.find(folder, name) is not None for name in (STATE, METRICS)):
        return Run(folder, each)
    elif files.find(folder, STATE) is not None:
        fault = f"{folder} has no conversations so far: a run writes them once its first batch is scored."
    elif files.find(folder, METRICS) is None:
        fault = f"{folder} is not the folder of a run: name its `output_dir`, which has `metrics.jsonl`."
    else:
        fault = f"{folder} has no conversations: the file {index} is not there (a run writes it with its first batch)."
    raise UserError(fault)


class Run:
    """A run's folder. See `open_run`."""

    def __init__(self, folder: Path, each: Each = map) -> None:
        self.folder = folder
        self._rollouts = folder / schema.FOLDER
        self._checked: dict[str, tuple[int, int, tuple[int, int] | None]] = {}
        self._metrics: tuple[int, list[Row], int | None] = 0, [], None
        self._index = Index()
        self._index.read(folder, each)

    @property
    def rows(self) -> Table:
        """A row per conversation, as `mt_grpo.runlog.index` describes it, in the order written."""
        return self._index.rows

    @property
    def about(self) -> Row:
        """The index's latest line of kind `run`; empty where there is none."""
        return self._index.run

    def refresh(self) -> list[int]:
        """Reads what was added since. Returns the positions in `rows` that are added or changed."""
        return self._index.read(self.folder).tolist()

    def column(self, name: str) -> list | np.ndarray:
        """One field of all rows: an array for those in `_NUMBERS` (NaN where a float is null), else a list."""
        if name in _NUMBERS:
            return self.rows.numbers(name)
        return [row[name] for row in self.rows]

    def columns(self) -> dict[str, list | np.ndarray]:
        """All fields of all rows, by name."""
        return {name: self.column(name) for name in (self.rows[0] if self.rows else {})}

    def checksum(self, name: str) -> tuple[int, int] | None:
        """Size and CRC-32 of a file in `rollouts/`, as the index has them."""
        return self._index.files.get(name)

    def steps(self) -> list[Row]:
        """Where the time of each optimiser step went: the index's lines of kind `step`, in order."""
        return self._index.steps

    def metrics(self) -> list[Row]:
        """The lines of `metrics.jsonl`; a line's `step` is the number of steps that were taken."""
        path = files.find(self.folder, METRICS)
        state = None if path is None else path.stat()
        whole, lines, inode = self._metrics
        if state is None or state.st_ino != inode or state.st_size < whole:
            whole, lines = 0, []
        if state is not None and state.st_size > whole:
            end, added = _metrics(self.folder, whole)
            whole, lines = whole + end, lines + added if added else lines
        self._metrics = whole, lines, state and state.st_ino
        return lines

    @staticmethod
    def metrics_of(folder: Path) -> list[Row]:
        """The lines of `metrics.jsonl` in a folder whose index need not be read."""
        return _metrics(folder, 0)[1]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; `None` where it left none that the library `tokenizers` reads."""
        name = schema.TOKENIZER_FILE
        data = files.read(self.folder, name)
        if data is None:
            return None
        try:
            if self._index.files.get(name, (len(data), crc32(data))) != (len(data), crc32(data)):
                raise CorruptRecord("its bytes are others than the run wrote")
            return Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises no narrower one
            raise UserError(
                f"{self.folder / name} is damaged ({str(error)[:100]}): bring it back, or remove it to see the "
                "conversations without the text of their tokens."
            ) from None

    def row(self, session: str) -> Row:
        place = self.rows.places.get(session)
        if place is None:
            near = did_you_mean(session, self.rows.sessions[:_MOST_NAMES])
            raise UserError(f"{self.folder} has no conversation {session[:_MOST_SHOWN]!r}{near}.")
        return self.rows[place]

    def trajectory(self, session: str) -> Row:
        """One conversation with everything that is known of it; see `StoredConversation.shown`."""
        row = self.row(session)
        file, credit_file = row["file"], row["credit_file"]
        rollout = self._read(file, row["row"], session, schema.ROLLOUTS)
        credit = None if credit_file is None else self._read(credit_file, row["credit_row"], session, schema.CREDIT)
        updates = [self._read(each["file"], each["row"], session, schema.UPDATES) for each in row["updates"]]
        with self._naming_damage(file):
            return StoredConversation(rollout, row).shown(credit, updates, self.tokenizer)

    def texts(self, start: int = 0) -> Iterator[tuple[str, str]]:
        """The session and the words of each conversation from `rows[start]` on, to search in; file by file."""
        for row, record in self.records(self.rows[start:]):
            yield row["session"], "\n".join(words(message) for message in messages_of(record))

    def records(self, rows: Sequence[Row] | None = None) -> Iterator[tuple[Row, Row]]:
        """Each row, or each of some, with its `record`: the conversation without its tokens."""
        for row, data in self._in_files(self.rows if rows is None else rows, ["session", "record"]):
            with self._naming_damage(row["file"]):
                record = StoredConversation(data, row).record
            yield row, record

    def trajectories(self, rows: Sequence[Row] | None = None) -> Iterator[Row]:
        """
        Every conversation as `Trajectory.to_dict()` has it, with `step` and `mode` before, ordered as in the index; or
        those of some of its rows, in their order. `session` is the row's, which no other of the run has.
        """
        for row, data in self._in_files(self.rows if rows is None else rows, schema.ROLLOUTS.names):
            with self._naming_damage(row["file"]):
                whole = StoredConversation(data, row).plain()
            yield {"step": row["step"], "mode": row["mode"], **whole}

    def trees(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Row, TokenTree]]:
        """Each of some rows with its `record` and its token tree."""
        for row, data in self._in_files(rows, schema.ROLLOUTS.names):
            with self._naming_damage(row["file"]):
                record, tree = StoredConversation(data, row).both()
            yield row, record, tree

    def ways(self, rows: Sequence[Row] | None = None) -> Iterator[tuple[Row, Row, list[Said]]]:
        """Each row with its `record` and each way through it, as messages that the template renders."""
        template = files.read(self.folder, schema.TEMPLATE_FILE)
        shows_calls = template is None or b"tool_calls" in template
        tokenizer = None if shows_calls else self.tokenizer
        columns = ["session", "record"] if tokenizer is None else schema.ROLLOUTS.names
        for row, data in self._in_files(self.rows if rows is None else rows, columns):
            with self._naming_damage(row["file"]):
                stored = StoredConversation(data, row)
                record, texts = stored.record, None if tokenizer is None else stored.turn_texts(tokenizer)
            yield row, record, list(ways(record, texts))

    def credited(self, rows: Sequence[Row]) -> list[Row]:
        """
        What the credit rule had and gave, without tokens, for rows with credit: of each `record`, `weights` of rewards
        by name, and `advantages` and `parts` of `CREDIT`.
        """
        rollouts = self._in_files(rows, ["session", "weights", "record"])
        credits = self._in_files(rows, schema.CREDIT.names, schema.CREDIT)
        found = []
        for (row, rollout), (_, credit) in zip(rollouts, credits, strict=True):
            with self._naming_damage(row["file"]):
                stored = StoredConversation(rollout, row)
                record, weights = stored.record, stored.weights
            with self._naming_damage(row["credit_file"]):
                check_credit(credit, len(record["turns"]))
            parts = credit.get("parts") or []
            found.append({"record": record, "weights": weights, "advantages": credit["advantages"], "parts": parts})
        return found

    def _in_files(
        self, rows: Sequence[Row], columns: list[str], known: pa.Schema = schema.ROLLOUTS
    ) -> Iterator[tuple[Row, Row]]:
        """Rows of the index with theirs of the files; rows of one row group lie next to each other."""
        of_file, of_row = ("credit_file", "credit_row") if known is schema.CREDIT else ("file", "row")
        at, table = None, []
        for row in rows:
            file, (group, place) = row[of_file], divmod(row[of_row], schema.ROW_GROUP)
            if (file, group) != at:
                at = file, group
                with self._naming_damage(file):
                    table = self._read_group(file, group, known, columns).to_pylist()
            yield row, self._of_session(table, place, file, row["session"])

    def _read(self, name: str, row: int, session: str, columns: pa.Schema) -> Row:
        group, place = divmod(row, schema.ROW_GROUP)
        table = self._read_group(name, group, columns, columns.names)
        with self._naming_damage(name):
            return self._of_session(table.slice(place, 1).to_pylist(), 0, name, session)

    def _of_session(self, rows: list[Row], place: int, name: str, session: str) -> Row:
        with self._naming_damage(name):
            if place >= len(rows) or rows[place]["session"] != session:
                raise CorruptRecord(f"it lacks the conversation {session} where the index has it")
            return rows[place]

    def _read_group(self, name: str, group: int, known: pa.Schema, columns: list[str]) -> pa.Table:
        """A row group of a file. Checks first that the file is as it was written, and no larger than a run writes."""
        path = files.find(self.folder, f"{schema.FOLDER}/{name}")
        if path is None:
            raise UserError(
                f"{self._rollouts / name} is gone, which the index speaks of: bring it back, or look at another "
                "conversation."
            )
        with self._naming_damage(name), path.open("rb") as file:
            self._check(name, file)
            with _READS:
                return _unpacked(file, group, known, columns)

    def _check(self, name: str, file: BinaryIO) -> None:
        """Raises `CorruptRecord` if a file has other bytes than the index says. An unchanged file is read once."""
        about, known = os.fstat(file.fileno()), self._index.files.get(name)
        state = about.st_size, about.st_mtime_ns, known
        if known is None or self._checked.get(name) == state:
            return
        checksum = 0
        while part := file.read(2**20):
            checksum = crc32(part, checksum)
        file.seek(0)
        if (about.st_size, checksum) != known:
            raise CorruptRecord("its bytes are others than the run wrote")
        self._checked[name] = state

    @contextmanager
    def _naming_damage(self, name: str) -> Iterator[None]:
        """Refuses a damaged file by its name, whatever reading it raised."""
        try:
            yield
        # pyarrow raises all of these, a `ValueError` for text that is not UTF-8
        except (CorruptRecord, pa.ArrowException, OSError, ValueError, MemoryError) as error:
            words = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"{self._rollouts / name} is damaged ({words}): bring it back, or look at another conversation."
            ) from None


def _unpacked(file: BinaryIO, group: int, known: pa.Schema, columns: list[str]) -> pa.Table:
    """Reads by this thread alone: pyarrow's would wait for the interpreter, whose end waits for them."""
    parquet = pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False)
    found = parquet.schema_arrow
    columns = [name for name in columns if name not in schema.LATER or name in found.names]
    for name in columns:
        number = found.get_field_index(name)  # -1 where there are several too
        if number < 0 or found.field(number).type != known.field(name).type:
            raise CorruptRecord(f"it has no column `{name}` of {known.field(name).type}")
    if group >= parquet.num_row_groups:
        raise CorruptRecord(f"it has {parquet.metadata.num_rows} rows")
    about = parquet.metadata.row_group(group)
    values = max(about.column(number).num_values for number in range(about.num_columns))
    if about.num_rows > schema.ROW_GROUP or about.total_byte_size > _MOST_BYTES or values > _MOST_VALUES:
        raise CorruptRecord("a row group is larger than any that a run writes")
    # one thread: handing 16 rows out to several takes longer than reading them
    return parquet.read_row_group(group, columns, use_threads=False).select(columns)


def _metrics(folder: Path, offset: int) -> tuple[int, list[Row]]:
    """The size of the whole lines of `metrics.jsonl` from `offset` on, and what they say."""
    data = files.read(folder, METRICS, offset) or b""
    whole = data.rfind(b"\n") + 1
    lines = []
    for raw in data[:whole].splitlines():
        line, wrong = files.parse(raw, "metrics")
        if wrong is not None:
            raise UserError(f"{folder / METRICS} has a line that is not JSON of metrics ({wrong}): remove that line.")
        lines.append(line)
    return whole, lines


def read_trajectories(folder: str | Path) -> Iterator[Row]:
    """Every conversation of a run: `open_run(folder).trajectories()`."""
    return open_run(folder).trajectories()
