"""
`rollouts/index.jsonl`: a JSON object per line, appended once the files that it speaks of are whole.

Every line has `kind`. A line of a kind or with a field that is not listed here is to be passed over.

| kind | field | type, unit | what |
| --- | --- | --- | --- |
| `run` | `version` | int | of this format |
| | `started` | float, s | since 1970 (UTC); a resumed run adds a line of its own |
| | `group_size`, `group_size_eval` | int | conversations of a prompt |
| | `processes` | int | that write files |
| | `rewards` | list | of `{"name", "kind": "turn" or "outcome", "weight", "maximum"}` |
| | `estimator` | str or dict | the credit rule |
| | `model` | str | name or folder of the model |
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
| | `unique` | int | tokens of the tree, each once |
| | `forks` | int | root-to-leaf sequences less one |
| | `reward` | float or null | weighted total; null where no reward applies |
| | `rewards` | dict | each by name, not weighted; turn rewards summed over turns; null where it does not apply |
| | `turn_rewards` | list of float or null | weighted sum of turn rewards, per turn |
| | `calls` | int | tool calls |
| | `errors` | list of int | failed attempts at calls, per turn |
| | `start` | float or null, s | since 1970 (UTC) |
| | `seconds` | float, s | wall time of the conversation |
| | `turn_seconds` | list of float, s | time of the engine, per turn |
| | `tool_seconds` | list of float, s | longest call, per turn |
| | `file`, `row` | str, int | file in `rollouts/` and row in it; its row group is `row // 16` |
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

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from mt_grpo.errors import UserError

_LATER = {
    "advantages": None,
    "credit_file": None,
    "credit_row": None,
    "mismatch": None,
    "entropy": None,
    "clipped": None,
}


def _add_credit(row: dict[str, Any], line: dict[str, Any]) -> None:
    row["advantages"], row["credit_file"], row["credit_row"] = line["advantages"], line["file"], line["row"]


def _add_update(row: dict[str, Any], line: dict[str, Any]) -> None:
    # a step that is taken again replaces the updates of it and of later ones
    updates = [update for update in row["updates"] if update["step"] < line["step"]]
    if not updates:
        row["mismatch"], row["entropy"] = line["mismatch"], line["entropy"]
    row["clipped"] = line["clipped"]
    row["updates"] = [*updates, {name: line[name] for name in ("step", "file", "row")}]


_ADDED = {"credit": _add_credit, "update": _add_update}
"""What lines add to the row of their session, by kind."""


@dataclass
class Index:
    """
    The lines of an index, merged. It is read on with `read`, which looks at what was added only.

    Args:
        rows (`list[dict]`): A row per session, in the order in which they were first written.
        steps (`list[dict]`): The lines of kind `step`, one per step, in order.
        run (`dict`): The latest line of kind `run`; empty where there is none.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)
    _offsets: dict[Path, int] = field(default_factory=dict)

    def read(self, folder: Path) -> list[int]:
        """
        Reads what was added to the index files of a folder. Where another run has taken the folder's place, it begins
        anew.

        Returns:
            `list[int]`: Positions in `rows` of the sessions that are added or changed.

        Raises:
            UserError: If a whole line is no JSON.
        """
        changed: set[int] = set()
        paths = sorted(folder.glob("index*.jsonl"))
        if any(path not in paths or path.stat().st_size < offset for path, offset in self._offsets.items()):
            self.rows, self.steps, self.run, self._places, self._offsets = [], [], {}, {}, {}
        for path in paths:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                added = file.read()
            whole = added.rfind(b"\n") + 1  # the last line may be half written
            try:
                lines = list(map(orjson.loads, added[:whole].splitlines()))
            except orjson.JSONDecodeError as error:
                raise UserError(
                    f"{path} has a line that is no JSON ({error}): remove the line; the conversations stay in the "
                    "Parquet files beside it."
                ) from None
            self._offsets[path] = self._offsets.get(path, 0) + whole
            changed.update(self._merge(lines))
        return sorted(changed)

    def _merge(self, lines: Iterable[dict[str, Any]]) -> Iterable[int]:
        for line in lines:
            kind = line.pop("kind")
            if kind == "step":
                self._add_step(line)
            elif kind == "run":
                self.run = line
            elif kind == "rollout":
                yield self._add_rollout(line)
            elif kind in _ADDED and (place := self._places.get(line["session"])) is not None:
                _ADDED[kind](self.rows[place], line)
                yield place

    def _add_rollout(self, line: dict[str, Any]) -> int:
        line |= _LATER
        line["updates"] = []
        place = self._places.setdefault(line["session"], len(self.rows))
        if place == len(self.rows):
            self.rows.append(line)
        else:
            self.rows[place] = line
        return place

    def _add_step(self, line: dict[str, Any]) -> None:
        while self.steps and self.steps[-1]["step"] >= line["step"]:  # a resumed run takes them again
            self.steps.pop()
        self.steps.append(line)

    def place(self, session: str) -> int | None:
        """Position of a session in `rows`."""
        return self._places.get(session)
