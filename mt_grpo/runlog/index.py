"""
`rollouts/index.jsonl`: a JSON object per line, appended once the files that it speaks of are whole.

Every line has `kind`. Readers pass over kinds and fields that are not listed here. The last field of each line, `crc`,
is the CRC-32 of the line's bytes before `,"crc":`, as eight hexadecimal digits.

| kind | field | type, unit | what |
| --- | --- | --- | --- |
| `run` | `version` | int | of this format |
| | `started` | float, s | since 1970 (UTC); a resumed run adds a line of its own |
| | `group_size`, `group_size_eval` | int | conversations of a prompt |
| | `processes` | int | that write files |
| | `rewards` | list | of `{"name", "kind": "turn" or "outcome", "weight", "maximum"}` |
| | `estimator` | str or dict | the credit rule, as it was given |
| | `rule` | dict | its `name` and every option that it is called with; old indices lack it |
| | `rule_says` | str or null | the first paragraph of its docstring; old indices lack it |
| | `model` | str | name or folder of the model |
| | `tools` | list of str | names of the tools that are known at the start; old indices lack it |
| | `chat_template_kwargs` | dict | variables of the chat template; old indices lack it |
| | `command`, `versions` | str, dict | what was called; versions of packages; old indices lack them |
| | `options` | dict | those that differ from their defaults; old indices lack it |
| `rollout` | `session` | str | unique in the run; a later line replaces this one and its credit and updates |
| | `mode`, `step`, `k`, `rank` | | see `schema` |
| | `group`, `member` | int | group in the batch (unique with `mode`, `step`, `k`), place in the group |
| | `prompt` | str | last user message, the first 80 characters |
| | `stop` | str or null | why it ended |
| | `error` | str or null | the failure behind it, the first 300 characters |
| | `where` | str or null | where the user's code raised it, as `FILE, line N, in FUNCTION`; old indices lack it |
| | `answer` | str or null | final answer, the first 80 characters |
| | `right` | bool or null | whether the first outcome reward is at its maximum; null where it does not apply |
| | `turns` | int | number of turns |
| | `tokens` | list of int | tokens sampled, per turn |
| | `context` | int | tokens of the longest context that the model was given |
| | `sampled` | int | the same for conversations that sampled the same tokens; old indices lack it |
| | `unique` | int | tokens of the tree, each once |
| | `forks` | int | root-to-leaf sequences less one |
| | `reward` | float or null | weighted total; null where no reward applies |
| | `rewards` | dict | each by name, not weighted; turn rewards summed over turns; null where it does not apply |
| | `turn_rewards` | list of float or null | weighted sum of turn rewards, per turn |
| | `calls` | int | tool calls |
| | `errors` | list of int | failed attempts at calls, per turn |
| | `raised` | int | calls that raised in the code of their tool; old indices lack it |
| | `first_raised` | str or null | tool, error and place of the first of them, 300 characters |
| | `failed` | int | calls that failed otherwise: refused, out of time, or as their tool said; old indices lack it |
| | `first_failed` | str or null | tool and error of the first of them, 300 characters |
| | `refused` | int | requests of an agent that were refused, limits apart; old indices lack it |
| | `first_refused` | str or null | why the first of them was, 300 characters |
| | `branch_of`, `shared_turns` | str, int | of a branch: the session it belongs to, and turns it shares with it |
| | `start` | float or null, s | since 1970 (UTC) |
| | `seconds` | float, s | wall time of the conversation |
| | `turn_seconds` | list of float, s | time of the engine, per turn |
| | `tool_seconds` | list of float, s | longest call, per turn |
| | `file`, `row` | str, int | file in `rollouts/` and row in it; its row group is `row // 16` |
| `file` | `file` | str | a whole file in `rollouts/`, or `tokenizer/tokenizer.json` |
| | `size`, `crc32` | int | its bytes and their CRC-32 |
| `credit` | `session` | str | |
| | `advantages` | list of float | per turn |
| | `file`, `row` | | in the credit file |
| `update` | `session` | str | |
| | `step` | int | of the update |
| | `mismatch` | float, nats | largest absolute difference of the engine's and the trainer's log-prob |
| | `entropy` | float, nats | mean over trained tokens |
| | `clipped` | float | share of trained tokens that the loss clips |
| | `file`, `row` | | in the updates file |
| `step` | `step` | int | of the update, from 0; `metrics.jsonl` logs it as `step + 1` |
| | `start` | float, s | since 1970 (UTC) |
| | `seconds` | float, s | wall time |
| | `sampling`, `rewards`, `sync`, `training` | float, s | its parts on the main process; `training` is the rest |

The reader merges the lines of a session into one row: the fields of `rollout`; `advantages`, `credit_file` and
`credit_row` of `credit` (null before it is there); `mismatch`, `entropy` and `clipped` of `update` (`mismatch` and
`entropy` of the first update of the conversation, `clipped` of the latest; null before), and `updates`, a list of
`{"step", "file", "row"}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import orjson

from mt_grpo.errors import UserError
from mt_grpo.runlog import files
from mt_grpo.runlog.files import SHAPES, misfit, to_json
from mt_grpo.runlog.schema import FOLDER
from mt_grpo.runlog.table import Table, block_of

PART = 2**23
"""Bytes that are read at a time."""
NEAR = 2**16
"""Bytes at a time in which the end of a line is looked for."""

Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]

_CHECKSUM = len(b',"crc":"01234567"}')
_ENDED = re.compile(rb',"crc":"[0-9a-f]{8}"\}.', re.DOTALL)
"""A whole line that something else than a line feed ends."""


def written(line: dict[str, Any]) -> bytes:
    """A line as it stands in an index, with its checksum."""
    head = to_json(line, separators=(",", ":"))[:-1].encode()
    return head + b',"crc":"%08x"}\n' % crc32(head)


def _parsed(raw: bytes) -> dict[str, Any]:
    line = orjson.loads(raw)
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        raise ValueError("it has no `kind`")
    checksum = line.pop("crc", None)
    if checksum is not None and raw[-_CHECKSUM:] != b',"crc":"%08x"}' % crc32(raw[:-_CHECKSUM]):
        raise ValueError("its checksum is another")
    wrong = misfit(line["kind"], line) if line["kind"] in SHAPES else None
    if wrong is not None:
        raise ValueError(wrong)
    return line


Part = list[tuple[str, Any]]
"""What a part of an index says, in order: lines of other kinds as they are, and blocks of a `Table`, by kind."""


def read_part(folder: Path, name: str, bounds: tuple[int, int, int]) -> tuple[int, Part]:
    """A part of a file of an index, which another process may read."""
    begin, end, size = bounds
    added = files.read(folder, name, begin, end - begin) or b""
    whole = added.rfind(b"\n") + 1  # the last line may be half written
    return begin + whole, list(_blocks(_lines(folder / name, added, whole, end >= size)))


def _bounds(folder: Path, name: str, begin: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The parts of a file from `begin` on; each but the last ends with a line."""
    while begin < size:
        end = begin + PART
        while end < size:
            near = files.read(folder, name, end, NEAR) or b""
            found = near.find(b"\n")
            end += len(near) if found < 0 else found + 1
            if found >= 0 or not near:
                break
        yield begin, min(end, size), size
        begin = end


def lines_of(folder: Path, head: bytes) -> Iterator[dict[str, Any]]:
    """
    The lines of an index that begin with `head`. The others are not parsed, which takes most of the time of `Index`.
    """
    for path in sorted((folder / FOLDER).glob("index*.jsonl")):
        data = files.read(folder, f"{FOLDER}/{path.name}") or b""
        yield from _lines(path, data, data.rfind(b"\n") + 1, False, head)


def evaluated(folder: Path) -> Table:
    """The rows of a run's evaluations alone. Raises `UserError` as `lines_of`."""
    rows = Table()
    for kind, block in _blocks(lines_of(folder, b'{"kind":"rollout","session":"eval-')):
        rows.add(kind, block)
    return rows


def _lines(path: Path, added: bytes, whole: int, last: bool, head: bytes = b"") -> Iterator[dict[str, Any]]:
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


def _blocks(lines: Iterable[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Lines as what they say, see `Part`."""
    waiting: dict[str, dict[str, dict[str, Any]]] = {"rollout": {}, "credit": {}, "update": {}}
    rollouts, credit, updates = waiting.values()

    def together() -> Iterator[tuple[str, Any]]:
        for kind, of_kind in waiting.items():
            if of_kind:
                yield kind, block_of(kind, list(of_kind.values()))
                of_kind.clear()

    for line in lines:
        kind = line.pop("kind")
        if kind not in waiting:
            yield kind, line
            continue
        session, of_kind = line["session"], waiting[kind]
        # a row replaces what was said of its session before; a block has one line of a session
        if session in of_kind or (kind == "rollout" and (session in credit or session in updates)):
            yield from together()
        of_kind[session] = line
    yield from together()


@dataclass
class Index:
    """The lines of an index, merged. `read` reads only what was added since it was called last."""

    rows: Table = field(default_factory=Table)
    steps: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    _offsets: dict[str, int] = field(default_factory=dict)
    _inodes: dict[str, int] = field(default_factory=dict)

    def read(self, folder: Path, each: Each = map) -> np.ndarray:
        """
        Reads what was added to the index files of a folder. If a file is gone, another or shorter, a run has replaced
        this one or has trimmed it, and everything is read again.
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
            offset = self._offsets.get(name, 0)
            # part by part: lines take several times as much memory as their bytes
            bounds = list(_bounds(folder, name, offset, size))
            for end, part in (each if len(bounds) > 1 else map)(partial(read_part, folder, name), bounds):
                changed += self._merge(part)
                self._offsets[name] = end
        return np.unique(np.concatenate(changed))

    def _merge(self, part: Part) -> Iterator[np.ndarray]:
        for kind, found in part:
            if kind in ("rollout", "credit", "update"):
                yield self.rows.add(kind, found)
            elif kind == "step":
                self._add_step(found)
            elif kind == "run":
                self.run = found
            elif kind == "file":
                self.files[found["file"]] = found["size"], found["crc32"]

    def _add_step(self, line: dict[str, Any]) -> None:
        while self.steps and self.steps[-1]["step"] >= line["step"]:  # a resumed run takes them again
            self.steps.pop()
        self.steps.append(line)

    def place(self, session: str) -> int | None:
        """Position of a session in `rows`."""
        return self.rows.places.get(session)
