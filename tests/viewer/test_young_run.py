"""A run before its first batch, or failed in it: its state, its error and its options are shown."""

from __future__ import annotations

import shutil

import pytest
from support.browser import missing, open_browser, serving, watched
from support.runs import write_run

from mt_grpo.app.view import open_run_parallel
from mt_grpo.cli import main
from mt_grpo.runlog.heartbeat import Heartbeat
from mt_grpo.viewer.queries import Queries
from mt_grpo.viewer.runs import Runs

AT = {"step": 0, "of": 40, "waits_for": "sampling", "under_way": []}
CONFIG = "model_name_or_path: org/small\nadvantage_estimator: gtpo\nlearning_rate: 0.00123\n"


def begun(folder, error=None):
    """A run that has written its options and its state alone; with an error one that failed."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    pulse = Heartbeat(folder, lambda: AT).beating()
    if error is None:
        return pulse
    with pytest.raises(ValueError), pulse:
        raise ValueError(error)
    return folder


def test_a_young_run_answers_all_that_is_known(tmp_path):
    with begun(tmp_path / "run"):
        queries = Queries(open_run_parallel(str(tmp_path / "run"), begun=True))
        assert queries.answer("run", {})["status"] == "running" and queries.answer("overview", {})["step"] == []
        view = queries.answer("panel", {})
        assert view["about"] == {"model": "org/small", "estimator": "gtpo"} and "0.00123" in view["config"]
        (row,) = Runs(tmp_path).answer("runs", {})["runs"]
        assert (row["status"], row["rule"], row["model"]) == ("running", "gtpo", "small")
    write_run(tmp_path / "whole", steps=1)
    shutil.copytree(tmp_path / "whole", tmp_path / "run", dirs_exist_ok=True)  # its first batches
    assert queries.answer("run", {})["conversations"] == 24 and queries.answer("overview", {})["step"] == [0]


@pytest.mark.parametrize("config", ["- a list", "a: [", "[" * 20_000, "!!python/object:os.system x", "x: 1\n\0"])
def test_a_strange_config_is_text_alone(tmp_path, config):
    begun(tmp_path / "run", "none")
    (tmp_path / "run" / "config.yaml").write_text(config)
    view = Queries(open_run_parallel(str(tmp_path / "run"), begun=True)).answer("panel", {})
    assert view["about"] == {} and view["config"] == config


def test_a_failed_run_is_the_first_finding(tmp_path):
    folder = begun(tmp_path / "run", "no reward for row 3")
    first = Queries(open_run_parallel(str(folder), begun=True)).answer("overview", {})["findings"][0]
    assert (first["level"], first["strong"], first["text"]) == (
        "bad",
        "The run failed:",
        "ValueError: no reward for row 3",
    )


def test_what_takes_conversations_still_refuses_a_young_run(tmp_path, capsys):
    folder = begun(tmp_path / "run", "none")
    for command in (["export", str(folder), "--to", "jsonl"], ["view", str(folder), "--export", str(tmp_path / "x")]):
        assert main(command) == 1
        assert "has no conversations so far" in capsys.readouterr().err


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_the_page_shows_a_run_from_its_first_second(tmp_path):
    write_run(tmp_path / "whole", steps=1)
    young, failed = tmp_path / "runs" / "young", begun(tmp_path / "runs" / "failed", "no reward for row 3")
    with open_browser() as browser, serving(Runs(tmp_path / "runs")) as server, watched(browser) as page:
        page.goto(f"{server.url}#/overview?run=failed")
        page.wait_for_function("() => document.querySelector('main').innerText.includes('no reward for row 3')")
        text = page.inner_text("main")
        assert "org/small" in text and "learning_rate: 0.00123" in text and "failed" in text
        with begun(young):
            page.goto(f"{server.url}#/overview?run=young")
            page.wait_for_function("() => document.querySelector('main').innerText.includes('waiting for sampling')")
            assert "gtpo" in page.inner_text("main")
            shutil.copytree(tmp_path / "whole", young, dirs_exist_ok=True)
            page.wait_for_function("() => document.querySelector('main').innerText.includes('Reward components')")
    with (
        open_browser() as browser,
        serving(Queries(open_run_parallel(str(failed), True))) as server,
        watched(browser) as page,
    ):
        for view, words in (("", "no reward for row 3"), ("find", "0 of 0 conversations"), ("run", "no reward")):
            page.goto(f"{server.url}#/{view}")
            page.wait_for_function("words => document.querySelector('main').innerText.includes(words)", arg=words)
