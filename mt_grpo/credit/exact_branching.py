"""
The bias and the noise of a credit rule on conversations that branch, without sampling: every group of branched trunks
is enumerated. See `mt_grpo.credit.exact`, and `mt_grpo.credit.branching` for what is in a group.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from mt_grpo.credit.exact import Measurement, Paths, Process, orders
from mt_grpo.credit.rule import Rule, bind_rule


def measure_branching(
    rule: Rule,
    process: Process,
    *,
    branch_at: int,
    num_branches: int,
    num_trunks: int = 2,
    parameters: tuple[float, ...] = (0.0,),
    turn_coef: float = 1.0,
) -> Measurement:
    """
    The bias and the noise of a rule, without scaling, on groups of branched trunks.

    Args:
        rule (`str` or `Mapping`): Its name, or a mapping of its `name` and its own options.
        process (`Process`): What is played. Trunks end before the first decision of turn `branch_at`.
        branch_at (`int`): Turns that branches share.
        num_branches (`int`): Branches of a trunk.
        num_trunks (`int`, *optional*, defaults to `2`): Trunks of a group.
        parameters (`tuple[float, ...]`, *optional*): The parameters of the policy.
        turn_coef (`float`, *optional*, defaults to `1.0`): Weight of turn rewards, for rule and truth.
    """
    paths = Paths.of(process, parameters)
    families, likely = _families(paths, branch_at, num_branches)
    chosen = list(itertools.combinations_with_replacement(range(len(families)), num_trunks))
    groups = torch.tensor(chosen)
    weights = likely[groups].prod(dim=1) * torch.tensor([orders(each) for each in chosen], dtype=torch.double)
    rows = families[groups].flatten(1)
    function, options = bind_rule(rule, turn_coef=turn_coef, scale_rewards="none")
    batch = replace(paths.batch(rows), num_branches=num_branches, branch_at=branch_at)
    return Measurement.of(paths.truth(turn_coef), paths.estimates(function(batch, **options), rows), weights)


def sampled_turns(process: Process, branch_at: int, num_branches: int, parameters: tuple[float, ...]) -> float:
    """The expected number of turns that are sampled for one trunk and its branches."""
    paths = Paths.of(process, parameters)
    turns = paths.turn_mask.sum(dim=1)
    own = torch.where(torch.tensor([_decides(paths, row, branch_at) for row in range(len(turns))]), num_branches, 1)
    shared = turns.clamp(max=branch_at)
    return (paths.probability @ (shared + own * (turns - shared)).double()).item()


def _families(paths: Paths, branch_at: int, num_branches: int) -> tuple[Tensor, Tensor]:
    """Every trunk with its branches as rows of paths, (F, m), without regard to order, and its probability, (F,)."""
    trunks = defaultdict(list)
    for row, play in enumerate(paths.plays):
        steps = (step for step, turn in play.decisions if turn >= branch_at)
        trunks[tuple(play.taken[: next(steps, None)])].append(row)
    families, likely = [], []
    for rows in trunks.values():
        total = paths.probability[rows].sum()
        if not _decides(paths, rows[0], branch_at):  # it ended sooner
            families.append((rows[0],) * num_branches)
            likely.append(total)
            continue
        for chosen in itertools.combinations_with_replacement(rows, num_branches):
            families.append(chosen)
            likely.append(total * (paths.probability[list(chosen)] / total).prod() * orders(chosen))
    return torch.tensor(families), torch.stack(likely)


def _decides(paths: Paths, row: int, branch_at: int) -> bool:
    """Whether a path has a decision from a turn on."""
    return any(turn >= branch_at for _, turn in paths.plays[row].decisions)
