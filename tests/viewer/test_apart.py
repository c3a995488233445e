"""Two conversations token by token, in a real browser."""

from __future__ import annotations

import pytest
from support.browser import missing, open_browser, serving, watched
from support.credited_runs import Member, write_credited

from mt_grpo.runlog import open_run
from mt_grpo.viewer.queries import Queries

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

TURNS = [[0.2, 0.0], [0.2, 0.0], [None, None]]
GROUP = [
    Member([1.0, 0.9], TURNS),
    Member([0.0, 0.9], [*TURNS[:2], TURNS[0], TURNS[2]], branch_of=0, shared=2),
    Member([0.0, 0.4], TURNS),
    Member([0.0, 0.4], TURNS, branch_of=2, shared=3),
]


def test_the_first_difference_is_marked_and_turns_aligned(tmp_path):
    queries = Queries(open_run(write_credited(tmp_path / "run", [GROUP], "gtpo")))
    one, two = (queries.run.trajectory(f"train-000000-000000-00000{number}") for number in (0, 1))
    with open_browser() as browser, serving(queries) as server, watched(browser) as page:
        page.goto(f"{server.url}#/trajectory?session=train-000000-000000-000000")
        page.wait_for_selector(".tokens")
        page.keyboard.press("d")
        page.wait_for_selector(".pairs")
        assert page.locator(".pairs article").count() == 7 and page.locator(".no-turn").count() == 1
        assert page.locator(".pairs .chip:text-is('the same')").count() == 4
        assert "The first 2 turns are the same." in page.inner_text("main")
        left, right = (
            [whole["tokens"]["ids"][i] for i, t in enumerate(whole["tokens"]["turn"]) if t == 2]
            for whole in (one, two)
        )
        place = next(i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1])
        assert f"First difference: turn 3, token {place + 1}" in page.inner_text("main")
        marked = page.locator(".tokens .first")
        assert marked.count() == 2
        begun = [whole["tokens"]["turn"].index(2) + place for whole in (one, two)]
        texts = [whole["tokens"]["texts"][i] for whole, i in zip((one, two), begun, strict=True)]
        assert marked.all_text_contents() == texts
        page.fill("input[aria-label='The other conversation']", "train-000000-000000-000002")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=First difference: turn 1")
        page.goto(f"{server.url}#/apart?a=train-000000-000000-000002&b=train-000000-000000-000003")
        page.wait_for_selector("text=Both sampled the same tokens.")
