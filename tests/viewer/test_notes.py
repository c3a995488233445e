"""Stars and notes: on the page, beside the run, in filters and in exports."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request

import pytest
from support.browser import missing, open_browser, serving, watched

from mt_grpo.cli import main
from mt_grpo.errors import UserError
from mt_grpo.runlog import open_run
from mt_grpo.runlog.files import read_notes, write_note
from mt_grpo.viewer.queries import Queries


@pytest.fixture
def folder(run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "run")
    return tmp_path / "run"


def post(server, session, body, **headers):
    own = {"Content-Type": "application/json", "Origin": server.url.rstrip("/")}
    request = urllib.request.Request(
        f"{server.url}api/note?session={session}", json.dumps(body).encode(), own | headers
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_notes_are_kept_found_and_exported(folder, tmp_path):
    queries = Queries(open_run(folder))
    first, second = (queries.run.rows[place]["session"] for place in (3, 9))
    queries.note({"session": first}, True, "Look <here>")
    queries.note({"session": second}, False, "and here")
    assert read_notes(folder) == {
        first: {"star": True, "note": "Look <here>"},
        second: {"star": False, "note": "and here"},
    }
    again = Queries(open_run(folder))
    for text, places in (("star=1", [3]), ("note=HERE", [3, 9]), ("note=look", [3]), ('note!=""', [3, 9])):
        assert [row["session"] for row in again.answer("find", {"q": text})["rows"]] == [
            again.run.rows[place]["session"] for place in places
        ], text
    assert again.answer("find", {"q": "star=0"})["matched"] == len(again.run.rows) - 1
    path = tmp_path / "starred.jsonl"
    assert main(["export", str(folder), "--to", "messages", "--output", str(path), "--filter", "star=1"]) == 0
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["session"], line["star"], line["note"]) == (first, True, "Look <here>")
    queries.note({"session": first}, False, " ")
    assert list(read_notes(folder)) == [second]


def test_only_the_page_itself_writes_notes(folder):
    queries = Queries(open_run(folder))
    session = queries.run.rows[0]["session"]
    with serving(queries) as server:
        for headers in ({"Origin": "http://elsewhere"}, {"Content-Type": "text/plain"}):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                post(server, session, {"star": True, "note": ""}, **headers)
        for body in ([], {"star": 1, "note": ""}, {"star": True}):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                post(server, session, body)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(server, "nobody", {"star": True, "note": ""})
        assert read_notes(folder) == {}
        assert post(server, session, {"star": True, "note": ""})["notes"][session]["star"]


def test_what_cannot_be_kept_is_said_in_a_sentence(folder):
    with pytest.raises(UserError, match="The note has 5000 characters, and may have 4000: shorten it"):
        write_note(folder, "s", True, "x" * 5000)
    (folder / "notes.json").write_text('{"s": {"star": 1}}')
    with pytest.raises(UserError, match=r"notes.json is damaged \(.*\): bring it back, or remove it"):
        read_notes(folder)


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_star_and_a_note_are_put_on_the_page(folder):
    queries = Queries(open_run(folder))
    session = queries.run.rows[5]["session"]
    with open_browser() as browser, serving(queries) as server, watched(browser) as page:
        page.goto(f"{server.url}#/trajectory?session={session}")
        page.click(".star")
        page.wait_for_selector(".star[aria-pressed=true]")
        page.fill(".noted input", "why <b>this</b>?")
        page.press(".noted input", "Tab")
        page.goto(f"{server.url}#/find?q=note%3Dthis")
        page.wait_for_selector(".starred")
        assert read_notes(folder) == {session: {"star": True, "note": "why <b>this</b>?"}}
        page.reload()
        page.goto(f"{server.url}#/trajectory?session={session}")
        page.wait_for_function("() => document.querySelector('.noted input')?.value === 'why <b>this</b>?'")
