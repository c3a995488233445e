"""
What a baseline that knows the exact value could gain on the task of `success_probe.py`, learnt by tables of logits.

    python benchmarks/success_toy.py             # a minute of one core
    python benchmarks/success_toy.py --quick     # two seeds of few steps; writes nothing

A table has a row of four logits for each turn (*own*), or one for all turns (*shared*), and begins with right calls in
.28 of the cases, as the model. A step has 6 groups of 8 attempts, as there. All arms are drawn with the same numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

import torch
from ablation_report import difference
from common import write
from designs_report import write_page
from success_task import HEAVY, TURNS, WEIGHTS, chance
from torch import Tensor

from mt_grpo.credit import RewardBatch, estimate

ARMS = ("grpo_or", "state_baseline on the exact value", "the exact value itself")
TABLES, RATES = ("own", "shared"), (0.05, 0.1)
GROUP, GROUPS = 8, 6
START = (0.28, 0.42, 0.12, 0.18)
"""How often the first policy takes each of the four actions; the first one is right."""
BEGIN, END = "<!-- tables -->", "<!-- end of the tables -->"

Row = dict[str, Any]


def values(likely: Tensor) -> Tensor:
    """
    The chance of success where each turn begins, by how many heavy and light calls were right before.

    Args:
        likely (`Tensor`): How often the call of each turn is right, shape (S, K).

    Returns:
        `Tensor`: Shape (S, K + 1, 3, K - 1), by turn, heavy calls and light calls.
    """
    light = TURNS - len(HEAVY)
    ends = [[chance(0.3 * heavy + 0.04 * more) for more in range(light + 1)] for heavy in range(len(HEAVY) + 1)]
    found = [torch.tensor(ends, dtype=torch.double).expand(len(likely), -1, -1)]
    for turn in range(TURNS - 1, -1, -1):
        after, share = found[0], likely[:, turn, None, None]
        right = after.roll(-1, dims=1 if turn in HEAVY else 2)  # what rolls round stands for counts that cannot be
        found.insert(0, share * right + (1 - share) * after)
    return torch.stack(found, dim=1)


def train(table: str, rate: float, arm: str, seeds: int, steps: int) -> Row:
    """Trains an arm; the mean chance of success over training and its curve, by seed."""
    draw = torch.Generator().manual_seed(0)
    size = GROUPS * GROUP
    logits = torch.tensor(START).double().log().repeat(seeds, TURNS if table == "own" else 1, 1).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=rate)
    weights = torch.tensor(WEIGHTS, dtype=torch.double)
    is_heavy = torch.tensor([turn in HEAVY for turn in range(TURNS)])
    curve = []
    for _ in range(steps):
        drawn = torch.rand(seeds, size, TURNS, generator=draw, dtype=torch.double)
        luck = torch.rand(seeds, size, generator=draw, dtype=torch.double)
        likely = logits.log_softmax(dim=2).expand(-1, TURNS, -1)
        actions = (drawn[..., None] > likely.detach().exp().cumsum(dim=2)[:, None, :, :3]).sum(dim=3)
        right = actions == 0
        chances = 1 / (1 + torch.exp(-12 * ((right * weights).sum(dim=2) - 0.5)))
        outcomes = (luck < chances).double()
        curve.append(chances.mean(dim=1))
        known = values(likely.detach().exp()[..., 0])
        before = torch.nn.functional.pad(right.long().cumsum(dim=2), (1, 0))[..., :-1]
        heavy = torch.nn.functional.pad((right & is_heavy).long().cumsum(dim=2), (1, 0))[..., :-1]
        place = torch.arange(seeds)[:, None, None], torch.arange(TURNS)[None, None]
        value = known[place[0], place[1], heavy, before - heavy]
        # groups are fitted on those of their own seed; the other arms judge each group by itself
        apart = [*zip(outcomes, value, strict=True)] if arm == ARMS[1] else [(outcomes.flatten(), value.flatten(0, 1))]
        advantages = torch.cat([credit(arm, *each) for each in apart]).view(actions.shape)
        chosen = likely[:, None].expand(-1, size, -1, -1).gather(3, actions[..., None])[..., 0]
        loss = -(advantages * chosen).mean(dim=(1, 2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = torch.stack(curve)
    over = [round(each, 5) for each in found.mean(dim=0).tolist()]
    means = [round(each, 4) for each in found.mean(dim=1).tolist()]
    return {"table": table, "rate": rate, "arm": arm, "over": over, "curve": means}


def credit(arm: str, outcomes: Tensor, value: Tensor) -> Tensor:
    """The advantages of a step, (B, K)."""
    exists = torch.ones_like(value, dtype=torch.bool)
    scores = torch.nn.functional.pad(value, (0, 1))[:, 1:]
    scores[:, -1] = torch.nan
    batch = RewardBatch(
        torch.full_like(value, torch.nan), outcomes, exists, torch.zeros_like(exists), GROUP, state_scores=scores
    )
    if arm == ARMS[2]:
        spread = outcomes.view(-1, GROUP).std(dim=1).repeat_interleave(GROUP)
        return torch.where(spread[:, None] > 0, (outcomes[:, None] - value) / (spread[:, None] + 1e-4), 0.0)
    return estimate("grpo_or" if arm == ARMS[0] else "state_baseline", batch).double()


def text(rows: Sequence[Row]) -> str:
    """The table of the page, in Markdown."""
    lines = ["| logits | learning rate | arm | over training | above `grpo_or` |", "| --- | --- | --- | --- | --- |"]
    plain = {(row["table"], row["rate"]): row["over"] for row in rows if row["arm"] == ARMS[0]}
    for row in rows:
        gap = difference(row["over"], plain[row["table"], row["rate"]]) if row["arm"] != ARMS[0] else None
        shown = f"{gap.mean:+.3f} ± {gap.half:.3f}" if gap else ""
        name = row["arm"].replace("grpo_or", "`grpo_or`").replace("state_baseline", "`state_baseline`")
        cells = (row["table"], row["rate"], name, f"{fmean(row['over']):.3f}", shown)
        lines.append(f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |"))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds of few steps; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, steps = (2, 3) if options.quick else (24, 60)
    rows = [train(*each, seeds, steps) for each in product(TABLES, RATES, ARMS)]
    if not options.quick:
        write("success_toy", {"seeds": seeds, "steps": steps, "groups": GROUPS}, rows)
        write_page(text(rows), "success_probe.md", BEGIN, END)
    print(text(rows))


if __name__ == "__main__":
    main()
