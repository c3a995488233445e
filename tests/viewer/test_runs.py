"""Several runs in one folder: their list, their curves, and the questions that all were asked."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.browser import missing, open_browser, serving, watched
from support.runs import write_run

from mt_grpo.cli import main
from mt_grpo.errors import UserError
from mt_grpo.runlog import open_run
from mt_grpo.runlog.heartbeat import Heartbeat
from mt_grpo.viewer.runs import Runs, find_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several") / "runs"
    for seed, (name, step) in enumerate((("first", 4), ("sweep/second", 2))):
        run = write_run(folder / name, steps=4, seed=seed)
        with Heartbeat(run, lambda step=step: {"step": step, "of": 4, "waits_for": "", "under_way": []}).beating():
            pass
    broken = write_run(folder / "broken", steps=1)
    (broken / "metrics.jsonl").write_text("{}\n")
    (folder / "notes").mkdir()
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    return Runs(folder)


def test_runs_are_found_below_the_folder_and_not_in_each_other(folder):
    assert list(find_runs(folder)) == ["broken", "first", "sweep/second"]


def test_the_list_says_how_each_run_is(runs, folder):
    answer = {run["name"]: run for run in runs.answer("runs", {})["runs"]}
    assert answer["first"]["status"] == "finished" and answer["sweep/second"]["status"] == "stopped"
    assert (answer["sweep/second"]["of"], answer["first"]["rule"], answer["first"]["model"]) == (
        4,
        "mt_grpo",
        "embedded",
    )
    rewards = [row["reward"] for row in open_run(folder / "first").metrics()]
    assert answer["first"]["reward"] == rewards and answer["first"]["last"] == pytest.approx(sum(rewards) / 4)
    assert "metrics.jsonl has a line that is not JSON of metrics" in answer["broken"]["error"]


def test_curves_are_of_each_run_by_step_and_time(runs):
    asked = {"runs": "first\nsweep/second", "metric": "loss"}
    by_step = runs.answer("curves", asked)
    assert by_step["curves"]["first"] == [[step, 0.01] for step in (1, 2, 3, 4)] and "entropy" in by_step["metrics"]
    by_time = runs.answer("curves", {**asked, "by": "time"})
    assert [x for x, _ in by_time["curves"]["first"]] == sorted(x for x, _ in by_time["curves"]["first"])
    assert by_time["curves"]["first"][0][0] == 0.0


def test_questions_are_those_that_all_were_asked(runs, folder):
    answer = runs.answer("questions", {"runs": "first\nsweep/second"})
    assert (
        answer["asked"] == 4
        and sum(answer["counts"][kind] for kind in ("all", "some", "none") if kind in answer["counts"]) == 4
    )
    for row in answer["rows"]:
        for name, cell in zip(("first", "sweep/second"), row["cells"], strict=True):
            whole = open_run(folder / name).trajectory(cell["session"])
            assert whole["index"]["prompt"] == row["prompt"] and cell["answer"] == whole["answer"]
            assert cell["right"] == (whole["rewards"]["outcome"]["exact_match"] == 1.0)


def test_runs_are_compared_without_being_opened(folder):
    runs = Runs(folder)
    index = folder / "first" / "rollouts" / "index.jsonl"
    whole = index.read_bytes()
    place = whole.index(b'{"kind":"rollout","session":"train-')
    index.write_bytes(whole[:place] + b"{" + whole[place:])  # a line that is not needed here
    try:
        assert runs.answer("questions", {"runs": "first\nsweep/second"})["asked"] == 4
        by_time = runs.answer("curves", {"runs": "first", "by": "time"})["curves"]["first"]
        with pytest.raises(UserError, match="damaged line"):
            runs.answer("run", {"run": "first"})
    finally:
        index.write_bytes(whole)
    first = open_run(folder / "first")
    ends = {step["step"] + 1: step["start"] + step["seconds"] for step in first.steps()}
    assert [x for x, _ in by_time] == [ends[row["step"]] - min(ends.values()) for row in first.metrics()]


OPENS = """
import multiprocessing, sys
from mt_grpo.app.view import parallel_map
from mt_grpo.runlog import index
from mt_grpo.viewer.runs import Runs
index._PART = 2**12
with parallel_map() as each:
    asked = []
    runs = Runs(sys.argv[1], lambda *read: asked.append(read) or each(*read))
    print(runs.answer("run", {"run": "first"})["conversations"], len(asked) > 0, end=" ")
print(len(multiprocessing.active_children()))
"""


def test_long_indices_are_read_by_other_processes(folder):
    done = subprocess.run([sys.executable, "-c", OPENS, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{len(open_run(folder / 'first').rows)} True 0\n", done.stderr


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


def test_a_folder_without_runs_is_refused_in_a_sentence(tmp_path, capsys):
    assert main(["view", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "is not the folder of a run and has none in it" in said and said.count("\n") == 1


def test_a_file_is_of_one_run(folder, tmp_path, capsys):
    assert main(["view", str(folder), "--export", str(tmp_path / "x.html")]) == 1
    assert "`--export` takes the folder of one run" in capsys.readouterr().err


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_runs_are_compared_and_opened(runs):
    with open_browser() as browser, serving(runs) as server, watched(browser) as page:
        page.goto(server.url)
        page.wait_for_selector(".overlaid .line")
        assert page.locator(".run-row:not(.th)").count() == 3
        assert page.locator(".overlaid .line:not(.faint)").count() == 2
        assert page.locator(".asked thead th").all_inner_texts()[1:] == ["sweep/second", "first"]
        names = page.locator(".run-row:not(.th) .run-name a")
        assert names.all_inner_texts() == ["sweep/second", "first", "broken"]  # the newest first
        page.click(".th button:has-text('last 5')")
        best_first = names.all_inner_texts()
        page.click(".th button:has-text('last 5')")
        assert names.all_inner_texts() == [*best_first[1::-1], "broken"] and "sort=last" in page.url
        page.click(".th button:text-is('run')")
        assert names.all_inner_texts() == ["sweep/second", "first", "broken"]
        page.keyboard.press("Enter")
        assert names.all_inner_texts() == ["broken", "first", "sweep/second"]
        page.reload()
        page.wait_for_selector(".overlaid .line")
        assert names.all_inner_texts() == ["broken", "first", "sweep/second"]
        page.click("button:has-text('finished')")
        assert page.locator(".run-row:not(.th)").count() == 1
        page.uncheck(".run-row input")
        page.wait_for_function("() => document.querySelectorAll('.overlaid .line:not(.faint)').length === 1")
        page.click(".run-row a:has-text('first')")
        page.wait_for_function("() => performance.getEntriesByName('shown overview').length")
        assert "run=first" in page.url and page.get_by_label("Run", exact=True).input_value() == "first"
        page.click("nav a:has-text('Find')")
        page.fill("#filter", "mode=eval")
        page.wait_for_function("() => document.querySelector('#said').textContent.startsWith('8 of')")
        page.reload()
        page.wait_for_function("() => document.querySelector('#said')?.textContent.startsWith('8 of')")
        page.get_by_label("Run", exact=True).select_option("sweep/second")
        page.wait_for_function(
            "location.hash.includes('second') && document.querySelector('#filter')?.value === 'mode=eval'"
        )
        page.goto(f"{server.url}#/find?run=nowhere")
        page.wait_for_selector("#said.wrong")
        page.wrong.clear()  # the browser notes the status 400
        assert "There is no run 'nowhere'" in page.inner_text("#said")
