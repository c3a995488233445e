"""The designs that credit rules are compared on: what they pay, in tables and in the trainer's environment alike."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.benchmarks import REPORTS, ROOT, steps_of

from mt_grpo.credit import estimate
from mt_grpo.trajectory import Trajectory, Turn


@pytest.fixture
def calls(bench):
    """S searches for the right name, s for another; T and t tally. Of one conversation for each text."""

    def make(texts: list[str], turns: int, luck: float = 0.5):
        def table(of):
            return torch.tensor([[of(letter) for letter in text] + [False] * (turns - len(text)) for text in texts])

        chances = torch.full((len(texts),), luck)
        return bench.designs.Calls(table(lambda letter: letter in "Ss"), table(str.isupper), table(bool), chances)

    return make


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
def test_a_design_pays_what_its_table_says(bench, calls, design, text, paid, outcome, reached):
    earned = bench.designs.earn(design, calls([text], 8), 0.1)
    assert earned.turns[0].tolist() == pytest.approx(paid)
    assert (float(earned.outcomes), float(earned.reached)) == pytest.approx((outcome, reached))


@pytest.mark.parametrize("design", "ABCDFHPN")
def test_the_trainers_environment_pays_the_same(bench, calls, design):
    trained, task = bench.designs_train, bench.horizon_task
    env = trained.Designed()
    env.design, env.length, env.session = design, 8, "one"
    (row,) = task.rows(task.Setting(8, 1), 1, seed=1)
    env.row = row
    said = [*row["right"]]
    said[1] = "search n0" if row["right"][1] != "search n0" else "search n1"
    said[3] = row["right"][3].replace("search", "tally")

    parsed = [task.Calls().parse(text, None) for text in said]
    turns = (Turn(index, each.message, tool_calls=each.calls) for index, each in enumerate(parsed))
    steps, ending = steps_of(env, row, turns), design in bench.designs.ENDING
    assert len(steps) == (4 if ending else 8) and steps[-1].done
    trajectory = Trajectory([], [Turn(index, {}) for index in range(len(steps))], info=steps[-1].info)
    made = calls(["SsST" if ending else "SsSTSSSS"], 8, steps[-1].info["luck"])
    expected = bench.designs.earn(design, made, 0.1)
    paid = [trained.Shaping(design, 0.1).score(turn, trajectory) for turn in trajectory.turns]
    assert paid == pytest.approx(expected.turns[0, : len(steps)].tolist())
    assert trained.Outcome(design).score(trajectory) == float(expected.outcomes)
    assert trained.Reached(design).score(trajectory) == float(expected.reached)


@pytest.mark.parametrize("design", "ABCDFHPN")
def test_the_policy_that_earns_most_reaches_all(bench, calls, design):
    """Of all sequences of calls, by rewards and outcome's chance together."""
    texts = list(product("SsTt", repeat=5 if design != "C" else 7))
    if design == "C":
        texts = texts[::7] + [tuple("S" * 7)]
    turns = len(texts[0])
    if design in "FHP":
        texts = [text[: next((place + 1 for place, call in enumerate(text) if call in "Tt"), turns)] for text in texts]
    made = calls(texts, turns)
    chances = [torch.full((len(texts),), luck) for luck in torch.arange(0.005, 1, 0.01)]
    drawn = [bench.designs.earn(design, replace(made, luck=luck), 0.1) for luck in chances]
    total = torch.stack([each.turns.sum(dim=1) + each.outcomes for each in drawn]).mean(dim=0)
    assert drawn[0].reached[total.argmax()] == pytest.approx(1)


# Tables


def row(design: str, arm: str, seed: int, start: float, end: float) -> dict:
    return {"design": design, "arm": arm, "seed": seed, "start": start, "end": end, "over": end}


def test_an_arm_below_its_start_or_the_outcome_alone_is_out(bench):
    ends = {
        "grpo_or": (0.30, 0.90),
        "lambda_to_go": (0.99, 0.10),
        "turn_gae": (0.95, 0.96),
        "one scale .8": (0.96, 0.95),
        "mt_grpo": (0.96, 0.80),
    }
    rows = [
        row(design, arm, seed, start, end + seed / 1000)
        for seed in (1, 2, 3)
        for arm, pair in ends.items()
        for design, start, end in zip("AF", (0.3, 0.8), pair, strict=True)
    ]
    report = bench.designs_report
    found = {each.arm: each.out for each in report.verdicts(rows)}
    assert found["lambda_to_go"] == "F: below its start" and found["mt_grpo"] == "F: below `grpo_or`"
    assert found["turn_gae"] is None
    assert report.decide(rows) == "turn_gae"  # a tie is decided by the mean, which is equal too
    better = [each | {"end": each["end"] + 0.01} if each["arm"] == "one scale .8" else each for each in rows]
    assert report.decide(better) == "one scale .8"


def test_a_rate_and_a_seed_are_drawn_alike_for_all_arms(bench):
    toy, arms = bench.designs_toy, bench.designs_report.ARMS
    starts = [
        toy.train(toy.Cell("B", 8, 0.1, 2, arm), arms[arm], seeds=2, steps=2)[0]["start"]
        for arm in ("grpo_or", "mt_grpo")
    ]
    assert starts[0] == starts[1]


@pytest.mark.parametrize("arm", ["one scale .8, batch", "one scale .8"])
def test_what_is_trained_beside_a_policy_does_not_change_it(bench, arm):
    """A scale of the batch is that of the policy's own conversations, at every rate."""
    cell, rule = bench.designs_toy.Cell("F", 8, 0.1, 2, arm), bench.designs_report.ARMS[arm]
    alone, beside = (
        bench.designs_toy.curves(cell, rule, seeds=1, steps=12, rates=rates) for rates in ((0.1,), (0.025, 0.1))
    )
    torch.testing.assert_close(beside[:, 1:], alone, rtol=0, atol=0)


def test_the_scale_of_a_policys_batch_is_that_of_the_rule(bench):
    searches, named = torch.rand(2, 32, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    made = bench.designs.Calls(searches, named, torch.ones_like(searches), torch.rand(32))
    whole, arms = bench.designs_toy.batch_of(made, bench.designs.earn("A", made, 0.1)), bench.designs_report.ARMS
    arm, own_scale = arms["one scale .8, batch"], bench.designs_toy.own_scale
    unscaled = estimate(arm.rule, whole, scale_rewards="none") / own_scale(whole, arm, 32)
    torch.testing.assert_close(unscaled, estimate(arm.rule, whole, scale_rewards="batch"), check_dtype=False)
    assert (own_scale(whole, arms["turn_gae"], 32) == 1).all()


def test_what_is_heard_is_what_runs_say(bench):
    source = " ".join((ROOT / "mt_grpo/training/step_log/warnings.py").read_text().replace('"', " ").split())
    assert all(part in source for part in bench.designs_said.KINDS)


# Stages of the trainer


@pytest.fixture
def main_table(bench, tmp_path):
    """Writes rows of all designs and arms, of which three end best."""

    def write(**changed) -> None:
        ends = {"turn_gae": 0.99, "one scale .8": 0.98, "one scale .9": 0.95, **changed}
        cells = product(bench.designs.DESIGNS, bench.designs_report.ARMS, (1, 2, 3))
        rows = [row(design, arm, seed, 0.3, ends.get(arm, 0.7) + seed / 1000) for design, arm, seed in cells]
        (tmp_path / "designs_train.json").write_text(json.dumps({"rows": rows}))

    return write


@pytest.fixture
def stages(bench, tmp_path, monkeypatch):
    """Results and runs are in a folder of the test, and the page is what is returned."""
    page = {}
    monkeypatch.setattr(bench.designs_train, "RESULT", tmp_path / "designs_train.json")
    monkeypatch.setattr(bench.designs_train, "SECOND", tmp_path / "designs_second.json")
    monkeypatch.setattr(bench.designs_train, "write_page", lambda lines, **marks: page.update(lines=lines, **marks))
    return page


def test_the_second_stage_lists_the_best_arms_and_todays_default(bench, main_table, stages, tmp_path, capsys):
    command = ["--stage", "second", "--list", "--folder", str(tmp_path)]
    with pytest.raises(SystemExit, match="The main table is not complete"):
        bench.designs_train.main(command)
    main_table()
    bench.designs_train.main(command)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "480 of 480 runs"  # five settings, eight designs, four arms, three seeds
    assert lines[:4] == [f"K 32 A {arm} 1" for arm in ("turn_gae", "one scale .8", "one scale .9", "gtpo .5")]
    main_table(**{"gtpo .5": 0.97})
    bench.designs_train.main(command)
    assert capsys.readouterr().out.splitlines()[-1] == "360 of 360 runs"


def test_the_second_stage_goes_on_where_it_stopped(bench, main_table, stages, tmp_path, monkeypatch, capsys):
    main_table()
    ran = []

    def run_missing(work, given, *, folder, workers, turns):
        for job in given[:1]:
            ran.append((job, turns))
            plan = bench.designs_train.VARIANTS[job.variant]._asdict()
            measures = {"start": 0.3, "end": 0.9, "over": 0.8, "plan": plan}
            job.file(folder).write_text(json.dumps(job._asdict() | measures))

    monkeypatch.setattr(bench.designs_train, "run_missing", run_missing)
    command = ["--stage", "second", "--folder", str(tmp_path), "--seeds", "1", "--designs", "B"]
    bench.designs_train.main(command)
    assert [(job.variant, turns) for job, turns in ran] == [("K 32", 32), ("24 groups", 12)]
    assert stages["begin"] == "<!-- second -->" and "**K 32.**" in stages["lines"]
    assert "| turn_gae | 0.10 | 0.100 | 0.200 |" in stages["lines"]
    for job, _ in ran:
        job.file(tmp_path).unlink()  # what is committed is enough
    capsys.readouterr()
    bench.designs_train.main([*command, "--list"])
    assert capsys.readouterr().out.splitlines()[-1] == "18 of 20 runs"


def test_the_page_has_a_place_for_each_table(bench):
    page, report = (REPORTS / "designs.md").read_text(), bench.designs_report
    marks = ["<!-- grid -->", "<!-- end of the grid -->", report.BEGIN, report.END]
    marks += [report.BEGIN_SECOND, report.END_SECOND]
    assert [page.count(mark) for mark in marks] == [1] * len(marks) and sorted(marks, key=page.index) == marks


def test_the_picture_is_of_the_trainer_once_it_has_run(bench, tmp_path):
    picture, designs = bench.designs_picture, list(bench.designs.DESIGNS)
    assert list(picture.HEADS) == designs
    tables = [{"design": "B", "arm": "turn_gae", "end": [0.5, 0.7]}, {"design": "B", "arm": "turn_gae", "end": [0.9]}]
    place = list(bench.designs_report.ARMS).index("turn_gae"), designs.index("B")
    values, where = picture.regrets([], tables)
    assert (where, values[place]) == (picture.TABLES, pytest.approx(0.3))
    values, where = picture.regrets([row("B", "turn_gae", 1, 0.3, 0.9)], tables)
    assert (where, values[place]) == (picture.TRAINER, pytest.approx(0.1))
    picture.draw(values, where, tmp_path / "designs.png")  # what has not run stays white
    assert (tmp_path / "designs.png").stat().st_size > 1000
    for page in ("README.md", "benchmarks/reports/designs.md"):
        assert (ROOT / page).read_text().count("images/designs.png") == 1
