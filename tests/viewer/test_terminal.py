"""A conversation in a shell: commands as a terminal shows them, and what the environment kept."""

from __future__ import annotations

import pytest
from support import runs
from support.browser import missing, open_browser, serving, watched

from mt_grpo.runlog import open_run
from mt_grpo.viewer.queries import Queries

COMMAND = "grep -c '<b>' /var/log/*; false"


@pytest.fixture
def in_a_shell(tmp_path, monkeypatch):
    def conversation(*arguments):
        made = written(*arguments)
        for turn in made.turns:
            for call in turn.tool_calls:
                call.name, call.arguments, call.result = "bash", {"command": COMMAND}, "3\n<script>\n[exit code 1]"
                call.data, call.error = {"exit_code": 1, "seconds": 0.25, "bytes": 2}, None
        made.info = {"verifier_log": "=== 2 failed ===\nassert <i>", "tests": 2}
        return made

    written = runs._conversation
    monkeypatch.setattr(runs, "_conversation", conversation)
    return runs.write_run(tmp_path / "agent", steps=1, groups=1)


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_command_is_shown_as_a_terminal_shows_it(in_a_shell):
    queries = Queries(open_run(in_a_shell))
    queries.answer("run", {})
    session = next(row["session"] for row in queries.run.rows if row["mode"] == "train" and row["turns"] > 1)
    with serving(queries) as server, open_browser() as browser, watched(browser) as page:
        page.goto(f"{server.url}#/trajectory?session={session}")
        page.wait_for_selector(".terminal")
        first = page.locator(".terminal").first
        assert first.locator("pre").all_inner_texts() == [f"$ {COMMAND}", "3\n<script>\n[exit code 1]"]
        assert first.locator("small.problem").inner_text() == "exit code 1 · 250 ms"
        log = page.locator("aside details", has_text="verifier log")
        log.locator("summary").click()
        assert log.locator("pre").inner_text() == "=== 2 failed ===\nassert <i>"
        assert page.locator("aside", has_text="tests 2").count() == 1
