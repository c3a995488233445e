"""The shell of a task, with bash on this machine in the place of a container's."""

import asyncio
import base64
import os
import shlex
import shutil
import subprocess
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_grpo.integrations.harbor.containers import OWNER, is_gone, owner, write_overlay
from mt_grpo.integrations.harbor.shell import MARK, SHOWN, Shell, ShellError


@pytest.fixture
def run(tmp_path):
    """Runs commands one after another in one shell; what each came to."""

    async def execute(script, seconds):
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", script), stdout=-1, stderr=-1, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        out, _ = await asyncio.wait_for(process.communicate(), seconds)
        return SimpleNamespace(stdout=out.decode(), return_code=process.returncode)

    async def all_of(commands, seconds):
        shell = Shell(execute, seconds)
        return await asyncio.gather(*map(shell.bash, commands))  # as calls of one turn, which run in their order

    return lambda *commands, seconds=20.0: asyncio.run(all_of(commands, seconds))


@pytest.mark.parametrize(
    ("before", "command", "shown"),
    [
        ("cd /usr", "pwd", "/usr"),
        ("cd /usr; cd /", "cd -", "/usr"),
        ("x=3; export y='a b'", 'echo "$x $y"', "3 a b"),
        ("say() { echo hi $1; }", "say you", "hi you"),
        ("alias q='echo qq'", "q", "qq"),
        ("x=1; exit 7", "echo $x", "1"),
        ("set -e; false", "echo goes on", "goes on"),
        ("kill -9 $$", "echo goes on", "goes on"),
        ("if", "echo goes on", "goes on"),
        ("mkdir in; code=5; for d in in; do :; done", "echo $d $code; ls in", "in 5"),
    ],
)
def test_a_shell_remembers_what_commands_changed(run, before, command, shown):
    assert run(before, command)[1][0] == shown


def test_commands_run_where_the_shells_folder_cannot_be_written(run):
    try:
        assert run("rm -r $TMPDIR/.shell; : > $TMPDIR/.shell", "echo goes on")[1][0] == "goes on"
    finally:
        shutil.rmtree("/dev/shm/.shell")


@pytest.mark.parametrize(
    ("command", "shown", "exit_code"),
    [
        ("echo out; echo err >&2", "out\nerr", 0),
        ("true", "[no output]", 0),
        ("false", "[exit code 1]", 1),
        ("echo no; exit 3", "no\n[exit code 3]", 3),
        ("kill -9 $$", "[exit code 137]", 137),
        ("cat", "[no output]", 0),
        ("exec echo replaced", "replaced", 0),
        ("cat <<EOF\n$((1 + 1)) 'it''s \\\\\nEOF", "2 'it''s \\", 0),
        (r"printf '\xff\x1b[31m'", "\ufffd\x1b[31m", 0),
    ],
)
def test_a_command_shows_its_output_and_exit_code(run, command, shown, exit_code):
    ((text, data),) = run(command)
    assert (text, data["exit_code"]) == (shown, exit_code)
    assert 0 < data["seconds"] < 20


def test_a_command_that_takes_too_long_is_ended(run):
    (slow, data), (after, _) = run("echo begun; sleep 30", "echo after", seconds=0.5)
    assert slow == "begun\n[The command was ended after 0.5 s.]" and data["exit_code"] == 124
    assert after == "after"


def test_what_runs_in_the_background_goes_on(run):
    (first, _), (second, _) = run("sleep 60 & echo $!", "kill $(jobs -p) 2> /dev/null; echo done")
    pid = int(first)
    assert second == "done" and os.path.exists(f"/proc/{pid}")
    os.kill(pid, 9)


def test_long_output_is_cut_in_its_middle(run, tmp_path, monkeypatch):
    (slow := tmp_path / "wc").write_text(f"#!/bin/sh\nn=$({shutil.which('wc')} $*); sleep .3; echo $n\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ((text, _),) = run("yes 123456789 | head -c 5000000")
    head, note, tail = text.rpartition("\n[")[0], text[text.rindex("\n[") :].splitlines()[1], text[-20:]
    assert len(head) == SHOWN // 2 and tail.strip("123456789\n") == ""
    assert note == f"[{5_000_000 - SHOWN:,} bytes left out]"


def test_endless_output_neither_hangs_nor_fills_the_disk(run, tmp_path):
    ((text, data),) = run("yes", seconds=1)
    assert data["exit_code"] == 124 and "bytes left out" in text
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 100_000


TEXTS = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=60)


@given(st.lists(TEXTS, min_size=4, max_size=8))
@settings(max_examples=4, deadline=None)
def test_any_text_reaches_the_command_as_it_is(texts):
    async def execute(script, seconds):
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=seconds)
        return SimpleNamespace(stdout=done.stdout, return_code=0)

    shown, _ = asyncio.run(Shell(execute).bash(f"printf '(%s)' {' '.join(map(shlex.quote, texts))}"))
    assert shown == "".join(f"({text})" for text in texts)


@pytest.mark.parametrize("says", ["", "no such container", "\nmt-grpo-shell:0:0:AAAA"])
def test_a_container_that_is_gone_is_told_from_a_failed_command(says):
    async def execute(script, seconds):
        return SimpleNamespace(stdout=says, return_code=1)

    shell = Shell(execute)
    with pytest.raises(ShellError, match="The container runs no commands any more: "):
        asyncio.run(shell.bash("true"))
    assert shell.failure


def test_a_container_that_still_answers_goes_on():
    async def execute(script, seconds):
        said = "" if base64.b64encode(b"kill -9 -1").decode() in script else f"{MARK}:0:0::"
        return SimpleNamespace(stdout=f"\n{said}", return_code=0)

    shell = Shell(execute)
    text, data = asyncio.run(shell.bash("kill -9 -1"))
    assert text.startswith("[The command ended the shell. It was begun again.]") and data["exit_code"] == 137
    assert shell.failure is None and not shell.spoilt


def test_containers_of_this_process_are_not_leftovers(tmp_path, monkeypatch):
    assert not is_gone(owner()) and OWNER in write_overlay(tmp_path / "overlay.json", through=None).read_text()
    host, pid, began = owner().split("/")
    assert is_gone(f"{host}/{pid}/{float(began) - 100}") and is_gone(f"{host}/999999999/1")
    assert not is_gone("another-host/999999999/1") and not is_gone("something else")
    boot = psutil.boot_time() + 3600  # once the clock was set
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot)
    assert not is_gone(owner())
