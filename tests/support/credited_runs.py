"""A run of one batch whose conversations are credited by a real rule, without sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mt_grpo.credit import Rule, estimate_parts, rule_says, whole_rule
from mt_grpo.rewards import Scores
from mt_grpo.rollout.runner import Branching
from mt_grpo.runlog import Batch, RunWriter
from mt_grpo.runlog.schema import session_id
from mt_grpo.training.reward_batch import gather_rewards
from mt_grpo.training.step_log.records import part_rows, run_line
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn
from support.runs import TOKENIZER, copy_tokenizer

REWARDS = [
    {"name": "tool_execution_reward_func", "kind": "turn", "weight": 1.0, "maximum": 0.2},
    {"name": "exist_answer_in_search_results", "kind": "turn", "weight": 1.0, "maximum": 0.5},
    {"name": "exact_match_reward_func", "kind": "outcome", "weight": 1.0, "maximum": 1.0},
    {"name": "format_reward_func", "kind": "outcome", "weight": 1.0, "maximum": 0.9},
]


@dataclass
class Member:
    """
    A conversation: its rewards, and at which turns a tool ran.

    Args:
        outcome (`list[float | None]`): Outcome rewards, in the order of `REWARDS`.
        turns (`list[list[float | None]]`): Of each turn its turn rewards, in the order of `REWARDS`.
        results (`list[bool]`, *optional*): Whether a tool result follows each turn; by default all but the last.
        branch_of (`int`, *optional*): Number of the conversation with which it shares its first turns.
        shared (`int`): How many it shares.
    """

    outcome: list[float | None]
    turns: list[list[float | None]]
    results: list[bool] | None = None
    branch_of: int | None = None
    shared: int = 0
    change: dict[str, Any] = field(default_factory=dict)


EXAMPLE = [
    Member([0.0, 0.4], [[0.2, 0.0], [0.0, 0.0], [None, None]]),
    Member([0.0, 0.345], [[0.2, 0.0], [-0.1, None], [-0.1 / 3, None], [None, None]], [True, False, False, False]),
    Member([1.0, 0.9], [[0.2, 0.0], [0.0, 0.5], [None, None]]),
    Member([0.0, 0.4], [[0.2, 0.0], [0.0, 0.5], [None, None]]),
    Member([0.0, 0.18], [[None, None]]),
    Member([0.0, 0.4], [[0.2, 0.0], [None, None]]),
    Member([1.0, 0.9], [[0.2, 0.0], [0.0, 0.5], [None, None]]),
    Member([0.0, 0.4], [[None, None]]),
]
"""The first group of the quickstart: "What is the capital of the homeland of Voltaire?"."""

OTHER = [Member([float(number % 2), 0.2 * number], [[0.1 * number, None], [0.0, 0.3]]) for number in range(8)]
EQUAL = [Member([1.0, 0.9], [[0.2, 0.5], [None, None]])] * 8
WRONG = [Member([0.0, 0.2], [[0.0, 0.0], [None, None]])] * 8
_SEARCHED = [[0.2, 0.0], [None, None]]
BRANCHED = [
    Member([1.0, 0.9], _SEARCHED),
    *(Member([0.0, format_], _SEARCHED, branch_of=0, shared=1) for format_ in (0.9, 0.4, 0.2)),
    Member([0.0, 0.1], _SEARCHED[:1], [False]),  # it ended before it branched
    *[Member([0.0, 0.1], _SEARCHED[:1], branch_of=4, shared=1)] * 3,
]


def write_credited(
    folder: Path, groups: list[list[Member]], rule: Rule, branching: Branching | None = None, **options: Any
) -> Path:
    """
    Writes a run of one training batch.

    Args:
        folder (`Path`): Its `output_dir`.
        groups (`list[list[Member]]`): Groups of one size.
        rule (`str` or `dict`): The credit rule.
        branching (`Branching`, *optional*): How conversations branched.
        options: `turn_coef` and `scale_rewards`, for the rule.
    """
    size = len(groups[0])
    members = [member for group in groups for member in group]
    made: list[Trajectory] = []
    for number, member in enumerate(members):
        made.append(_conversation(number, number // size, member, made))
    names = [reward["name"] for reward in REWARDS]
    scores = Scores(
        *([[each.rewards[kind][name] for each in made] for name in _names(kind)] for kind in ("turn", "outcome"))
    )
    weights = torch.tensor([reward["weight"] for reward in REWARDS])
    rewards, _ = gather_rewards(made, scores, weights, size, branching, names)
    options = {"turn_coef": None, "scale_rewards": "group", **options}
    credit = estimate_parts(rule, rewards, **options)
    writer = RunWriter(folder)
    batch = Batch("train", 0, 0, size, list(range(len(made))), made, REWARDS)
    about = {"group_size": size, "group_size_eval": 1, "processes": 1, "model": "embedded", "tools": ["search"]}
    about |= {"estimator": rule, "rule": whole_rule(rule, **options), "rule_says": rule_says(rule)}
    writer.append([*writer.save_tokenizer(copy_tokenizer), run_line(about, REWARDS), *writer.write(batch)])
    advantages = [row[: len(each.turns)] for each, row in zip(made, credit.advantages.tolist(), strict=True)]
    writer.append(writer.write_credit(batch, advantages, part_rows(credit, made)))
    return folder


def _names(kind: str) -> list[str]:
    return [reward["name"] for reward in REWARDS if reward["kind"] == kind]


def _conversation(number: int, group: int, member: Member, before: list[Trajectory]) -> Trajectory:
    prompt = [{"role": "system", "content": "Search, then answer."}, {"role": "user", "content": f"Question {group}?"}]
    session = session_id("train", 0, 0, number)
    made = Trajectory(
        prompt, session=session, row={"answer": ["Paris"]}, start=1000.0, stop_reason=StopReason.ANSWERED
    )
    results = member.results or [index + 1 < len(member.turns) for index in range(len(member.turns))]
    context = TOKENIZER.encode("Search, then answer. Question?").ids
    for index in range(len(member.turns)):
        own = number if member.branch_of is None or index >= member.shared else member.branch_of
        last = index + 1 == len(member.turns)
        text = f"<answer>{own}</answer>" if last else f"<reasoning>find {own} {index}</reasoning>"
        ids = TOKENIZER.encode(text).ids
        turn = Turn(index, {"role": "assistant", "content": text}, num_tokens=len(ids), context_length=len(context))
        turn.start, turn.seconds = 1000.0 + index + own / 100, 0.5 + own / 100
        made.tree.add_turn(context, ids, [-0.5] * len(ids))
        context = [*context, *ids]
        if results[index]:
            turn.tool_calls = [ToolCall("search", {"query": f"{own}"}, "France.", None, True, 0.1)]
            turn.replies = [{"role": "tool", "content": "France."}]
            context = [*context, *TOKENIZER.encode("France.").ids]
        made.turns.append(turn)
    made.answer, made.seconds = str(number), 2.0
    if member.branch_of is not None:
        made.branch_of = before[member.branch_of].session
    made.rewards = {
        "turn": {name: [turn[place] for turn in member.turns] for place, name in enumerate(_names("turn"))},
        "outcome": dict(zip(_names("outcome"), member.outcome, strict=True)),
    }
    for name, value in member.change.items():
        setattr(made, name, value)
    return made
