"""
Credit rules on the designs of `designs.py`, learnt by tables: a row of four logits for each turn.

    python benchmarks/designs_toy.py             # the whole grid, about an hour of one core; goes on where it stopped
    python benchmarks/designs_toy.py --quick     # one cell of B and F each, in seconds; writes nothing
    python benchmarks/designs_toy.py --report    # the tables alone, from benchmarks/results/designs_toy.json

A cell is a design, a number of turns, a shaping, a number of groups of a step and a learning rate. In each, all arms
are drawn with the same numbers, in ten seeds. The policy begins with .7 searches and .4 right names, at every turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import torch
from ablation_report import difference
from common import RESULTS, machine
from designs import DESIGNS, ENDING, Calls, Earned, earn
from designs_report import ARMS, Arm, write_page
from torch import Tensor

from mt_grpo.credit import RewardBatch, bind_rule
from mt_grpo.credit.rule import largest_deviation, to_go

RESULT = RESULTS / "designs_toy.json"
TURNS, SHAPINGS, GROUPS, RATES = (8, 16, 32), (0.02, 0.1), (6, 24), (0.025, 0.05, 0.1)
GROUP, SEEDS, STEPS, LAST = 8, 10, 120, 10
SEARCHES, NAMED = 0.7, 0.4
"""What the policy does at first."""

Row = dict[str, Any]


class Cell(NamedTuple):
    """What is trained at once: all rates and seeds of an arm."""

    design: str
    turns: int
    shaping: float
    groups: int
    arm: str


def first_policy(searches: float = SEARCHES, named: float = NAMED) -> Tensor:
    """How likely each of the four actions is."""
    of_tool, of_name = (torch.tensor([share, 1 - share], dtype=torch.double) for share in (searches, named))
    return torch.outer(of_tool, of_name).flatten()


def curves(
    cell: Cell,
    arm: Arm,
    seeds: int = SEEDS,
    steps: int = STEPS,
    rates: Sequence[float] = RATES,
    policy: tuple[float, float] = (SEARCHES, NAMED),
    group: int = GROUP,
) -> Tensor:
    """Trains an arm; what is reached at each step, shape (steps, rates, seeds)."""
    draw = torch.Generator().manual_seed(0)
    divides = "none" if arm.scale_rewards == "batch" else arm.scale_rewards
    function, options = bind_rule(arm.rule, turn_coef=None, scale_rewards=divides)
    number = cell.groups * group
    start = first_policy(*policy)
    tables = [start.log().repeat(seeds, cell.turns, 1).requires_grad_() for _ in rates]
    optimizer = torch.optim.Adam([{"params": [table], "lr": rate} for table, rate in zip(tables, rates, strict=True)])
    reached = []
    for _ in range(steps):
        # equal numbers for all rates and arms
        drawn = torch.rand(seeds, number, cell.turns, generator=draw, dtype=torch.double).repeat(len(rates), 1, 1)
        luck = torch.rand(seeds, number, generator=draw, dtype=torch.double).repeat(len(rates), 1)
        likely = torch.cat(tables).log_softmax(dim=2)
        ends = likely.detach().exp().cumsum(dim=2)[:, None, :, :3]
        actions = (drawn[..., None] > ends).sum(dim=3)
        calls = calls_of(cell.design, actions, luck)
        earned = earn(cell.design, calls, cell.shaping)
        exists = calls.exists
        batch = batch_of(calls, earned, group)
        advantages = (function(batch, **options) / own_scale(batch, arm, number)).view(actions.shape)
        chosen = likely[:, None].expand(-1, number, -1, -1).gather(3, actions[..., None])[..., 0]
        turns = exists.view(len(likely), -1).sum(dim=1)
        losses = -(advantages * chosen).flatten(1).sum(dim=1) / turns
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        reached.append(earned.reached.view(len(rates), seeds, number).mean(dim=2))
    return torch.stack(reached)


def train(cell: Cell, arm: Arm, seeds: int = SEEDS, steps: int = STEPS, **options: Any) -> list[Row]:
    """Trains an arm; for each rate the share reached at the first step, at the end and over training, by seed."""
    curve = curves(cell, arm, seeds, steps, **options)
    return [
        {
            **cell._asdict(),
            "rate": rate,
            "start": round(curve[0, place].mean().item(), 4),
            "end": [round(value, 4) for value in curve[-LAST:, place].mean(dim=0).tolist()],
            "over": [round(value, 4) for value in curve[:, place].mean(dim=0).tolist()],
        }
        for place, rate in enumerate(RATES)
    ]


def calls_of(design: str, actions: Tensor, luck: Tensor) -> Calls:
    """What was done, (R * n, K): the actions 0 and 1 search, 0 and 2 are named right."""
    actions = actions.flatten(0, 1)
    searches, named = actions < 2, actions % 2 == 0
    exists = torch.ones_like(searches)
    if design in ENDING:
        exists = (~searches).cumsum(dim=1) - (~searches).long() == 0
    return Calls(searches & exists, named & exists, exists, luck.flatten())


def batch_of(calls: Calls, earned: Earned, group: int = GROUP) -> RewardBatch:
    """The rewards as a rule gets them."""
    return RewardBatch(
        earned.turns.masked_fill(~calls.exists, torch.nan), earned.outcomes, calls.exists, calls.searches, group
    )


def own_scale(batch: RewardBatch, arm: Arm, number: int) -> Tensor:
    """
    With one scale of the batch, what divides advantages, (B, 1): that of each policy's own batch of so many
    conversations, since all policies are trained at once. Else 1.
    """
    totals = batch.of_outcomes()[:, None] + to_go(batch.of_turns())
    return largest_deviation(totals, number, "group" if arm.scale_rewards == "batch" else "none")


def cells(designs: Sequence[str]) -> list[Cell]:
    return [Cell(*each) for each in product(designs, TURNS, SHAPINGS, GROUPS, ARMS)]


def work(cell: Cell) -> list[Row]:
    torch.set_num_threads(1)
    return train(cell, ARMS[cell.arm])


def worst(rows: Sequence[Row], measure: str) -> dict[str, tuple[float, float, Row]]:
    """By arm: the largest and the mean regret over all cells, and the cell of the largest."""
    found = {}
    for arm in ARMS:
        own = [row for row in rows if row["arm"] == arm]
        regrets = [1 - fmean(row[measure]) for row in own]
        most = max(range(len(own)), key=regrets.__getitem__)
        found[arm] = (regrets[most], fmean(regrets), own[most])
    return found


def text(rows: Sequence[Row]) -> str:
    """The tables, in Markdown."""
    designs = [design for design in DESIGNS if any(row["design"] == design for row in rows)]
    lines = [
        "Mean regret at the end, over all cells of a design; then the largest of a cell.",
        "",
        f"| arm | {' | '.join(designs)} | mean | largest of a cell | where |",
        f"| --- |{' --- |' * (len(designs) + 3)}",
    ]
    largest = worst(rows, "end")
    for arm in ARMS:
        regrets = [
            fmean(1 - fmean(row["end"]) for row in rows if row["arm"] == arm and row["design"] == design)
            for design in designs
        ]
        most, mean, row = largest[arm]
        where = (
            f"{row['design']}, K {row['turns']}, shaping {row['shaping']}, {row['groups']} groups, rate {row['rate']}"
        )
        lines.append(
            f"| {arm} | {' | '.join(f'{each:.2f}' for each in regrets)} | {mean:.3f} | {most:.2f} | {where} |"
        )
    lines += ["", "Shown (95 %, paired) to end .05 below its own start, or below `grpo_or`: cells of each design.", ""]
    lines += [f"| arm | {' | '.join(designs)} |", f"| --- |{' --- |' * len(designs)}"]
    for arm in ARMS:
        lines.append(f"| {arm} | {' | '.join(str(below(rows, arm, design)) for design in designs)} |")
    return "\n".join(lines)


def below(rows: Sequence[Row], arm: str, design: str) -> int:
    """In how many cells of a design an arm is shown to end .05 below its start or below `grpo_or`."""
    own = [row for row in rows if row["design"] == design]
    key = lambda row: (row["turns"], row["shaping"], row["groups"], row["rate"])  # noqa: E731
    outcome = {key(row): row["end"] for row in own if row["arm"] == "grpo_or"}
    number = 0
    for row in own:
        if row["arm"] == arm:
            for other in ([row["start"]] * len(row["end"]), outcome[key(row)]):
                gap = difference(row["end"], other)
                if gap.mean + gap.half < -0.05:
                    number += 1
                    break
    return number


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of a cell of two designs; writes nothing")
    parser.add_argument("--report", action="store_true", help="train nothing, and read committed results")
    parser.add_argument("--designs", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    parser.add_argument("--workers", type=int, default=2, help="processes, of one core each (2)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.quick:
        given = [Cell(design, 8, 0.1, 6, arm) for design in "BF" for arm in ARMS]
        found = [row for cell in given for row in train(cell, ARMS[cell.arm], seeds=2, steps=LAST)]
        return print(text(found))
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    if not options.report:
        done = {tuple(row[name] for name in Cell._fields) for row in rows}
        left = [cell for cell in cells(options.designs) if tuple(cell) not in done]
        with ProcessPoolExecutor(options.workers) as pool:
            for number, made in enumerate(pool.map(work, left), 1):
                rows += made
                if number % len(ARMS) == 0 or number == len(left):
                    keep(rows)
                    print(f"{' '.join(map(str, left[number - 1]))}: {number} of {len(left)}", flush=True)
    write_page(text(rows), begin="<!-- grid -->", end="<!-- end of the grid -->")
    print(text(rows))


def keep(rows: Sequence[Row]) -> None:
    """Writes results, a line for each."""
    head = json.dumps({"machine": machine(), "seeds": SEEDS, "steps": STEPS}, indent=2)
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    RESULT.write_text(f'{head[:-2]},\n  "rows": [\n{lines}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
