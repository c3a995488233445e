"""`mt-grpo runs` and `mt-grpo compare`: what they list, what they call a difference, what they refuse."""

import json
import shutil

import numpy as np
import pytest
from support.runs import write_begun, write_run

from mt_grpo.app.runs import _in_words
from mt_grpo.runlog.findings import bootstrap, over_steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("one", "two")):
        write_run(folder / name, steps=24, groups=5, seed=seed)
        (folder / name / "config.yaml").write_text(
            f"model_name_or_path: org/small\nseed: {seed}\noutput_dir: {name}\n"
        )
    write_begun(folder / "deep" / "failed", "no memory\x1b[2J")
    (folder / "broken").mkdir()
    (folder / "broken" / "metrics.jsonl").write_text("{x\n")
    for name, reward in (("one", 0.75), ("two", 0.25)):
        with (folder / name / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": 24, "eval_reward": {reward}}}\n')
    return folder


@pytest.fixture
def printed(prints):
    return lambda *words: prints(*map(str, words))


def test_every_run_is_a_row(folder, printed):
    text = printed("runs", folder)
    rows = {line.split()[0]: line.split() for line in text.splitlines()}
    assert rows["deep/failed"][1:4] == ["small", "gtpo", "0/40"] and "failed" in rows["deep/failed"]
    assert rows["two"][1:4] == ["embedded", "mt_grpo", "24"] and rows["two"][5] == "0.25"
    assert "damaged" in rows["broken"] and "broken: " in text and "\x1b" not in text


def test_of_several_held_out_sets_the_mean_is_listed(tmp_path, printed):
    write_run(tmp_path / "run", steps=2, groups=1, seed=0)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        for step, name, reward in ((0, "easy", 0.5), (2, "easy", 1.0), (2, "very_hard", 0.25)):
            file.write(f'{{"step": {step}, "eval_{name}_reward": {reward}, "eval_{name}_reward_std": 9}}\n')
    assert json.loads(printed("runs", tmp_path, "--json"))[0]["eval"] == 0.625


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--sort run", ["broken", "deep/failed", "one", "two"]),
        ("--sort eval", ["one", "two", "deep/failed", "broken"]),
        ("--filter state=failed,damaged --sort=run", ["broken", "deep/failed"]),
        ("--filter rule!=mt_grpo --sort run", ["broken", "deep/failed"]),
        ("--filter EMBEDDED --sort run", ["one", "two"]),
        ("--filter age<1e6 --sort run", ["deep/failed", "one", "two"]),
    ],
)
def test_runs_are_sorted_and_filtered(folder, printed, words, names):
    assert [run["run"] for run in json.loads(printed("runs", folder, "--json", *words.split()))] == names


def test_options_questions_and_steps_are_compared(folder, printed):
    found = json.loads(printed("compare", folder / "one", folder / "two", "--json"))
    assert found["options"] == {"seed": [0, 1]}
    assert found["evaluations"]["questions"] == 5 and len(found["training"]["steps"]) == 20
    lines = [list(map(json.loads, (folder / name / "metrics.jsonl").open())) for name in ("one", "two")]
    rewards = np.array([[row["reward"] for row in each if "loss" in row][-20:] for each in lines])
    reward = found["training"]["metrics"]["reward"]
    assert reward["means"] == pytest.approx(rewards.mean(axis=1))
    assert reward["differences"][0]["mean"] == pytest.approx(float((rewards[1] - rewards[0]).mean()))
    text = printed("compare", folder / "one", folder / "two", folder / "deep" / "failed")
    assert "advantage_estimator" in text and "No question was asked of all" in text and "other seeds" not in text


def test_metrics_that_are_no_numbers_are_not_compared(folder, printed, tmp_path):
    run = shutil.copytree(folder / "two", tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    step = max(row["step"] for row in map(json.loads, lines) if "loss" in row)
    odd = json.dumps({"step": step, "loss": "low", "reward": [1], "entropy": None, "new": True})
    (run / "metrics.jsonl").write_text("\n".join([*lines, odd]) + "\n")
    found = json.loads(printed("compare", folder / "one", run, "--json"))["training"]["metrics"]
    assert {"loss", "reward"} <= found.keys() and "new" not in found


@pytest.mark.parametrize(
    ("text", "said"), [("seed: {1: 2020-01-01, x: .nan}", '{"1": "2020-01-01", "x": null}'), ("x: &a [*a]", None)]
)
def test_options_of_any_kind_are_compared(folder, printed, refused, tmp_path, text, said):
    write_begun(tmp_path / "run", "no memory", text)
    if said is None:
        assert "config.yaml is damaged" in refused("compare", folder / "one", tmp_path / "run")
    else:
        assert said in printed("compare", folder / "one", tmp_path / "run")


def test_the_words_say_what_is_not_shown(folder, printed):
    text = printed("compare", folder / "one", folder / "two")
    (entropy,) = (line for line in text.splitlines() if line.startswith("  entropy"))
    (reward,) = (line for line in text.splitlines() if line.startswith("  reward   "))
    assert entropy.endswith("equal") and "say nothing of other seeds" in text
    assert reward.endswith(("higher", "lower", "not shown to differ"))


@pytest.mark.parametrize(("rows", "said"), [(2, "+1, too few to tell"), (5, "+1, too few to tell"), (6, "higher")])
def test_few_questions_show_no_difference(rows, said):
    assert _in_words(bootstrap(np.ones(rows))).endswith(said)


def test_intervals_are_those_of_students_t():
    values = np.array([0.3, -0.1, 0.4, 0.0] * 5)  # neighbours go apart, so that all twenty count
    found, half = over_steps(values), 2.0930 * np.sqrt(0.85 / 19 / 20)  # t of 19 degrees; the variance by hand
    assert (found.low, found.high) == pytest.approx((0.15 - half, 0.15 + half), abs=1e-4)
    assert over_steps(values[:19]).low is None


def test_steps_that_are_alike_count_for_fewer():
    draw, held = np.random.default_rng(0), {"alone": 0, "alike": 0}
    for _ in range(400):
        noise, walk = draw.normal(size=60), np.zeros(60)
        for step in range(1, 60):
            walk[step] = 0.6 * walk[step - 1] + noise[step]
        found = over_steps(walk)
        held["alone"] += abs(walk.mean()) < 2 * walk.std(ddof=1) / 60**0.5
        held["alike"] += found.low <= 0 <= found.high
    assert held["alone"] < 0.75 * 400 and held["alike"] > 0.9 * 400


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("runs a b", "takes one folder"),
        ("runs HERE --sort luck", "'luck' is none"),
        ("runs HERE --filter luck=1", "no column 'luck'"),
        ("runs HERE --filter model<1", "compare model with `=` or `!=`"),
        ("runs HERE/nowhere", "has none in it"),
        ("compare HERE/one", "two runs or more"),
        ("compare HERE/one HERE/one", "two runs or more"),
        ("compare HERE/one HERE/three", "There is no folder"),
        ("compare HERE HERE/one", "is not the folder of a run"),
    ],
)
def test_what_cannot_be_listed_is_refused(folder, refused, command, words):
    assert words in refused(*command.replace("HERE", str(folder)).split())
