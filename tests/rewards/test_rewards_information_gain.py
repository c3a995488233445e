"""Information gain: what a turn is worth, and which right answer is scored."""

from __future__ import annotations

import math

import pytest
from support.scoring import score

from mt_grpo.errors import ConfigError
from mt_grpo.rewards import AnswerLogprob, InformationGain, RewardError, cut_after
from mt_grpo.trajectory import StopReason, Trajectory, Turn

LOGPROBS = [-5.0, -3.0, -3.5, -0.25]


def make_trajectory(logprobs=LOGPROBS, stop_reason=StopReason.ANSWERED):
    turns = [Turn(index, {"role": "assistant", "content": ""}) for index in range(len(logprobs))]
    return Trajectory([], turns, stop_reason=stop_reason, answer_logprobs={"information_gain": logprobs})


def gains(trajectory, **options):
    (reward,) = score([InformationGain(**options)], [], [trajectory]).turn
    return reward[0]


def test_a_turn_earns_what_it_adds_and_the_last_turn_nothing():
    assert gains(make_trajectory()) == [2.0, -0.5, 3.25, None]


def test_the_gain_may_be_one_of_probability_as_in_the_paper():
    expected = [math.exp(after) - math.exp(before) for before, after in zip(LOGPROBS, LOGPROBS[1:], strict=False)]
    assert gains(make_trajectory(), gain="probability") == [*map(pytest.approx, expected), None]


def test_the_gains_of_all_turns_sum_to_the_last_minus_the_first():
    assert sum(gains(make_trajectory())[:-1]) == pytest.approx(LOGPROBS[-1] - LOGPROBS[0])


def test_the_gain_of_a_turn_is_the_same_when_later_ones_are_cut():
    whole = make_trajectory()
    for index, expected in enumerate(gains(whole)):
        assert gains(cut_after(whole, index))[index] == expected


def test_a_turn_beside_a_context_without_a_score_earns_nothing():
    assert gains(make_trajectory([-2.0, None, -1.0, -0.5])) == [None, None, 0.5, None]


def test_the_score_of_a_state_is_that_of_the_context_it_leads_to():
    trajectory = make_trajectory()
    trajectory.answer_logprobs = {"answer_logprob": LOGPROBS}
    for index, expected in enumerate([*LOGPROBS[1:], None]):
        assert AnswerLogprob().score(trajectory.turns[index], trajectory) == expected


def test_a_conversation_that_failed_earns_nothing():
    assert gains(make_trajectory(stop_reason=StopReason.ENGINE_ERROR)) == [None] * 4


def test_without_log_probs_it_says_who_computes_them():
    trajectory = make_trajectory()
    trajectory.answer_logprobs = {}
    with pytest.raises(RewardError, match="no log-probs of the answer, which a trainer computes"):
        gains(trajectory)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (" Lima ", "Lima"),
        (42, "42"),
        (["Lima", "City of Kings"], "Lima"),
        ({"value": "Lima", "aliases": ["City of Kings"]}, "Lima"),
    ],
)
def test_the_first_of_several_right_answers_is_scored(value, text):
    assert InformationGain().right_answer(value) == text


@pytest.mark.parametrize("value", [None, "", "  ", [], [None], [""], {"aliases": ["Lima"]}, {"value": ""}])
def test_a_row_without_a_right_answer_is_refused(value):
    with pytest.raises(ConfigError, match="needs a right answer, and the column 'gold' of a row has"):
        InformationGain(column="gold").right_answer(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scorer": "severs"}, "`scorer` is unknown|scorer.*severs"),
        ({"gain": "logprob"}, "gain.*logprob"),
        ({"column": 3}, "The option `column` of the reward 'information_gain' is 3: give it text."),
        ({"prefix": None}, "The option `prefix` of the reward 'information_gain' is None: give it text."),
    ],
)
def test_an_unusable_option_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        InformationGain(**options)


def test_each_turn_scores_the_right_answer_of_its_row():
    assert InformationGain().answer_at(3, {"answer": ["Lima", "lima"]}) == "Lima"
