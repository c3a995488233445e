"""Reads a run's folder: its index as columns, whole conversations, steps and metrics. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from mt_grpo.errors import UserError
from mt_grpo.imports import did_you_mean
from mt_grpo.runlog import schema
from mt_grpo.runlog.conversation import conversation, messages_of, plain_trajectory, words
from mt_grpo.runlog.index import Index

NUMBERS = {
    "step": np.int32,
    "k": np.int32,
    "rank": np.int32,
    "group": np.int32,
    "member": np.int32,
    "turns": np.int32,
    "context": np.int32,
    "unique": np.int32,
    "forks": np.int32,
    "calls": np.int32,
    "row": np.int32,
    "reward": np.float64,
    "start": np.float64,
    "seconds": np.float64,
    "mismatch": np.float64,
    "entropy": np.float64,
    "clipped": np.float64,
}
"""Fields of a row that become arrays; the others become lists."""


def open_run(folder: str | Path) -> Run:
    """
    Opens the folder of a run, which may still go on.

    Args:
        folder (`str` or `Path`): The run's `output_dir`.

    Raises:
        UserError: If it is no folder, no run's folder, or one without conversations.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: name the `output_dir` of a run.")
    if not (folder / schema.FOLDER / schema.INDEX).is_file():
        if any(folder.glob("trajectories*.jsonl")):
            raise UserError(
                f"{folder} has its conversations in trajectories.jsonl, the form of earlier versions, which is not "
                "read here: look at them with the version that wrote them."
            )
        if not (folder / "metrics.jsonl").is_file():
            raise UserError(f"{folder} is not the folder of a run: name its `output_dir`, which has `metrics.jsonl`.")
        raise UserError(
            f"{folder} has no conversations: the file {schema.FOLDER}/{schema.INDEX} is not there (a run writes it "
            "with its first batch)."
        )
    return Run(folder)


class Run:
    """
    A run's folder. See `open_run`.

    Attributes:
        folder (`Path`): The folder.
        rows (`list[dict]`): A row per conversation, as `mt_grpo.runlog.index` describes it, in the order written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rollouts = folder / schema.FOLDER
        self._index = Index()
        self._columns: dict[str, list[Any] | np.ndarray] = {}
        self.refresh()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._index.rows

    @property
    def about(self) -> dict[str, Any]:
        """The index's latest line of kind `run`; empty where there is none."""
        return self._index.run

    def refresh(self) -> list[int]:
        """Reads what was added since. Returns the positions in `rows` that are added or changed."""
        number = len(self.rows)
        changed = self._index.read(self._rollouts)
        if changed or len(self.rows) != number:
            self._columns = {}
        return changed

    def column(self, name: str) -> list[Any] | np.ndarray:
        """
        One field of all rows.

        Returns:
            `np.ndarray` for the fields in `NUMBERS` (NaN where a float is null), else `list`.
        """
        if name not in self._columns:
            values = [row[name] for row in self.rows]
            self._columns[name] = np.array(values, dtype=NUMBERS[name]) if name in NUMBERS else values
        return self._columns[name]

    def columns(self) -> dict[str, list[Any] | np.ndarray]:
        """All fields of all rows, by name."""
        return {name: self.column(name) for name in (self.rows[0] if self.rows else {})}

    def steps(self) -> list[dict[str, Any]]:
        """Where the time of each optimiser step went: the index's lines of kind `step`, in order."""
        return self._index.steps

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`; a line's `step` is the number of steps that were taken."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return []
        data = path.read_bytes()
        try:
            return [orjson.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        except orjson.JSONDecodeError as error:
            raise UserError(f"{path} has a line that is not JSON ({error}): remove that line.") from None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; `None` where it left none that the library `tokenizers` reads."""
        path = self.folder / schema.TOKENIZER / "tokenizer.json"
        return Tokenizer.from_file(str(path)) if path.is_file() else None

    def trajectory(self, session: str) -> dict[str, Any]:
        """
        One conversation with everything that is known of it. See `mt_grpo.runlog.conversation.conversation`.

        Raises:
            UserError: If there is no such session, or its file is gone.
        """
        place = self._index.place(session)
        if place is None:
            sessions = [row["session"] for row in self.rows]
            raise UserError(f"{self.folder} has no conversation {session!r}{did_you_mean(session, sessions)}.")
        row = self.rows[place]
        rollout = self._read(row["file"], row["row"])
        credit = None if row["credit_file"] is None else self._read(row["credit_file"], row["credit_row"])
        updates = [self._read(update["file"], update["row"]) for update in row["updates"]]
        return conversation(row, rollout, credit, updates, self.tokenizer)

    def texts(self, start: int = 0) -> Iterator[tuple[str, str]]:
        """The session and the words of each conversation from `rows[start]` on, to search in; file by file."""
        for row, record in self.records(start):
            yield row["session"], "\n".join(words(message) for message in messages_of(record))

    def records(self, start: int = 0) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The rows from `rows[start]` on, each with its `record`: the conversation without its tokens."""
        for row, data in self._in_files(self.rows[start:], ["record"]):
            yield row, json.loads(data["record"])

    def trajectories(self) -> Iterator[dict[str, Any]]:
        """
        Every conversation as `Trajectory.to_dict()` has it, with `step` and `mode` before, ordered as in the index.
        """
        for row, data in self._in_files(self.rows):
            yield {"step": row["step"], "mode": row["mode"], **plain_trajectory(data)}

    def _in_files(
        self, rows: list[dict[str, Any]], columns: list[str] | None = None
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Rows of the index with theirs of the files; rows of one file lie next to each other."""
        name, table = None, []
        for row in rows:
            if row["file"] != name:
                name, table = row["file"], self._open(row["file"]).read(columns).to_pylist()
            yield row, table[row["row"]]

    def _read(self, name: str, row: int) -> dict[str, Any]:
        group, place = divmod(row, schema.ROW_GROUP)
        # one thread: handing 16 rows out to several takes longer than reading them
        return self._open(name).read_row_group(group, use_threads=False).slice(place, 1).to_pylist()[0]

    def _open(self, name: str) -> pq.ParquetFile:
        path = self._rollouts / name
        try:
            return pq.ParquetFile(path)
        except FileNotFoundError:
            raise UserError(
                f"{path} is gone, which the index speaks of: bring it back, or look at another conversation."
            ) from None
        except pa.ArrowInvalid as error:
            raise UserError(f"{path} is damaged ({error}): bring it back, or look at another conversation.") from None


def read_trajectories(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Every conversation of a run: `open_run(folder).trajectories()`."""
    return open_run(folder).trajectories()
