"""
Rewards made to refute a credit rule: what conversations of K turns earn; see reports/designs.md.

A turn is a call of one of two tools, with one of many names. It *searches* or tallies, and it is *named* right or not.
A call is right if it searches for the right name. In three designs a tally ends the conversation.

Axes: B conversation, K turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LATE = 6
"""Turns by which design C pays late."""
ENOUGH = 3
"""Searches after which an answer of design P is worth .9."""


@dataclass(frozen=True)
class Calls:
    """
    What conversations did.

    Args:
        searches, named (`Tensor`): Of each turn, shape (B, K), bool; False after the end.
        exists (`Tensor`): Which turns there were, shape (B, K), bool.
        luck (`Tensor`): Shape (B,), between 0 and 1, drawn for each conversation.
    """

    searches: Tensor
    named: Tensor
    exists: Tensor
    luck: Tensor

    @property
    def right(self) -> Tensor:
        return self.searches & self.named


@dataclass(frozen=True)
class Earned:
    """
    What they earned.

    Args:
        turns (`Tensor`): Turn rewards, shape (B, K), float64.
        outcomes (`Tensor`): Shape (B,), float64.
        reached (`Tensor`): What is measured, of all that is possible, shape (B,).
    """

    turns: Tensor
    outcomes: Tensor
    reached: Tensor


DESIGNS = {
    "A": "each right call is paid at once; the outcome wants all of them",
    "B": "the outcome is the second call alone; every search is paid",
    "C": "as A, paid six turns late",
    "D": "every second right call is paid; the outcome is the share right of the others",
    "F": "searches are paid a little; each makes an answer right 1/K less often",
    "H": "right names are paid a little; the outcome is how long the conversation gets",
    "P": "searches are paid a little; an answer is right in .2 of the cases, and in .9 after three searches",
    "N": "all right calls together earn the shaping; the outcome is nearly chance",
}
"""By name, what is paid."""

HELD_OUT = {
    "T": "turn 5 alone decides the outcome; right calls after it are paid",
    "M": "milestones: every fourth turn is paid for the share right of the last four; the outcome wants .75 right",
    "W": "wrong names are paid a little; the outcome is the share right",
    "Q": "right names are paid next to nothing; the outcome is chance, and more likely with each search",
}
"""Designs that the advice of `mt-grpo credit` was not made on; in no other comparison."""

ENDING = ("F", "H", "P")
"""Designs in which a tally ends the conversation."""


def earn(design: str, calls: Calls, shaping: float) -> Earned:
    """
    What conversations earn.

    Args:
        design (`str`): One of `DESIGNS` or `HELD_OUT`.
        calls (`Calls`): What they did.
        shaping (`float`): What a turn earns for what is paid; a fifth of it in F, H, P and W, a fiftieth in Q, and a
            K-th in N.
    """
    right, turns = calls.right.double(), calls.exists.shape[1]
    searched = calls.searches.double().sum(dim=1)
    answered = (calls.exists & ~calls.searches).any(dim=1).double()
    share = right.mean(dim=1)
    if design == "A":
        return Earned(shaping * right, calls.right.all(dim=1).double(), share)
    if design == "B":
        return Earned(shaping * calls.searches.double(), right[:, 1], right[:, 1])
    if design == "C":
        paid = torch.nn.functional.pad(right, (LATE, 0))[:, :turns]
        paid[:, -1] += right[:, turns - LATE :].sum(dim=1)
        return Earned(shaping * paid, calls.right.all(dim=1).double(), share)
    if design == "D":
        is_paid = torch.arange(turns) % 2 == 0
        others = right[:, ~is_paid].mean(dim=1)
        return Earned(shaping * right * is_paid, others, others)
    if design == "F":
        likely = answered * (1 - searched / turns)
        return Earned(shaping / 5 * calls.searches.double(), (calls.luck < likely).double(), likely)
    if design == "H":
        outcome = searched / turns
        return Earned(shaping / 5 * calls.named.double(), outcome, outcome)
    if design == "P":
        likely = answered * torch.where(searched >= ENOUGH, 0.9, 0.2)
        return Earned(shaping / 5 * calls.searches.double(), (calls.luck < likely).double(), likely / 0.9)
    if design == "N":
        outcome = (calls.luck < 0.4 + 0.2 * share).double()
        return Earned(shaping / turns * right, outcome, share)
    if design == "T":
        later = torch.arange(turns) > 4
        return Earned(shaping * right * later, right[:, 4], right[:, 4])
    if design == "M":
        paid = torch.zeros_like(right)
        paid[:, 3::4] = right.view(len(right), -1, 4).mean(dim=2)
        return Earned(shaping * paid, (share >= 0.75).double(), share)
    if design == "W":
        return Earned(shaping / 5 * (~calls.named).double(), share, share)
    likely = 0.2 + 0.6 * searched / turns
    return Earned(shaping / 50 * calls.named.double(), (calls.luck < likely).double(), searched / turns)
