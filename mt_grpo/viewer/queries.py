"""The questions that the page asks about a run, by name. The server and the exported file give the same answers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from mt_grpo.errors import UserError
from mt_grpo.runlog import Run
from mt_grpo.runlog.export import LINES, lines
from mt_grpo.runlog.files import read_notes, read_state, to_json, write_note
from mt_grpo.runlog.index import Table, is_copy
from mt_grpo.runlog.schema import Row
from mt_grpo.viewer import conversations
from mt_grpo.viewer.columns import SPREAD, Columns, SearchIndex, cached, hits, parse_filter, short_name
from mt_grpo.viewer.conversations import groups
from mt_grpo.viewer.explain import why
from mt_grpo.viewer.overview import ended, findings, limits, metric_curves, overview, panel, status, waterfall

_MOST_ROWS = 500  # rows of one answer
_MOST_HITS = 60  # conversations of one answer in which hits are shown

_DIGITS = 15  # most digits of a number in a question; a browser does not hold longer ones exactly

# fields of a row of the table
_SHOWN = tuple("session mode step k group prompt stop reward right turns mismatch seconds answer".split())

Parameters = dict[str, str]


class BadQuestion(UserError, ValueError):
    """A question of the page that cannot be answered. The message is one sentence fit for the user."""


class Queries:
    """Answers questions about a run, which may still go on. Several threads may ask at the same time."""

    def __init__(self, run: Run, cache: Path | None = None) -> None:
        self.run = run
        self.columns = Columns(Table())
        self.words = SearchIndex(run, cache)
        self.version = 1  # grows with what the run writes
        self._lock = threading.Lock()
        self._metrics = self._written()
        self._curves_of: list[Row] | None = None
        self._all_curves: Row = {}
        self._lost_at: tuple[int, Row] = 0, {}
        self._questions: dict[str, Callable[[Parameters], Row]] = {
            "run": self._about,
            "runs": lambda asked: {"runs": []},  # it is one run alone, see `mt_grpo.viewer.runs`
            "overview": self._overview,
            "metrics": self._curves,
            "find": self._find,
            "groups": lambda asked: groups(self.columns, asked.get("mode", "train"), _step(asked, "step")),
            "group": self._group,
            "trajectory": lambda asked: conversations.trajectory(self.run, self.columns, self._session(asked)),
            "why": lambda asked: why(self.run, self.columns, self._session(asked)),
            "compare": lambda asked: _compare(self.columns, _step(asked, "from"), _step(asked, "to")),
            "hits": self._hits,
            "notes": lambda asked: {"notes": self.columns.notes},
            "panel": lambda asked: panel(self.run, self.columns, self._seconds()),
            "waterfall": self._waterfall,
            "lost": lambda asked: self._lost(),
        }

    def answer(self, question: str, asked: Parameters) -> Row:
        """Answers one question."""
        if question == "lost":  # reads conversations: nothing else waits for it
            return self._lost()
        if question not in self._questions:
            raise BadQuestion(f"There is nothing at {question!r}: ask for one of {', '.join(self._questions)}.")
        with self._lock:
            self._refresh()
            return self._questions[question](asked)

    def select(self, text: str) -> np.ndarray:
        """Positions of the rows that a filter selects, as of the latest answer."""
        return np.flatnonzero(self.columns.where(parse_filter(text)))

    def _refresh(self) -> None:
        changed, written = bool(self.run.refresh()), self._written()
        if self.columns.rows is not self.run.rows:  # the first question, or another run in the same folder
            columns = Columns(self.run.rows)
            columns.said, columns.notes = self.words.where, read_notes(self.run.folder)
            self.columns, changed = columns, True
        if changed or written != self._metrics:
            self.words.follow(self.run.rows)
            self.columns.change()
            self._metrics = written
            self.version += 1

    def _written(self) -> tuple[int, int]:
        """Bytes of metrics and number of steps, to see whether there are more."""
        path = self.run.folder / "metrics.jsonl"
        return path.stat().st_size if path.is_file() else 0, len(self.run.steps())

    def _about(self, asked: Parameters) -> Row:
        metrics, state = self.run.metrics(), read_state(self.run.folder)
        steps = [row["step"] for row in metrics]
        return {
            "name": self.run.folder.resolve().name,
            "version": self.version,
            "conversations": len(self.columns.rows),
            "steps": max(steps, default=0),
            **status(state, self._seconds(), self.run.folder),
            "evaluations": evaluations(self.columns),
            "rewards": [short_name(name) for name in self.columns.rewards],
        }

    def _seconds(self) -> float | None:
        """That training took, where it is finished."""
        metrics = self.run.metrics()
        return next((row["train_runtime"] for row in reversed(metrics) if "train_runtime" in row), None)

    def _curves(self, asked: Parameters) -> Row:
        metrics = self.run.metrics()
        if self._curves_of is not metrics:  # it is another list once there are more
            self._curves_of, self._all_curves = metrics, metric_curves(metrics)
        return self._all_curves

    def _waterfall(self, asked: Parameters) -> Row:
        mode, step = asked.get("mode", "train"), _step(asked, "step")
        steps = self.columns.numbers("step")[self.columns.is_text("mode", mode)]
        return waterfall(self.run, self.columns, int(steps.max(initial=0)) if step is None else step, mode)

    def _overview(self, asked: Parameters) -> Row:
        view = overview(self.columns, self.run.steps(), self.run.metrics())
        compared = _compare(self.columns) if len(evaluations(self.columns)) > 1 else None
        return {
            **view,
            "limits": limits(view),
            "findings": [
                *ended(status(read_state(self.run.folder), self._seconds(), self.run.folder)),
                *findings(view, self.columns, compared, self.run.about),
            ],
        }

    def _find(self, asked: Parameters) -> Row:
        places = self.select(asked.get("q", ""))
        sort = asked.get("sort", "")
        if sort:
            places = self.columns.order(places, sort.removeprefix("-"), sort.startswith("-"))
        offset, limit = _whole(asked, "offset", 0), min(_whole(asked, "limit", 100), _MOST_ROWS)
        rows = self.table_rows(places[offset : offset + limit])
        total, texts = len(self.columns.rows), searched(asked.get("q", ""))
        answer = {"total": total, "matched": len(places), "offset": offset, "rows": rows, "texts": texts}
        return {**answer, "read": self.words.read, "problem": self.words.problem}

    def _hits(self, asked: Parameters) -> Row:
        """Where the texts of a filter stand in some conversations."""
        texts = searched(asked.get("q", ""))
        sessions = asked.get("sessions", "").split(",")[:_MOST_HITS]
        places = [place for name in sessions if (place := self.columns.rows.places.get(name)) is not None]
        rows = self.columns.rows.at(places)
        return {"hits": {row["session"]: hits(record, texts) for row, record in self.run.records(rows)}}

    def _lost(self) -> Row:
        with self._lock:
            self._refresh()
            rows, version = conversations.may_be_lost(self.columns), self.version
        if self._lost_at[0] != version:
            self._lost_at = version, conversations.lost_answers(self.run, rows)
        return self._lost_at[1]

    def note(self, asked: Parameters, star: bool, note: str) -> Row:
        """Puts a star and a note on a conversation, which `session` names."""
        with self._lock:
            self._refresh()
            session = asked.get("session", "")
            if session not in self.columns.rows.places:
                raise BadQuestion(f"There is no conversation {session[:80]!r}.")
            self.columns.notes = write_note(self.run.folder, session, star, note)
            return {"notes": self.columns.notes}

    def export(self, form: str, asked: Parameters) -> Iterator[str]:
        """The conversations that the filter `q` selects, as lines of a form that `mt-grpo export` writes."""
        text = asked.get("q", "")
        if form not in LINES:
            raise BadQuestion(f"The form {form[:40]!r} is unknown: give one of {', '.join(LINES)}.")
        with self._lock:
            self._refresh()
            rows = self.columns.rows.at(to_write(self.columns, text))
        return lines(self.run, form, rows)

    def table_rows(self, places: np.ndarray) -> list[Row]:
        """Rows of the table."""
        return [
            {
                **{name: row[name] for name in _SHOWN},
                "member": row["member"] + 1,
                "tokens": sum(row["tokens"]),
                "errors": sum(row["errors"]),
                "copy": is_copy(row),
                SPREAD: spread,
                **self.columns.notes.get(row["session"], {}),
            }
            for row, spread in zip(
                self.columns.rows.at(places), self.columns.numbers(SPREAD)[places].tolist(), strict=True
            )
        ]

    def _session(self, asked: Parameters) -> str:
        return asked.get("session") or self._first()["session"]

    def _first(self) -> Row:
        """The row to show if the question names none: the first of training."""
        if not self.columns.rows:
            raise BadQuestion("No conversation is written yet.")
        return self.columns.rows[next(iter(self.select("mode=train").tolist()), 0)]

    def _group(self, asked: Parameters) -> Row:
        if "step" in asked:
            key = {name: _whole(asked, name) for name in ("step", "k", "group")}
            return conversations.group(self.run, self.columns, {"mode": asked.get("mode", "train"), **key})
        return conversations.group(self.run, self.columns, conversations.key_of(self._first()))


def to_write(columns: Columns, text: str) -> np.ndarray:
    """Positions of the rows that a filter selects; raises `BadQuestion` where there are none."""
    places = np.flatnonzero(columns.where(parse_filter(text)))
    if not len(places):
        raise BadQuestion(f"No conversation fulfils the filter {text!r}, so that there is nothing to write.")
    return places


def selected(run: Run, text: str) -> Sequence[Row]:
    """The rows of a run that a filter selects."""
    if not text.strip():
        return run.rows
    columns = Columns(run.rows)
    columns.notes = read_notes(run.folder)
    if searched(text):
        index = SearchIndex(run, cached(run.folder))
        index.read_all(run.rows)
        columns.said = index.where
    return run.rows.at(to_write(columns, text))


def searched(text: str) -> list[str]:
    """The texts that a filter looks for in what was said; where it has none, names of tools and errors."""
    conditions = parse_filter(text)
    named = [each.value for each in conditions if each.name in ("tool", "error") and each.sign == "="]
    return [each.value for each in conditions if not each.name] or named


def as_json(answer: Row) -> bytes:
    """An answer as JSON, in ASCII where it has half a character or a number that 64 bits do not hold."""
    try:
        return orjson.dumps(answer)
    except orjson.JSONEncodeError:
        return to_json(answer, ensure_ascii=True).encode()


def _whole(asked: Parameters, name: str, default: int | None = None) -> int:
    text = asked.get(name, "" if default is None else str(default))
    if not text.isdecimal() or len(text) > _DIGITS:
        raise BadQuestion(f"`{name}` is a whole number of up to {_DIGITS} digits; {text[:40]!r} is none.")
    return int(text)


def _step(asked: Parameters, name: str) -> int | None:
    return _whole(asked, name) if name in asked else None


_KINDS = {(False, True): "fixed", (True, True): "still right", (False, False): "still wrong", (True, False): "broken"}
"""How a question fared, by whether it was right, and is."""


def evaluations(columns: Columns) -> list[int]:
    """The steps at which the run was evaluated."""
    return sorted({int(step) for step in columns.numbers("step")[columns.is_text("mode", "eval")]})


def _compare(columns: Columns, before: int | None = None, after: int | None = None) -> Row:
    """
    How each question fared in two evaluations. It is right if at least half of its conversations are, or, without
    outcome rewards, if its mean reward is at least half of the largest of both evaluations.
    """
    steps = evaluations(columns)
    if len(steps) < 2:
        number = "no evaluation" if not steps else f"one evaluation, at step {steps[0]}"
        raise UserError(
            f"This run has {number} so far, and it takes two to compare: `do_eval: true` evaluates before and after "
            "training, `eval_strategy: steps` in between."
        )
    before, after = steps[0] if before is None else before, steps[-1] if after is None else after
    for step in (before, after):
        if step not in steps:
            raise UserError(f"There is no evaluation at step {step}: there are some at {', '.join(map(str, steps))}.")
    sides = [questions(columns, step) for step in (before, after)]
    enough = enough_of(sides)
    rows: list[Row] = []
    for key, first in sides[0].items():
        if (last := sides[1].get(key)) is not None:
            kind = _KINDS[first.is_right(enough), last.is_right(enough)]
            means = {"before": first.mean, "after": last.mean}
            rows.append({"prompt": key[0], "kind": kind, "sessions": [first.session, last.session], **means})
    rows.sort(key=lambda row: (row["kind"] != "broken", -abs((row["after"] or 0) - (row["before"] or 0))))
    counts = Counter(row["kind"] for row in rows)
    return {
        "steps": steps,
        "from": before,
        "to": after,
        "counts": {kind: counts[kind] for kind in _KINDS.values()},
        "rows": rows,
    }


@dataclass(frozen=True)
class Question:
    """A question of an evaluation: one of its conversations, and of all which are right, and their rewards."""

    session: str
    right: list[float]
    rewards: list[float]

    def is_right(self, enough: float) -> bool:
        if self.right:
            return bool(np.mean(self.right) >= 0.5)
        return bool(self.rewards) and bool(np.mean(self.rewards) >= enough > 0)

    @property
    def mean(self) -> float | None:
        return float(np.mean(self.rewards)) if self.rewards else None


Questions = dict[tuple[str, int], Question]


def enough_of(sides: Iterable[Questions]) -> float:
    """The mean reward from which on a question is right, where no outcome reward says so."""
    return 0.5 * max((max(each.rewards) for side in sides for each in side.values() if each.rewards), default=0)


def questions(columns: Columns, step: int) -> Questions:
    """The questions of an evaluation, in order, by their beginnings; those with one beginning are numbered."""
    groups: dict[tuple[int, int], list[int]] = {}
    k, group, prompts = columns.numbers("k"), columns.numbers("group"), columns.rows.codes("prompt")
    for place in np.flatnonzero(columns.is_text("mode", "eval") & (columns.numbers("step") == step)).tolist():
        groups.setdefault((int(k[place]), int(group[place])), []).append(place)
    seen: Counter[str] = Counter()
    found = {}
    for _, places in sorted(groups.items()):
        prompt = prompts[1][prompts[0][places[0]]] or ""
        key = prompt, seen[prompt]
        seen[prompt] += 1
        numbers = [columns.numbers(name)[places] for name in ("right", "reward")]
        right, rewards = (values[~np.isnan(values)].tolist() for values in numbers)
        found[key] = Question(columns.rows.sessions[places[0]], right, rewards)
    return found
