"""
The index of a run as columns, so that 50,000 conversations are filtered and sorted at once, and the language of
filters: `stop=timeout reward<0.5 mismatch>.1 "text"`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.imports import did_you_mean

Row = dict[str, Any]
"""A conversation in the index, see `mt_grpo.runlog.index`."""

NUMBERS: dict[str, Callable[[Row], float | None]] = {
    **{name: itemgetter(name) for name in ("step", "k", "group", "turns", "calls", "context", "unique", "forks")},
    **{name: itemgetter(name) for name in ("seconds", "reward", "right", "mismatch", "entropy", "clipped")},
    "member": lambda row: row["member"] + 1,
    "tokens": lambda row: sum(row["tokens"]),
    "errors": lambda row: sum(row["errors"]),
}
"""Columns of numbers, each with its function of a row. Every reward has a further column, and so has `SPREAD`."""

TEXTS = ("mode", "stop", "prompt", "answer", "error", "session")
"""Columns of text."""

SPREAD = "spread"
"""Standard deviation (n − 1, as credit rules have it) of the reward in the group. A group with 0 teaches nothing."""

TOOL = "tool"
"""The tools that a conversation called."""

NOTES = ("star", "note")
"""What people put on a conversation."""

PER_TURN = {"turn_reward": "turn_rewards", "advantage": "advantages"}
"""Columns with a number per turn: a comparison holds where it holds for one of them."""

REWARD = "rewards/"
"""Comes before the name of a reward, to make the name of its column."""


def short_name(reward: str) -> str:
    """The name of a reward without the endings `_reward` and `_func`."""
    return reward.removesuffix("_func").removesuffix("_reward") or reward


class Columns:
    """Conversations in the order in which they were written, by column. Rows may be added and replaced."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.positions: dict[str, int] = {}
        """Where each session's row is."""
        self._numbers = {name: np.zeros(0) for name in NUMBERS}
        self._texts: dict[str, list[str]] = {name: [] for name in TEXTS}
        self._searched: list[str] = []
        self._made: dict[str, np.ndarray] = {}
        self.notes: dict[str, dict[str, Any]] = {}
        """Stars and notes, by session."""
        self._turns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.said: Callable[[str, str, int], np.ndarray] | None = None
        """Which of the first rows have a text in what was said, in the tools called, or in errors."""

    def put(self, rows: list[Row]) -> None:
        """Adds rows. A row replaces the one that its session has already."""
        rows = list({row["session"]: row for row in rows}.values())
        places, searched = [], {}
        for row in rows:
            place = self.positions.setdefault(row["session"], len(self.rows))
            if place == len(self.rows):
                self.rows.append(row)
                for texts in (*self._texts.values(), self._searched):
                    texts.append("")
            self.rows[place] = row
            places.append(place)
            for name in TEXTS:
                self._texts[name][place] = row[name] or ""
            both = row["prompt"], row["answer"]
            if both not in searched:  # many conversations have the same question and answer
                searched[both] = f"{row['prompt']}\n{row['answer'] or ''}".casefold()
            self._searched[place] = searched[both]
        names = {REWARD + name: None for row in rows for name in row["rewards"]}
        for name in {**dict.fromkeys(NUMBERS), **self._numbers, **names}:
            get = NUMBERS.get(name)
            key = name.removeprefix(REWARD)
            values = [row["rewards"].get(key) if get is None else get(row) for row in rows]
            column = np.full(len(self.rows), np.nan)
            old = self._numbers.get(name, column[:0])
            column[: len(old)] = old
            column[places] = np.array([np.nan if value is None else value for value in values], dtype=float)
            self._numbers[name] = column
        self._made.clear()
        self._turns.clear()

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards that any row has."""
        return [name.removeprefix(REWARD) for name in self._numbers if name.startswith(REWARD)]

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers of shape `(rows,)`, NaN for a row without one."""
        if name != SPREAD:
            return self._numbers[name]
        if name not in self._made:
            self._made[name] = self._spread()
        return self._made[name]

    def texts(self, name: str) -> np.ndarray:
        """A column of text as the rank of each value among the sorted values; of the shape `(rows,)`."""
        if name not in self._made:
            texts = self._texts[name]
            ranks = {text: rank for rank, text in enumerate(sorted(set(texts)))}
            self._made[name] = np.fromiter(map(ranks.__getitem__, texts), np.int64, len(texts))
        return self._made[name]

    def is_text(self, name: str, value: str) -> np.ndarray:
        """Whether a column of text has this value; of the shape `(rows,)`, of bool."""
        return np.fromiter((text == value for text in self._texts[name]), bool, len(self.rows))

    @property
    def groups(self) -> np.ndarray:
        """A whole number per row, equal for the members of a group, in the order in which groups were sampled."""
        if "groups" not in self._made:
            key = np.zeros(len(self.rows), np.int64)
            parts = [self.texts("mode"), *map(self.numbers, ("step", "k", "group"))]
            for part in parts:
                key = key * (int(part.max(initial=0)) + 1) + part.astype(np.int64)
            self._made["groups"] = key
        return self._made["groups"]

    def resolve(self, name: str) -> str:
        """
        The column that a name in a filter means. Rewards may be given by their short names.

        Raises:
            FilterError: If there is none.
        """
        if name in NUMBERS or name in TEXTS or name in self._numbers or name in (SPREAD, TOOL, *NOTES, *PER_TURN):
            return name
        name = name.removeprefix("reward.")
        for known in self.rewards:
            if name in (known, short_name(known)):
                return REWARD + known
        names = [*NUMBERS, SPREAD, *TEXTS, TOOL, *NOTES, *PER_TURN, *map(short_name, self.rewards)]
        near = did_you_mean(name, names)
        raise FilterError(f"There is no column {name!r}{near or ': there are ' + ', '.join(names)}.")

    def where(self, conditions: list[Condition]) -> np.ndarray:
        """
        Which rows fulfil all conditions.

        Returns:
            `np.ndarray` of shape `(rows,)`, of bool.

        Raises:
            FilterError: For a column that is not there, or a comparison that makes no sense for it.
        """
        mask = np.ones(len(self.rows), dtype=bool)
        for condition in conditions:
            mask &= self._holds(condition)
        return mask

    def order(self, places: np.ndarray, name: str, descending: bool) -> np.ndarray:
        """Sorts rows by a column, rows without a value last, and equal ones as they were written."""
        name = self.resolve(name)
        values = self.texts(name)[places].astype(float) if name in TEXTS else self.numbers(name)[places]
        return places[np.argsort(-values if descending else values, kind="stable")]

    def _holds(self, condition: Condition) -> np.ndarray:
        if not condition.name:
            wanted = condition.value.casefold()
            there = np.fromiter((wanted in text for text in self._searched), bool, len(self.rows))
            return there | self._said(condition.value, "said")
        name = self.resolve(condition.name)
        if name == TOOL:
            return self._of_tools(condition)
        if name in NOTES:
            return self._noted(name, condition)
        if name in TEXTS:
            return self._is_text(name, condition)
        if name in PER_TURN:
            return self._of_turns(name, condition)
        return self._compared(condition, self.numbers(name))

    def _said(self, text: str, column: str) -> np.ndarray:
        return np.zeros(len(self.rows), bool) if self.said is None else self.said(text, column, len(self.rows))

    def _of_tools(self, condition: Condition) -> np.ndarray:
        if condition.sign not in ("=", "!="):
            raise FilterError(f"`{condition.written}` makes no sense: compare {TOOL} with `=` or `!=`.")
        called = np.zeros(len(self.rows), bool)
        for part in condition.value.split(","):
            called |= self._said(part, TOOL)
        return called if condition.sign == "=" else ~called

    def _noted(self, name: str, condition: Condition) -> np.ndarray:
        """`star=1`, and `note=` with a part of the note; `note!=""` is any note."""
        if condition.sign not in ("=", "!="):
            raise FilterError(f"`{condition.written}` makes no sense: compare {name} with `=` or `!=`.")
        wanted = condition.value.casefold()
        has = np.zeros(len(self.rows), bool)
        for session, noted in self.notes.items():
            if (place := self.positions.get(session)) is not None:
                text = noted["note"].casefold()
                has[place] = noted["star"] if name == "star" else bool(text) and wanted in text
        if wanted in (("0", "no", "false") if name == "star" else ("",)):  # those without
            has = ~has
        return has if condition.sign == "=" else ~has

    def _of_turns(self, name: str, condition: Condition) -> np.ndarray:
        """Which rows have a turn of which a condition holds."""
        if name not in self._turns:
            sizes = [len(row[PER_TURN[name]] or ()) for row in self.rows]
            flat = [value for row in self.rows for value in row[PER_TURN[name]] or ()]
            known = np.array([np.nan if value is None else value for value in flat], dtype=float)
            self._turns[name] = np.repeat(np.arange(len(self.rows)), sizes), known
        places, values = self._turns[name]
        mask = np.zeros(len(self.rows), bool)
        mask[places[self._compared(condition, values)]] = True
        return mask

    def _compared(self, condition: Condition, values: np.ndarray) -> np.ndarray:
        try:
            asked = [float(part) for part in condition.value.split(",")]
        except ValueError:
            raise FilterError(f"`{condition.written}` compares with no number: {condition.name} is one.") from None
        if condition.sign in ("=", "!="):
            equal = np.isclose(values[:, None], np.array(asked), rtol=1e-6, atol=1e-9).any(axis=1)
            return equal if condition.sign == "=" else ~equal & ~np.isnan(values)
        if len(asked) > 1:
            raise FilterError(f"`{condition.written}` compares with several numbers: give one.")
        compare = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}[condition.sign]
        return compare(values, asked[0])

    def _is_text(self, name: str, condition: Condition) -> np.ndarray:
        if condition.sign not in ("=", "!="):
            raise FilterError(f"`{condition.written}` makes no sense: {name} is text, compare it with `=` or `!=`.")
        values = {part.strip().casefold() for part in condition.value.split(",")}
        whole = condition.value.casefold()
        texts = self._texts[name]
        equal = np.fromiter(((low := text.casefold()) in values or low == whole for text in texts), bool, len(texts))
        if name == "error":  # the index has the conversation's own alone
            equal |= self._said(condition.value, "error")
        return equal if condition.sign == "=" else ~equal

    def _spread(self) -> np.ndarray:
        if not self.rows:
            return np.zeros(0)
        groups = np.unique(self.groups, return_inverse=True)[1]
        reward = self.numbers("reward")
        there = ~np.isnan(reward)
        count = np.bincount(groups, there)
        total = np.bincount(groups, np.where(there, reward, 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / count
            square = np.bincount(groups, np.where(there, (reward - mean[groups]) ** 2, 0.0))
            spread = np.sqrt(square / (count - 1))
        spread = np.where(spread < 1e-9, 0.0, spread)
        return np.where(count < 2, np.nan, spread)[groups]  # one reward has nothing to differ from


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
    """
    One term of a filter; all terms of a filter must hold.

    Args:
        name (`str`): The column; empty for text that prompt or answer contains.
        sign (`str`): `=`, `!=`, `<`, `<=`, `>` or `>=`; empty for text.
        value (`str`): What stands behind the sign. With `=` and `!=`, commas separate values of which one must match.
    """

    name: str
    sign: str
    value: str

    @property
    def written(self) -> str:
        """As it may be written again."""
        value = f'"{self.value}"' if not self.sign or re.search(r"\s", self.value) or not self.value else self.value
        return f"{self.name}{self.sign}{value}"


def parse_filter(text: str) -> list[Condition]:
    """
    Reads a filter: terms between spaces. A term is a comparison, or text that prompt or answer contains, in quotes
    where it has spaces.

    Raises:
        FilterError: Says which term cannot be read.
    """
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
