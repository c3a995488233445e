"""Search in what was said: the index, its terms, and the hits on the page."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request

import pytest
from support.browser import missing, open_browser, serving, watched
from support.runs import index_line, write_run

from mt_grpo.cli import main
from mt_grpo.errors import UserError
from mt_grpo.runlog import open_run
from mt_grpo.runlog.conversation import messages_of, words
from mt_grpo.runlog.index import Table
from mt_grpo.viewer.columns import parse_filter
from mt_grpo.viewer.queries import Queries
from mt_grpo.viewer.search import SearchIndex, hits


@pytest.fixture(scope="module")
def index(run_folder):
    run = open_run(run_folder)
    index = SearchIndex(run)
    index.read_all(run.rows)
    return index


@pytest.fixture(scope="module")
def all_words(run_folder):
    run = open_run(run_folder)
    said = {row["session"]: "\n".join(map(words, messages_of(record))) for row, record in run.records()}
    return [said[row["session"]] for row in run.rows]


@pytest.mark.parametrize("text", ["capital of Peru is", "I look it up", "lima", "Error: <script", "nowhere at all"])
def test_it_finds_what_a_loop_over_all_words_finds(index, all_words, text):
    wanted = [text.casefold() in each.casefold() for each in all_words]
    assert index.where(text, "said", len(all_words)).tolist() == wanted


def test_a_phrase_does_not_go_from_one_part_into_the_next(index, all_words):
    assert not index.where("up tool name search the capital", "said", len(all_words)).any()


@pytest.mark.parametrize("text", ['"', "NEAR(", "*", "a\0b", "said : x", "-", ""])
def test_no_text_is_read_as_a_language_of_queries(index, all_words, text):
    index.where(text, "said", len(all_words))


@pytest.mark.parametrize(
    ("term", "holds"),
    [
        ("tool=search", lambda row: row["calls"] > 0),
        ("tool=other", lambda row: False),
        ("advantage<-1.5", lambda row: any(value < -1.5 for value in row["advantages"] or ())),
        ("turn_reward>=0.1", lambda row: any(value is not None and value >= 0.1 for value in row["turn_rewards"])),
        ("reward.exact_match>0.5", lambda row: row["rewards"]["exact_match"] > 0.5),
        ('error="took longer than"', lambda row: sum(row["errors"]) > 0),
    ],
)
def test_terms_count_what_a_loop_counts(index, run_folder, term, holds):
    queries = Queries(open_run(run_folder))
    queries.answer("run", {})
    queries.columns.said = index.where
    assert queries.columns.where(parse_filter(term)).tolist() == [bool(holds(row)) for row in queries.run.rows]


def test_characters_without_spaces_between_are_found(tmp_path, run_folder):
    run = open_run(run_folder)
    index = SearchIndex(run)
    record = {"prompt": [{"role": "user", "content": "法国的首都是哪里"}], "turns": [], "error": None}
    index._run = type("Run", (), {"records": lambda self, rows: [(rows[0], record)], "checksum": run.checksum})()
    table = Table()
    table.add("rollout", [index_line("s")])
    index.read_all(table)
    assert index.where("首都", "said", 1).all() and not index.where("都首", "said", 1).any()


def test_an_index_is_kept_and_follows_the_run(tmp_path):
    whole = write_run(tmp_path / "whole", steps=2)
    folder, path = tmp_path / "run", tmp_path / "words.sqlite"
    shutil.copytree(whole, folder)
    lines = (folder / "rollouts" / "index.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rollouts" / "index.jsonl").write_bytes(b"".join(lines[:20]))
    run = open_run(folder)
    first = SearchIndex(run, path)
    first.read_all(run.rows)
    few = first.read
    (folder / "rollouts" / "index.jsonl").write_bytes(b"".join(lines))
    run.refresh()
    again = SearchIndex(run, path)
    assert len(again._documents) == few  # those are not read again
    again.read_all(run.rows)
    assert again.read == len(run.rows) > few
    assert again.where("look it up", "said", len(run.rows)).sum() == sum(row["calls"] > 0 for row in run.rows)


def test_an_index_that_has_read_all_has_no_thread(run_folder):
    def end():
        for thread in threading.enumerate():
            if thread.name == "mt-grpo-search":
                thread.join(60)
                assert not thread.is_alive()

    end()  # of tests before
    run = open_run(run_folder)
    index = SearchIndex(run)
    for _ in range(2):
        index.follow(run.rows)
        end()
    assert index.read == len(run.rows)


def test_a_damaged_index_is_made_again(tmp_path, run_folder):
    path = tmp_path / "words.sqlite"
    path.write_bytes(b"SQLite format 3\0" + b"nothing like it" * 500)
    run = open_run(run_folder)
    index = SearchIndex(run, path)
    index.read_all(run.rows)
    assert index.where("look it up", "said", len(run.rows)).any()


def test_a_damaged_file_of_the_run_is_said(tmp_path):
    folder = write_run(tmp_path / "run", steps=1)
    next((folder / "rollouts").glob("train-*.parquet")).write_bytes(b"nothing")
    run = open_run(folder)
    with pytest.raises(UserError, match=r"is damaged .*: bring it back"):
        SearchIndex(run).read_all(run.rows)


def test_hits_name_turn_and_part(run_folder):
    run = open_run(run_folder)
    row, record = next((row, record) for row, record in run.records() if row["calls"])
    (hit, *_) = hits(record, ["LOOK it up"])
    assert (hit["turn"], hit["part"], hit["before"], hit["hit"]) == (1, "turn", "I ", "look it up")
    assert hits(record, ["no such words"]) == []


def test_an_export_searches_as_the_page_does(run_folder, tmp_path, monkeypatch, all_words):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "x.jsonl"
    text = "The capital of Peru is"
    assert main(["export", str(run_folder), "--to", "messages", "--output", str(path), "--filter", f'"{text}"']) == 0
    assert len(path.read_text().splitlines()) == sum(text in each for each in all_words)


def test_conversations_are_downloaded_from_the_page(server, queries):
    with urllib.request.urlopen(f"{server.url}export/messages?q=mode%3Deval") as answer:
        lines = [json.loads(line) for line in answer.read().splitlines()]
        assert answer.headers["Content-Disposition"] == 'attachment; filename="messages.jsonl"'
    assert [line["session"] for line in lines] == [row["session"] for row in queries.run.rows if row["mode"] == "eval"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}export/nothing")
    assert "give one of messages, sharegpt, tokens, preferences, jsonl" in refused.value.read().decode()


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_hits_are_marked_on_the_page(run_folder, all_words):
    with open_browser() as browser, serving(Queries(open_run(run_folder))) as server, watched(browser) as page:
        page.goto(f"{server.url}#/find?q=%22The+capital+of+Peru+is%22")
        page.wait_for_selector(".hit mark")
        page.wait_for_function("() => document.querySelector('#said').textContent.endsWith('every word read')")
        wanted = sum("The capital of Peru is" in each for each in all_words)
        assert page.inner_text("#said").startswith(f"{wanted} of ")
        assert page.locator(".hit mark").first.inner_text() == "The capital of Peru is"
        assert "turn 1 · result" in page.inner_text(".hits >> nth=0")
        with page.expect_download() as download:
            page.click(".exports a:text-is('messages')")
        assert len(download.value.path().read_text().splitlines()) == wanted
