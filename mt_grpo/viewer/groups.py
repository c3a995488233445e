"""The groups of a step side by side: what their members earned, which of them are branches, and whether they teach."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.runlog.table import Row, is_copy
from mt_grpo.viewer.columns import SIGNAL, Columns

EQUAL = 1e-9
"""Rewards that differ by less are the same."""


def groups(columns: Columns, mode: str, step: int | None) -> dict[str, Any]:
    """The groups of a step."""
    of_mode = np.flatnonzero(columns.is_text("mode", mode))
    if not len(of_mode):
        raise UserError(f"No conversation of the mode {mode!r} is written yet.")
    numbers = columns.numbers("step")[of_mode]
    step = int(numbers.max()) if step is None else step
    places = of_mode[numbers == step]
    if not len(places):
        raise UserError(
            f"There is no step {step} ({mode}): there are some from {numbers.min():.0f} to {numbers.max():.0f}."
        )
    labels = columns.groups[places]
    signal = columns.numbers(SIGNAL)
    of_groups = [places[labels == label] for label in np.unique(labels)]
    found = [_group([columns.rows[place] for place in each], bool(signal[each[0]] == 1)) for each in of_groups]
    rewards = [member["reward"] for each in found for member in each["members"] if member["reward"] is not None]
    return {
        "mode": mode,
        "step": step,
        "steps": _steps(columns, of_mode),
        "highest": max(rewards, default=0.0),
        "lowest": min([0.0, *rewards]),
        "groups": found,
    }


def _steps(columns: Columns, places: np.ndarray) -> dict[str, list[int]]:
    """Of each step, the number of its groups, and of those that have a signal."""
    first = places[np.unique(columns.groups[places], return_index=True)[1]]
    step = columns.numbers("step")[first].astype(int)
    axis, place = np.unique(step, return_inverse=True)
    teaches = columns.numbers(SIGNAL)[first] == 1
    return {
        "step": axis.tolist(),
        "groups": np.bincount(place).tolist(),
        "signal": np.bincount(place, teaches).astype(int).tolist(),
    }


def _group(rows: list[Row], signal: bool) -> dict[str, Any]:
    rows = sorted(rows, key=lambda row: row["member"])
    members = member_rows(rows)
    counted = rewards_that_count(members)
    mean, deviation = moments(counted)
    return {
        "key": {name: rows[0][name] for name in ("mode", "step", "k", "group")},
        "prompt": rows[0]["prompt"],
        "mean": mean,
        "deviation": deviation,
        "stops": Counter(str(row["stop"]) for row in rows),
        "signal": signal,
        "says": _says(members, counted, signal),
        "members": members,
    }


def moments(rewards: list[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (n − 1) of rewards; `None` where there are too few."""
    mean = float(np.mean(rewards)) if rewards else None
    return mean, float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None


def rewards_that_count(members: list[dict[str, Any]]) -> list[float]:
    """The rewards of a group's members, each conversation once."""
    return [each["reward"] for each in members if not each["copy"] and each["reward"] is not None]


def member_rows(rows: list[Row]) -> list[dict[str, Any]]:
    """The members of a group as the list has them."""
    places = {row["session"]: row["member"] + 1 for row in rows}
    found = []
    for row in rows:
        branch_of = row.get("branch_of")
        shared = row.get("shared_turns") or 0
        found.append(
            {
                "session": row["session"],
                "member": row["member"] + 1,
                "reward": row["reward"],
                "right": row["right"],
                "stop": row["stop"],
                "root": places.get(branch_of, row["member"] + 1),
                "shared": shared,
                "copy": is_copy(row),
            }
        )
    return found


def _says(members: list[dict[str, Any]], counted: list[float], signal: bool) -> str:
    """Why a group has a signal, or none."""
    copies = sum(member["copy"] for member in members)
    right = [member["right"] for member in members if not member["copy"] and member["right"] is not None]
    words = ""
    if right:
        number = sum(right)
        words = (
            "all right" if number == len(right) else "all wrong" if not number else f"{number} of {len(right)} right"
        )
    if copies:
        words = ", ".join(filter(None, [words, f"{len(members) - copies} count, {copies} are copies"]))
    if not counted:
        return "no reward applies"
    if signal:
        return words
    if len(counted) == 1:
        return "one conversation"
    equal = max(counted) - min(counted) <= EQUAL
    why = f"all earned {counted[0]:.2f}" if equal else "the rule does not use what differs"
    return ", ".join(filter(None, [why, words]))
