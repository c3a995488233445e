"""Two evaluations of a run, question by question."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.viewer.columns import Columns

KINDS = ("fixed", "still right", "still wrong", "broken")


def evaluations(columns: Columns) -> list[int]:
    """The steps at which the run was evaluated."""
    return sorted({int(step) for step in columns.numbers("step")[columns.is_text("mode", "eval")]})


def compare(columns: Columns, before: int | None = None, after: int | None = None) -> dict[str, Any]:
    """
    What became of each question between two evaluations. A question is right where at least half of its conversations
    are: where their first outcome reward is at its maximum, or, in a run without outcome rewards, where the reward is
    at least half of the largest of the two evaluations.

    Args:
        columns (`Columns`): The run's conversations.
        before, after (`int`, *optional*): Steps of evaluations; the first and the last where they are left out.

    Returns:
        `dict`: `steps` of all evaluations, `from`, `to`, `counts` by kind, and `rows`: the broken first, then those
        whose reward changed most. A row has `prompt`, `kind`, `before` and `after` (mean rewards), and `sessions`, a
        conversation of each evaluation. Questions that only one of the two has are left out.

    Raises:
        UserError: If there are not two evaluations, or none at these steps.
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
    sides = [_questions(columns, step) for step in (before, after)]
    enough = 0.5 * max((np.nanmax(rewards) for side in sides for *_, rewards in side.values() if rewards), default=0)
    rows = []
    for key, (session, right, rewards) in sides[0].items():
        if key in sides[1]:
            session_after, right_after, rewards_after = sides[1][key]
            was, is_ = _is_right(right, rewards, enough), _is_right(right_after, rewards_after, enough)
            kind = KINDS[{(False, True): 0, (True, True): 1, (False, False): 2, (True, False): 3}[was, is_]]
            row: dict[str, Any] = {"prompt": key[0], "kind": kind, "sessions": [session, session_after]}
            rows.append({**row, "before": _mean(rewards), "after": _mean(rewards_after)})
    rows.sort(key=lambda row: (row["kind"] != "broken", -abs((row["after"] or 0) - (row["before"] or 0))))
    counts = Counter(row["kind"] for row in rows)
    return {
        "steps": steps,
        "from": before,
        "to": after,
        "counts": {kind: counts[kind] for kind in KINDS},
        "rows": rows,
    }


def _questions(columns: Columns, step: int) -> dict[tuple[str, int], tuple[str, list[float], list[float]]]:
    """
    The questions of an evaluation, in order: a session of each, which of its conversations are right, their rewards.
    The index has the beginning of a question only, so that the how manieth with this beginning it is tells it apart.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for place in np.flatnonzero(columns.is_text("mode", "eval") & (columns.numbers("step") == step)):
        row = columns.rows[place]
        groups.setdefault((row["k"], row["group"]), []).append(int(place))
    seen: Counter[str] = Counter()
    questions = {}
    for _, places in sorted(groups.items()):
        first = columns.rows[places[0]]
        key = first["prompt"], seen[first["prompt"]]
        seen[first["prompt"]] += 1
        numbers = [columns.numbers(name)[places] for name in ("right", "reward")]
        right, rewards = (values[~np.isnan(values)].tolist() for values in numbers)
        questions[key] = first["session"], right, rewards
    return questions


def _is_right(right: list[float], rewards: list[float], enough: float) -> bool:
    if right:
        return bool(np.mean(right) >= 0.5)
    return bool(rewards) and bool(np.mean(rewards) >= enough > 0)


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None
