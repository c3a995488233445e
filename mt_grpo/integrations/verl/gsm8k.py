"""The score of answers to GSM8K, in the form of `verl.utils.reward_score.gsm8k`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from mt_grpo.rewards.gsm8k import find_number

_FINAL = re.compile(r"####\s*(-?[0-9.,]+)")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer of a solution: the number after `####`, or with `"flexible"` the last number."""
    found = _FINAL.findall(solution_str) if method == "strict" else []
    number = find_number(solution_str) if method == "flexible" else find_number(found[-1]) if found else None
    return None if number is None else str(number)


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, 0 without an answer."""
    said = extract_solution(solution_str, method)
    if said is None:
        return 0.0
    return score if Decimal(said) == find_number(str(ground_truth)) else format_score
