"""The calculator: right, exact for whole numbers, and bounded."""

import math
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mt_grpo.tools import calculator

INTEGERS = st.integers(0, 10**6).map(str)
DECIMALS = st.decimals(0, 10**4, allow_nan=False, allow_infinity=False, places=3).map(str)


def compound(parts: st.SearchStrategy[str], operators: list[str]) -> st.SearchStrategy[str]:
    binary = st.tuples(parts, st.sampled_from(operators), parts).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
    call = st.tuples(st.sampled_from(["min", "max"]), parts, parts).map(lambda t: f"{t[0]}({t[1]}, {t[2]})")
    unary = st.tuples(st.sampled_from(["-", "+", "abs", "round"]), parts).map(lambda t: f"{t[0]}({t[1]})")
    power = st.tuples(parts, st.integers(0, 3)).map(lambda t: f"({t[0]} ** {t[1]})")
    return binary | call | unary | power


WHOLE = st.recursive(INTEGERS, lambda parts: compound(parts, ["+", "-", "*", "//", "%"]), max_leaves=12)
DECIMAL = st.recursive(INTEGERS | DECIMALS, lambda parts: compound(parts, ["+", "-", "*", "/"]), max_leaves=8)


@settings(max_examples=300)
@given(st.tuples(WHOLE, st.just(True)) | st.tuples(DECIMAL, st.just(False)))
def test_it_agrees_with_python_and_is_exact_for_whole_numbers(case: tuple[str, bool]) -> None:
    expression, exact = case
    try:
        expected = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="Division by zero"):
            calculator(expression)
        return
    if exact:
        assert calculator(expression) == str(expected)
    else:  # the difference of two nearly equal numbers loses as many digits as they share
        assert float(calculator(expression)) == pytest.approx(expected, rel=1e-9, abs=1e-3)


@pytest.mark.filterwarnings("error::SyntaxWarning", "error::DeprecationWarning")  # of what Python makes of the text
@example("1if")
@example("2.or 3")
@example("'\\d'")
@example("-" * 499 + "1")  # as deep as it goes
@example("(" * 199 + "1" + ")" * 199)
@example("1" + "+1" * 249)
@given(st.text("0123456789+-*/%()., eabsqrtmind^_'\\", max_size=40))
def test_any_text_has_a_value_or_a_value_error(expression: str) -> None:
    try:
        assert math.isfinite(float(calculator(expression))) or len(calculator(expression)) > 300
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        (" (2 + 3) * 4\n", "20"),
        ("-2 ** 2", "-4"),
        ("2 ** 3 ** 2", "512"),
        ("10 ** 30 / 10 ** 29", "10"),
        ("7 / 2", "3.5"),
        ("1 / 3", "0.333333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("2.5 * 4", "10"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** -1", "0.5"),
        ("10 ** 20 + 1", "100000000000000000001"),
        ("1e21 * 1.5", "1.5e+21"),
        ("2.e3 + 1E-1 + 1_000", "3000.1"),
        ("sqrt(16)", "4"),
        ("sqrt(10 ** 40)", "100000000000000000000"),
        ("sqrt(2.25)", "1.5"),
        ("round(2.345, 1) + abs(-3)", "5.3"),
        ("round(1234, -2)", "1200"),
        ("max(1, 7, 3) - min(4)", "3"),
        ("1 ** 999999999", "1"),
        # commas group digits except between arguments
        ("1,234 + 1", "1235"),
        ("1,234,567.5 * 2", "2469135"),
        ("max(100,200)", "200"),
        ("max(1,000)", "1"),
        ("max((1,000), 5)", "1000"),
        ("(max(1,2) + 3,000)", "3002"),
        ("sqrt(4) * 2,000", "4000"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculator(expression) == value


TOO_LARGE = [
    *("9**9**9", "-9**9**9", "10 ** 10 ** 10", "2 ** 100000", "2.0 ** 100000", "1e308 * 10", "1e999"),
    *("10 ** 1200 * 10 ** 1200", "10 ** 1000 * 1.5", "10 ** 1000 / 7", "sqrt(10 ** 1001)"),
]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "Not an arithmetic expression: ''"),
        ("2 +", "Not an arithmetic expression: '2 \\+'"),
        ("2 + 2 = 4", "Not an arithmetic expression"),
        ("\0", "Not an arithmetic expression"),
        ("(" * 250 + ")" * 250, "Not an arithmetic expression"),
        ("12,34", "Not arithmetic: '\\(12, 34\\)'"),
        ("5 / (3 - 3)", "Division by zero"),
        ("5 % 0", "Division by zero"),
        ("0 ** -1", "Division by zero"),
        ("2 ^ 3", "Write \\*\\* for a power"),
        ("x + 1", "Unknown name 'x'; the functions are sqrt"),
        ("sin(1)", "Unknown name 'sin'"),
        ("__import__('os')", "Unknown name '__import__'"),
        ("(1).real", "Not an arithmetic expression"),
        ("2 if 1 else 3", "Not arithmetic"),
        ("~" * 490 + "1", "nested too deeply"),
        ("'a' * 3", "Not arithmetic: \"'a'\""),
        ("True + 1", "Not arithmetic: 'True'"),
        ("3(4)", "Not arithmetic: '3\\(4\\)'"),
        ("1 < 2", "Not arithmetic"),
        ("1j", "Not an arithmetic expression"),
        ("max(*[1, 2])", "Not arithmetic"),
        ("round(1.5, ndigits=1)", "Unknown name|Not arithmetic"),
        ("sqrt(1, 2)", "sqrt does not take 2 arguments"),
        ("abs()", "abs does not take 0 arguments"),
        ("max()", "max does not take 0 arguments"),
        ("round(1, 0.5)", "round takes a whole number of decimals"),
        ("sqrt(-1)", "not a real number"),
        ("(-8) ** (1 / 3)", "not a real number"),
        ("1 + " * 200 + "1", "longer than 500 characters"),
        ("round(5, -10 ** 9)", "whole number of decimals"),
        *((expression, "too large") for expression in TOO_LARGE),
    ],
)
def test_what_is_no_arithmetic_is_refused_at_once(expression: str, said: str) -> None:
    start = time.thread_time()
    with pytest.raises(ValueError, match=said):
        calculator(expression)
    assert time.thread_time() - start < 1
