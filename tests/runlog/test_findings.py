"""What is said of conversations follows from how they ended, what they called and what they sampled."""

from itertools import combinations, count

import numpy as np
import pytest
from scipy import stats
from support.runs import index_line

from mt_grpo.runlog.findings import CONFIDENCE, RESAMPLES, Counts, bootstrap, find, find_in_run, pass_at, why_equal
from mt_grpo.runlog.index import Table

TOO_LONG = "This model's maximum context length is 12 tokens, and the messages have 71."
SESSIONS = count()


def row(number, stop="answered", group=0, **fields):
    usual = {"turns": 2, "calls": 1, "errors": [0, 0], "sampled": number}
    return index_line(str(next(SESSIONS)), **{**usual, "stop": stop, "group": group, **fields})


def rows(numbers, *stop, **fields):
    return [row(number, *stop, **fields) for number in numbers]


def without_turns(size, stop, **fields):
    return rows([0] * size, stop, turns=0, calls=0, errors=[], **fields)


BROKEN = rows(range(4), "env_error", error="KeyError: 'a'", where="env.py, line 3, in step")
BROKEN_SAID = (
    "4 of 8 conversations failed (env_error), the first with: KeyError: 'a' (env.py, line 3, in step). Nothing is"
)
RAISED = "look_up: KeyError: 'a' (t.py, line 3, in look_up)"
FAILED = {"failed": 1, "first_failed": "unknown tool 'serach'; the tools are: search."}
REFUSED = [row(0, refused=2, first_refused="`a` forces"), row(1), row(2, "env_error", refused=1)]
REFUSED_SAID = "Requests were refused in 1 of 2 conversations, which went on: the first since `a` forces"
PROMPTS = [*without_turns(4, "context_full", error=TOO_LONG), row(1)]
GARBLED = {"calls": 0, "errors": [1, 0]}


@pytest.mark.parametrize(
    ("conversations", "found"),
    [
        ([row(9), *BROKEN, *rows([8, 7, 6])], {"failed": f"{BROKEN_SAID} learnt from them."}),
        ([row(0, "env_error", error="\x1b[2J")], {"failed": "1 of 1 conversation failed"}),
        ([row(0, "length")], {"length": "1 of 1 conversation was cut off by length:"}),
        (PROMPTS, {"too long": "4 of 5 conversations had no turn, since the prompt is too long: This"}),
        (REFUSED, {"failed": "1 of 3 conversations failed", "refused": REFUSED_SAID}),
        (without_turns(4, "env_done"), {"no turn": "the policy was never asked"}),
        ([row(group, group=group) for group in (0, 0, 0, 0, 1, 1, 1, 1)], {"same samples": "`temperature`"}),
        (
            [row(group, group=group, right=group != 2) for group in (0, 0, 1, 1, 2, 2)],
            {"same samples": "3 of 3 groups sampled the same tokens in all members, right ones in 2: nothing tells"},
        ),
        (rows([1, 1, 2]), {}),
        (rows([1, 1], sampled=None), {}),
        (rows(range(4), **GARBLED), {"no call": "No call of a tool could be read: 4 turns"}),
        (rows(range(4), "length", **GARBLED), {"length": ""}),
        (rows(range(4), calls=0), {"no call": "None of 4 conversations called a tool: ask for search in"}),
        (rows(range(4), "length", calls=0), {"length": ""}),
        (rows([1, 2], raised=1, first_raised=RAISED), {"raised": f"the first: {RAISED}"}),
        (
            rows([1, 2], calls=2, **FAILED),
            {"failed calls": f"2 of 4 calls failed, the first with: {FAILED['first_failed']}"},
        ),
        (rows([1, 2], calls=3, **FAILED), {}),
    ],
)
def test_what_went_wrong_is_said_with_its_place(conversations, found):
    counts = Counts().add(conversations)
    said = {each.kind: each.sentence for each in find(counts, {"tools": ["search"]})}
    assert said.keys() == found.keys()
    assert all(words in said[kind] and "\x1b" not in said[kind] for kind, words in found.items()), said
    without_tools = {each.kind for each in find(counts)}
    assert without_tools == found.keys() - ({"no call"} if "None of" in found.get("no call", "") else set())


@pytest.mark.parametrize(
    ("stop", "option"),
    [
        *[("length", "`max_turn_length`"), ("token_budget", "`max_completion_length`")],
        *[("max_steps", "`max_env_steps`"), ("timeout", "`rollout_timeout`"), ("context_full", "`history: compact`")],
    ],
)
def test_a_limit_that_ends_most_names_its_option(stop, option):
    most, few = (Counts().add(rows(range(cut), stop) + rows(range(cut, 8))) for cut in (6, 1))
    (finding,) = find(most)
    assert finding.kind == stop and option in finding.sentence
    for sentence in (finding.sentence, why_equal(most)):
        assert sentence.startswith("6 of 8 conversations were ")
    assert not find(few)


@pytest.mark.parametrize("kind", ["raised", "failed"])
def test_questions_are_not_blamed_for_calls_that_fail(kind):
    wrong = rows([1, 2], right=False, reward=0.0, **{kind: 1, f"first_{kind}": "x: broken"})
    assert why_equal(Counts().add(wrong)).startswith("2 of 2 calls ")


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
    def equal(**fields):
        given = zip(right * 2, rewards * 2, strict=False)
        made = [row(n, group=n % 2, right=one, reward=reward, **fields) for n, (one, reward) in enumerate(given)]
        return why_equal(Counts().add(made))

    assert why in equal() and why in equal(refused=1, first_refused="`a` forces")
    assert "question" not in equal(stop="length")


def test_a_run_is_judged_by_its_training_and_all_failures():
    table, failed = Table(), {"error": "gone"}
    evaluated = [row(0, "max_steps", mode="eval"), row(1, "engine_error", mode="eval", **failed)]
    table.add("rollout", [*evaluated, row(2, "env_error", **failed), row(3, "length")])
    failure, limit = find_in_run(table)
    assert (failure.kind, limit.kind) == ("failed", "length") and failure.sentence.startswith("2 of 4 conversations")


def test_a_reward_that_never_applies_in_training_stands_out():
    table = Table()
    table.add("rollout", [row(0, rewards={"a": 1.0, "b": None}), row(1, mode="eval", rewards={"a": None, "b": 1.0})])
    (finding,) = find_in_run(table)
    assert finding.sentence == "The reward 'b' applied to no conversation: it returned `None` for each."


def test_rows_of_old_indices_are_read():
    later = ("sampled", "raised", "first_raised", "failed", "first_failed", "refused", "first_refused", "where")
    assert not find(Counts().add([{name: value for name, value in row(0).items() if name not in later}] * 2))


def test_merged_counts_are_those_of_all_batches():
    too_long = {"error": TOO_LONG, "refused": 1, "first_refused": "c"}
    batches = [
        [row(0, right=True, reward=1.0), row(0, "length", right=False, raised=1, first_raised="a")],
        [row(1, "env_error", step=1, error="gone"), row(2, step=1, turns=0, calls=0, errors=[])],
        [
            row(3, step=2, failed=1, first_failed="b"),
            row(5, step=2, calls=0, errors=[1, 1]),
            *without_turns(1, "context_full", step=2, **too_long),
            row(4, "env_error", step=2, error="other", raised=2),
        ],
    ]
    merged = Counts()
    for each in batches:
        merged.merge(Counts().add(each))
    assert merged == Counts().add(sum(batches, []))


# Intervals and chances of evaluations, against scipy and against every subset of attempts


@pytest.mark.parametrize("size", (2, 7, 500))
def test_intervals_are_those_of_scipy(size):
    values = np.random.default_rng(size).random(size)
    rng = np.random.default_rng(0)
    options = {"n_resamples": RESAMPLES, "confidence_level": CONFIDENCE, "method": "percentile", "rng": rng}
    theirs = stats.bootstrap((values,), np.mean, **options).confidence_interval
    ours = bootstrap(np.append(values, np.nan))  # a row without a value does not count
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert (ours.mean, ours.rows) == (pytest.approx(values.mean()), size)


def test_too_few_rows_have_no_interval():
    assert bootstrap(np.array([np.nan])).mean is None
    one = bootstrap(np.array([0.5]))
    assert (one.mean, one.low, one.rows) == (0.5, None, 1)


def test_chances_are_shares_of_all_subsets():
    attempts = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0]]
    right, number = (np.array([count_of(each) for each in attempts]) for count_of in (sum, len))
    for k in (1, 2, 3, 4):
        subsets = [list(combinations(each, k)) for each in attempts]
        wanted = [
            [np.mean([judge(one) for one in each]) if each else np.nan for each in subsets] for judge in (any, all)
        ]
        np.testing.assert_allclose(pass_at(right, number, k), wanted, atol=1e-12)
