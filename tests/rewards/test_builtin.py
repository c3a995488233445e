"""The rewards that come with the package: what each gives, by what was said, and which answers it takes."""

import math
import random
import sys
from decimal import Decimal
from types import SimpleNamespace

import pytest
from support.reward_batches import score

from mt_grpo import rewards
from mt_grpo.errors import ConfigError
from mt_grpo.rewards import (
    AnswerLogprob,
    EnvReward,
    InformationGain,
    RewardError,
    cut_after,
    exact_match_reward_func,
    exist_answer_in_search_results,
    exist_answer_reward_func,
    format_reward_func,
    gsm8k_correct_reward_func,
    gsm8k_number_reward_func,
    load_rewards,
    reasoning_gym_reward,
    step_reward,
    tool_execution_reward_func,
    xml_reward_func,
)
from mt_grpo.rewards.builtin import find_number, normalize_answer
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn

OK, FAILED = ToolCall("search", executed=True), ToolCall("search", executed=True, error="HTTP 500")
UNKNOWN = ToolCall("serach", error="no such tool")


def search(result, error=None, executed=True):
    return ToolCall("search", {"query": "q"}, result, error, executed)


def outcomes(reward, *trajectories):
    return score([], [reward], list(trajectories)).outcome[0]


def turn_values(reward, *turns, **row):
    """Turns are lists of calls, or a string for one that could not be parsed."""
    made = [
        Turn(index, {}, error=calls) if isinstance(calls, str) else Turn(index, {}, calls)
        for index, calls in enumerate(turns)
    ]
    return score([reward], [], [Trajectory([], made, row=row)]).turn[0][0]


# What the environment or the task gave


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        (None, {"won": 1.0, "speed": 0.5}, 1.5),
        (None, {}, None),
        ("won", {"won": 1.0, "speed": 0.5}, 1.0),
        ("lost", {"won": 1.0}, None),
        ("lost", {"won": 1.0, "*": 0.0}, 0.0),
    ],
)
def test_what_the_environment_gave_is_a_reward(key, given, value):
    assert EnvReward(key).score(Trajectory([], env_rewards=given)) == value


def test_one_of_its_rewards_has_a_name_of_its_own():
    first, second = load_rewards(["env_reward", EnvReward("won")], "outcome")
    assert (first.name, second.name) == ("env_reward", "env_reward/won")


def test_the_reward_of_a_turn_is_what_it_was_given():
    trajectory = Trajectory([], [Turn(0, {}, reward=0.5), Turn(1, {}), Turn(2, {}, reward=-1.0)])
    again = Trajectory.from_dict(trajectory.to_dict())
    assert [step_reward.score(turn, again) for turn in again.turns] == [0.5, None, -1.0]


class Task(list):
    """A dataset of reasoning-gym, as far as it is asked; `tests/interop` asks the real one."""

    def __init__(self, name, size, seed):
        super().__init__({"answer": f"{name} {seed + index}"} for index in range(size))

    def score_answer(self, answer, entry):
        return 1 if answer.strip() == entry["answer"] else 0.01


@pytest.mark.parametrize(("answer", "value"), [("legs 4 ", 1.0), ("legs 3", 0.01), (None, 0.0)])
def test_the_task_judges_the_answer(monkeypatch, answer, value):
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Task))
    row = {"task": "legs", "task_options": '{"size": 2, "seed": 3}', "index": 1}
    assert reasoning_gym_reward.score(Trajectory([], answer=answer), **row) == value


# Tool calls


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
    assert turn_values(tool_execution_reward_func, *turns) == pytest.approx(values)


@pytest.mark.parametrize("seed", range(20))
def test_tool_execution_sums_to_a_fifth_of_the_share(seed):
    draw = random.Random(seed)
    turns = [draw.choices([OK, FAILED, UNKNOWN], k=draw.randrange(3)) for _ in range(draw.randrange(1, 7))]
    calls = [call for turn in turns for call in turn]
    values = turn_values(tool_execution_reward_func, *turns)
    expected = 0.2 * sum(call.error is None for call in calls) / max(1, len(calls))
    assert sum(value or 0.0 for value in values) == pytest.approx(expected, abs=1e-15)


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
    assert turn_values(exist_answer_in_search_results, *turns, answer="Lima") == values


# Answers to trivia questions


def trivia(gold, answer):
    """(exact match, exist answer)"""
    trajectory = Trajectory([], answer=answer, row={"answer": gold, "question": "Who sang Help!?"})
    return outcomes(exact_match_reward_func, trajectory)[0], outcomes(exist_answer_reward_func, trajectory)[0]


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
    assert trivia(gold, answer) == (exact, exist)


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
        ("?", ["", "!!!"], False),  # a string of punctuation accepts nothing
        ("Chk Chk Chk!", ["", "!!!", "Chk Chk Chk"], True),
        ("It is 3", 3.0, True),
        ("0.5", 0.5, True),
    ],
)
def test_an_answer_is_held_as_whole_words(text, answer, held):
    assert trivia(answer, text)[1] == 0.5 * held
    assert trivia(["nothing of the kind", *(answer if isinstance(answer, list) else [answer])], text)[1] == 0.5 * held


@pytest.mark.parametrize("reward", [exact_match_reward_func, exist_answer_reward_func], ids=lambda reward: reward.name)
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "?"}, "TypeError: .*'answer'"),
        ({"answer": [None, "x"]}, "ValueError: .* is no answer: give"),
    ],
)
def test_a_row_without_an_answer_is_an_error(reward, row, reason):
    with pytest.raises(RewardError, match=f"'{reward.name}' failed with {reason}"):
        outcomes(reward, Trajectory([], answer="x", row=row))


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


# The format

CALL = '<reasoning>look it up</reasoning>\n<tool>{"name": "search", "args": {}}</tool>'
ANSWER = "<reasoning>found</reasoning>\n<answer>Lima</answer>"


def said(*texts):
    return Trajectory([], [Turn(index, {"role": "assistant", "content": text}) for index, text in enumerate(texts)])


@pytest.mark.parametrize(
    ("text", "fields_spacing_start_end", "marks"),
    [
        (CALL, 1.0, 1.0),
        (ANSWER, 1.0, 1.0),
        (f"\n{ANSWER}\n", 1.0, 1.0),
        ("Lima", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("<result>not a tag of the model</result>", 0.0, 0.0),
        # fields: a missing one costs 0.2
        ("<answer>Lima</answer>", 0.6, 1.0),
        ("<reasoning>hm</reasoning>", 0.6, 1.0),
        # fields: more than one is as bad as none
        ("<reasoning>a</reasoning><reasoning>b</reasoning><answer>x</answer>", 0.8, 2 / 4),
        ("<reasoning>a</reasoning><tool>{}</tool><answer>x</answer>", 0.8, 1.0),
        ("<reasoning>a</reasoning><answer>x</answer><answer>y</answer>", 0.8, 2 / 4),
        # fields: a stray mark spoils its field
        ("<reasoning>a <answer> b</reasoning><answer>x</answer>", 0.8, 3 / 4),
        ("<reasoning>a</reasoning></reasoning><answer>x</answer>", 0.8, 3 / 4),
        # spacing, start and end
        ("<reasoning>a</reasoning><answer> x</answer>", 0.8, 1.0),
        ("<reasoning>a\n</reasoning><answer>x</answer>", 0.8, 1.0),
        ("Well. <reasoning>a</reasoning><answer>x</answer>", 0.8, 1.0),
        ("<reasoning>a</reasoning><answer>x</answer> Done.", 0.8, 1.0),
        # marks the wrong way round are no block: start and end only
        ("<reasoning></answer>", 0.4, 2 / 4),
        ("</reasoning>a<reasoning></answer>x<answer>", 0.0, 1.0),
        # marks that are missing or too many
        ("<answer>Lima", 0.0, 1 / 2),
        ("Lima</answer>", 0.2, 1 / 2),
        ("<reasoning>a</reasoning><answer>Lima", 0.6, 3 / 4),
        ("<reasoning>a<reasoning><tool>{}</tool>", 0.8, 2 / 4),
    ],
)
def test_a_message_is_scored_by_its_fields_and_its_marks(text, fields_spacing_start_end, marks):
    assert outcomes(format_reward_func, said(text)) == [pytest.approx(0.2 * fields_spacing_start_end)]
    assert outcomes(xml_reward_func, said(text)) == [pytest.approx(0.2 * marks)]


@pytest.mark.parametrize("reward", [format_reward_func, xml_reward_func], ids=lambda reward: reward.name)
def test_rewards_are_a_fifth_of_the_mean_over_assistant_turns(reward):
    trajectory = said(CALL, "Lima")
    trajectory.turns[0].replies = [{"role": "user", "content": "<result><answer></result>"}]
    assert outcomes(reward, trajectory, said(CALL, ANSWER), said()) == [0.1, 0.2, None]


# Grade-school maths


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("42.", "42"),
        ("1,234,567", "1234567"),
        ("1,234.50", "1234.5"),
        ("$1,234.", "1234"),
        ("50%", "50"),
        ("-3", "-3"),
        ("−3", "-3"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        (".5", "0.5"),
        ("10-4", "4"),  # a minus between numbers is no sign
        ("the numbers are 3,4", "4"),  # a comma that sets no thousands apart
        ("She has 3 apples and 4 pears, 7 in all.", "7"),
        ("2 + 2 = 4 #### 1,004", "1004"),
        ("#### 1 #### 2", "2"),
        ("x2", None),
        ("none", None),
        ("", None),
        ("7 ####", None),
    ],
)
def test_the_last_number_of_a_text_is_found(text, number):
    assert find_number(text) == (None if number is None else Decimal(number))


GOLDS = ["He pays 2*617=<<2*617=1234>>1234\n#### 1,234", "1234", "$1,234.00", 1234, 1234.0]
SAID = {"It is $1,234.": 1.0, "1235": 0.0, "many": 0.0, None: 0.0}


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [*((gold, *said) for gold in GOLDS for said in SAID.items()), (1e-5, "0.00001", 1.0), (1e20, "20", 0.0)],
)
def test_the_number_of_the_answer_has_to_equal_the_gold_number(gold, answer, expected):
    assert outcomes(gsm8k_correct_reward_func, Trajectory([], answer=answer, row={"answer": gold})) == [expected]


@pytest.mark.parametrize("gold", ["unknown", math.nan])
def test_a_gold_answer_without_a_number_is_named_in_an_error(gold):
    with pytest.raises(RewardError, match=f"ValueError: the answer column holds no number: {gold!r}"):
        outcomes(gsm8k_correct_reward_func, Trajectory([], answer="3", row={"answer": gold}))


@pytest.mark.parametrize(
    ("answers", "value"),
    [(["42", " 42 ", "$1,234.50", "-5%", "42."], 0.2), (["42 apples", "4 2", "3,4", "", None], 0.0)],
)
def test_a_bare_number_is_rewarded(answers, value):
    given = [Trajectory([], answer=answer) for answer in answers]
    assert outcomes(gsm8k_number_reward_func, *given) == [value] * 5


# Information gain

LOGPROBS = [-5.0, -3.0, -3.5, -0.25]


def with_logprobs(logprobs=LOGPROBS, stop_reason=StopReason.ANSWERED, name="information_gain"):
    turns = [Turn(index, {"role": "assistant", "content": ""}) for index in range(len(logprobs))]
    return Trajectory([], turns, stop_reason=stop_reason, answer_logprobs={name: logprobs})


def gains(trajectory, **options):
    return score([InformationGain(**options)], [], [trajectory]).turn[0][0]


def test_a_turn_earns_what_it_adds_and_the_last_turn_nothing():
    whole = with_logprobs()
    assert gains(whole) == [2.0, -0.5, 3.25, None]
    assert sum(gains(whole)[:-1]) == pytest.approx(LOGPROBS[-1] - LOGPROBS[0])
    for index, expected in enumerate(gains(whole)):
        assert gains(cut_after(whole, index))[index] == expected  # whatever comes later
    assert gains(with_logprobs([-2.0, None, -1.0, -0.5])) == [None, None, 0.5, None]
    assert gains(with_logprobs(stop_reason=StopReason.ENGINE_ERROR)) == [None] * 4


def test_the_gain_may_be_one_of_probability_as_in_the_paper():
    expected = [math.exp(after) - math.exp(before) for before, after in zip(LOGPROBS, LOGPROBS[1:], strict=False)]
    assert gains(with_logprobs(), gain="probability") == [*map(pytest.approx, expected), None]


def test_the_score_of_a_state_is_that_of_the_context_it_leads_to():
    trajectory = with_logprobs(name="answer_logprob")
    assert [AnswerLogprob().score(turn, trajectory) for turn in trajectory.turns] == [*LOGPROBS[1:], None]


def test_without_log_probs_it_says_who_computes_them():
    with pytest.raises(RewardError, match="no log-probs of the answer, which a trainer computes"):
        gains(with_logprobs(name="another"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (" Lima ", "Lima"),
        (42, "42"),
        (3.0, "3"),
        (["Lima", "City of Kings"], "Lima"),
        ({"value": "Lima", "aliases": ["City of Kings"]}, "Lima"),
    ],
)
def test_the_first_of_several_right_answers_is_scored(value, text):
    assert InformationGain().answer_at(3, {"answer": value}) == text


@pytest.mark.parametrize("value", [None, math.nan, "", "  ", [], [None], [""], {"aliases": ["Lima"]}, {"value": ""}])
def test_a_row_without_a_right_answer_is_refused(value):
    with pytest.raises(ConfigError, match="needs a right answer, and the column 'gold' of a row has"):
        InformationGain(column="gold").right_answer(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scorer": "severs"}, "scorer.*severs"),
        ({"gain": "logprob"}, "gain.*logprob"),
        ({"column": 3}, "The option `column` of the reward 'information_gain' is 3: give it text."),
        ({"prefix": None}, "The option `prefix` of the reward 'information_gain' is None: give it text."),
    ],
)
def test_an_unusable_option_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        InformationGain(**options)


def test_agreement_needs_a_teacher():
    with pytest.raises(rewards.RewardError, match="name one in `teacher`"):
        score([rewards.teacher_agreement], [], [with_logprobs()])


def test_a_state_is_scored_by_what_a_teacher_has_read_so_far():
    trajectory = Trajectory([], turns=[Turn(index, {}, []) for index in range(4)])
    trajectory.teacher_log_ratios = [None, -1.0, 0.5, None]
    scores = [rewards.teacher_log_ratio.score(turn, trajectory) for turn in trajectory.turns]
    assert scores == [None, -1.0, -0.25, -0.25]


def test_each_is_found_by_the_name_it_reports():
    kinds = {"turn": rewards.TurnReward, "outcome": rewards.OutcomeReward, "state": rewards.StateScore}
    assert set(rewards.REWARDS) == {
        *("answer_logprob", "env_reward", "exact_match_reward_func", "exist_answer_in_search_results"),
        *("exist_answer_reward_func", "format_reward_func", "gsm8k_correct_reward_func", "gsm8k_number_reward_func"),
        *("information_gain", "reasoning_gym_reward", "step_reward", "teacher_agreement"),
        *("teacher_log_ratio", "tool_execution_reward_func", "xml_reward_func"),
    }
    for name, reward_class in rewards.REWARDS.items():
        (loaded,) = load_rewards([name], next(kind for kind, base in kinds.items() if issubclass(reward_class, base)))
        assert type(loaded) is reward_class is type(getattr(rewards, name)) and loaded.name == name
        assert name in rewards.__all__
