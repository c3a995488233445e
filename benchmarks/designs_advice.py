"""
Which rule `mt-grpo credit` names on the designs of `designs.py`, and how that rule ended in the grid of
`designs_toy.py`; see docs/designs.md.

    python benchmarks/designs_advice.py

In each cell (design, K, shaping) it draws 48 groups of 8 conversations of the first policy, as the command does with
the model before training, ten times. A name counts as right if the rule ended within .05 of the best arm of the cell.
"""

from __future__ import annotations

import json
from itertools import product
from statistics import fmean

import torch
from designs import DESIGNS, earn
from designs_report import ARMS, write_page
from designs_toy import GROUP, NAMED, RESULT, SEARCHES, SHAPINGS, TURNS, batch_of, calls_of

from mt_grpo.app.credit.measure import compare

GROUPS, DRAWS, NEAR, STEP = 48, 10, 0.05, 6


def named(design: str, turns: int, shaping: float, seed: int) -> str | None:
    """The arm that is named from a draw; `None` where the groups do not tell."""
    draw = torch.Generator().manual_seed(1000 + seed)
    tool, name = (torch.tensor([likely, 1 - likely], dtype=torch.double) for likely in (SEARCHES, NAMED))
    likely = torch.outer(tool, name).flatten()
    number = GROUPS * GROUP
    actions = torch.multinomial(likely, number * turns, replacement=True, generator=draw).view(1, number, turns)
    calls = calls_of(design, actions, torch.rand(1, number, generator=draw, dtype=torch.double))
    batch = batch_of(calls, earn(design, calls, shaping))
    hit = torch.nn.functional.one_hot(actions[0], 4).double() - likely
    gradients = torch.zeros(number, turns, turns, 4, dtype=torch.double)
    gradients[:, torch.arange(turns), torch.arange(turns)] = hit * calls.exists[..., None]
    rules = {arm: each.rule for arm, each in ARMS.items() if each.scale_rewards == "group"}
    judged, _ = compare(gradients.flatten(2), batch, rules, STEP, scale_rewards="group")
    return judged.best if judged.known else None


def main() -> None:
    torch.set_num_threads(1)
    rows = json.loads(RESULT.read_text())["rows"]
    ends: dict[tuple[str, int, float], dict[str, list[float]]] = {}
    for row in rows:
        cell = ends.setdefault((row["design"], row["turns"], row["shaping"]), {})
        cell.setdefault(row["arm"], []).append(fmean(row["end"]))
    lines = ["| design | named | right | not enough evidence |", "| --- | --- | --- | --- |"]
    right = known = 0
    for design in DESIGNS:
        names: dict[str, int] = {}
        of_design = silent = 0
        for turns, shaping in product(TURNS, SHAPINGS):
            found = {arm: fmean(values) for arm, values in ends.get((design, turns, shaping), {}).items()}
            if not found:
                continue
            for seed in range(DRAWS):
                arm = named(design, turns, shaping, seed)
                if arm is None:
                    silent += 1
                    continue
                names[arm] = names.get(arm, 0) + 1
                of_design += found[arm] >= max(found.values()) - NEAR
        total = sum(names.values())
        right, known = right + of_design, known + total
        ordered = sorted(names, key=lambda arm: -names[arm])
        said = ", ".join(f"`{arm}` {names[arm]}" for arm in ordered)
        lines.append(f"| {design} | {said} | {of_design} of {total} | {silent} |")
        print(lines[-1], flush=True)
    lines += ["", f"Right in {right} of {known} draws that tell anything."]
    write_page("\n".join(lines), begin="<!-- advice -->", end="<!-- end of the advice -->")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
