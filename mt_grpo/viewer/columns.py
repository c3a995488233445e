"""
The index of a run as columns, so that 50,000 conversations are filtered and sorted at once, and the language of
filters: `stop=timeout reward<0.5 mismatch>.1 "text"`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.imports import did_you_mean
from mt_grpo.runlog.index import Table
from mt_grpo.runlog.schema import Row

_NUMBERS = (
    *("step", "k", "group", "turns", "calls", "context", "unique", "forks", "refused"),
    *("seconds", "reward", "right", "mismatch", "entropy", "clipped"),
    *("member", "tokens", "errors", "copy"),
)
"""Columns of numbers. Every reward has a further column, and so have `SPREAD` and `SIGNAL`."""

_TEXTS = ("mode", "stop", "prompt", "answer", "error", "session")  # columns of text

SPREAD = "spread"
"""Standard deviation (n − 1, as credit rules have it) of the reward in the group, of which copies do not count."""

SIGNAL = "signal"
"""
1 for the conversations of a group that teaches something, else 0; NaN for one without others. It does if a turn of the
group has an advantage, or, where none is recorded as in an evaluation, if members earned differently.
"""

TOOL = "tool"  # the tools that a conversation called

_NOTES = ("star", "note")  # what people put on a conversation

_PER_TURN = {"turn_reward": "turn_rewards", "advantage": "advantages"}
"""Columns with a number per turn: a comparison holds where it holds for one of them."""

REWARD = "rewards/"  # comes before the name of a reward, to make the name of its column


def short_name(reward: str) -> str:
    """The name of a reward without the endings `_reward` and `_func`."""
    return reward.removesuffix("_func").removesuffix("_reward") or reward


class Columns:
    """Conversations in the order in which they were written, by column."""

    def __init__(self, rows: Table) -> None:
        self.rows = rows
        self._size = len(rows)
        self._made: dict[str, np.ndarray] = {}
        self._searched: dict[str, list[str]] = {}
        self.notes: dict[str, Row] = {}  # stars and notes, by session
        self._turns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.said: Callable[[str, str, int], np.ndarray] | None = None
        """Which of the first rows have a text in what was said, in the tools called, or in errors."""

    @property
    def positions(self) -> dict[str, int]:
        """Where each session's row is."""
        return self.rows.places

    def change(self) -> None:
        """Takes in the rows that were added or changed."""
        self._size = len(self.rows)
        self._made.clear()
        self._turns.clear()

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards that any row has."""
        return self.rows.reward_names

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers of shape `(rows,)`, NaN for a row without one."""
        if name not in self._made:
            self._made[name] = self._numbers(name)
        return self._made[name]

    def _numbers(self, name: str) -> np.ndarray:
        if name == SPREAD:
            return self._spread()
        if name == SIGNAL:
            return self._signal()
        if name.startswith(REWARD):
            return self.rows.reward(name.removeprefix(REWARD))
        if name == "copy":
            return self.rows.copies.astype(float)
        if name in ("tokens", "errors"):
            return self.rows.totals(name)
        return self.rows.numbers(name).astype(float) + (name == "member")

    def texts(self, name: str) -> np.ndarray:
        """A column of text as the rank of each value among the sorted values; of the shape `(rows,)`."""
        key = f"rank of {name}"
        if key not in self._made:
            if name == "session":
                sessions = self.rows.sessions
                ranks = np.empty(self._size, np.int64)
                ranks[sorted(range(self._size), key=sessions.__getitem__)] = np.arange(self._size)
            else:
                codes, values = self.rows.codes(name)
                places = {text: rank for rank, text in enumerate(sorted({text or "" for text in values}))}
                ranks = np.array([places[text or ""] for text in values])[codes]
            self._made[key] = ranks
        return self._made[key]

    def is_text(self, name: str, value: str) -> np.ndarray:
        """Whether a column of text has this value; of the shape `(rows,)`, of bool."""
        return self._where_text(name, lambda text: text == value)

    def _where_text(self, name: str, holds: Callable[[str], bool]) -> np.ndarray:
        """Of which rows the text fulfils a condition, which is asked once of each text."""
        if name == "session":
            return np.fromiter(map(holds, self.rows.sessions[: self._size]), bool, self._size)
        codes, values = self.rows.codes(name)
        return np.fromiter((holds(text or "") for text in values), bool, len(values))[codes]

    @property
    def groups(self) -> np.ndarray:
        """A whole number per row, equal for the members of a group, in the order in which groups were sampled."""
        if "groups" not in self._made:
            key = np.zeros(self._size, np.int64)
            parts = [self.texts("mode"), *map(self.numbers, ("step", "k", "group"))]
            for part in parts:
                key = key * (int(part.max(initial=0)) + 1) + part.astype(np.int64)
            self._made["groups"] = key
        return self._made["groups"]

    def resolve(self, name: str) -> str:
        """The column that a name in a filter means. Rewards may be given by their short names."""
        if name in _NUMBERS or name in _TEXTS or name in (SPREAD, SIGNAL, TOOL, *_NOTES, *_PER_TURN):
            return name
        name = name.removeprefix("reward.").removeprefix(REWARD)
        for known in self.rewards:
            if name in (known, short_name(known)):
                return REWARD + known
        names = [*_NUMBERS, SPREAD, SIGNAL, *_TEXTS, TOOL, *_NOTES, *_PER_TURN, *map(short_name, self.rewards)]
        near = did_you_mean(name, names)
        raise FilterError(f"There is no column {name!r}{near or ': there are ' + ', '.join(names)}.")

    def where(self, conditions: list[Condition]) -> np.ndarray:
        """Which rows fulfil all conditions."""
        mask = np.ones(self._size, dtype=bool)
        for condition in conditions:
            mask &= self._holds(condition)
        return mask

    def order(self, places: np.ndarray, name: str, descending: bool) -> np.ndarray:
        """Sorts rows by a column, rows without a value last, and equal ones as they were written."""
        name = self.resolve(name)
        if name in (TOOL, *_NOTES, *_PER_TURN):
            raise FilterError(f"The table is not sorted by {name}: choose a column with one value per row.")
        values = self.texts(name)[places].astype(float) if name in _TEXTS else self.numbers(name)[places]
        return places[np.argsort(-values if descending else values, kind="stable")]

    def _holds(self, condition: Condition) -> np.ndarray:
        if not condition.name:
            there = self._contains("prompt", condition.value) | self._contains("answer", condition.value)
            return there | self._said(condition.value, "said")
        name = self.resolve(condition.name)
        if name in _PER_TURN:
            return self._of_turns(name, condition)
        if name not in (TOOL, *_NOTES, *_TEXTS):
            return compare_numbers(condition, self.numbers(name))
        is_equal = equal_text(condition)
        if name == TOOL:
            equal = np.zeros(self._size, bool)
            for part in condition.value.split(","):
                equal |= self._said(part, TOOL)
        elif name in _NOTES:
            equal = self._noted(name, condition.value.casefold())
        else:
            equal = self._where_text(name, is_equal)
        if name == "error":  # the index has the conversation's own alone
            equal |= self._said(condition.value, "error")
        return equal if condition.sign == "=" else ~equal

    def _contains(self, name: str, text: str) -> np.ndarray:
        codes, values = self.rows.codes(name)
        folded, wanted = self._searched.setdefault(name, []), text.casefold()
        folded += [(value or "").casefold() for value in values[len(folded) :]]
        return np.fromiter((wanted in value for value in folded), bool, len(folded))[codes]

    def _said(self, text: str, column: str) -> np.ndarray:
        return np.zeros(self._size, bool) if self.said is None else self.said(text, column, self._size)

    def _noted(self, name: str, wanted: str) -> np.ndarray:
        """`star=1`, and `note=` with a part of the note; `note!=""` is any note."""
        has = np.zeros(self._size, bool)
        for session, noted in self.notes.items():
            if (place := self.positions.get(session)) is not None:
                text = noted["note"].casefold()
                has[place] = noted["star"] if name == "star" else bool(text) and wanted in text
        without = ("0", "no", "false") if name == "star" else ("",)
        return ~has if wanted in without else has

    def _of_turns(self, name: str, condition: Condition) -> np.ndarray:
        """Which rows have a turn of which a condition holds."""
        places, values = self._flat(name)
        mask = np.zeros(self._size, bool)
        mask[places[compare_numbers(condition, values)]] = True
        return mask

    def _flat(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A column of `_PER_TURN`: for each turn its row, and its value."""
        if name not in self._turns:
            self._turns[name] = self.rows.flat(_PER_TURN[name])
        return self._turns[name]

    def _spread(self) -> np.ndarray:
        if not self._size:
            return np.zeros(0)
        groups = np.unique(self.groups, return_inverse=True)[1]
        reward = self.numbers("reward")
        there = ~np.isnan(reward) & (self.numbers("copy") == 0)
        count = np.bincount(groups, there)
        total = np.bincount(groups, np.where(there, reward, 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / count
            square = np.bincount(groups, np.where(there, (reward - mean[groups]) ** 2, 0.0))
            spread = np.sqrt(square / (count - 1))
        spread = np.where(spread < 1e-9, 0.0, spread)
        return np.where(count < 2, np.nan, spread)[groups]  # one reward has nothing to differ from

    def _signal(self) -> np.ndarray:
        if not self._size:
            return np.zeros(0)
        groups = np.unique(self.groups, return_inverse=True)[1]
        places, advantages = self._flat("advantage")
        credited, moved = np.zeros(self._size, bool), np.zeros(self._size, bool)
        credited[places] = True
        moved[places[np.abs(advantages) > 0]] = True
        known, has, differ = (np.bincount(groups, each) > 0 for each in (credited, moved, self.numbers(SPREAD) > 0))
        signal = np.where(known, has, differ).astype(float)
        return np.where(np.bincount(groups) < 2, np.nan, signal)[groups]


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
    """One term of a filter; all terms of a filter must hold."""

    name: str
    sign: str
    value: str

    @property
    def written(self) -> str:
        """As it may be written again."""
        value = f'"{self.value}"' if not self.sign or re.search(r"\s", self.value) or not self.value else self.value
        return f"{self.name}{self.sign}{value}"


def compare_numbers(condition: Condition, values: np.ndarray) -> np.ndarray:
    """Of which numbers a condition holds: `=` and `!=` take several, between commas."""
    try:
        asked = [float(part.replace("−", "-")) for part in condition.value.split(",")]  # as the page writes it
    except ValueError:
        raise FilterError(f"`{condition.written}` compares with no number: {condition.name} is one.") from None
    if condition.sign in ("=", "!="):
        equal = np.isclose(values[:, None], np.array(asked), rtol=1e-6, atol=1e-9).any(axis=1)
        return equal if condition.sign == "=" else ~equal & ~np.isnan(values)
    if len(asked) > 1:
        raise FilterError(f"`{condition.written}` compares with several numbers: give one.")
    compare = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}[condition.sign]
    return compare(values, asked[0])


def equal_text(condition: Condition) -> Callable[[str], bool]:
    """Whether a text is the one that a condition names, or one of several between commas; for `!=` too."""
    if condition.sign not in ("=", "!="):
        raise FilterError(f"`{condition.written}` makes no sense: compare {condition.name} with `=` or `!=`.")
    values = {condition.value.casefold(), *(part.strip().casefold() for part in condition.value.split(","))}
    return lambda text: text.casefold() in values


def parse_filter(text: str) -> list[Condition]:
    """Reads a filter: terms between spaces, each a comparison, or text (in quotes if it has spaces) to find."""
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
