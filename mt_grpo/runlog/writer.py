"""
Writes the files of a run. A file is whole or absent, and the index speaks of whole files only. `trim` takes records
back to a checkpoint: it replaces the index before files go that it spoke of, so that a process which is killed in
between leaves a sound folder, and the next one finishes the work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from zlib import crc32

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from mt_grpo.errors import UserError
from mt_grpo.media import Medium, digest, is_medium, to_file
from mt_grpo.runlog import schema
from mt_grpo.runlog.files import to_json, whole, written_whole
from mt_grpo.runlog.index import written
from mt_grpo.runlog.schema import Row
from mt_grpo.sounds import Sound
from mt_grpo.trajectory import UNWRITTEN, Trajectory

_SHOWN, _SHOWN_OF_ERRORS = 80, 300  # characters of a prompt or an answer in the index, and of an error


class RunLogError(UserError):
    """A run cannot write its conversations. The message is one sentence with the file and the reason."""


@dataclass(frozen=True)
class Batch:
    """Conversations that are sampled and scored together on one process."""

    mode: str  # `train` or `eval`
    step: int  # optimiser steps that were taken before
    k: int  # tells batches of one step apart
    group_size: int  # conversations of a prompt
    numbers: list[int]  # row of each conversation in the batch of all processes
    trajectories: list[Trajectory]
    rewards: list[Row] = field(default_factory=list)  # `name`, `kind` (`turn` or `outcome`), `weight` and `maximum`
    part: int | None = None  # tells the files of a batch apart that is written as its conversations end

    @property
    def sessions(self) -> list[str]:
        """Name of each conversation in the run."""
        return [schema.session_id(self.mode, self.step, self.k, number) for number in self.numbers]

    @property
    def columns(self) -> dict[str, list]:
        """What every file has of each conversation."""
        known = {"mode": self.mode, "step": self.step, "k": self.k}
        return {"session": self.sessions, **{name: [value] * len(self.numbers) for name, value in known.items()}}

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward by name."""
        return {reward["name"]: reward["weight"] for reward in self.rewards}


class RunWriter:
    """
    Writes the files of one process, and returns lines for the index, which the first process appends once all have
    written theirs. Every method raises `RunLogError` if the folder cannot be written.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder).absolute() / schema.FOLDER
        self.rank = rank
        self._mended: set[Path] = set()

    def write(self, batch: Batch) -> list[Row]:
        """Writes the conversations of a batch of this process, each image and sound once. Returns their lines."""
        if not batch.trajectories:
            return []
        kept: list[Row] = []

        def keep(value: Medium) -> str:
            """Writes an image or a sound, and returns the name of its file."""
            try:
                file = f"sound_{digest(value)}.wav" if isinstance(value, Sound) else f"image_{digest(value)}.png"
            except (OSError, ValueError) as error:  # one that the user's code opened, and that is cut off
                return f"[{error}]"
            if not (self.folder / file).exists():
                kept.append(self._save(file, to_file(value)))
            return file

        table = _rollout_table(batch, self.rank, keep)
        return [*kept, self._write(_rollouts_file(batch, self.rank), table), *rollout_lines(batch, self.rank)]

    def write_credit(
        self, batch: Batch, advantages: Sequence[Sequence[float]], parts: Sequence[Sequence[Row]] | None = None
    ) -> list[Row]:
        """Writes the advantage of each turn of a batch, and the parts of each, see `CREDIT`. Returns their lines."""
        if not batch.trajectories:
            return []
        columns = {
            **batch.columns,
            "advantages": [list(values) for values in advantages],
            "parts": [[] for _ in advantages] if parts is None else parts,
        }
        file = f"credit-{_rollouts_file(batch, self.rank)}"
        lines = [self._write(file, pa.table(columns, schema=schema.CREDIT))]
        for row, (session, values) in enumerate(zip(batch.sessions, advantages, strict=True)):
            rounded = [round(value, 6) for value in values]
            lines.append({"kind": "credit", "session": session, "advantages": rounded, "file": file, "row": row})
        return lines

    def write_updates(self, step: int, rows: list[Row], summaries: list[Row]) -> list[Row]:
        """
        Writes what the trainer computed in an optimiser step, `rows` with the columns of `UPDATES`. Returns the lines.
        """
        if not rows:
            return []
        file = f"updates-{step}.rank{self.rank}.parquet"
        columns = {name: [row[name] for row in rows] for name in schema.UPDATES.names if name != "updated_step"}
        lines = [self._write(file, pa.table({**columns, "updated_step": [step] * len(rows)}, schema=schema.UPDATES))]
        for number, (row, summary) in enumerate(zip(rows, summaries, strict=True)):
            known = {"kind": "update", "session": row["session"], "step": step}
            lines.append({**known, **summary, "file": file, "row": number})
        return lines

    def append(self, lines: Sequence[Row], rank: int = 0) -> None:
        """Appends lines of whole files to the index; only a batch that failed has lines in that of another `rank`."""
        path = self.folder / (schema.INDEX if rank == 0 else f"index.rank{rank}.jsonl")
        with self._refusing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            if path not in self._mended:
                end_with_a_line(path)
                self._mended.add(path)
            with path.open("ab") as file:
                file.write(b"".join(map(written, lines)))

    def save_tokenizer(self, save: Callable[[Path], object]) -> list[Row]:
        """Calls `save` with the path of the tokenizer's folder. Returns the lines of what it wrote."""
        path = self.folder.parent / schema.TOKENIZER
        with self._refusing(path):
            try:
                save(path)
            except OSError:
                raise
            except Exception as error:  # the library tokenizers raises no narrower one, for a full disk too
                raise OSError(str(error)) from error
            file = path / "tokenizer.json"
            return [_file_line(schema.TOKENIZER_FILE, file.read_bytes())] if file.is_file() else []

    def _write(self, name: str, table: pa.Table) -> Row:
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", row_group_size=schema.ROW_GROUP, write_page_checksum=True)
        return self._save(name, sink.getvalue())

    def _save(self, name: str, data: bytes | pa.Buffer) -> Row:
        path = self.folder / name
        with self._refusing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as partial:
                partial.write_bytes(data)
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


def _rollouts_file(batch: Batch, rank: int) -> str:
    part = "" if batch.part is None else f".part{batch.part}"
    return f"{batch.mode}-{batch.step}-{batch.k}.rank{rank}{part}.parquet"


def _file_line(name: str, data: bytes | pa.Buffer) -> Row:
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


@dataclass(frozen=True)
class _Weighted:
    """The weighted rewards of a conversation, `None` where none applies."""

    total: float | None
    turns: list[float | None]
    by_name: dict[str, float | None]

    @classmethod
    def of(cls, trajectory: Trajectory, weights: dict[str, float]) -> _Weighted:
        """The rewards of a conversation; none if it was not scored."""
        turn_rewards = trajectory.rewards.get("turn", {})
        outcomes = trajectory.rewards.get("outcome", {})
        turns = [
            _sum(_times(weights[name], values[index]) for name, values in turn_rewards.items())
            for index in range(len(trajectory.turns))
        ]
        total = _sum([*turns, *(_times(weights[name], value) for name, value in outcomes.items())])
        return cls(total, turns, {name: _sum(values) for name, values in turn_rewards.items()} | outcomes)


def _times(weight: float, value: float | None) -> float | None:
    return None if value is None else weight * value


def _sum(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def _rollout_table(batch: Batch, rank: int, keep: Callable[[Medium], str]) -> pa.Table:
    """The conversations of a batch with the columns of `ROLLOUTS`; `keep` writes an image or sound to a file."""
    weights, size = batch.weights, len(batch.trajectories)
    weighted = [_Weighted.of(trajectory, weights) for trajectory in batch.trajectories]
    trees = [trajectory.tree for trajectory in batch.trajectories]
    nodes = [tree.nodes for tree in trees]
    columns: dict[str, object] = {
        **batch.columns,
        "rank": [rank] * size,
        "group": [number // batch.group_size for number in batch.numbers],
        "member": [number % batch.group_size for number in batch.numbers],
        "stop": [trajectory.stop_reason and trajectory.stop_reason.value for trajectory in batch.trajectories],
        "reward": [each.total for each in weighted],
        "turn_rewards": [each.turns for each in weighted],
        "weights": [to_json(weights)] * size,
        "record": [record_of(trajectory, keep) for trajectory in batch.trajectories],
        "tokens": _lists([[node.tokens for node in each] for each in nodes], np.int32),
        "logprobs": _lists([[node.logprobs for node in each if node.turn >= 0] for each in nodes], np.float32),
        "node_parent": [[node.parent for node in each] for each in nodes],
        "node_turn": [[node.turn for node in each] for each in nodes],
        "node_size": [[len(node.tokens) for node in each] for each in nodes],
        "num_turns": [tree.num_turns for tree in trees],
        "tip": [tree.tip for tree in trees],
    }
    return pa.table(columns, schema=schema.ROLLOUTS)


def _lists(rows: Sequence[Sequence[Sequence[float]]], kind: type) -> pa.Array:
    """A column of lists, each given in parts. It is much faster than pyarrow's conversion of Python lists."""
    sizes = [sum(map(len, parts)) for parts in rows]
    values: np.ndarray = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), dtype=kind, count=sum(sizes))
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def record_of(trajectory: Trajectory, keep: Callable[[Medium], str]) -> bytes:
    """A conversation as JSON, without its tokens, its messages once: images and sounds are what `keep` returns."""
    fields = {
        name: getattr(trajectory, name)
        for name in Trajectory.__dataclass_fields__
        if name not in (*UNWRITTEN, "tree", "turns", "stop_reason")
    }
    fields["turns"] = [{**vars(turn), "tool_calls": list(map(vars, turn.tool_calls))} for turn in trajectory.turns]
    fields["stop_reason"] = trajectory.stop_reason and trajectory.stop_reason.value
    # half a character, which an environment may write, as the escape that JSON has for it
    plain = to_json(fields, default=lambda value: keep(value) if is_medium(value) else str(value))
    return plain.encode("utf-8", "backslashreplace")


def rollout_lines(batch: Batch, rank: int) -> list[Row]:
    """The index's lines of a batch."""
    file, lines = _rollouts_file(batch, rank), []
    known = list(zip(batch.sessions, batch.numbers, batch.trajectories, strict=True))
    by_session = {trajectory.session: (trajectory, session) for session, _, trajectory in known}
    for row, (session, number, trajectory) in enumerate(known):
        weighted = _Weighted.of(trajectory, batch.weights)
        turns = trajectory.turns
        lines.append(
            {
                "kind": "rollout",
                "session": session,
                "mode": batch.mode,
                "step": batch.step,
                "k": batch.k,
                "rank": rank,
                "group": number // batch.group_size,
                "member": number % batch.group_size,
                "prompt": question_of(trajectory),
                "stop": trajectory.stop_reason and trajectory.stop_reason.value,
                "error": trajectory.error and _short(trajectory.error, _SHOWN_OF_ERRORS),
                "where": trajectory.where,
                "answer": trajectory.answer and _short(str(trajectory.answer)),
                "right": _right(batch, weighted),
                "turns": len(turns),
                "tokens": [turn.num_tokens for turn in turns],
                "context": max((turn.context_length for turn in turns), default=0),
                "sampled": _digest(trajectory),
                "unique": trajectory.tree.num_tokens,
                "forks": max(0, trajectory.tree.num_sequences - 1),
                "reward": _rounded(weighted.total),
                "rewards": {name: _rounded(value) for name, value in weighted.by_name.items()},
                "turn_rewards": list(map(_rounded, weighted.turns)),
                "calls": sum(len(turn.tool_calls) for turn in turns),
                "errors": [turn.num_failures for turn in turns],
                **_failed_calls(trajectory),
                "refused": sum(trajectory.refusals.values()),
                "first_refused": next((_short(why, _SHOWN_OF_ERRORS) for why in trajectory.refusals), None),
                **_branch(trajectory, by_session),
                "start": _rounded(trajectory.start, 3),
                "seconds": _rounded(trajectory.seconds, 3),
                "turn_seconds": [_rounded(turn.seconds, 3) for turn in turns],
                "tool_seconds": [
                    _rounded(max((call.seconds for call in turn.tool_calls), default=0.0), 3) for turn in turns
                ],
                "file": file,
                "row": row,
            }
        )
    return lines


def _digest(trajectory: Trajectory) -> int:
    """A checksum of the sampled tokens."""
    digest = 0
    for node in trajectory.tree.nodes:
        if node.turn >= 0:
            digest = crc32(np.array(node.tokens, np.int64).tobytes(), digest)
    return digest


def _branch(trajectory: Trajectory, by_session: dict[str, tuple[Trajectory, str]]) -> Row:
    """Of a branch, the conversation that it is one of, and how many turns it shares with it."""
    if trajectory.branch_of not in by_session:
        return {}
    trunk, session = by_session[trajectory.branch_of]
    same = [own.start == other.start for own, other in zip(trajectory.turns, trunk.turns, strict=False)]
    return {"branch_of": session, "shared_turns": [*same, False].index(False)}


def _failed_calls(trajectory: Trajectory) -> Row:
    """Calls that raised in their tool's code, those that failed otherwise, and the first of each."""
    tried = [call for turn in trajectory.turns for call in turn.tool_calls if turn.replies or call.executed]
    failed = [call for call in tried if call.error is not None]
    raised = [f"{call.name}: {call.error} ({call.where})" for call in failed if call.where]
    others = [call.error or "" for call in failed if not call.where]
    return {
        "raised": len(raised),
        "first_raised": _short(raised[0], _SHOWN_OF_ERRORS) if raised else None,
        "failed": len(others),
        "first_failed": _short(others[0], _SHOWN_OF_ERRORS) if others else None,
    }


def _right(batch: Batch, weighted: _Weighted) -> bool | None:
    outcomes = [reward for reward in batch.rewards if reward["kind"] == "outcome"]
    exact = [reward for reward in outcomes if "exact_match" in reward["name"]]
    for reward in [*exact, *outcomes][:1]:
        value = weighted.by_name.get(reward["name"])
        return None if value is None else value >= reward["maximum"]
    return None


def question_of(trajectory: Trajectory) -> str:
    """The last message of the user in a prompt, shortened."""
    messages = trajectory.prompt if isinstance(trajectory.prompt, list) else [{"content": trajectory.prompt}]
    asked = [message for message in messages if message.get("role", "user") == "user"] or messages
    content = asked[-1].get("content") if asked else ""
    if isinstance(content, list):  # content in parts
        content = " ".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return _short(str(content or ""))


def _short(text: str, size: int = _SHOWN) -> str:
    text = " ".join(text[: 4 * size].split())
    text = text if len(text) <= size else text[: size - 1] + "…"
    return whole(text)


def _rounded(value: float | None, digits: int = 6) -> float | None:
    return None if value is None else round(value, digits)


_LOGS = (schema.METRICS, "audit.jsonl")  # files whose lines count the steps that were taken
_SAMPLED = re.compile(r"(?:credit-)?(train|eval|discarded)-(\d+)-")
_UPDATES = re.compile(r"updates-(\d+)\.")


def trim(folder: Path, steps: int) -> int:
    """Removes what a run recorded after so many optimiser steps; all else stays byte for byte."""
    last = steps

    def logged(line: Row) -> bool:
        nonlocal last
        last = max(last, line["step"])
        return line["step"] <= steps

    try:
        for path in sorted((folder / schema.FOLDER).glob("index*.jsonl")):
            _keep(path, lambda line: _indexed(line, steps))
        for path in (folder / schema.FOLDER).iterdir() if (folder / schema.FOLDER).is_dir() else ():
            if not _stays(path.name, steps) or path.suffix == ".partial":
                path.unlink()
        for name in _LOGS:
            _keep(folder / name, logged)
        for path in folder.glob(".*.partial"):  # of a process that was killed while it wrote one of these
            path.unlink()
    except OSError as error:
        raise RunLogError(
            f"The records of {folder} after step {steps}, from which the run goes on, cannot be removed: "
            f"{error.strerror or error}. Mend the folder, or choose another `output_dir`."
        ) from error
    return last


def _keep(path: Path, stays: Callable[[Row], bool]) -> None:
    """Writes a file of JSON lines anew, if some do not stay; half a line at its end goes too."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        if all(_stands(raw, stays) for raw in lines):
            return
        lines.seek(0)
        with written_whole(path) as partial, partial.open("wb") as kept:
            kept.writelines(raw for raw in lines if _stands(raw, stays))


def _stands(raw: bytes, stays: Callable[[Row], bool]) -> bool:
    try:
        return raw.endswith(b"\n") and stays(orjson.loads(raw))
    except (orjson.JSONDecodeError, KeyError, TypeError):  # damage, which a reader names
        return True


def _indexed(line: Row, steps: int) -> bool:
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
