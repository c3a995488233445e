"""
Writes the files of a run. A file is whole or absent, and the index speaks of whole files only. `trim` takes records
back to a checkpoint: it replaces the index before files go that it spoke of, so that a process which is killed in
between leaves a sound folder, and the next one finishes the work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from mt_grpo.errors import UserError
from mt_grpo.media import digest, to_file
from mt_grpo.runlog.files import written_whole
from mt_grpo.runlog.index import written
from mt_grpo.runlog.rows import Batch, rollout_lines, rollout_table
from mt_grpo.runlog.schema import (
    CREDIT,
    FOLDER,
    INDEX,
    ROW_GROUP,
    TOKENIZER,
    TOKENIZER_FILE,
    UPDATES,
    credit_file,
    image_file,
    rollouts_file,
    sound_file,
    updates_file,
)
from mt_grpo.sounds import Sound

Line = dict[str, Any]


class RunLogError(UserError):
    """A run cannot write its conversations. The message is one sentence with the file and the reason."""


class RunWriter:
    """
    Writes the files of one process. Its methods return lines for the index. The first process appends them once all
    processes have written their files.

    Args:
        folder (`str` or `Path`): The run's `output_dir`.
        rank (`int`): The process.

    Raises:
        RunLogError: From all methods, if the disk is full or the folder cannot be written.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder) / FOLDER
        self.rank = rank
        self._mended: set[Path] = set()

    def write(self, batch: Batch) -> list[Line]:
        """Writes the conversations of a batch of this process, each image and sound once. Returns their lines."""
        if not batch.trajectories:
            return []
        name = rollouts_file(batch.mode, batch.step, batch.k, self.rank)
        kept: list[Line] = []

        def keep(value: Any) -> str:
            try:
                file = (sound_file if isinstance(value, Sound) else image_file)(digest(value))
            except (OSError, ValueError) as error:  # one that the user's code opened, and that is cut off
                return f"[{error}]"
            if not (self.folder / file).exists():
                kept.append(self._save(file, to_file(value)))
            return file

        table = rollout_table(batch, self.rank, keep)
        return [*kept, self._write(name, table), *rollout_lines(batch, self.rank)]

    def write_credit(
        self, batch: Batch, advantages: Sequence[Sequence[float]], parts: Sequence[Sequence[Line]] | None = None
    ) -> list[Line]:
        """
        Writes the advantage of each turn of a batch's conversations. Returns their lines.

        Args:
            batch (`Batch`): As it was written.
            advantages (`list[list[float]]`): Per conversation and turn.
            parts (`list[list[dict]]`, *optional*): Per conversation, the `name`, `values` and `scales` of each part of
                its advantages, see `CREDIT`.
        """
        if not batch.trajectories:
            return []
        size = len(batch.trajectories)
        columns = {
            "session": batch.sessions,
            "mode": [batch.mode] * size,
            "step": [batch.step] * size,
            "k": [batch.k] * size,
            "advantages": [list(values) for values in advantages],
            "parts": [[] for _ in advantages] if parts is None else parts,
        }
        file = credit_file(batch.mode, batch.step, batch.k, self.rank)
        return [
            self._write(file, pa.table(columns, schema=CREDIT)),
            *(
                {
                    "kind": "credit",
                    "session": session,
                    "advantages": [round(value, 6) for value in values],
                    "file": file,
                    "row": row,
                }
                for row, (session, values) in enumerate(zip(batch.sessions, advantages, strict=True))
            ),
        ]

    def write_updates(self, step: int, rows: list[dict[str, Any]], summaries: list[dict[str, Any]]) -> list[Line]:
        """
        Writes what the trainer computed in an optimiser step. Returns the lines.

        Args:
            step (`int`): The step, from 0.
            rows (`list[dict]`): Rows with the columns of `UPDATES`, except `updated_step`.
            summaries (`list[dict]`): Of each row `mismatch`, `entropy` and `clipped`, as the index has them.
        """
        if not rows:
            return []
        file = updates_file(step, self.rank)
        columns = {name: [row[name] for row in rows] for name in UPDATES.names if name != "updated_step"}
        return [
            self._write(file, pa.table({**columns, "updated_step": [step] * len(rows)}, schema=UPDATES)),
            *(
                {"kind": "update", "session": row["session"], "step": step, **summary, "file": file, "row": number}
                for number, (row, summary) in enumerate(zip(rows, summaries, strict=True))
            ),
        ]

    def append(self, lines: Sequence[Line], rank: int = 0) -> None:
        """
        Appends lines to the index.

        Args:
            lines (`list[dict]`): Of files that are whole.
            rank (`int`, *optional*, defaults to 0): Whose index; only a batch that failed has lines in another's.
        """
        path = self.folder / (INDEX if rank == 0 else f"index.rank{rank}.jsonl")
        with self._refusing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            if path not in self._mended:
                end_with_a_line(path)
                self._mended.add(path)
            with path.open("ab") as file:
                file.write(b"".join(map(written, lines)))

    def save_tokenizer(self, save: Callable[[Path], Any]) -> list[Line]:
        """Calls `save` with the path of the tokenizer's folder. Returns the lines of what it wrote."""
        path = self.folder.parent / TOKENIZER
        with self._refusing(path):
            try:
                save(path)
            except OSError:
                raise
            except Exception as error:  # the library tokenizers raises no narrower one, for a full disk too
                raise OSError(str(error)) from error
            file = path / "tokenizer.json"
            return [_file_line(TOKENIZER_FILE, file.read_bytes())] if file.is_file() else []

    def _write(self, name: str, table: pa.Table) -> Line:
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP, write_page_checksum=True)
        return self._save(name, sink.getvalue())

    def _save(self, name: str, data: bytes | pa.Buffer) -> Line:
        path = self.folder / name
        partial = path.with_suffix(f".{self.rank}.partial")  # processes may write the same image
        with self._refusing(path):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                partial.write_bytes(data)
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        return _file_line(name, data)

    @contextmanager
    def _refusing(self, path: Path) -> Iterator[None]:
        """Raises `RunLogError` for what goes wrong with a file."""
        try:
            yield
        except OSError as error:
            raise RunLogError(
                f"The run's conversations cannot be written to {path}: {error.strerror or error}. Free space or mend "
                "the folder, or choose another `output_dir`."
            ) from error


def _file_line(name: str, data: bytes | pa.Buffer) -> Line:
    return {"kind": "file", "file": name, "size": len(data), "crc32": crc32(data)}


def end_with_a_line(path: Path) -> None:
    """Removes half a line at the end, which a killed run may leave."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def finite(value: float) -> float | None:
    """A number for the index; `None` where it is NaN or infinite."""
    return round(value, 6) if math.isfinite(value) else None


LOGS = ("metrics.jsonl", "audit.jsonl")
"""Files whose lines count the steps that were taken."""
_SAMPLED = re.compile(r"(?:credit-)?(train|eval|discarded)-(\d+)-")
_UPDATES = re.compile(r"updates-(\d+)\.")


def trim(folder: Path, steps: int) -> int:
    """
    Removes what a run recorded after a number of optimiser steps. What it recorded up to there stays byte for byte, an
    evaluation after the last of these steps too.
    """
    last = steps

    def logged(line: dict[str, Any]) -> bool:
        nonlocal last
        last = max(last, line["step"])
        return line["step"] <= steps

    try:
        for path in sorted((folder / FOLDER).glob("index*.jsonl")):
            _keep(path, lambda line: _indexed(line, steps))
        for path in (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ():
            if not _stays(path.name, steps) or path.suffix == ".partial":
                path.unlink()
        for name in LOGS:
            _keep(folder / name, logged)
        for path in folder.glob(".*.partial"):  # of a process that was killed while it wrote one of these
            path.unlink()
    except OSError as error:
        raise RunLogError(
            f"The records of {folder} after step {steps}, from which the run goes on, cannot be removed: "
            f"{error.strerror or error}. Mend the folder, or choose another `output_dir`."
        ) from error
    return last


def _keep(path: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    """Writes a file of JSON lines anew, if some do not stay; half a line at its end goes too."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        if all(_stands(raw, stays) for raw in lines):
            return
        lines.seek(0)
        with written_whole(path) as partial, partial.open("wb") as kept:
            kept.writelines(raw for raw in lines if _stands(raw, stays))


def _stands(raw: bytes, stays: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        return raw.endswith(b"\n") and stays(orjson.loads(raw))
    except (orjson.JSONDecodeError, KeyError, TypeError):  # damage, which a reader names
        return True


def _indexed(line: dict[str, Any], steps: int) -> bool:
    """Whether a line of the index stays."""
    kind = line["kind"]
    if kind == "file":
        return _stays(line["file"], steps)
    if kind in ("rollout", "credit"):
        return _stays(line["session"], steps)
    return kind not in ("update", "step") or line["step"] < steps


def _stays(name: str, steps: int) -> bool:
    """Whether a file or a session stays; both begin with their mode and the steps that were taken before."""
    if found := _SAMPLED.match(name):
        return int(found[2]) < steps or (found[1] == "eval" and int(found[2]) == steps)
    found = _UPDATES.match(name)
    return found is None or int(found[1]) < steps
