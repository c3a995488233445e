"""Search in what was said, its index, and the notes beside a run."""

import json
import resource
import shutil
import sqlite3
import threading

import pytest
from support.runs import index_line, queries_of, write_run

from mt_grpo.cli import main
from mt_grpo.errors import UserError
from mt_grpo.runlog import open_run
from mt_grpo.runlog.conversation import messages_of, words
from mt_grpo.runlog.files import read_notes, write_note
from mt_grpo.runlog.index import Table
from mt_grpo.viewer.columns import SearchIndex, hits


def read(run, path=None):
    index = SearchIndex(run, path)
    index.read_all(run.rows)
    return index


@pytest.fixture(scope="module")
def run(run_folder):
    return open_run(run_folder)


@pytest.fixture(scope="module")
def index(run):
    return read(run)


@pytest.fixture(scope="module")
def all_words(run):
    said = {row["session"]: "\n".join(map(words, messages_of(record))) for row, record in run.records()}
    return [said[row["session"]] for row in run.rows]


@pytest.mark.parametrize("text", ["capital of Peru is", "I look it up", "lima", "Error: <script", "nowhere at all"])
def test_it_finds_what_a_loop_over_all_words_finds(index, all_words, text):
    wanted = [text.casefold() in each.casefold() for each in all_words]
    assert index.where(text, "said", len(all_words)).tolist() == wanted


@pytest.mark.parametrize("text", ['"', "NEAR(", "*", "a\0b", "said : x", "-", "", "up tool name search the capital"])
def test_no_text_is_a_language_or_goes_over_parts(index, all_words, text):
    found = index.where(text, "said", len(all_words))
    assert len(found) == len(all_words) and not (len(text) > 10 and found.any())


def test_characters_without_spaces_between_are_found(run):
    index, table = SearchIndex(run), Table()
    record = {"prompt": [{"role": "user", "content": "法国的首都是哪里"}], "turns": [], "error": None}
    index._run = type("Run", (), {"records": lambda self, rows: [(rows[0], record)], "checksum": run.checksum})()
    table.add("rollout", [index_line("s")])
    index.read_all(table)
    assert index.where("首都", "said", 1).all() and not index.where("都首", "said", 1).any()


def test_an_index_is_kept_and_follows_the_run(run_folder, tmp_path):
    folder, path = shutil.copytree(run_folder, tmp_path / "run"), tmp_path / "words.sqlite"
    whole = (folder / "rollouts" / "index.jsonl").read_bytes()
    (folder / "rollouts" / "index.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:20]))
    run = open_run(folder)
    few = read(run, path).read
    (folder / "rollouts" / "index.jsonl").write_bytes(whole)
    run.refresh()
    again = SearchIndex(run, path)
    assert len(again._documents) == few  # those are not read again
    again.read_all(run.rows)
    assert again.read == len(run.rows) > few
    assert again.where("look it up", "said", len(run.rows)).sum() == sum(row["calls"] > 0 for row in run.rows)


def test_an_index_that_has_read_all_has_no_thread(run):
    def end():
        for thread in threading.enumerate():
            if thread.name == "mt-grpo-search":
                thread.join(60)
                assert not thread.is_alive()

    end()  # of tests before
    index = SearchIndex(run)
    for _ in range(2):
        index.follow(run.rows)
        end()
    assert index.read == len(run.rows)


def test_rows_that_are_added_while_others_are_read_are_all_there(monkeypatch):
    table, reading, added = Table(), threading.Event(), threading.Event()
    table.add("rollout", [index_line("a")])

    def made(self, name, make=Table._made):
        column = make(self, name)
        reading.set()
        added.wait(0.3)  # a reader that is slow: whoever adds a row waits for it
        return column

    with monkeypatch.context() as patch:
        patch.setattr(Table, "_made", made)
        thread = threading.Thread(target=table.codes, args=("file",))
        thread.start()
        reading.wait(60)
        table.add("rollout", [index_line("b")])
        added.set()
        thread.join(60)
    assert len(table.codes("file")[0]) == len(table.numbers("row")) == 2


def test_a_damaged_index_is_made_again(tmp_path, run):
    path = tmp_path / "words.sqlite"
    path.write_bytes(b"SQLite format 3\0" + b"nothing like it" * 500)
    assert read(run, path).where("look it up", "said", len(run.rows)).any()


def test_an_index_that_another_writes_is_written_later(tmp_path, run):
    index, other = SearchIndex(run, tmp_path / "words.sqlite"), sqlite3.connect(tmp_path / "words.sqlite")
    index._database.execute("PRAGMA busy_timeout=0")
    other.execute("BEGIN IMMEDIATE")
    index._rows = run.rows
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        index._catch_up()
    assert read(run, None).where("look it up", "said", len(run.rows)).any()
    other.rollback()
    index.read_all(run.rows)
    assert index.read == len(run.rows) == len(SearchIndex(run, tmp_path / "words.sqlite")._documents)


@pytest.mark.parametrize("room", [0, 50_000])
def test_a_full_disk_keeps_no_index_and_searches_all_the_same(tmp_path, run, room):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    try:
        index = read(run, tmp_path / "words.sqlite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert index.where("look it up", "said", len(run.rows)).any() and index.read == len(run.rows)


def test_a_damaged_file_of_the_run_is_said(tmp_path):
    next((write_run(tmp_path, steps=1) / "rollouts").glob("train-*.parquet")).write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"is damaged .*: bring it back"):
        read(open_run(tmp_path))


def test_hits_name_turn_and_part(run):
    record = next(record for row, record in run.records() if row["calls"])
    (hit, *_) = hits(record, ["LOOK it up"])
    assert (hit["turn"], hit["part"], hit["before"], hit["hit"]) == (1, "turn", "I ", "look it up")
    assert hits(record, ["no such words"]) == []


def exported(folder, tmp_path, text):
    path = tmp_path / "x.jsonl"
    assert main(["export", str(folder), "--to", "messages", "--output", str(path), "--filter", text]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_export_searches_as_the_page_does(run_folder, tmp_path, monkeypatch, all_words):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "The capital of Peru is"
    assert len(exported(run_folder, tmp_path, f'"{text}"')) == sum(text in each for each in all_words)


def test_notes_are_kept_found_and_exported(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    queries = queries_of(folder)
    sessions = [row["session"] for row in queries.run.rows]
    first, second = sessions[3], sessions[9]
    queries.note({"session": first}, True, "Look <here>")
    queries.note({"session": second}, False, "and here")
    notes = {first: {"star": True, "note": "Look <here>"}, second: {"star": False, "note": "and here"}}
    assert read_notes(folder) == notes
    again = queries_of(folder)
    others = [place for place in range(len(sessions)) if place != 3]
    both, look = [3, 9], [3]
    for text, places in {
        "star=1": look,
        "star=0": others,
        "note=HERE": both,
        "note=look": look,
        'note!=""': both,
    }.items():
        assert again.select(text).tolist() == places, text
    (line,) = exported(folder, tmp_path, "star=1")
    assert (line["session"], line["star"], line["note"]) == (first, True, "Look <here>")
    queries.note({"session": first}, False, " ")
    assert list(read_notes(folder)) == [second]


def test_notes_that_cannot_be_kept_are_refused(tmp_path):
    with pytest.raises(UserError, match="The note has 5000 characters, and may have 4000: shorten it"):
        write_note(tmp_path, "s", True, "x" * 5000)
    (tmp_path / "notes.json").write_text('{"s": {"star": 1}}')
    with pytest.raises(UserError, match=r"notes.json is damaged \(.*\): bring it back, or remove it"):
        read_notes(tmp_path)
