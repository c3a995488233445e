"""What is said of conversations follows from how they ended, what they called and what they sampled."""

from __future__ import annotations

from itertools import count

import pytest
from support.runs import index_line

from mt_grpo.runlog.findings import Counts, find, find_in_run, why_equal
from mt_grpo.runlog.index import Table

TOO_LONG = "This model's maximum context length is 12 tokens, and the messages have 71."


SESSIONS = count()


def row(number, stop="answered", group=0, **fields):
    usual = {"turns": 2, "calls": 1, "errors": [0, 0], "sampled": number}
    return index_line(str(next(SESSIONS)), **{**usual, "stop": stop, "group": group, **fields})


def said(rows, tools=()):
    return {finding.kind: finding.sentence for finding in find(Counts().add(rows), {"tools": list(tools)})}


def test_failures_are_counted_with_the_first_and_its_place():
    broken = [row(n, "env_error", error="KeyError: 'a'", where="env.py, line 3, in step") for n in range(4)]
    assert said([row(9), *broken, row(8), row(7), row(6)]) == {
        "failed": "4 of 8 conversations failed (env_error), the first with: KeyError: 'a' (env.py, line 3, in step). "
        "Nothing is learnt from them."
    }


def test_an_error_does_nothing_to_a_terminal():
    assert "\x1b" not in said([row(0, "env_error", error="\x1b[2J")])["failed"]


@pytest.mark.parametrize(
    ("stop", "option"),
    [
        ("length", "`max_turn_length`"),
        ("token_budget", "`max_completion_length`"),
        ("max_steps", "`max_env_steps`"),
        ("timeout", "`rollout_timeout`"),
        ("context_full", "`history: compact`"),
    ],
)
def test_a_limit_that_ends_most_names_its_option(stop, option):
    rows = [*(row(number, stop) for number in range(6)), row(6), row(7)]
    assert option in said(rows)[stop] and said(rows)[stop].startswith("6 of 8 conversations were ")
    assert why_equal(Counts().add(rows)).startswith("6 of 8 conversations were ")
    assert stop not in said([row(0, stop), *(row(number) for number in range(1, 8))])


def test_one_conversation_is_told_of_in_the_singular():
    assert said([row(0, "length")])["length"].startswith("1 of 1 conversation was cut off by length:")


def test_prompts_that_are_too_long_are_named_with_tokens():
    rows = [row(0, "context_full", turns=0, calls=0, errors=[], error=TOO_LONG) for _ in range(4)]
    assert list(said([*rows, row(1)], tools=["search"])) == ["too long"]
    assert said(rows)["too long"].startswith("4 of 4 conversations had no turn, since the prompt is too long: This")


def test_conversations_that_went_on_after_a_refusal_are_told_of():
    rows = [
        row(0, refused=2, first_refused="`a` forces"),
        row(1),
        row(2, "env_error", refused=1),
    ]
    assert said(rows)["refused"] == (
        "Requests were refused in 1 of 2 conversations, which went on: the first since `a` forces"
    )


def test_a_refusal_is_no_reason_for_equal_rewards():
    rows = [row(number, right=True, refused=1, first_refused="`a` forces") for number in range(2)]
    assert "too easy" in why_equal(Counts().add(rows))


def test_a_policy_that_was_never_asked_is_named():
    rows = [row(0, "env_done", turns=0, calls=0, errors=[]) for _ in range(4)]
    assert list(said(rows)) == ["no turn"] and "the policy was never asked" in said(rows)["no turn"]


def test_members_that_sampled_the_same_are_named():
    rows = [row(group, group=group) for group in (0, 1) for _ in range(4)]
    assert "`temperature`" in said(rows)["same samples"]
    assert not said([row(1), row(1), row(2)])
    assert not said([{**row(1), "sampled": None}, {**row(1), "sampled": None}])


def test_calls_that_nobody_could_read_are_named():
    rows = [row(number, calls=0, errors=[1, 0]) for number in range(4)]
    assert "No call of a tool could be read: 4 turns" in said(rows)["no call"]
    assert list(said([{**one, "stop": "length"} for one in rows])) == ["length"]
    without = [row(number, calls=0) for number in range(4)]
    assert said(without, ["search"])["no call"].startswith("None of 4 conversations called a tool: ask for search in")
    assert not said(without)
    assert list(said([{**one, "stop": "length"} for one in without], ["search"])) == ["length"]


def test_a_tool_that_raises_is_named():
    rows = [
        row(number, raised=1, first_raised="look_up: KeyError: 'a' (t.py, line 3, in look_up)") for number in (1, 2)
    ]
    assert said(rows)["raised"].endswith("the first: look_up: KeyError: 'a' (t.py, line 3, in look_up)")


def test_calls_that_fail_are_told_with_the_first_error():
    unknown = "unknown tool 'serach'; the tools are: search."
    rows = [row(number, calls=2, failed=1, first_failed=unknown) for number in (1, 2)]
    assert said(rows) == {"failed calls": f"2 of 4 calls failed, the first with: {unknown}"}
    assert not said([row(number, calls=3, failed=1, first_failed=unknown) for number in (1, 2)])


@pytest.mark.parametrize("kind", ["raised", "failed"])
def test_questions_are_not_blamed_for_calls_that_fail(kind):
    rows = [row(number, right=False, reward=0.0, **{kind: 1, f"first_{kind}": "x: broken"}) for number in (1, 2)]
    assert why_equal(Counts().add(rows)).startswith("2 of 2 calls ")


@pytest.mark.parametrize(
    ("right", "rewards", "why"),
    [
        ((True,), (1.0,), "too easy"),
        ((False,), (0.0,), "too hard"),
        ((True, False), (0.0, 1.0), "Some questions are too easy, and others too hard."),
        ((None,), (0.9,), "Every conversation earned 0.9"),
        ((None,), (0.1, 0.9), "too coarse"),
    ],
)
def test_questions_are_blamed_only_where_nothing_else_is(right, rewards, why):
    def rows(**fields):
        given = zip(right * 2, rewards * 2, strict=False)
        return [row(n, group=n % 2, right=one, reward=reward, **fields) for n, (one, reward) in enumerate(given)]

    assert why in why_equal(Counts().add(rows()))
    assert "question" not in why_equal(Counts().add(rows(stop="length")))


def test_a_run_is_judged_by_its_training_and_all_failures():
    table = Table()
    table.add("rollout", [row(0, "max_steps", mode="eval"), row(1, "engine_error", mode="eval", error="gone"), row(2)])
    assert [finding.kind for finding in find_in_run(table)] == ["failed"]


def test_rows_of_old_indices_are_read():
    later = ("sampled", "raised", "first_raised", "failed", "first_failed", "refused", "first_refused", "where")
    old = [{name: value for name, value in row(0).items() if name not in later} for _ in range(2)]
    assert not find(Counts().add(old))


def test_merged_counts_are_those_of_all_batches():
    batches = [
        [row(0, step=0, right=True, reward=1.0), row(0, "length", step=0, right=False, raised=1, first_raised="a")],
        [row(1, "env_error", step=1, error="gone"), row(2, step=1, turns=0, calls=0, errors=[])],
        [
            row(3, step=2, failed=1, first_failed="b"),
            row(5, step=2, calls=0, errors=[1, 1]),
            row(6, "context_full", step=2, turns=0, calls=0, errors=[], error=TOO_LONG, refused=1, first_refused="c"),
            row(4, "env_error", step=2, error="other", raised=2),
        ],
    ]
    merged = Counts()
    for rows in batches:
        merged.merge(Counts().add(rows))
    assert merged == Counts().add(sum(batches, []))
