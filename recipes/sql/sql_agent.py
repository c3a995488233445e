"""A SQL agent over a read-only database per row, and rewards for queries that run and find the answer."""

from __future__ import annotations

import math
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.tools import load_tools
from mt_grpo.trajectory import Message, ToolCall, Trajectory, Turn

READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
SECONDS, ROWS = 2.0, 20
"""What a query may take, and how many of its rows are shown."""


def read(path: Path, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and first rows of a query that only reads; raises `sqlite3.Error` for any other, and for a slow one."""
    end = time.monotonic() + SECONDS
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)
        database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
        database.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        cursor = database.execute(sql)
        return [column[0] for column in cursor.description], cursor.fetchmany(ROWS + 1)


class SQLAgent(MultiTurnToolEnv):
    """One conversation over the database of the row's column `database`, or else of the variable `DATABASE`."""

    async def reset(self, row: dict[str, Any]) -> list[Message]:
        self.database = Path(row.get("database") or os.environ["DATABASE"]).resolve(strict=True)
        tools = load_tools([self.schema, self.query])  # bound to this conversation's copy
        self.tools = {tool.name: tool for tool in tools}
        return await super().reset(row)

    def schema(self) -> str:
        """Shows the tables of the database and their columns."""
        return "\n".join(sql for (sql,) in read(self.database, "SELECT sql FROM sqlite_master")[1])

    def query(self, sql: str) -> tuple[str, dict[str, Any]]:
        """
        Runs a query, and shows its first rows.

        Args:
            sql: One SELECT in SQLite's dialect.
        """
        columns, rows = read(self.database, sql)
        lines = [" | ".join(map(str, row)) for row in [columns, *rows[:ROWS]]]
        more = [f"(more rows; the first {ROWS} are shown)"] if len(rows) > ROWS else []
        return "\n".join([*lines, *more] if rows else ["no rows"]), {"rows": rows[:ROWS]}


def same(said: object, answer: str) -> bool:
    """Whether an answer is the right one: numbers to a hundredth, texts but for case."""
    try:
        return math.isclose(float(str(said).replace(",", "")), float(answer), abs_tol=0.01, rel_tol=0)
    except ValueError:
        return str(said).strip(" .").casefold() == answer.casefold()


def queries(turn: Turn) -> list[ToolCall]:
    """The queries of a turn."""
    return [call for call in turn.tool_calls if call.name == "query"]


def finds(turn: Turn, answer: str) -> bool:
    """Whether a query of the turn has the answer in its first row, among two values at most: `SELECT *` finds none."""
    first = [call.data["rows"][0] for call in queries(turn) if call.data and call.data["rows"]]
    return any(same(value, answer) for values in first if len(values) <= 2 for value in values)


class Runs(TurnReward):
    """The share of a turn's queries that ran; none for a turn without any."""

    weight = 0.1

    def score(self, turn: Turn, trajectory: Trajectory, **row: Any) -> float | None:
        ran = [call.error is None for call in queries(turn)]
        return sum(ran) / len(ran) if ran else None


class Finds(TurnReward):
    """One for the first turn whose query finds the answer."""

    weight = 0.3

    def score(self, turn: Turn, trajectory: Trajectory, answer: str, **row: Any) -> float:
        before = trajectory.turns[: turn.index]
        return float(finds(turn, answer) and not any(finds(each, answer) for each in before))


class Right(OutcomeReward):
    """One for the right answer."""

    def score(self, trajectory: Trajectory, answer: str, **row: Any) -> float:
        return float(trajectory.answer is not None and same(trajectory.answer, answer))
