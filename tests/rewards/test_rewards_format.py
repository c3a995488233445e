import pytest
from support.scoring import score

from mt_grpo.rewards import format_reward_func, xml_reward_func
from mt_grpo.rewards.builtin import message_format, message_xml
from mt_grpo.trajectory import Trajectory, Turn

CALL = '<reasoning>look it up</reasoning>\n<tool>{"name": "search", "args": {}}</tool>'
ANSWER = "<reasoning>found</reasoning>\n<answer>Lima</answer>"


def make_trajectory(*texts):
    return Trajectory([], [Turn(index, {"role": "assistant", "content": text}) for index, text in enumerate(texts)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, 1.0),
        (ANSWER, 1.0),
        (f"\n{ANSWER}\n", 1.0),
        ("Lima", 0.0),
        ("", 0.0),
        # fields: a missing one costs 0.2
        ("<answer>Lima</answer>", 0.2 + 0.2 + 0.2),
        ("<reasoning>hm</reasoning>", 0.2 + 0.2 + 0.2),
        # fields: more than one is as bad as none
        ("<reasoning>a</reasoning><reasoning>b</reasoning><answer>x</answer>", 0.2 + 0.2 + 0.2 + 0.2),
        ("<reasoning>a</reasoning><tool>{}</tool><answer>x</answer>", 0.2 + 0.2 + 0.2 + 0.2),
        ("<reasoning>a</reasoning><answer>x</answer><answer>y</answer>", 0.2 + 0.2 + 0.2 + 0.2),
        # fields: a stray mark spoils its field
        ("<reasoning>a <answer> b</reasoning><answer>x</answer>", 0.2 + 0.2 + 0.2 + 0.2),
        ("<reasoning>a</reasoning></reasoning><answer>x</answer>", 0.2 + 0.2 + 0.2 + 0.2),
        # spacing
        ("<reasoning>a</reasoning><answer> x</answer>", 0.4 + 0.2 + 0.2),
        ("<reasoning>a\n</reasoning><answer>x</answer>", 0.4 + 0.2 + 0.2),
        # start and end
        ("Well. <reasoning>a</reasoning><answer>x</answer>", 0.4 + 0.2 + 0.2),
        ("<reasoning>a</reasoning><answer>x</answer> Done.", 0.4 + 0.2 + 0.2),
        # marks the wrong way round are no block: start and end only
        ("<reasoning></answer>", 0.2 + 0.2),
        ("</reasoning>a<reasoning></answer>x<answer>", 0.0),
    ],
)
def test_a_message_is_scored_by_fields_spacing_start_and_end(text, expected):
    assert message_format(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, 1.0),
        ("Lima", 0.0),
        ("<answer>Lima</answer>", 1.0),
        ("<answer>Lima", 1 / 2),
        ("Lima</answer>", 1 / 2),
        ("<reasoning>a</reasoning><answer>Lima", 3 / 4),
        ("<reasoning>a</reasoning><answer>x</answer><answer>y</answer>", 2 / 4),
        ("<reasoning>a<reasoning><tool>{}</tool>", 2 / 4),
        ("<result>not a tag of the model</result>", 0.0),
    ],
)
def test_marks_that_occur_exactly_once_are_counted(text, expected):
    assert message_xml(text) == pytest.approx(expected)


def test_rewards_are_a_fifth_of_the_mean_over_assistant_turns():
    trajectory = make_trajectory(CALL, "Lima")
    trajectory.turns[0].replies = [{"role": "user", "content": "<result><answer></result>"}]
    assert score([], [format_reward_func, xml_reward_func], [trajectory]).outcome == [[0.1], [0.1]]
    perfect = make_trajectory(CALL, ANSWER)
    assert score([], [format_reward_func, xml_reward_func], [perfect]).outcome == [[0.2], [0.2]]


def test_a_conversation_without_a_message_is_not_judged():
    assert score([], [format_reward_func, xml_reward_func], [make_trajectory()]).outcome == [[None], [None]]
