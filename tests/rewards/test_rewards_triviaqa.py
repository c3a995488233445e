import random

import pytest
from support.scoring import score

from mt_grpo.rewards import (
    RewardError,
    exact_match_reward_func,
    exist_answer_in_search_results,
    exist_answer_reward_func,
    tool_execution_reward_func,
)
from mt_grpo.rewards import format_reward_func as public_format_reward_func
from mt_grpo.rewards.builtin import accepted_answers, format_reward_func, holds_answer, normalize_answer
from mt_grpo.trajectory import ToolCall, Trajectory, Turn

OK, FAILED = ToolCall("search", executed=True), ToolCall("search", executed=True, error="HTTP 500")
UNKNOWN = ToolCall("serach", error="no such tool")


def search(result, error=None, executed=True):
    return ToolCall("search", {"query": "q"}, result, error, executed)


def make_trajectory(*turns, **row):
    """Turns are lists of calls, or a string for one that could not be parsed."""
    made = [
        Turn(index, {}, error=calls) if isinstance(calls, str) else Turn(index, {}, calls)
        for index, calls in enumerate(turns)
    ]
    return Trajectory([], made, row=row)


def turn_values(reward, trajectory):
    return score([reward], [], [trajectory]).turn[0][0]


def outcome_values(gold, answer):
    """(exact match, exist answer)"""
    trajectory = Trajectory([], answer=answer, row={"answer": gold, "question": "Who sang Help!?"})
    [[exact], [exist]] = score([], [exact_match_reward_func, exist_answer_reward_func], [trajectory]).outcome
    return exact, exist


# Tool execution


@pytest.mark.parametrize(
    ("turns", "values"),
    [
        ([[OK], []], [0.2, None]),
        ([[OK], [FAILED], []], [0.2, -0.1, None]),
        ([[OK, FAILED, UNKNOWN], [OK]], [0.2 / 3, 0.1 - 0.2 / 3]),
        (["not JSON", [OK]], [0.0, 0.1]),
        ([[OK, OK], [OK]], [0.2, 0.0]),
        ([[OK], [], [FAILED], [OK]], [0.2, None, -0.1, 0.4 / 3 - 0.1]),
        ([[]], [None]),
        ([], []),
    ],
)
def test_tool_execution_is_the_change_of_a_fifth_of_the_share(turns, values):
    assert turn_values(tool_execution_reward_func, make_trajectory(*turns)) == pytest.approx(values)


@pytest.mark.parametrize("seed", range(20))
def test_tool_execution_sums_to_a_fifth_of_the_share(seed):
    draw = random.Random(seed)
    turns = [draw.choices([OK, FAILED, UNKNOWN], k=draw.randrange(3)) for _ in range(draw.randrange(1, 7))]
    calls = [call for turn in turns for call in turn]
    values = turn_values(tool_execution_reward_func, make_trajectory(*turns))
    expected = 0.2 * sum(call.error is None for call in calls) / max(1, len(calls))
    assert sum(value or 0.0 for value in values) == pytest.approx(expected, abs=1e-15)


# Answer in the search results


@pytest.mark.parametrize(
    ("turns", "values"),
    [
        ([[search("Lima is the capital.")], []], [0.5, None]),
        ([[search("Cusco.")], [search("Lima.")], [search("Lima again")]], [0.0, 0.5, 0.0]),
        ([[search("Cusco."), search("Lima.")]], [0.5]),
        ([[search("error at Lima", error="HTTP 500")]], [0.0]),
        ([[search("call 'Lima' is malformed", error="bad arguments", executed=False)]], [None]),
        ([[search("Lima", error="bad arguments", executed=False), search("Cusco")]], [0.0]),
        ([[search("Lima", executed=False), search("Cusco")]], [0.0]),
        (["not JSON", [search("Lima")]], [None, 0.5]),
        ([[search("Limassol")]], [0.0]),
    ],
)
def test_the_first_result_with_the_answer_earns_a_half(turns, values):
    assert turn_values(exist_answer_in_search_results, make_trajectory(*turns, answer="Lima")) == values


# Outcome


@pytest.mark.parametrize(
    ("answer", "exact", "exist"),
    [
        ("the  Beatles!", 1.0, 0.5),
        ("Beatles", 1.0, 0.5),
        ("I think it was The Beatles.", 0.0, 0.5),
        ("The Fab Four", 1.0, 0.5),
        ("beetles", 0.0, 0.0),
        ("", 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize(
    "gold",
    [
        ["The Beatles", "Fab Four"],
        {"value": "The Beatles", "aliases": ["Fab Four"], "normalized_aliases": ["fab four"], "type": "Wikipedia"},
        {"value": "The Beatles", "normalized_aliases": ["fab four"]},
        {"value": "The Beatles", "aliases": ["Fab Four"]},
    ],
)
def test_an_answer_is_right_if_it_holds_an_accepted_one(gold, answer, exact, exist):
    assert outcome_values(gold, answer) == (exact, exist)


def test_the_answer_column_may_be_one_string():
    assert outcome_values("Lima", "lima") == (1.0, 0.5)
    assert outcome_values("Lima", "Cusco") == (0.0, 0.0)


def test_an_accepted_string_of_punctuation_accepts_nothing():
    assert outcome_values(["", "!!!"], "?") == (0.0, 0.0)
    assert accepted_answers(["", "!!!", "Chk Chk Chk"]) == ["Chk Chk Chk"]


@pytest.mark.parametrize("reward", [exact_match_reward_func, exist_answer_reward_func], ids=lambda reward: reward.name)
def test_a_dataset_without_an_answer_column_is_an_error(reward):
    with pytest.raises(RewardError, match=f"'{reward.name}' failed with TypeError: .*'answer'"):
        score([], [reward], [Trajectory([], answer="x", row={"question": "?"})])


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  U.S.\tArmy", "us army"),
        ("An apple a day", "apple day"),
        ("Theatre", "theatre"),
        ("“O’Brien’s” – pub…", "obriens pub"),
        ("A", "a"),
        ("The The", "the the"),
        ("São Paulo", "são paulo"),
        ("...", ""),
    ],
)
def test_normalisation_drops_case_punctuation_articles_spaces(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("text", "answer", "held"),
    [
        ("the Sol system", "sol", True),
        ("solid", "sol", False),
        ("parasol", "sol", False),
        ("New York City", "york", True),
        ("New York City", "new city", False),
        ("He lived in the U.S. then", "US", True),
        ("Lima/Callao", "lima", True),
        ("Lima-based", "Lima", True),
        ("the Paris—Dakar rally", "Paris", True),
        ("Martin Luther King, Jr.", "Martin Luther King Jr", True),
        ("O'Brien", "Brien", False),
        ("AC/DC played", "ac/dc", True),
        ("ACDC played", "AC/DC", True),
    ],
)
def test_an_answer_is_held_as_whole_words(text, answer, held):
    assert holds_answer(text, [answer]) is held
    assert holds_answer(text, ["nothing of the kind", answer]) is held


def test_the_format_reward_is_named_here_too():
    assert format_reward_func is public_format_reward_func
