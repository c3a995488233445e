"""`mt-grpo view`: what it refuses, how it starts and ends, and what it does not import."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from support.own_process import COMMAND
from support.runs import write_run

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


def test_a_port_that_is_taken_is_refused(folder, refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"Port {port} is taken" in refused("view", folder, "--port", port)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "takes one folder"),
        ("a b", "takes one folder"),
        ("--prot 3", "the nearest is '--port'"),
        ("x --port", "needs a value"),
        ("x --port many", "'many' is none"),
        ("x --port=70000", "'70000' is none"),
        ("x --filter reward<1", "belongs to `--export FILE`"),
        ("HERE", "is not the folder of a run"),
        ("HERE/missing", "There is no folder"),
        ("RUN --export HERE/x.html --filter rewrd<1", "no column 'rewrd'"),
        ("RUN --export HERE/a/b/x.html --filter reward>99", "No conversation fulfils the filter"),
        ("RUN --export /dev/null/x.html", "cannot be written"),
        ("RUN --export HERE/x.html", "are too many for a file, which takes 3"),
    ],
)
def test_what_cannot_be_shown_is_refused(folder, tmp_path, monkeypatch, refused, arguments, words):
    if words.startswith("are too many"):
        monkeypatch.setattr("mt_grpo.viewer.server.MAX_EXPORTED", 3)
    given = [word.replace("HERE", str(tmp_path)).replace("RUN", str(folder)) for word in arguments.split()]
    assert words in refused("view", *given) and not any((tmp_path / name).exists() for name in ("x.html", "a"))


def test_a_file_is_written_for_a_filter(folder, tmp_path, prints):
    path = tmp_path / "x.html"
    assert prints("view", folder, "--export", path, "--filter", "mode=eval").startswith(f"{path}: 8 conversations")
    assert path.read_text().count("</script>") == 2


READ = """
import json, multiprocessing, sys
from mt_grpo.app import runs as view
from mt_grpo.errors import UserError
from mt_grpo.runlog import index
view.LONG_INDEX, index._PART, index._NEAR = 0, 3000, 100
try:
    run = view._open_run_parallel(sys.argv[1])
except UserError as error:
    sys.exit(f"refused: {error}")
print(json.dumps([run.rows[:], run.steps(), run.about]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems read an index in one process")
def test_several_processes_read_what_one_reads(tmp_path):
    """Of a long index."""

    def read() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", READ, folder], capture_output=True, text=True, timeout=120)

    folder = write_run(tmp_path / "run", steps=2, ranks=2)
    run = open_run(folder)
    assert read().stdout == f"{json.dumps([run.rows[:], run.steps(), run.about])}\n"
    index = folder / "rollouts" / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    lines[len(lines) // 2] = lines[len(lines) // 2].replace(b":", b";", 1)
    index.write_bytes(b"".join(lines))
    ended = read()
    assert ended.returncode == 1 and ended.stderr.startswith("refused: ") and ended.stderr.count("\n") == 1
    assert "has a damaged line" in ended.stderr
