"""
The smallest thing that learns from credit: a conversation of K turns, each with four actions of which one is right.

A turn reward of 1 / K pays for the right action, the outcome is 1 if all turns are right. A skill is a row of four
logits, and the turns are divided among the skills. It begins at .40 right; Adam, 6 groups of 8 a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from mt_grpo.credit import RewardBatch, Rule, bind_rule, rule_name

GOAL = 0.9
STEPS = 100
SEEDS = 4
GROUP, GROUPS = 8, 6
RATE = 0.05


@dataclass(frozen=True)
class Lesson:
    """
    What is learnt.

    Args:
        turns (`int`): K.
        skills (`int`): S.
        errs (`float`): How often the turn reward is wrong.
        delay (`int`): By how many turns turn rewards come late; at the latest they come at the last turn.
    """

    turns: int
    skills: int
    errs: float = 0.0
    delay: int = 0


LESSONS = {
    **{f"K {turns}": Lesson(turns, turns) for turns in (8, 16, 32)},
    "S 4": Lesson(16, 4),
    "noisy": Lesson(16, 16, errs=0.2),
    "delayed": Lesson(16, 16, delay=6),
}
"""By the heading of their column; where none is named there are 16 turns, and a skill for each."""


def steps_to_learn(rule: Rule, lesson: Lesson) -> str:
    """The mean number of steps to the goal; `never`, with the share right at the end, if a seed does not get there."""
    found = [train(rule, lesson, seed) for seed in range(SEEDS)]
    late = [right for steps, right in found if steps is None]
    return f"never (.{100 * fmean(late):.0f})" if late else f"{fmean(steps for steps, _ in found if steps):.0f}"


def train(rule: Rule, lesson: Lesson, seed: int) -> tuple[int | None, float]:
    """The step that reaches the goal, and the share right after it."""
    draw = torch.Generator().manual_seed(seed)
    skill = torch.arange(lesson.turns) * lesson.skills // lesson.turns
    logits = torch.zeros(lesson.skills, 4, dtype=torch.double)
    logits[:, 0] = math.log(2)
    logits.requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=RATE)
    function, options = bind_rule(rule, turn_coef=None, scale_rewards="group")
    right = 0.0
    for step in range(1, STEPS + 1):
        likely = logits.log_softmax(dim=1)[skill]
        actions = torch.multinomial(
            likely.detach().exp(), GROUP * GROUPS, replacement=True, generator=draw
        ).T.contiguous()
        chosen = likely.expand(len(actions), -1, -1).gather(2, actions[:, :, None])[:, :, 0]
        batch = rewards(lesson, actions, draw)
        if rule_name(rule) == "optimal_baseline":
            hit = torch.nn.functional.one_hot(actions, 4) - likely.detach().exp()
            batch = RewardBatch(**{**vars(batch), "state_scores": hit.square().sum(dim=2)})
        optimizer.zero_grad()
        (-(function(batch, **options) * chosen).mean()).backward()
        optimizer.step()
        right = logits.detach().softmax(dim=1)[skill, 0].mean().item()
        if right >= GOAL:
            return step, right
    return None, right


def rewards(lesson: Lesson, actions: Tensor, draw: torch.Generator) -> RewardBatch:
    """What a batch of conversations earns; actions have the shape (B, K)."""
    right = actions == 0
    judged = (right ^ (torch.rand(right.shape, generator=draw) < lesson.errs)).double()
    if lesson.delay:
        paid = torch.nn.functional.pad(judged, (lesson.delay, 0))[:, : lesson.turns]
        paid[:, -1] += judged[:, lesson.turns - lesson.delay :].sum(dim=1)
        judged = paid
    before = torch.nn.functional.pad(right, (1, 0))[:, :-1]
    exists = torch.ones_like(right)
    states = 2 * torch.arange(lesson.turns) + before
    return RewardBatch(judged / lesson.turns, right.all(dim=1).double(), exists, exists, GROUP, state_ids=states)
