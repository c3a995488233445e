"""
Rewards for keeping to the tag protocol: `<reasoning>` first, then one `<tool>` or one `<answer>`.

Scales follow the rewards of Zeng et al. 2025 (arXiv 2505.11821): format and XML give at most 0.2 each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mt_grpo.rewards.base import OutcomeReward
from mt_grpo.rewards.registry import reward
from mt_grpo.trajectory import Trajectory

TAGS = ("reasoning", "tool", "answer")
ACTIONS = ("tool", "answer")
BLOCK = re.compile(rf"<({'|'.join(TAGS)})>(.*?)</\1>", re.DOTALL)


@reward("format_reward_func")
class FormatReward(OutcomeReward):
    """0.2 × the mean of `message_format` over the assistant messages; `None` if there is none."""

    maximum = 0.2

    def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        return _mean(trajectory, message_format)


@reward("xml_reward_func")
class XmlReward(OutcomeReward):
    """0.2 × the mean of `message_xml` over the assistant messages; `None` if there is none."""

    maximum = 0.2

    def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        return _mean(trajectory, message_xml)


def message_format(text: str) -> float:
    """
    How well one message follows the protocol, from 0 to 1.

    - 0.4 × the share of two fields that occur exactly once: the reasoning, and one of tool and answer.
    - 0.2 if no block has whitespace just inside its tags. A message without a block earns nothing here.
    - 0.2 if it starts with `<reasoning>`.
    - 0.2 if it ends with `</tool>` or `</answer>`.

    Whitespace around the whole message does not matter.
    """
    text = text.strip()
    blocks = BLOCK.findall(text)
    fields = [_count_once(text, ("reasoning",)), _count_once(text, ACTIONS)]
    tight = bool(blocks) and all(content == content.strip() for _, content in blocks)
    starts = text.startswith("<reasoning>")
    ends = text.endswith(tuple(f"</{tag}>" for tag in ACTIONS))
    return 0.4 * sum(fields) / len(fields) + 0.2 * tight + 0.2 * starts + 0.2 * ends


def message_xml(text: str) -> float:
    """
    How well one message opens and closes its tags, from 0 to 1.

    Each tag in use (opened or closed at least once) has two marks, the opening and the closing. The score is the share
    of marks that occur exactly once, or 0 if no tag is in use.
    """
    counts = [(text.count(f"<{tag}>"), text.count(f"</{tag}>")) for tag in TAGS]
    marks = [count == 1 for pair in counts if any(pair) for count in pair]
    return sum(marks) / len(marks) if marks else 0.0


def _count_once(text: str, tags: tuple[str, ...]) -> bool:
    """Whether exactly one block of these tags is there, and no mark of them outside it."""
    blocks = sum(tag in tags for tag, _ in BLOCK.findall(text))
    openings = sum(text.count(f"<{tag}>") for tag in tags)
    closings = sum(text.count(f"</{tag}>") for tag in tags)
    return blocks == openings == closings == 1


def _mean(trajectory: Trajectory, score: Callable[[str], float]) -> float | None:
    scores = [score(turn.text) for turn in trajectory.turns]
    return 0.2 * sum(scores) / len(scores) if scores else None


format_reward_func = FormatReward()
xml_reward_func = XmlReward()
