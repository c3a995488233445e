"""
Which rule `mt-grpo credit` names before the runs of `horizon.py`, and how that rule ended there;
see reports/horizon.md.

    python benchmarks/horizon_advice.py             # samples each setting with the first model, then compares
    python benchmarks/horizon_advice.py --report    # the table alone, from benchmarks/results/horizon_advice.json

It takes a quarter of an hour on one core, and goes on where it was interrupted. The first model is that of --folder
(runs/horizon), which `horizon.py` makes; the runs are those of benchmarks/results/horizon.json.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from ablation_report import REPORTS
from common import RESULTS, machine
from horizon import FOLDER, RESULT, Job, Plan, build
from horizon_report import behind, paired, share
from horizon_task import ARMS, GROUP, SCORES, SETTINGS
from jobs import prepare, rows_of

from mt_grpo.advisor.measure import ALL, compare, compute
from mt_grpo.credit import rule_label
from mt_grpo.forward import TurnGradients
from mt_grpo.training.reward_batch import gather_rewards

ADVICE = RESULTS / "horizon_advice.json"
TURNS = 6144
"""Turns that are sampled for a setting."""
MOST_GROUPS = 192
SEED = 100
"""Of the questions, which no run has."""
BEGIN, END = "<!-- advice -->", "<!-- end of the advice -->"

Row = dict[str, Any]


def advise(setting: str, plan: Plan, model: Path) -> Row:
    """What `mt-grpo credit` finds on conversations that the first model of a setting samples."""
    turns = SETTINGS[setting].turns
    groups = min(TURNS // (turns * GROUP), MOST_GROUPS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(Job(setting, "mt_grpo", SEED), plan._replace(turns=TURNS), model, folder)
        trainer.rollout(groups, GROUP)
        judged = trainer.batch
    batch, _ = gather_rewards(judged.trajectories, judged.scores, trainer.reward_weights, GROUP)
    found = compute(judged.trajectories, TurnGradients(trainer.model), "of the setting", print)
    labels = {arm: rule_label(rule) for arm, rule in ARMS.items() if arm not in SCORES}
    rules = {label: ARMS[arm] for arm, label in labels.items()}
    judged, _ = compare(found.gradients, batch, rules, plan.turns / turns / GROUP, scale_rewards="group")
    comparison = judged.items[ALL]
    directions = {arm: comparison.directions[label] for arm, label in labels.items()}
    best = next(arm for arm, label in labels.items() if label == judged.best) if judged.known else None
    return {
        "setting": setting,
        "groups": groups,
        "seconds": round(found.seconds, 1),
        "known": judged.known,
        "named": best,
        "arms": {arm: None if each is None else asdict(each) for arm, each in directions.items()},
        "near": [
            arm for arm in labels if arm != best and judged.known and not judged.behind(labels[arm], judged.best)
        ],
    }


def table(advice: Sequence[Row], runs: Sequence[Row]) -> list[str]:
    """The lines of the table, in Markdown: over the seeds that all arms have which were judged, and run."""
    lines = [
        "| setting | named | a step's cosine | ended | behind the best | order of arms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in advice:
        own, named = [run for run in runs if run["arm"] in row["arms"]], row["named"]
        arms = paired(own, row["setting"])
        seeds = len(next(iter(arms.values()), []))
        if not seeds:
            continue
        means = {arm: fmean(share(trained)) for arm, trained in arms.items()}
        told, ended, gap = "not enough evidence | ", "", None
        if named is not None:
            step = row["arms"][named]["step"]
            told = f"`{named}` | {step['value']:.2f} [{step['low']:.2f}, {step['high']:.2f}]"
            ended = "not run"
        if named in means:
            place = sorted(means, key=lambda arm: -means[arm]).index(named) + 1
            ended = f"{place} of {len(means)}, {seeds} seeds"
            gap = behind(own, row["setting"], named, None) if seeds > 1 else None
        lines.append(f"| `{row['setting']}` | {told} | {ended} | {gap or ''} | {agreement(row, means):+.2f} |")
    return [re.sub(r" +", " ", line) for line in lines]


def agreement(row: Row, means: dict[str, float]) -> float:
    """Spearman's correlation of a step's expected cosine and the share right over training, over arms."""
    steps = [0.0 if row["arms"][arm] is None else row["arms"][arm]["step"]["value"] or 0.0 for arm in means]
    ranks = [np.argsort(np.argsort(values)) for values in (steps, list(means.values()))]
    return float(np.corrcoef(*ranks)[0, 1])


def write_page(lines: Sequence[str], page: Path = REPORTS / "horizon.md") -> None:
    """Puts the table into the page, between its two marks."""
    whole = page.read_text()
    before, rest = whole.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{chr(10).join(lines)}\n\n{END}{rest.split(END)[1]}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="sample nothing, and read the committed advice")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where horizon.py left its model (runs/horizon)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = parser.parse_args(argv)
    plan = Plan()
    found = {row["setting"]: row for row in rows_of(ADVICE)}
    if not options.report:
        prepare()
        for setting in options.settings:
            if setting not in found:
                found[setting] = advise(setting, plan, options.folder / "model")
                print(setting, found[setting]["named"], found[setting]["near"], flush=True)
                rows = ",\n".join("    " + json.dumps(found[name]) for name in SETTINGS if name in found)
                head = json.dumps({"machine": machine(), "plan": plan._asdict()}, indent=2)
                ADVICE.write_text(f'{head[:-2]},\n  "rows": [\n{rows}\n  ]\n}}\n')
    advice = [found[name] for name in SETTINGS if name in found]
    lines = table(advice, rows_of(RESULT))
    write_page(lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
