"""The filter language, held against a plain reading of every row."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from mt_grpo.viewer.columns import Columns, Condition, FilterError, parse_filter


def reward(row):
    return float("nan") if row["reward"] is None else row["reward"]


FILTERS = {
    "": lambda row: True,
    "stop=timeout": lambda row: row["stop"] == "timeout",
    "stop=TIMEOUT,length": lambda row: row["stop"] in ("timeout", "length"),
    "stop!=answered": lambda row: row["stop"] != "answered",
    "reward<0.5": lambda row: reward(row) < 0.5,
    "advantage<−0.5": lambda row: any(value < -0.5 for value in row["advantages"] or ()),
    "mode=eval reward>=1": lambda row: row["mode"] == "eval" and reward(row) >= 1,
    "mismatch>.1": lambda row: (row["mismatch"] or 0) > 0.1,
    "turns=2 errors>0": lambda row: row["turns"] == 2 and sum(row["errors"]) > 0,
    "step>=3 step<=4": lambda row: 3 <= row["step"] <= 4,
    "exact_match=1": lambda row: row["rewards"]["exact_match"] == 1,
    "right!=1": lambda row: row["right"] is False,
    "rewards/format>=1": lambda row: (row["rewards"]["format"] or 0) >= 1,
    "member=2 tokens>20": lambda row: row["member"] == 1 and sum(row["tokens"]) > 20,
    '"capital of Peru"': lambda row: "capital of peru" in row["prompt"].lower(),
    "lima": lambda row: "lima" in (row["answer"] or "").lower(),
    'answer="Lima" mode=train': lambda row: row["answer"] == "Lima" and row["mode"] == "train",
    "session=train-000002-000000-000003": lambda row: row["session"] == "train-000002-000000-000003",
}


@pytest.mark.parametrize("text", FILTERS)
def test_a_filter_counts_what_a_loop_counts(queries, text):
    wanted = [place for place, row in enumerate(queries.run.rows) if FILTERS[text](row)]
    columns = Columns(queries.run.rows)  # of the index alone, without the words of the conversations
    assert np.flatnonzero(columns.where(parse_filter(text))).tolist() == wanted
    assert text in ("turns=2 errors>0",) or wanted


def test_groups_without_signal_are_found(queries):
    groups = {}
    for place, row in enumerate(queries.run.rows):
        groups.setdefault((row["mode"], row["step"], row["k"], row["group"]), []).append((place, row["reward"]))
    dead = [
        place for rows in groups.values() if len(rows) > 1 == len({reward for _, reward in rows}) for place, _ in rows
    ]
    assert queries.select("spread=0").tolist() == sorted(dead) and dead
    several = next(rows for rows in groups.values() if len({reward for _, reward in rows}) > 1)
    deviation = statistics.stdev(reward for _, reward in several)  # n - 1, as credit rules have it
    assert queries.columns.numbers("spread")[several[0][0]] == pytest.approx(deviation)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reward<", "cannot be read from `reward<` on"),
        ("<3", "cannot be read from `<3` on"),
        ('"open', "a quote that is not closed"),
        ("rewrd<1", "no column 'rewrd'; the nearest is 'reward'"),
        ("stop<3", "stop is text"),
        ("reward=high", "compares with no number"),
        ("reward<1,2", "several numbers"),
        ("a=b=c", "no column 'a'"),
    ],
)
def test_a_bad_filter_is_refused_in_one_sentence(queries, text, words):
    with pytest.raises(FilterError) as refused:
        queries.select(text)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_terms_can_be_written_again():
    conditions = parse_filter('stop=length,timeout  answer="two words" "a b" word reward>=-1e-3')
    assert conditions == [
        Condition("stop", "=", "length,timeout"),
        Condition("answer", "=", "two words"),
        Condition("", "", "a b"),
        Condition("", "", "word"),
        Condition("reward", ">=", "-1e-3"),
    ]
    assert parse_filter(" ".join(condition.written for condition in conditions)) == conditions
