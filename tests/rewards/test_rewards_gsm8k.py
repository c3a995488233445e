from decimal import Decimal

import pytest
from support.scoring import score

from mt_grpo.rewards import RewardError, gsm8k_correct_reward_func, gsm8k_number_reward_func
from mt_grpo.rewards.builtin import find_number
from mt_grpo.trajectory import Trajectory


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


@pytest.mark.parametrize("gold", ["He pays 2*617=<<2*617=1234>>1234\n#### 1,234", "1234", "$1,234.00", 1234, 1234.0])
@pytest.mark.parametrize(("answer", "expected"), [("It is $1,234.", 1.0), ("1235", 0.0), ("many", 0.0), (None, 0.0)])
def test_the_number_of_the_answer_has_to_equal_the_gold_number(gold, answer, expected):
    trajectory = Trajectory([], answer=answer, row={"answer": gold})
    assert score([], [gsm8k_correct_reward_func], [trajectory]).outcome == [[expected]]


def test_a_gold_answer_without_a_number_is_named_in_an_error():
    with pytest.raises(RewardError, match="ValueError: the answer column holds no number: 'unknown'"):
        score([], [gsm8k_correct_reward_func], [Trajectory([], answer="3", row={"answer": "unknown"})])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("42", 0.2),
        (" 42 ", 0.2),
        ("$1,234.50", 0.2),
        ("-5%", 0.2),
        ("42.", 0.2),
        ("42 apples", 0.0),
        ("4 2", 0.0),
        ("3,4", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_a_bare_number_is_rewarded(answer, expected):
    assert score([], [gsm8k_number_reward_func], [Trajectory([], answer=answer)]).outcome == [[expected]]
