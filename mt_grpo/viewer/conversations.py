"""
Conversations for the page: one token by token, and the members of a group side by side. Apart from `queries`, which
knows what the page may ask, not what a conversation looks like.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.runlog import Run
from mt_grpo.runlog.conversation import words
from mt_grpo.runlog.findings import EQUAL
from mt_grpo.runlog.index import is_copy
from mt_grpo.runlog.schema import Row
from mt_grpo.viewer.columns import REWARD, SIGNAL, Columns, parse_filter, short_name

_MOST_READ = 200  # most conversations that are read to find lost answers
_LABEL = 80  # characters of a turn's label


def trajectory(run: Run, columns: Columns, session: str) -> Row:
    """One conversation as the page shows it."""
    whole = run.trajectory(session)
    row = columns.rows[columns.rows.places[session]]
    places = _members(columns, key_of(row))
    members = _member_rows(columns.rows.at(places))
    accepted = _accepted(whole.pop("row").get("answer"))
    added, ids = {} if run.tokenizer is None else run.tokenizer.get_added_tokens_decoder(), set(whole["tokens"]["ids"])
    return {
        **whole,
        "question": _question(whole["prompt"]),
        "accepted": accepted,
        "group": {
            "mean": _mean_and_std(_rewards_that_count(members))[0],
            "sessions": [member["session"] for member in members],
            "rewards": [member["reward"] for member in members],
            **key_of(row),
        },
        "branch": next(member for member in members if member["session"] == session),
        "special": sorted(number for number, token in added.items() if token.special and number in ids),
        "short": {name: short_name(name) for kind in whole["rewards"].values() for name in kind},
    }


def group(run: Run, columns: Columns, key: Row) -> Row:
    """The conversations that answer one prompt, the best first. See `key_of`."""
    places = _members(columns, key)
    if not len(places):
        raise UserError("There is no group {group} of step {step} ({mode}, batch {k}).".format_map(key))
    wholes = [run.trajectory(row["session"]) for row in columns.rows.at(places)]
    wholes.sort(
        key=lambda whole: -np.inf if whole["index"]["reward"] is None else whole["index"]["reward"], reverse=True
    )
    branches = {each["session"]: each for each in _member_rows(columns.rows.at(places))}
    mean, deviation = _mean_and_std(_rewards_that_count(list(branches.values())))
    accepted = _accepted(wholes[0]["row"].get("answer"))
    at = columns.groups[places[0]]
    of_mode = columns.is_text("mode", key["mode"])
    here = np.unique(columns.groups[of_mode & (columns.numbers("step") == key["step"])])
    before, after = (columns.groups[of_mode & beside] for beside in (columns.groups < at, columns.groups > at))
    # turn rewards first, each kind in the order of the run
    order = [name for kind in ("turn", "outcome") for name in wholes[0]["rewards"].get(kind, {})]
    found = {name for whole in wholes for name in whole["index"]["rewards"]}
    names = sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))
    largest = {name: float(np.nanmax(columns.numbers(REWARD + name), initial=0.0)) for name in names}
    return {
        "key": key,
        "question": _question(wholes[0]["prompt"]),
        "accepted": accepted,
        "number": int(np.searchsorted(here, at)) + 1,
        "of": len(here),
        "previous": _key_at(columns, before.max()) if len(before) else None,
        "next": _key_at(columns, after.min()) if len(after) else None,
        "rewards": [{"name": name, "short": short_name(name), "largest": largest[name]} for name in names],
        "mean": mean,
        "deviation": deviation,
        "members": [
            {"row": whole["index"], "branch": branches[whole["index"]["session"]], "turns": _turns(whole)}
            for whole in wholes
        ],
        "notes": [note for whole in wholes for note in _notes(whole, accepted)],
    }


def may_be_lost(columns: Columns) -> list[Row]:
    """Rows of the latest `_MOST_READ` training conversations with a failed turn and a wrong answer."""
    places = np.flatnonzero(columns.where(parse_filter("mode=train right=0 errors>0")))[-_MOST_READ:]
    return columns.rows.at(places)


def lost_answers(run: Run, rows: list[Row]) -> Row:
    """Those conversations that had the right answer in a turn that could not be parsed, and ended with another one."""
    wholes = ({**record, "index": row} for row, record in run.records(rows))
    lost = [whole["index"]["session"] for whole in wholes if _notes(whole, _accepted(whole["row"].get("answer")))]
    return {"sessions": lost, "read": len(rows)}


def _question(prompt: list[Row]) -> str:
    """The last message of the user in a prompt, or its last message."""
    asked = [message for message in prompt if message.get("role", "user") == "user"] or prompt
    return words(asked[-1]) if asked else ""


def _members(columns: Columns, key: Row) -> np.ndarray:
    mask = columns.is_text("mode", key["mode"])
    for name in ("step", "k", "group"):
        mask = mask & (columns.numbers(name) == key[name])
    places = np.flatnonzero(mask)
    return places[np.argsort(columns.numbers("member")[places], kind="stable")]


def key_of(row: Row) -> Row:
    """What names the group of a conversation."""
    return {name: row[name] for name in ("mode", "step", "k", "group")}


def _key_at(columns: Columns, group: int) -> Row:
    return key_of(columns.rows[int(np.argmax(columns.groups == group))])


def _accepted(answer: object) -> list[str]:
    """The right answers as the dataset has them."""
    if answer is None:
        return []
    return list(map(str, answer if isinstance(answer, list) else [answer]))


def _turns(whole: Row) -> list[Row]:
    turns, tokens = whole["turns"], whole["tokens"]
    entropies: dict[int, list[float]] = {}
    for turn, entropy in zip(tokens["turn"], tokens["entropies"], strict=True):
        if turn >= 0 and entropy is not None:
            entropies.setdefault(turn, []).append(entropy)
    shown = []
    for number, turn in enumerate(turns):
        after = turns[number + 1] if number + 1 < len(turns) else None
        known = entropies.get(number)
        shown.append(
            {
                "label": _label(turn, last=after is None),
                "text": words(turn["message"]),
                "tokens": turn["num_tokens"],
                "seconds": turn["seconds"],
                "advantage": turn["advantage"],
                "reward": whole["index"]["turn_rewards"][number],
                "entropy": float(np.mean(known)) if known else None,
                "error": turn["error"],
                "reply": _reply(turn, after),
            }
        )
    return shown


def _label(turn: Row, last: bool) -> str:
    """A turn in a few words: the first text that its call was given, or its kind."""
    for call in turn["tool_calls"]:
        given = next((value for value in call["arguments"].values() if isinstance(value, str) and value), call["name"])
        return given[:_LABEL]
    if turn["error"] is not None:
        return "malformed"
    return "answer" if last or turn.get("answer") is not None else "message"


def _reply(turn: Row, after: Row | None) -> Row | None:
    if not turn["replies"]:
        return None
    errors = [call["error"] for call in turn["tool_calls"] if call["error"] is not None]
    return {
        "tokens": after["observation_length"] if after else 0,
        "seconds": max((call["seconds"] for call in turn["tool_calls"]), default=0.0),
        "error": turn["error"] or next(iter(errors), None),
        "text": "\n".join(words(message) for message in turn["replies"]),
    }


def _notes(whole: Row, accepted: list[str]) -> list[Row]:
    """A note if a member had the right answer in a turn that could not be parsed, and ended with another one."""
    right = whole["index"]["right"]
    if right is None or right or not accepted:
        return []
    for turn in whole["turns"]:
        text = words(turn["message"]).casefold()
        found = next((answer for answer in accepted if answer and answer.casefold() in text), None)
        if turn["error"] is not None and found:
            row = whole["index"]
            place = {"session": row["session"], "member": row["member"] + 1, "turn": turn["index"] + 1}
            return [{**place, "answer": found}]
    return []


def groups(columns: Columns, mode: str, step: int | None) -> Row:
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
    found = [_group(columns.rows.at(each), bool(signal[each[0]] == 1)) for each in of_groups]
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


def _group(rows: list[Row], signal: bool) -> Row:
    rows = sorted(rows, key=lambda row: row["member"])
    members = _member_rows(rows)
    counted = _rewards_that_count(members)
    mean, deviation = _mean_and_std(counted)
    return {
        "key": key_of(rows[0]),
        "prompt": rows[0]["prompt"],
        "mean": mean,
        "deviation": deviation,
        "stops": Counter(str(row["stop"]) for row in rows),
        "signal": signal,
        "says": _says(members, counted, signal),
        "members": members,
    }


def _mean_and_std(rewards: list[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (n − 1) of rewards; `None` where there are too few."""
    mean = float(np.mean(rewards)) if rewards else None
    return mean, float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None


def _rewards_that_count(members: list[Row]) -> list[float]:
    """The rewards of a group's members, each conversation once."""
    return [each["reward"] for each in members if not each["copy"] and each["reward"] is not None]


def _member_rows(rows: list[Row]) -> list[Row]:
    """The members of a group as the list has them."""
    places = {row["session"]: row["member"] + 1 for row in rows}
    found = []
    for row in rows:
        member = row["member"] + 1
        known = {name: row[name] for name in ("session", "member", "reward", "right", "stop")} | {"member": member}
        branch = {"root": places.get(row.get("branch_of"), member), "shared": row.get("shared_turns") or 0}
        found.append({**known, **branch, "copy": is_copy(row)})
    return found


def _says(members: list[Row], counted: list[float], signal: bool) -> str:
    """Why a group has a signal, or none."""
    copies = sum(member["copy"] for member in members)
    right = [member["right"] for member in members if not member["copy"] and member["right"] is not None]
    words = ""
    if right:
        some = f"{sum(right)} of {len(right)} right"
        words = "all right" if all(right) else some if any(right) else "all wrong"
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
