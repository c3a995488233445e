"""`mt-grpo view`: what it refuses, how it starts and ends, and what it does not import."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from support.own_process import COMMAND
from support.runs import write_run

from mt_grpo.cli import main
from mt_grpo.runlog import open_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("view") / "run", steps=1)


HEAVY = """
import sys, threading
from mt_grpo.viewer import server

server.Server.serve_forever = lambda self: None
from mt_grpo.cli import main

assert main(["view", sys.argv[1], "--no_browser"]) == 0
heavy = {"torch", "transformers", "trl", "accelerate", "datasets", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""


def test_it_imports_nothing_heavy(folder):
    subprocess.run([sys.executable, "-c", HEAVY, str(folder)], check=True)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_ended(folder, ending):
    command = [sys.executable, "-c", COMMAND, "view", str(folder), "--no_browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split(" is at ")[1].split()[0]
            with urllib.request.urlopen(url, timeout=60) as page:
                assert b"<main" in page.read()
            process.send_signal(ending)
            assert process.wait(60) == (0 if ending == signal.SIGINT else -ending)
        finally:
            process.kill()
        assert process.stderr.read() == ""


def refused(arguments, capsys):
    assert main(["view", *map(str, arguments)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("mt-grpo: ") and said.count("\n") == 1
    return said


def test_a_port_that_is_taken_is_refused(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"Port {port} is taken" in refused([folder, "--port", port], capsys)


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert "is not the folder of a run" in refused([tmp_path], capsys)
    assert "There is no folder" in refused([tmp_path / "missing"], capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "takes one folder"),
        (["a", "b"], "takes one folder"),
        (["--prot", "3"], "the nearest is '--port'"),
        (["x", "--port"], "needs a value"),
        (["x", "--port", "many"], "'many' is none"),
        (["x", "--port=70000"], "'70000' is none"),
        (["x", "--filter", "reward<1"], "belongs to `--export FILE`"),
    ],
)
def test_wrong_options_are_refused(arguments, words, capsys):
    assert words in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--filter", "rewrd<1"], "no column 'rewrd'"),
        (["--filter", "reward>99"], "No conversation fulfils the filter"),
    ],
)
def test_a_filter_that_gives_no_file_is_refused(folder, tmp_path, arguments, words, capsys):
    assert words in refused([folder, "--export", tmp_path / "x.html", *arguments], capsys)
    assert not (tmp_path / "x.html").exists()


def test_a_file_that_cannot_be_written_is_refused(folder, tmp_path, capsys):
    assert "cannot be written: " in refused([folder, "--export", tmp_path / "none" / "x.html"], capsys)


def test_too_many_conversations_for_a_file_are_refused(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mt_grpo.viewer.server.MAX_EXPORTED", 3)
    assert "are too many for a file, which takes 3" in refused([folder, "--export", tmp_path / "x.html"], capsys)


def test_a_file_is_written_for_a_filter(folder, tmp_path, capsys):
    path = tmp_path / "x.html"
    assert main(["view", str(folder), "--export", str(path), "--filter", "mode=eval"]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: 8 conversations")
    assert path.read_text().count("</script>") == 2


READ = """
import json, multiprocessing, sys
from mt_grpo.app import view
from mt_grpo.errors import UserError
from mt_grpo.runlog import index
view.LONG_INDEX, index._PART, index._NEAR = 0, 3000, 100
try:
    run = view.open_run_parallel(sys.argv[1])
except UserError as error:
    sys.exit(f"refused: {error}")
print(json.dumps([run.rows[:], run.steps(), run.about]))
"""


def read(folder) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", READ, folder], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems read an index in one process")
def test_several_processes_read_what_one_reads(tmp_path):
    """Of a long index."""
    folder = write_run(tmp_path / "run", steps=2, ranks=2)
    run = open_run(folder)
    assert read(folder).stdout == f"{json.dumps([run.rows[:], run.steps(), run.about])}\n"
    index = folder / "rollouts" / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    lines[len(lines) // 2] = lines[len(lines) // 2].replace(b":", b";", 1)
    index.write_bytes(b"".join(lines))
    ended = read(folder)
    assert ended.returncode == 1 and ended.stderr.startswith("refused: ") and ended.stderr.count("\n") == 1
    assert "has a damaged line" in ended.stderr
