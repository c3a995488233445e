"""
Why a turn has its advantage: the terms that a rule's parts make up, the group's values behind each, and the turns
whose rewards a turn is credited with. All of it is measured on the record of a run, so that rules of one's own are
shown like the built-in ones; what the numbers do not bear out is left away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.runlog import Run
from mt_grpo.runlog.findings import FAILED
from mt_grpo.runlog.index import is_copy
from mt_grpo.runlog.schema import Row
from mt_grpo.viewer.columns import Columns, short_name

_EPSILON = 1e-4  # what the built-in rules add to a deviation before they divide by it

_NAMES = {"outcome": "outcome", "turn": "turn rewards", "": "all rewards"}
"""What stands before `baseline` in the name of a part: the name of its term."""

_SAME_STATE = " (same state)"  # ends the names of parts that are compared among turns of one state alone

_TermParts = tuple[str, str | None, list[str]]  # of a term: its name, its baseline, and its other parts

_BASELINE = re.compile(r"^(?:(?P<of>.*) )?baseline(?P<kind> \(.*\))?$")


@dataclass(frozen=True)
class _Member:
    """A conversation of the group, as `Run.credited` has it."""

    row: Row
    record: Row
    weights: dict[str, float]
    advantages: list[float]
    parts: dict[str, Row]

    @property
    def turns(self) -> int:
        return len(self.record["turns"])

    @property
    def root(self) -> str:
        """The conversation that this one is a branch of; itself where it is none."""
        return self.record.get("branch_of") or self.row["session"]

    def earned(self, name: str, turn: int) -> float | None:
        """A part before it was divided by its scale; `None` where the rule has no such part at the turn."""
        part = self.parts.get(name)
        if part is None or not 0 <= turn < self.turns:
            return None
        value = float(part["values"][turn])
        if part["scales"] is None:
            return value
        scale = part["scales"][turn]
        return None if scale is None else value * float(scale)

    def value(self, name: str, turn: int) -> float:
        part = self.parts.get(name)
        return 0.0 if part is None else float(part["values"][turn])

    def scale(self, name: str, turn: int) -> float | None:
        scales = self.parts[name]["scales"] if name in self.parts else None
        return None if scales is None else scales[turn]

    @cached_property
    def turn_rewards(self) -> dict[str, list[float]]:
        """Weighted turn rewards of each turn by name; 0 where one does not apply."""
        return {
            name: [self.weights.get(name, 1.0) * float(value or 0.0) for value in values[: self.turns]]
            for name, values in self.record["rewards"].get("turn", {}).items()
        }

    @cached_property
    def totals(self) -> list[float]:
        """Weighted turn rewards of each turn, summed."""
        rows = self.turn_rewards.values()
        return [sum(values) for values in zip(*rows, strict=True)] if rows else [0.0] * self.turns

    @cached_property
    def counting(self) -> list[bool]:
        """Whether the rule credits turn rewards at each turn at all."""
        parts = [name for name in self.parts if name.startswith("turn reward")]
        return [any(self.earned(name, turn) is not None for name in parts) for turn in range(self.turns)]


def why(run: Run, columns: Columns, session: str) -> Row:
    """Why the turns of a conversation have their advantages."""
    place = columns.rows.places.get(session)
    if place is None:
        run.trajectory(session)  # says what is the nearest
        raise AssertionError(session)
    row = columns.rows[place]
    if row["advantages"] is None:
        raise UserError(f"{session} has no advantage yet: the batch is not credited.")
    peers = _peers(columns, row)
    rule = run.about.get("rule")
    whole_batch = rule is not None and "batch" in (rule.get("scale_rewards"), rule.get("scales"))
    peers_of = peers if whole_batch else [peer for peer in peers if peer["group"] == row["group"]]
    batch = []
    for peer, known in zip(peers_of, run.credited(peers_of), strict=True):
        parts = {part["name"]: part for part in known["parts"]}
        batch.append(_Member(peer, known["record"], known["weights"], known["advantages"], parts))
    group = [member for member in batch if member.row["group"] == row["group"]]
    here = next(member for member in group if member.row["session"] == session)
    splits = {kind: _Split.find(group, rule or {}, kind) for kind in ("", _SAME_STATE)}
    return {
        "session": session,
        "rule": rule,
        "says": run.about.get("rule_says"),
        "batch": len(peers),
        "members": [
            {
                "session": each.row["session"],
                "member": each.row["member"] + 1,
                "reward": each.row["reward"],
                "advantages": each.advantages,
                "copy": is_copy(each.row),
            }
            for each in group
        ],
        "turns": [_turn(here, turn, group, batch, splits) for turn in range(here.turns)],
    }


def _peers(columns: Columns, row: Row) -> list[Row]:
    """The conversations that were credited together with one."""
    together = (columns.numbers("step") == row["step"]) & (columns.numbers("k") == row["k"])
    places = np.flatnonzero(together & columns.is_text("mode", row["mode"]))
    peers = (peer for peer in columns.rows.at(places) if peer["advantages"] is not None)
    return sorted(peers, key=lambda peer: (peer["group"], peer["member"]))


def _turn(here: _Member, turn: int, group: list[_Member], batch: list[_Member], splits: _Splits) -> Row:
    advantage = here.advantages[turn]
    split = splits[""]
    terms = [_term(here, turn, each, group, batch, splits) for each in _terms(here, turn)]
    return {
        "advantage": advantage,
        "sum": sum(here.value(name, turn) for name in here.parts) if here.parts else None,
        "terms": terms,
        "moved": [] if split is None else list(_moved(here, turn, group, split)),
    }


def _terms(here: _Member, turn: int) -> list[_TermParts]:
    """The terms of a turn: the name of each, its baseline, and its other parts."""
    baselines = {name: found for name in here.parts if (found := _BASELINE.match(name))}
    terms: dict[str | None, list[str]] = {}
    for name in here.parts:
        if name in baselines:
            continue
        kind = _SAME_STATE if name.endswith(_SAME_STATE) else None
        fitting = [each for each, found in baselines.items() if found["kind"] == kind]
        own = [each for each in fitting if each != "baseline" and _is_of(name, baselines[each]["of"])]
        candidates = [*own, *(each for each in fitting if not baselines[each]["of"])]
        there = [each for each in candidates if here.value(each, turn) or here.scale(each, turn) is not None]
        terms.setdefault(next(iter([*there, *candidates]), None), []).append(name)
    for name in baselines:
        terms.setdefault(name, [])
    shown: list[_TermParts] = []
    for baseline, names in terms.items():
        every = [*names, *([baseline] if baseline else [])]
        counts = (here.value(name, turn) or here.earned(name, turn) for name in every)
        if any(counts) or any(here.scale(name, turn) is not None for name in every):
            of, state = (baselines[baseline]["of"], baselines[baseline]["kind"]) if baseline else (None, None)
            title = _NAMES.get(of or "", of) if baseline else ""
            shown.append((f"{title}{state or ''}" or "parts", baseline, names))
    return shown


def _is_of(part: str, baseline: str | None) -> bool:
    if baseline == "turn":
        return part.startswith("turn reward") or part == "later values"
    return baseline is not None and (part == baseline or baseline == "outcome" and part.startswith("outcome "))


def _term(
    here: _Member, turn: int, term: _TermParts, group: list[_Member], batch: list[_Member], splits: _Splits
) -> Row:
    name, baseline, names = term
    every = [*names, *([baseline] if baseline else [])]
    scale = next((found for each in every if (found := here.scale(each, turn)) is not None), None)
    earned = sum(here.earned(each, turn) or 0.0 for each in names)
    taken = None if baseline is None else -(here.earned(baseline, turn) or 0.0)
    values, of = _values(here, turn, names, group, taken) if taken is not None else ([], "")
    rewards, others = _rewards(here, turn, names, splits)
    return {
        "name": name,
        "value": sum(here.value(each, turn) for each in every),
        "scale": scale,
        "deviation": None if scale is None else _deviation(scale, turn, names, group, batch),
        "earned": earned,
        "baseline": taken,
        "values": values,
        "of": of,
        "rewards": rewards,
        "others": others,
    }


def _of_member(member: _Member, turn: int, names: list[str], whole: bool) -> float:
    """What a member earned from a turn on, or in `whole`; 0 beyond its end."""
    order = [turn] if turn < member.turns else []
    for each in [*order, *(range(member.turns) if whole else [])]:
        found = [value for name in names if (value := member.earned(name, each)) is not None]
        if found:
            return sum(found)
    return 0.0


def _values(
    here: _Member, turn: int, names: list[str], group: list[_Member], taken: float
) -> tuple[list[list[float]], str]:
    """Whose values have the baseline as their mean: `[member, value]`, and who they are in words."""
    counted = [member for member in group if member.row["stop"] not in FAILED]
    others = [member for member in counted if member is not here]
    applies = [member for member in counted if _applies(member, names)]
    reach = [member for member in counted if turn < member.turns]
    siblings = [member for member in others if member.root == here.root]
    who = [
        (counted, f"the group’s {len(counted)}"),
        (others, f"the other {len(others)}"),
        (siblings, f"its other {len(siblings)} branches" if len(siblings) > 1 else "its other branch"),
        ([member for member in counted if member.root != here.root], "the other conversations and their branches"),
        (applies, f"the {len(applies)} of the group that have one"),
        ([member for member in reach if member is not here], f"the others that reach turn {turn + 1}"),
        (reach, f"the {len(reach)} of the group that reach turn {turn + 1}"),
    ]
    for whole in (False, True):
        for members, words in who:
            values = [_of_member(member, turn, names, whole) for member in members]
            if values and abs(float(np.mean(values)) - taken) <= 1e-6 * max(1.0, *map(abs, values)):
                shown = members if here in members else [*members, here]
                pairs = [[each.row["member"] + 1, _of_member(each, turn, names, whole)] for each in shown]
                return pairs, words
    return [], ""


def _applies(member: _Member, names: list[str]) -> bool:
    """Whether the member has any of the rewards behind these parts."""
    outcome, turns = (member.record["rewards"].get(kind, {}) for kind in ("outcome", "turn"))
    found = list(outcome.values()) if any("outcome" in name for name in names) else []
    if any(name.startswith("turn") for name in names):
        found += [value for values in turns.values() for value in values]
    return any(value is not None for value in found)


def _deviation(scale: float, turn: int, names: list[str], group: list[_Member], batch: list[_Member]) -> Row | None:
    """The deviation (n − 1) that a scale is, less `_EPSILON`, and whose; `None` if these values have no such one."""
    for members in [batch, group] if len(batch) > len(group) else [group]:
        counted = [member for member in members if member.row["stop"] not in FAILED]
        if len(counted) < 2:
            continue
        of_batch = members is batch and len(batch) > len(group)
        who = f"step {counted[0].row['step']}’s {len(counted)}" if of_batch else f"the group’s {len(counted)}"
        longest = max(member.turns for member in counted)
        for whole in (False, True):
            for other in sorted(range(longest), key=lambda other: (other != turn, other)):
                values = [_of_member(each, other, names, whole) for each in counted]
                if abs(float(np.std(values, ddof=1)) + _EPSILON - scale) <= 1e-6 * max(1.0, scale):
                    at = "" if other == turn else f" at turn {other + 1}, the largest"
                    return {"value": scale - _EPSILON, "of": f"{who}{at}", "here": other == turn and not of_batch}
    return None


def _rewards(here: _Member, turn: int, names: list[str], splits: _Splits) -> tuple[list[Row], list[Row]]:
    """
    The rewards of a term, with `values` (per turn, or one of an outcome), and `factors` (how much of each turn's the
    turn is credited with, `None` where the record does not say); and the other parts.
    """
    kinds = here.record["rewards"]
    rows, others = [], []
    mixed = any(part.startswith("outcome") for part in names)
    for part in names:
        base = part.removesuffix(_SAME_STATE)
        split = splits[part.removeprefix(base)]
        earned = here.earned(part, turn) or 0.0
        found = list(_named(base, kinds))
        if not found:
            others.append({"name": part, "value": earned})
        for kind, name in found:
            weight = here.weights.get(name, 1.0)
            row = {"kind": kind, "name": short_name(name).replace("_", " "), "weight": weight}
            if kind == "outcome":
                value = kinds["outcome"][name]
                worth = weight * (value or 0.0)
                whole = earned if len(found) == 1 else None
                factor = whole / worth if whole is not None and worth else None
                rows.append({**row, "value": value, "factor": factor, "earned": whole})
            else:
                factors = None if split is None else split.factors(turn, here.turns)
                coefficient = None if split is None else split.coefficient
                if factors is not None and coefficient is not None and mixed:
                    factors, coefficient = [coefficient * factor for factor in factors], 1.0
                known = {"values": kinds["turn"][name], "factors": factors, "coefficient": coefficient}
                rows.append({**row, **known, "earned": earned if len(found) == 1 else None})
    return rows, others


def _named(part: str, kinds: Row) -> Iterator[tuple[str, str]]:
    """The rewards of a part: one, or all of a kind where the part does not name it."""
    for kind, label in (("outcome", "outcome"), ("turn", "turn reward")):
        names = list(kinds.get(kind, {}))
        if part == label:
            yield from ((kind, name) for name in names)
        elif part.startswith(f"{label} ") and part.removeprefix(f"{label} ") in names:
            yield kind, part.removeprefix(f"{label} ")


@dataclass(frozen=True)
class _Split:
    """How much of a turn's reward each turn is credited with, found by trying what explains every part of a group."""

    kind: str
    discount: float
    coefficient: float

    def factors(self, turn: int, turns: int) -> list[float]:
        """Of the rewards of each turn, for one."""
        if self.kind == "own":
            return [float(other == turn) for other in range(turns)]
        if self.kind == "all":
            return [1.0] * turns
        return [self.discount ** (other - turn) if other >= turn else 0.0 for other in range(turns)]

    @classmethod
    def find(cls, group: list[_Member], rule: Row, kind: str = "") -> _Split | None:
        """The first that explains all parts of turn rewards of a group whose names end so; `None` if none does."""
        known = {name: value for name, value in rule.items() if isinstance(value, (int, float))}
        coefficients = list(dict.fromkeys([float(known.get("turn_coef", 1.0)), 1.0]))
        gamma, lam = (float(known.get(name, 1.0)) for name in ("gamma", "lam"))
        discounts = list(dict.fromkeys([gamma * lam, gamma, lam, 1.0]))
        kinds = [*(("to go", discount) for discount in discounts), ("all", 1.0), ("own", 1.0)]
        measured = [each for member in group for each in _of_turns(member, kind)]
        if not any(earned or any(rewards) for _, _, rewards, earned in measured):
            return None
        for coefficient in coefficients:
            for of, discount in kinds:
                split = cls(of, discount, coefficient)
                if all(split.explains(*each) for each in measured):
                    return split
        return None

    def explains(self, turn: int, turns: int, rewards: list[float], earned: float) -> bool:
        """Whether what a turn was credited with is this share of a conversation's rewards."""
        expected = self.coefficient * float(np.dot(self.factors(turn, turns), rewards))
        return abs(expected - earned) <= 1e-5 * max(1.0, abs(earned), *map(abs, rewards))


_Splits = dict[str, _Split | None]  # of the parts of a group, by what their names end with: `""`, or `_SAME_STATE`


def _of_turns(member: _Member, kind: str) -> Iterator[tuple[int, int, list[float], float]]:
    """The turns at which turn rewards are credited: turn, number of turns, weighted rewards, what it is credited."""
    for name, weighted in member.turn_rewards.items():
        part = f"turn reward {name}{kind}"
        if part not in member.parts and len(member.turn_rewards) == 1:
            part = f"turn reward{kind}"
        for turn in range(member.turns):
            earned = member.earned(part, turn)
            if earned is not None and member.parts[part]["scales"] is not None:
                yield turn, member.turns, weighted, earned


def _moved(here: _Member, turn: int, group: list[_Member], split: _Split) -> Iterator[Row]:
    """
    Rewards that another turn than the one that earned them is credited with, as far as this turn is concerned: `kind`
    is `away` (this turn's own reward counts at `to`), `here` (a reward of `from` counts here, and not there), `later`
    or `earlier` (it counts at both); `amount` is weighted, `share` what counts here.
    """
    totals, counted = here.totals, here.counting
    factors = split.factors(turn, here.turns)
    if totals[turn] and not counted[turn]:
        to = [other for other in range(here.turns) if counted[other] and split.factors(other, here.turns)[turn]]
        if to:
            yield {"kind": "away", "from": turn + 1, "to": [other + 1 for other in to], "amount": totals[turn]}
    if not counted[turn]:
        return
    for other, amount in enumerate(totals):
        if other != turn and amount and factors[other]:
            kind = "here" if not counted[other] else "later" if other > turn else "earlier"
            share = split.coefficient * factors[other] * amount
            yield {"kind": kind, "from": other + 1, "to": [turn + 1], "amount": amount, "share": share}
    for other in range(max(member.turns for member in group)):
        them = [member for member in group if member is not here and _is_moved(member, other, turn, split)]
        for amount in sorted({round(each.totals[other], 6) for each in them}, reverse=True):
            earned = [each for each in them if round(each.totals[other], 6) == amount]
            members = [{"member": each.row["member"] + 1, "session": each.row["session"]} for each in earned]
            yield {"kind": "group", "from": other + 1, "to": [turn + 1], "members": members, "amount": amount}


def _is_moved(member: _Member, source: int, turn: int, split: _Split) -> bool:
    """Whether a member's turn is credited with a reward of another one, which does not count there."""
    if source == turn or max(source, turn) >= member.turns:
        return False
    counted = member.counting
    factor = split.factors(turn, member.turns)[source]
    return bool(member.totals[source] and factor and counted[turn] and not counted[source])
