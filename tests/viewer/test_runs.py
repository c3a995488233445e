"""Several runs in one folder, and a run before its first batch: what is known of them."""

import subprocess
import sys

import pytest
from support.runs import queries_of, write_begun, write_run

from mt_grpo.app.runs import _open_run_parallel
from mt_grpo.cli import main
from mt_grpo.errors import UserError
from mt_grpo.runlog import open_run
from mt_grpo.viewer.queries import Queries
from mt_grpo.viewer.runs import Runs, _find_runs

BOTH = {"runs": "first\nsweep/second"}


@pytest.fixture(scope="module")
def runs(several_runs):
    return Runs(several_runs)


def test_the_list_says_how_each_run_is(runs, several_runs):
    assert list(_find_runs(several_runs)) == ["broken", "first", "sweep/second"]
    answer = {run["name"]: run for run in runs.answer("runs", {})["runs"]}
    first, second = answer["first"], answer["sweep/second"]
    assert (first["status"], second["status"], second["of"]) == ("finished", "stopped", 4)
    assert (first["rule"], first["model"]) == ("mt_grpo", "embedded")
    rewards = [row["reward"] for row in open_run(several_runs / "first").metrics()]
    assert first["reward"] == rewards and first["last"] == pytest.approx(sum(rewards) / 4)
    assert "metrics.jsonl has a line that is not JSON of metrics" in answer["broken"]["error"]


def test_curves_are_of_each_run_by_step_and_time(runs, several_runs):
    by_step = runs.answer("curves", {**BOTH, "metric": "loss"})
    assert by_step["curves"]["first"] == [[step, 0.01] for step in (1, 2, 3, 4)] and "entropy" in by_step["metrics"]
    first = open_run(several_runs / "first")
    ends = {step["step"] + 1: step["start"] + step["seconds"] for step in first.steps()}
    by_time = runs.answer("curves", {**BOTH, "metric": "loss", "by": "time"})["curves"]["first"]
    times = [x for x, _ in by_time]
    assert times == [ends[row["step"]] - min(ends.values()) for row in first.metrics()] == sorted(times)


def test_questions_are_those_that_all_were_asked(runs, several_runs):
    answer = runs.answer("questions", BOTH)
    assert answer["asked"] == 4 == sum(answer["counts"].get(kind, 0) for kind in ("all", "some", "none"))
    for row in answer["rows"]:
        for name, cell in zip(BOTH["runs"].split(), row["cells"], strict=True):
            whole = open_run(several_runs / name).trajectory(cell["session"])
            assert (row["prompt"], cell["answer"]) == (whole["index"]["prompt"], whole["answer"])
            assert cell["right"] == (whole["rewards"]["outcome"]["exact_match"] == 1.0)


def test_runs_are_compared_without_being_opened(tmp_path):
    for seed, name in enumerate(("first", "second")):
        write_run(tmp_path / name, steps=2, seed=seed)
    index, runs = tmp_path / "first" / "rollouts" / "index.jsonl", Runs(tmp_path)
    whole = index.read_bytes()
    place = whole.index(b'{"kind":"rollout","session":"train-')
    index.write_bytes(whole[:place] + b"{" + whole[place:])  # a line that is not needed here
    assert runs.answer("questions", {"runs": "first\nsecond"})["asked"] == 4
    assert len(runs.answer("curves", {"runs": "first", "by": "time"})["curves"]["first"]) == 2
    with pytest.raises(UserError, match="damaged line"):
        runs.answer("run", {"run": "first"})


OPENS = """
import multiprocessing, sys
from mt_grpo.app.runs import _parallel_map
from mt_grpo.runlog import index
from mt_grpo.viewer.runs import Runs
index._PART = 2**12
with _parallel_map() as each:
    asked = []
    runs = Runs(sys.argv[1], lambda *read: asked.append(read) or each(*read))
    print(runs.answer("run", {"run": "first"})["conversations"], len(asked) > 0, end=" ")
print(len(multiprocessing.active_children()))
"""


def test_long_indices_are_read_by_other_processes(several_runs):
    done = subprocess.run(
        [sys.executable, "-c", OPENS, str(several_runs)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == f"{len(open_run(several_runs / 'first').rows)} True 0\n", done.stderr


def test_files_are_read_again_once_they_are_others(tmp_path):
    runs, path = Runs(write_run(tmp_path / "runs" / "one", steps=1).parent), tmp_path / "runs/one/metrics.jsonl"
    before, again = (runs._read(open_run(path.parent).metrics_of, path.parent, path.name) for _ in range(2))
    assert again is before and runs.answer("runs", {})["runs"][0]["step"] == 1
    with path.open("a") as file:
        file.write('{"step": 2, "reward": 0.5}\n')
    assert runs.answer("runs", {})["runs"][0]["step"] == 2
    assert runs.answer("curves", {"runs": "one"})["curves"]["one"][-1] == [2, 0.5]


@pytest.mark.parametrize(
    ("question", "asked", "words"),
    [
        ("find", {"run": "frist"}, "There is no run 'frist' in .*; the nearest is 'first'"),
        ("curves", {"runs": ""}, "`runs` names 1 to 8 runs, a line each"),
        ("curves", {"runs": "first", "by": "luck"}, "`by` is one of step, time, tokens; 'luck' is none"),
    ],
)
def test_what_is_not_there_is_said(runs, question, asked, words):
    with pytest.raises(UserError, match=words):
        runs.answer(question, asked)


def test_folders_that_do_not_fit_are_refused(run_folder, several_runs, tmp_path, capsys):
    """Without runs, with several for one file, with a run that has no conversations; and a file that is there."""
    begun, file = write_begun(tmp_path / "begun", "none"), tmp_path / "file.html"
    (tmp_path / "empty").mkdir()
    file.write_text("mine")
    young, there = (
        "has no conversations so far",
        "is there already: give another place, or `--overwrite` to replace it.",
    )
    for command, words in (
        (["view", tmp_path / "empty"], "is not the folder of a run and has none in it"),
        (["view", several_runs, "--export", tmp_path / "x.html"], "`--export` takes the folder of one run"),
        (["view", begun, "--export", tmp_path / "x"], young),
        (["export", begun, "--to", "jsonl"], young),
        (["view", run_folder, "--export", file, "--filter", "step=3"], there),
    ):
        assert main([*map(str, command)]) == 1
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    assert file.read_text() == "mine"
    assert main(["view", str(run_folder), "--export", str(file), "--filter", "step=3", "--overwrite"]) == 0
    assert file.read_text() != "mine"


def test_a_young_run_answers_all_that_is_known(tmp_path):
    with write_begun(tmp_path / "run"):
        queries = Queries(_open_run_parallel(str(tmp_path / "run"), begun=True))
        assert queries.answer("run", {})["status"] == "running" and queries.answer("overview", {})["step"] == []
        view = queries.answer("panel", {})
        assert view["about"] == {"model": "org/small", "estimator": "gtpo"} and "0.00123" in view["config"]
        (row,) = Runs(tmp_path).answer("runs", {})["runs"]
        assert (row["status"], row["rule"], row["model"]) == ("running", "gtpo", "small")
    write_run(tmp_path / "run", steps=1)  # its first batches
    assert queries.answer("run", {})["conversations"] == 24 and queries.answer("overview", {})["step"] == [0]


ODD = ["- a list", "a: [", "[" * 5_000, "!!python/object:os.system x", "x: 1\n\0", "model_name_or_path: &a {b: *a}"]
ODD += ["2026-01-01: x", "x: !!bool perhaps", "x: !!timestamp soon"]


@pytest.mark.parametrize("config", ODD)
def test_a_failed_run_tells_its_error_and_any_config(tmp_path, config):
    queries = queries_of(write_begun(tmp_path / "run", "no reward for row 3", config))
    view, first = queries.answer("panel", {}), queries.answer("overview", {})["findings"][0]
    assert (view["about"], view["config"]) == ({}, config)
    said = first["level"], first["strong"], first["text"]
    assert said == ("bad", "The run failed:", "ValueError: no reward for row 3")
