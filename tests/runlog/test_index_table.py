"""The columns of an index, held against a merge of its lines into dictionaries, line by line."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.runs import index_line

from mt_grpo.runlog.index import Index, Table, written

LATER = dict.fromkeys(("advantages", "credit_file", "credit_row", "mismatch", "entropy", "clipped"))
OLD = dict.fromkeys(("sampled", "where", "first_raised", "branch_of", "first_failed", "first_refused"))
OLD |= dict.fromkeys(("raised", "shared_turns", "failed", "refused"), 0)


def merged(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that lines make, one line after the other."""
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        kind, fields = line["kind"], {name: value for name, value in line.items() if name != "kind"}
        row = rows.get(line["session"])
        if kind == "rollout":
            rows[line["session"]] = {**OLD, **fields, **LATER, "updates": []}
        elif row is None:
            continue
        elif kind == "credit":
            row |= {"advantages": line["advantages"], "credit_file": line["file"], "credit_row": line["row"]}
        else:
            kept = [update for update in row["updates"] if update["step"] < line["step"]]
            if not kept:
                row |= {"mismatch": line["mismatch"], "entropy": line["entropy"]}
            row["clipped"] = line["clipped"]
            row["updates"] = [*kept, {name: line[name] for name in ("step", "file", "row")}]
    return list(rows.values())


def drawn(draw: random.Random) -> dict[str, Any]:
    kind, session, turns = draw.choice(["rollout", "credit", "update"]), f"s{draw.randrange(6)}", draw.randrange(4)
    file, row = f"{draw.choice('abc')}.parquet", draw.randrange(100)
    if kind == "credit":
        advantages = [draw.choice([None, draw.gauss(0, 1)]) for _ in range(turns)]
        return {"kind": kind, "session": session, "advantages": advantages, "file": file, "row": row}
    if kind == "update":
        numbers = {name: draw.choice([None, draw.random()]) for name in ("mismatch", "entropy", "clipped")}
        return {"kind": kind, "session": session, "step": draw.randrange(5), **numbers, "file": file, "row": row}
    rewards = {name: draw.choice([None, draw.random()]) for name in draw.sample("pqr", draw.randrange(4))}
    lists = {name: [draw.random() for _ in range(turns)] for name in ("turn_rewards", "turn_seconds", "tool_seconds")}
    later = {"sampled": 2**32 - 1, "raised": 2, "branch_of": "s0", "shared_turns": 1, "where": "a.py"}
    more = draw.sample(sorted(later.items()), draw.randrange(4))
    texts = {"answer": draw.choice([None, "", "Lima"]), "stop": draw.choice([None, "length"]), "file": file}
    fields = {"rewards": rewards, "right": draw.choice([None, True, False]), "row": row, "tokens": [7] * turns}
    return {"kind": kind, **index_line(session, **lists, **texts, **fields, **dict(more))}


@pytest.mark.parametrize("seed", range(20))
def test_columns_hold_what_a_merge_line_by_line_gives(tmp_path, seed):
    draw = random.Random(seed)
    lines = [drawn(draw) for _ in range(120)]
    (tmp_path / "rollouts").mkdir()
    index, path = Index(), tmp_path / "rollouts" / "index.jsonl"
    for begin in range(0, len(lines), 40):  # as a run that goes on writes it
        before = merged(lines[:begin])
        with path.open("ab") as file:
            file.writelines(map(written, lines[begin : begin + 40]))
        changed = index.read(tmp_path).tolist()
        rows = merged(lines[: begin + 40])
        assert list(index.rows) == rows
        assert {place for place, row in enumerate(rows) if row not in before[place : place + 1]} <= set(changed)
    table = index.rows
    assert table[-1] == rows[-1] and table[1:3] == rows[1:3]
    for name in ("p", "q", "r"):
        wanted = [np.nan if row["rewards"].get(name) is None else row["rewards"][name] for row in rows]
        assert np.array_equal(table.reward(name), wanted, equal_nan=True)
    assert table.totals("tokens").tolist() == [sum(row["tokens"]) for row in rows]
    places, values = table.flat("advantages")
    flat = [(place, value) for place, row in enumerate(rows) for value in row["advantages"] or ()]
    assert places.tolist() == [place for place, _ in flat]
    assert np.array_equal(values, np.array([value for _, value in flat], float), equal_nan=True)


def test_an_empty_table_has_empty_columns():
    table = Table()
    assert list(table) == [] and not table.numbers("step").size and not table.totals("tokens").size
    assert table.reward_names == [] and not table.flat("advantages")[0].size
    with pytest.raises(IndexError):
        table[0]
