"""The designs that credit rules are compared on: what they pay, in tables and in the trainer's environment alike."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from support.registered import keep_estimators
from support.servers import ROOT

from mt_grpo.concurrency import run
from mt_grpo.trajectory import Trajectory, Turn


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    keep_estimators(monkeypatch)
    for name in (
        "ablation_arms",
        "horizon_task",
        "designs",
        "designs_report",
        "designs_train",
        "designs_toy",
        "designs_said",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)


def calls(text: str, turns: int, luck: float = 0.5):
    """S searches for the right name, s for another; T and t tally."""
    from designs import Calls

    def row(of):
        return torch.tensor([[of(letter) for letter in text] + [False] * (turns - len(text))])

    return Calls(row(lambda letter: letter in "Ss"), row(str.isupper), row(bool), torch.tensor([luck]))


@pytest.mark.parametrize(
    ("design", "text", "paid", "outcome", "reached"),
    [
        ("A", "SSsTSSSS", [0.1, 0.1, 0, 0, 0.1, 0.1, 0.1, 0.1], 0, 6 / 8),
        ("B", "TSttssTT", [0, 0.1, 0, 0, 0.1, 0.1, 0, 0], 1, 1),
        ("C", "SSsTSSsS", [0, 0, 0, 0, 0, 0, 0.1, 0.4], 0, 5 / 8),
        ("D", "SSsTSSsS", [0.1, 0, 0, 0, 0.1, 0, 0, 0], 3 / 4, 3 / 4),
        ("F", "SsT", [0.02, 0.02, 0, 0, 0, 0, 0, 0], 1, 6 / 8),
        ("F", "SSSSSSSS", [0.02] * 8, 0, 0),
        ("H", "SsSt", [0.02, 0, 0.02, 0, 0, 0, 0, 0], 3 / 8, 3 / 8),
        ("P", "SsT", [0.02, 0.02, 0, 0, 0, 0, 0, 0], 0, 0.2 / 0.9),
        ("P", "SssT", [0.02, 0.02, 0.02, 0, 0, 0, 0, 0], 1, 1),
        ("N", "SSSSSSSS", [0.1 / 8] * 8, 1, 1),
    ],
)
def test_a_design_pays_what_its_table_says(design, text, paid, outcome, reached):
    from designs import earn

    earned = earn(design, calls(text, 8), 0.1)
    assert earned.turns[0].tolist() == pytest.approx(paid)
    assert (float(earned.outcomes), float(earned.reached)) == pytest.approx((outcome, reached))


@pytest.mark.parametrize("design", "ABCDFHPN")
def test_the_trainers_environment_pays_the_same(design):
    from designs import ENDING, earn
    from designs_train import Designed, Outcome, Reached, Shaping
    from horizon_task import Calls, Setting, rows

    env = Designed()
    env.design, env.length, env.session = design, 8, "one"
    (row,) = rows(Setting(8, 1), 1, seed=1)
    env.row = row
    said = [row["right"][0], "search n0", row["right"][2], "tally n0", *row["right"][4:]]
    said[1] = "search n0" if row["right"][1] != "search n0" else "search n1"
    said[3] = row["right"][3].replace("search", "tally")

    async def converse():
        await env.reset(row)
        steps = []
        for index, text in enumerate(said):
            parsed = Calls().parse(text, None)
            steps.append(await env.step(Turn(index, parsed.message, tool_calls=parsed.calls)))
            if steps[-1].done:
                break
        return steps

    steps = run(converse())
    assert len(steps) == (4 if design in ENDING else 8) and steps[-1].done
    trajectory = Trajectory([], [Turn(index, {}) for index in range(len(steps))], info=steps[-1].info)
    text = "SsST" if design in ENDING else "SsSTSSSS"
    expected = earn(design, calls(text, 8, steps[-1].info["luck"]), 0.1)
    paid = [Shaping(design, 0.1).score(turn, trajectory) for turn in trajectory.turns]
    assert paid == pytest.approx(expected.turns[0, : len(steps)].tolist())
    assert Outcome(design).score(trajectory) == float(expected.outcomes)
    assert Reached(design).score(trajectory) == float(expected.reached)


@pytest.mark.parametrize("design", "ABCDFHPN")
def test_the_policy_that_earns_most_reaches_all(design):
    """Of all sequences of calls, by rewards and outcome's chance together."""
    from itertools import product

    from designs import Calls, earn

    texts = list(product("SsTt", repeat=5 if design != "C" else 7))
    if design == "C":
        texts = texts[::7] + [tuple("S" * 7)]
    turns = len(texts[0])
    if design in "FHP":
        texts = [text[: next((place + 1 for place, call in enumerate(text) if call in "Tt"), turns)] for text in texts]
    made = [calls("".join(text), turns) for text in texts]
    joined = Calls(
        *(torch.cat([getattr(each, name) for each in made]) for name in ("searches", "named", "exists")), None
    )
    chances = torch.arange(0.005, 1, 0.01)
    drawn = [
        earn(design, Calls(joined.searches, joined.named, joined.exists, torch.full((len(made),), luck)), 0.1)
        for luck in chances
    ]
    total = torch.stack([each.turns.sum(dim=1) + each.outcomes for each in drawn]).mean(dim=0)
    assert drawn[0].reached[total.argmax()] == pytest.approx(1)


def row(design: str, arm: str, seed: int, start: float, end: float) -> dict:
    return {"design": design, "arm": arm, "seed": seed, "start": start, "end": end, "over": end}


def test_an_arm_below_its_start_or_the_outcome_alone_is_out():
    from designs_report import decide, verdicts

    rows = []
    for seed in (1, 2, 3):
        noise = seed / 1000
        rows += [row("A", "grpo_or", seed, 0.3, 0.30 + noise), row("F", "grpo_or", seed, 0.8, 0.90 + noise)]
        rows += [row("A", "lambda_to_go", seed, 0.3, 0.99 + noise), row("F", "lambda_to_go", seed, 0.8, 0.10 + noise)]
        rows += [row("A", "turn_gae", seed, 0.3, 0.95 + noise), row("F", "turn_gae", seed, 0.8, 0.96 + noise)]
        rows += [row("A", "one scale .8", seed, 0.3, 0.96 + noise), row("F", "one scale .8", seed, 0.8, 0.95 + noise)]
        rows += [row("A", "mt_grpo", seed, 0.3, 0.96 + noise), row("F", "mt_grpo", seed, 0.8, 0.80 + noise)]
    found = {each.arm: each.out for each in verdicts(rows)}
    assert found["lambda_to_go"] == "F: below its start" and found["mt_grpo"] == "F: below `grpo_or`"
    assert found["turn_gae"] is None
    assert decide(rows) == "turn_gae"  # a tie is decided by the mean, which is equal too
    better = [each | {"end": each["end"] + 0.01} if each["arm"] == "one scale .8" else each for each in rows]
    assert decide(better) == "one scale .8"


def test_a_rate_and_a_seed_are_drawn_alike_for_all_arms():
    from designs_report import ARMS
    from designs_toy import Cell, train

    starts = {
        arm: train(Cell("B", 8, 0.1, 2, arm), ARMS[arm], seeds=2, steps=2)[0]["start"]
        for arm in ("grpo_or", "mt_grpo")
    }
    assert starts["grpo_or"] == starts["mt_grpo"]


def test_what_is_trained_beside_a_policy_does_not_change_it():
    """A scale of the batch is that of the policy's own conversations, at every rate."""
    from designs_report import ARMS
    from designs_toy import Cell, curves

    for arm in ("one scale .8, batch", "one scale .8"):
        cell = Cell("F", 8, 0.1, 2, arm)
        alone = curves(cell, ARMS[arm], seeds=1, steps=12, rates=(0.1,))
        beside = curves(cell, ARMS[arm], seeds=1, steps=12, rates=(0.025, 0.1))
        torch.testing.assert_close(beside[:, 1:], alone, rtol=0, atol=0)


def test_the_scale_of_a_policys_batch_is_that_of_the_rule():
    from designs import Calls, earn
    from designs_report import ARMS
    from designs_toy import batch_of, own_scale

    from mt_grpo.credit import estimate

    searches, named = torch.rand(2, 32, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    made = Calls(searches, named, torch.ones_like(searches), torch.rand(32))
    whole = batch_of(made, earn("A", made, 0.1))
    arm = ARMS["one scale .8, batch"]
    unscaled = estimate(arm.rule, whole, scale_rewards="none") / own_scale(whole, arm, 32)
    by_rule = estimate(arm.rule, whole, scale_rewards="batch")
    torch.testing.assert_close(unscaled, by_rule, check_dtype=False)
    assert (own_scale(whole, ARMS["turn_gae"], 32) == 1).all()


def test_what_is_heard_is_what_runs_say():
    from designs_said import KINDS

    source = " ".join((ROOT / "mt_grpo/training/step_log/metrics.py").read_text().replace('"', " ").split())
    assert all(part in source for part in KINDS)


def main_table(folder, **changed) -> None:
    """Rows of all designs and arms, of which three end best."""
    from designs import DESIGNS
    from designs_report import ARMS

    ends = {"turn_gae": 0.99, "one scale .8": 0.98, "one scale .9": 0.95, **changed}
    rows = [
        row(design, arm, seed, 0.3, ends.get(arm, 0.7) + seed / 1000)
        for design in DESIGNS
        for arm in ARMS
        for seed in (1, 2, 3)
    ]
    (folder / "designs_train.json").write_text(json.dumps({"rows": rows}))


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """Results and runs are in a folder of the test, and the page is what is returned."""
    import designs_train

    page = {}
    monkeypatch.setattr(designs_train, "RESULT", tmp_path / "designs_train.json")
    monkeypatch.setattr(designs_train, "SECOND", tmp_path / "designs_second.json")
    monkeypatch.setattr(designs_train, "write_page", lambda lines, **marks: page.update(lines=lines, **marks))
    return page


def test_the_second_stage_lists_the_best_arms_and_todays_default(stages, tmp_path, capsys):
    import designs_train

    command = ["--stage", "second", "--list", "--folder", str(tmp_path)]
    with pytest.raises(SystemExit, match="The main table is not complete"):
        designs_train.main(command)
    main_table(tmp_path)
    designs_train.main(command)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "480 of 480 runs"  # five settings, eight designs, four arms, three seeds
    assert lines[:4] == [f"K 32 A {arm} 1" for arm in ("turn_gae", "one scale .8", "one scale .9", "gtpo .5")]
    main_table(tmp_path, **{"gtpo .5": 0.97})
    designs_train.main(command)
    assert capsys.readouterr().out.splitlines()[-1] == "360 of 360 runs"


def test_the_second_stage_goes_on_where_it_stopped(stages, tmp_path, monkeypatch, capsys):
    import designs_train
    from designs_train import VARIANTS

    main_table(tmp_path)
    ran = []

    def run_missing(work, given, *, folder, workers, turns):
        for job in given[:1]:
            ran.append((job, turns))
            measures = {"start": 0.3, "end": 0.9, "over": 0.8, "plan": VARIANTS[job.variant]._asdict()}
            job.file(folder).write_text(json.dumps(job._asdict() | measures))

    monkeypatch.setattr(designs_train, "run_missing", run_missing)
    command = ["--stage", "second", "--folder", str(tmp_path), "--seeds", "1", "--designs", "B"]
    designs_train.main(command)
    assert [(job.variant, turns) for job, turns in ran] == [("K 32", 32), ("24 groups", 12)]
    assert stages["begin"] == "<!-- second -->" and "**K 32.**" in stages["lines"]
    assert "| turn_gae | 0.10 | 0.100 | 0.200 |" in stages["lines"]
    for job, _ in ran:
        job.file(tmp_path).unlink()  # what is committed is enough
    capsys.readouterr()
    designs_train.main([*command, "--list"])
    assert capsys.readouterr().out.splitlines()[-1] == "18 of 20 runs"


def test_the_page_has_a_place_for_each_table():
    from designs_report import BEGIN, BEGIN_SECOND, END, END_SECOND

    page = (ROOT / "benchmarks" / "reports" / "designs.md").read_text()
    marks = ("<!-- grid -->", "<!-- end of the grid -->", BEGIN, END, BEGIN_SECOND, END_SECOND)
    assert [page.count(mark) for mark in marks] == [1] * len(marks)
    assert sorted(marks, key=page.index) == list(marks)


def test_the_picture_is_of_the_trainer_once_it_has_run(tmp_path):
    from designs import DESIGNS
    from designs_picture import HEADS, TABLES, TRAINER, draw, regrets
    from designs_report import ARMS

    assert list(HEADS) == list(DESIGNS)
    tables = [{"design": "B", "arm": "turn_gae", "end": [0.5, 0.7]}, {"design": "B", "arm": "turn_gae", "end": [0.9]}]
    values, where = regrets([], tables)
    place = list(ARMS).index("turn_gae"), list(DESIGNS).index("B")
    assert (where, values[place]) == (TABLES, pytest.approx(0.3))
    values, where = regrets([row("B", "turn_gae", 1, 0.3, 0.9)], tables)
    assert (where, values[place]) == (TRAINER, pytest.approx(0.1))
    draw(values, where, tmp_path / "designs.png")  # what has not run stays white
    assert (tmp_path / "designs.png").stat().st_size > 1000
    for page in ("README.md", "benchmarks/reports/designs.md"):
        assert (ROOT / page).read_text().count("images/designs.png") == 1
