"""The score of answers to Geometry3K, in the form of `verl.utils.reward_score.geo3k`. Needs `mathruler`."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

from mt_grpo.tools.function import ToolDefinitionError

_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def find_grader() -> ModuleType:
    """The module that grades answers."""
    try:
        return importlib.import_module("mathruler.grader")
    except ModuleNotFoundError as error:
        raise ToolDefinitionError(
            f"Answers to Geometry3K are graded by `mathruler`, and {error.name!r} is not installed: `pip install "
            "mathruler pylatexenc`."
        ) from error


def format_reward(predict_str: str) -> float:
    """1.0 for thoughts in `<think>` and an answer in a box after them, else 0.0."""
    return float(_FORMAT.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1.0 if the answer, by default that in the box, equals `ground_truth` as an expression, else 0.0."""
    grader = find_grader()
    answer = grader.extract_boxed_content(predict_str) if use_boxed else predict_str
    return float(grader.grade_answer(answer, ground_truth))


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """The mean of `acc_reward` and `format_reward`; the second has the weight `format_score`."""
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * format_reward(predict_str)
