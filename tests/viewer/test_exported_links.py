"""Links of an exported file lead to what its filter lets through, and nowhere else."""

from __future__ import annotations

import pytest
from support.browser import missing, open_browser, watched

from mt_grpo.cli import main


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_links_of_a_file_obey_its_filter(run_folder, queries, tmp_path):
    path, text = tmp_path / "file.html", "mode=train step=3 errors>0"
    assert main(["view", str(run_folder), "--export", str(path), "--filter", text]) == 0
    inside = {queries.run.rows[place]["session"] for place in queries.select(text).tolist()}
    with open_browser() as browser, watched(browser, offline=True) as page:
        page.goto(path.as_uri())
        page.wait_for_function("() => performance.getEntriesByName('shown overview').length")
        page.wait_for_selector(".findings a")
        for view in ("overview", "find", "groups", "trajectory"):
            page.evaluate("view => { performance.clearMarks(); location.hash = '#/' + view }", view)
            page.wait_for_function("view => performance.getEntriesByName('shown ' + view).length", arg=view)
            hrefs = page.locator("main a[href^='#/']").evaluate_all(
                "all => all.map(each => each.getAttribute('href'))"
            )
            sessions = [href.split("session=")[1].split("&")[0] for href in hrefs if "#/trajectory?session=" in href]
            assert set(sessions) <= inside, view
            if view == "find":
                assert len(sessions) == len(inside)
        saw, apart = page.locator("a.saw").first, page.locator("a:text-is('difference to another')")
        assert saw.get_attribute("href").startswith("#/context?session=")
        if apart.count():  # where another of its group is in the file
            assert apart.get_attribute("href").split("b=")[1] in inside
        saw.click()
        page.wait_for_selector(".seen .block")
        assert page.locator("#state a").count() == 0 and "conversations" in page.inner_text("#state")
        page.evaluate("() => { location.hash = '#/run' }")
        page.wait_for_function(
            "() => document.querySelector('main').innerText.includes('not how the run itself went')"
        )
        page.evaluate("() => { location.hash = '#/context?session=train-000000-000000-000000' }")
        page.wait_for_function("() => document.querySelector('main').innerText.includes('its filter leaves it out')")


def test_a_file_is_overwritten_where_that_is_asked_for(run_folder, tmp_path, capsys):
    path = tmp_path / "file.html"
    path.write_text("mine")
    assert main(["view", str(run_folder), "--export", str(path), "--filter", "step=3"]) == 1
    assert "is there already: give another name, or `--overwrite` to replace it." in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main(["view", str(run_folder), "--export", str(path), "--filter", "step=3", "--overwrite"]) == 0
