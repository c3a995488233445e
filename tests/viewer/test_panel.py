"""The run's panel: its state, what it was started with, and a step as it ran."""

from __future__ import annotations

import shutil

import pytest
from support.browser import missing, open_browser, serving, watched

from mt_grpo.errors import UserError
from mt_grpo.runlog import open_run
from mt_grpo.runlog.heartbeat import Heartbeat
from mt_grpo.viewer.queries import Queries

UNDER_WAY = [
    {"session": "s", "prompt": "What <b>now</b>?", "turns": 2, "tokens": 31, "start": 0.0, "waits_for": "tools"}
]


@pytest.fixture
def going_on(run_folder, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    return folder


def test_a_step_is_divided_among_what_its_conversations_did(queries):
    flow = queries.answer("waterfall", {"step": "3"})
    rows = [row for row in queries.run.rows if (row["mode"], row["step"]) == ("train", 3)]
    assert {row["session"] for row in flow["rows"]} == {row["session"] for row in rows} and len(rows) == 16
    assert [row["end"] for row in flow["rows"]] == sorted((row["end"] for row in flow["rows"]), reverse=True)
    assert flow["seconds"] == pytest.approx(max(row["seconds"] for row in rows), abs=2e-3)
    sampling = sum(sum(row["turn_seconds"]) for row in rows) / (16 * flow["seconds"])
    assert flow["shares"]["sampling"] == pytest.approx(sampling, abs=2e-3)
    assert sum(flow["shares"].values()) == pytest.approx(1)


def test_calls_of_a_turn_that_run_at_once_count_once():
    from mt_grpo.viewer.overview import _covered

    assert _covered([["tools", 0, 2, "a"], ["tools", 1, 2, "b"], ["tools", 5, 1, "c"]]) == 4


def test_a_step_without_conversations_is_said(queries):
    with pytest.raises(UserError, match="Step 999 has no conversation"):
        queries.answer("waterfall", {"step": "999"})


def test_the_run_says_its_state_in_the_header(going_on):
    at = {"step": 3, "of": 40, "waits_for": "sampling", "under_way": []}
    queries = Queries(open_run(going_on))
    assert queries.answer("run", {})["status"] == "unknown"
    with Heartbeat(going_on, lambda: at).beating():
        about = queries.answer("run", {})
        assert (about["status"], about["of"]) == ("running", 40) and about["left"] is not None
    assert queries.answer("run", {})["status"] == "stopped"


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_run_under_way_is_shown_and_then_its_end(going_on):
    at = {"step": 3, "of": 40, "waits_for": "sampling", "under_way": UNDER_WAY}
    with (
        open_browser() as browser,
        serving(Queries(open_run(going_on))) as server,
        watched(browser, viewport={"width": 1280, "height": 860}) as page,
    ):
        with Heartbeat(going_on, lambda: at).beating():
            page.goto(f"{server.url}#/run")
            page.wait_for_selector(".flow .sampling")
            text = page.inner_text("main")
            assert "What <b>now</b>?" in text and "running, waiting for sampling" in text and "3 of 40" in text
            page.wait_for_function("() => document.querySelector('#state').textContent.includes('running')")
            assert page.locator("a.flow").count() == 16
            page.click("text=◀ step before")
            page.wait_for_function("() => location.hash.includes('step=10')")
        page.wait_for_function("() => document.querySelector('#state').textContent.includes('stopped')")
        page.wait_for_function("() => document.querySelector('main').textContent.includes('before its last step')")
        page.locator("a.flow").first.click()
        page.wait_for_function("() => performance.getEntriesByName('shown trajectory').length")
