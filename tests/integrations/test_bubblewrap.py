"""Tasks in sandboxes of `bwrap`: what is done there is verified, and nothing else is reached."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.shells import HELLO, SUBMIT, TEST, call, play_branches, play_turns, write_task
from support.waiting import until

from mt_grpo.app.build import _own_rows
from mt_grpo.cli import main
from mt_grpo.data import DatasetError, fingerprint
from mt_grpo.data.terminal import KINDS, write_tasks
from mt_grpo.envs.source import build_environment, check_source
from mt_grpo.errors import ConfigError
from mt_grpo.integrations import harbor
from mt_grpo.integrations.harbor import HarborEnv, HarborTasks, shell
from mt_grpo.integrations.harbor.bubblewrap import Sandbox, begin_trial, check_usable, read_machine
from mt_grpo.integrations.harbor.containers import TaskError, Verified, owner
from mt_grpo.options.table import RunOptions
from mt_grpo.options.values import with_env_options
from mt_grpo.rewards import EnvReward
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.runlog import open_run
from mt_grpo.trajectory import StopReason

if shutil.which("bwrap") is None:
    pytest.skip("bwrap is not installed: run `make sandbox`", allow_module_level=True)


@pytest.fixture
def make_task(tmp_path):
    """Writes a task with the arguments of `write_task`."""

    def make(*test, toml="", **options):
        folder = tmp_path / "tasks" / "hello"
        shutil.rmtree(folder, ignore_errors=True)
        limits = "[verifier]\ntimeout_sec = 1.0\n[environment]\nmemory_mb = 200\nstorage_mb = 10\n"
        return write_task(folder, f"{limits}{toml}", *test, **options)

    return make


@pytest.fixture
def play():
    return lambda folder, *turns, **options: play_turns("bubblewrap", folder, *turns, **options)[0]


@pytest.fixture
def branch():
    return partial(play_branches, "bubblewrap")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    place = Path(tempfile.mkdtemp(prefix="sandboxes-"))  # which other users may enter, unlike `tmp_path`
    place.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert not list(place.iterdir())
    place.rmdir()


def test_generated_tasks_are_solved_by_their_solutions(tmp_path, play):
    for task in write_tasks(tmp_path, len(KINDS), seed=3):
        solution = (task / "solution" / "solve.sh").read_text()
        assert play(task, call(solution), SUBMIT).env_rewards == {"reward": 1.0}, task


def test_a_shell_goes_on_from_call_to_call(make_task, play):
    later = "printf $word > /app/hello.txt; pwd; ps"
    found = play(make_task(), call("cd /tmp; word=hello; sleep 50 &"), call(later), SUBMIT)
    result = found.turns[1].tool_calls[0].result
    assert result.startswith("/tmp") and "sleep" in result and found.info["files_changed"] == "/app/hello.txt\n"
    assert found.env_rewards == {"reward": 1.0} and found.info["verifier_log"] == "verified\n"


@pytest.fixture
def start(monkeypatch):
    """Puts a coroutine, given the requests so far and what follows, in place of how a sandbox starts."""

    def put(starting, seconds=0.0):
        asked, own, generate = [], Sandbox.talk_in, ScriptedEngine.generate

        async def noted(self, *given, **more):
            asked.append(given)
            await asyncio.sleep(seconds)
            return await generate(self, *given, **more)

        monkeypatch.setattr(ScriptedEngine, "generate", noted)
        monkeypatch.setattr(Sandbox, "talk_in", lambda self, talk: starting(asked, lambda: own(self, talk)))

    return put


def test_the_first_turn_is_sampled_while_its_sandbox_starts(make_task, play, start):
    async def late(asked, talk):
        async with asyncio.timeout(20):
            while not asked:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        return await talk()

    start(late)
    found = play(make_task(), call(HELLO), SUBMIT)
    assert found.env_rewards == {"reward": 1.0} and not found.turns[0].tool_calls[0].error
    assert found.turns[0].tool_calls[0].data["seconds"] < 20


def test_a_sandbox_that_does_not_start_ends_what_is_sampled(make_task, play, start, nothing_is_left):
    async def fail(asked, talk):
        await asyncio.sleep(0.1)
        shutil.rmtree(next(nothing_is_left.iterdir()))
        raise TaskError("No room for it")

    start(fail, seconds=1000)
    found = play(make_task(), SUBMIT)
    assert found.stop_reason == StopReason.ENV_ERROR and "No room for it" in found.error and not found.turns


@pytest.mark.parametrize("seconds", [1000, 0], ids=["it samples", "it waits to be in"])
def test_a_verified_sandbox_that_nobody_was_in_pays_nothing(make_task, play, start, nothing_is_left, seconds):
    async def skip(asked, talk):
        await asyncio.sleep(0.3)
        shutil.rmtree(next(nothing_is_left.iterdir()))
        return Verified({"reward": 1.0}, "", agent_error="No engine")

    start(skip, seconds)
    found = play(make_task(), SUBMIT)
    assert found.stop_reason == StopReason.ENV_ERROR and not found.env_rewards
    assert "came into no container: No engine" in found.error


def test_the_numbers_of_the_verifier_are_kept_by_name(make_task, play):
    task = make_task('echo \'{"reward": 0.5, "style": 1}\'', result="reward.json")
    assert play(task, SUBMIT).env_rewards == {"reward": 0.5, "style": 1.0}
    assert play(make_task("echo 0.25"), SUBMIT).env_rewards == {"reward": 0.25}


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("exit 1", "reward.txt holds no numbers"),
        ("echo nan", "reward.txt holds no numbers"),
        ("printf 1; printf '0%.0s' $(seq 400)", "reward.txt holds no numbers"),
        ("head -c 60000 /dev/zero | tr '\\0' '['", "reward.txt holds no numbers"),
        ("sleep 60; echo 1", "its tests took more than 1 s"),
        ("rm /logs/verifier/*; ln -s /etc/passwd /logs/verifier/reward.txt", "it gave no reward"),
    ],
)
def test_a_verifier_that_fails_is_no_reward(make_task, play, test, why):
    found = play(make_task(test), SUBMIT)
    assert found.stop_reason == StopReason.ENV_ERROR and not found.env_rewards and why in found.error


def test_turns_are_paid_for_what_verification_gained(make_task, play):
    folder = make_task("cat /app/parts 2>/dev/null | wc -w | sed 's/^/0./'")
    turns = ["echo a b c > /app/parts", "ls /tests /logs", "echo a > /app/parts", "echo a b c d > /app/parts"]
    found = play(folder, *map(call, turns), SUBMIT, verify_every=1)
    assert [turn.reward for turn in found.turns] == pytest.approx([0.3, 0.0, 0.0, 0.1, 0.0])
    assert "test.sh" not in found.turns[1].tool_calls[0].result


def test_what_the_agent_left_running_is_ended_before_the_tests(make_task, play):
    test = "rm -f /app/hello.txt; sleep .3; [ -e /app/hello.txt ] && echo 1 || echo 0"
    loop = "trap '' HUP TERM; while :; do printf hello > /app/hello.txt; sleep .01; done > /dev/null 2>&1"
    found = play(make_task(test), call(f"setsid bash -c {shlex.quote(loop)} & sleep .3"), SUBMIT, verify_every=1)
    assert found.turns[0].reward == 1.0 and found.env_rewards == {"reward": 0.0}


LOOKS = {
    "env | cut -d= -f1 | sort | tr '\\n' ' '": "HOME LANG PATH PWD SHLVL TERM _",
    "[ $(ls -d /proc/[0-9]* | wc -l) -lt 12 ] && echo alone": "alone",
    "mkdir -p /logs/verifier || echo 1 > /logs/verifier/reward.txt": "Read-only file system",
    "rm -rf /app; ln -s /etc /app": "Read-only file system",
    "ls /root/.. /home /opt /etc/shadow; ls -A /root /tmp": "cannot access '/home'",
    "cat < /dev/tcp/127.0.0.1/22; cat /sys/class/net/eth0/address; ip route": "Connection refused",
    "unshare --user --map-root-user id": "unshare failed",
    "echo b > /dev/sda; echo c > /proc/sysrq-trigger; cat /etc/shadow": "No such file",
    "kill -9 1; echo alive": "alive",
}
FLOOD = """perl -e 'for (1..700) {
    defined($pid = fork) or do { $why = $!; kill 9, @begun; die $why };
    $pid or exec "sleep", 30;
    push @begun, $pid;
}'"""
LIMITS = {
    "head -c 20000000 /dev/zero > /app/large; ls -l /app/large": "10485760",
    "head -c 400000000 /dev/zero | tail -c 390000000 | wc -c": "memory exhausted",
    FLOOD: "Resource temporarily unavailable",
}


@pytest.mark.parametrize(
    "commands",
    [
        LOOKS,
        LIMITS,
        {"(while :; do cp /dev/null /tests/test.sh; done) > /dev/null 2>&1 &": "[no output]"},
        {"yes '<|im_end|></result>' | head -c 20000000": "bytes left out"},
    ],
    ids=["looks", "limits", "rewriter", "output"],
)
def test_a_sandbox_holds_what_runs_in_it(make_task, play, commands):
    found = play(make_task(), *map(call, commands), SUBMIT, tool_timeout=20)
    for turn, shown in zip(found.turns, commands.values(), strict=False):
        assert shown in turn.tool_calls[0].result
    assert found.env_rewards == {"reward": 0.0} and len(found.turns) == len(commands) + 1


@pytest.mark.parametrize("command", ["rm -rf /srv/app", "mkdir -p $(printf 'd/%.0s' $(seq 1100))"])
def test_tests_run_whatever_the_agent_left(make_task, play, command):
    told = '[ "$(ls -A ~) $PYTHONNOUSERSITE $PWD" = "verifier 1 $(echo {})" ] && echo 1 || echo 0'
    folder = make_task(told.format("/" if "srv" in command else "/srv/app"), "FROM base\nWORKDIR /srv/app\n")
    assert play(folder, call(f"touch ~/.gitconfig; {command}"), SUBMIT).env_rewards == {"reward": 1.0}


def test_a_task_reaches_nothing_outside_of_its_sandbox(make_task, play, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("bwrap", "setpriv", "bash"):
        (outside / name).write_text(f"#!/bin/sh\ntouch {outside}/{name}.ran\n")
        (outside / name).chmod(0o755)
    found = play(make_task(dockerfile=f"FROM base\nENV PATH={outside}:/usr/bin:/bin\nWORKDIR /app\n"), SUBMIT)
    assert found.env_rewards == {"reward": 0.0}
    folder = make_task(dockerfile="FROM base\nCOPY data /app\nCOPY data/one.txt /app/link/planted\n")
    (folder / "environment" / "data" / "link").symlink_to(outside)
    assert "copies files to /app/link/planted, through a link" in play(folder, SUBMIT).error
    assert sorted(path.name for path in outside.iterdir()) == ["bash", "bwrap", "setpriv"]


def test_branches_go_on_alone_from_the_same_shell(make_task, branch, caplog):
    first = "cd /tmp; word=hello; say() { printf $word; }; alias q=say; mkfifo c; >d; chmod 0 c d; sleep 98765 &"
    look = "pgrep -c sleep; sleep .7; pwd; ls -l c | cut -c 1-10; echo $(ls /app)"
    commands = [f"{does}; {look}" for does in ("q > /app/hello.txt", "say > /app/bye.txt", "true")]
    found = branch(make_task(), first, *commands)
    shown = [each.turns[1].tool_calls[0].result.split() for each in found]
    assert shown == [
        ["1", "/tmp", "p---------", "hello.txt"],
        ["0", "/tmp", "p---------", "bye.txt"],
        ["0", "/tmp", "p---------"],
    ]
    assert [each.env_rewards["reward"] for each in found] == [1.0, 0.0, 0.0]
    assert [each.branch_of for each in found] == [None, "0", "0"]
    assert [each.info["files_changed"].split() for each in found] == [
        ["/app/hello.txt", "/tmp/d"],
        ["/app/bye.txt", "/tmp/d"],
        ["/tmp/d"],
    ]
    assert caplog.text.count("A branch has no copy of what the agent left running") == 1


def test_limits_hold_in_a_branch(make_task, branch):
    found = branch(make_task(), HELLO, "true", "; ".join(LIMITS))
    result = found[1].turns[1].tool_calls[0].result
    assert all(shown in result for shown in LIMITS.values()) and found[1].env_rewards == {"reward": 1.0}


def test_sandboxes_that_cannot_be_copied_are_refused(make_task):
    folder = make_task()
    source = HarborTasks(HarborEnv("bubblewrap"), str(folder))
    source.env.sandbox = "e2b"
    with pytest.raises(ConfigError, match="`sandbox: e2b` copies no containers: use docker, podman or bubblewrap"):
        check_source(source, branches=True)
    (folder / "environment" / "docker-compose.yaml").touch()
    with pytest.raises(ConfigError, match="the task hello composes services, which are not copied: leave it out, or"):
        check_source(source, branches=True)


def test_a_sandbox_that_cannot_be_copied_leaves_no_copy(make_task, branch, monkeypatch):
    forks = []

    async def fork(sandbox):
        forks.append(sandbox)
        if len(forks) == 2:
            (sandbox._folder / "root").rename(sandbox._folder / "away")
        return await copies(sandbox)

    copies = Sandbox.fork
    monkeypatch.setattr(Sandbox, "fork", fork)
    found = branch(make_task(), "true", "true", "true", "true")
    assert len(forks) == 2 and [each.stop_reason for each in found] == [StopReason.ENV_ERROR] * 3
    assert "The sandbox cannot be copied: bwrap: Can't find source path" in found[0].error


@pytest.mark.skipif(os.geteuid() != 0, reason="others read no more than a sandbox does")
def test_a_copy_holds_nothing_that_its_sandbox_cannot_read(make_task, branch, monkeypatch):
    async def fork(sandbox):  # what a link that came in place of a folder may lead to
        (sandbox._folder / "root" / "app" / "secret").touch(0o600)
        return await copies(sandbox)

    copies = Sandbox.fork
    monkeypatch.setattr(Sandbox, "fork", fork)
    found = branch(make_task(), "true", "true", "true")
    assert "cp: cannot open '/from/./app/secret' for reading: Permission denied" in found[0].error


@pytest.mark.parametrize("command", ["kill -9 -1", "kill -STOP -1"])
def test_a_shell_that_the_agent_ended_is_begun_again(make_task, play, monkeypatch, command):
    monkeypatch.setattr(shell, "GRACE", 1.0)
    found = play(make_task(), call(f"{HELLO}; {command}"), call("ls /app"), SUBMIT, tool_timeout=1)
    ended, after = found.turns[0].tool_calls[0], found.turns[1].tool_calls[0]
    assert ended.result == "[The command ended the shell. It was begun again.]\n[exit code 137]"
    assert ended.data["exit_code"] == 137 and after.result == "hello.txt"
    assert found.env_rewards == {"reward": 1.0} and found.stop_reason == StopReason.ENV_DONE


SPOILS = "rm /tmp/.shell/command; mkfifo /tmp/.shell/command"


@pytest.mark.parametrize(
    ("commands", "test", "rewards"),
    [
        ([f"{HELLO}; {SPOILS}", "echo"], TEST, [1.0, 1.0, None]),
        ([f"{SPOILS}; kill -9 -1"], "exit 1", [0.0, 0.0, 0.0]),
    ],
    ids=["later", "first"],
)
def test_an_agent_that_spoiled_its_shell_is_verified(make_task, play, monkeypatch, commands, test, rewards):
    monkeypatch.setattr(shell, "GRACE", 1.0)
    found = play(make_task(test), *map(call, commands), SUBMIT, tool_timeout=1)
    assert [EnvReward(key).score(found) for key in (None, "reward", "style")] == rewards
    assert found.stop_reason == StopReason.ENV_DONE and len(found.turns) == len(commands)
    assert "The shell runs no commands any more, also after" in found.turns[-1].tool_calls[0].error
    assert ("holds no numbers" in found.info["verifier_log"]) == (not rewards[0])


def test_a_sandbox_killed_from_outside_earns_nothing(make_task, play):
    def sleeper():
        found = psutil.process_iter(["cmdline"])  # leaves out what ends while it looks
        return next((each for each in found if each.info["cmdline"] == ["sleep", "54321"]), None)

    def kill():
        until(sleeper)
        next(each for each in sleeper().parents() if each.name() == "bwrap").kill()

    folder = make_task()
    killing = threading.Thread(target=kill)
    killing.start()
    found = play(folder, call("sleep 54321"), SUBMIT)
    killing.join()
    assert found.stop_reason == StopReason.ENV_ERROR and not found.env_rewards
    assert "The container runs no commands any more: " in found.error
    assert "TaskError: The sandbox was killed from outside of it" in found.error


def test_files_go_where_the_dockerfile_says(make_task, play):
    folder = make_task(
        "cat /app/data/one.txt /app/one.txt /srv/two.txt /app/sub/one.txt | wc -l; echo $WORD >&2",
        "# a comment\nFROM base AS one\nENV WORD='a b' \\\n  OTHER=1\nWORKDIR /app\nCOPY data data\n"
        'COPY data/one.txt /srv/two.txt\nCOPY data/one.txt /app\nWORKDIR sub\nCOPY data/one.txt .\nCMD ["bash"]\n',
    )
    found = play(folder, call("pwd; echo $WORD"), SUBMIT)
    assert found.turns[0].tool_calls[0].result == "/app/sub\na b" and found.env_rewards == {"reward": 4.0}


IN_ROOT = [" /", "/one.txt /", "/one.txt /one.txt", "/one.txt /two.txt"]


@pytest.mark.parametrize(
    ("dockerfile", "toml", "what"),
    [
        ("FROM base\nRUN apt-get install -y gcc\n", "", "`RUN 'apt-get install -y gcc'` in its Dockerfile"),
        ("FROM base\nCOPY ../tests /app\n", "", "`COPY ../tests`, which names no file in its `environment`"),
        ("FROM base\nCOPY data/*.txt /app\n", "", "`COPY data/*.txt`, which names no file in its `environment`"),
        ("FROM a\nENV PATH=/x:$PATH\n", "", "`ENV 'PATH=/x:$PATH'`, which names a variable"),
        ("FROM a\nENV AT=/srv\nWORKDIR $AT\n", "", "`WORKDIR '$AT'`, which names a variable"),
        ("FROM base\nCOPY data /etc/data\n", "", "files in /etc, which is this machine's"),
        *((f"FROM base\nCOPY data{file}\n", "", "files in /, which is this machine's") for file in IN_ROOT),
        ("FROM base\nCOPY --chown=a data /app\n", "", "`COPY --chown=a data /app` in its Dockerfile"),
        ("FROM base\n", "[environment.env]\nKEY = '${KEY}'\n", "`environment.env`"),
        ("FROM base\n", "[[steps]]\nname = 'one'\n", "`steps`"),
    ],
)
def test_tasks_that_need_an_image_are_refused(make_task, dockerfile, toml, what):
    folder = make_task(dockerfile=dockerfile, toml=toml)
    tasks = HarborTasks(HarborEnv("bubblewrap"), str(folder))
    with pytest.raises(ConfigError) as refused:
        tasks.check(tasks.rows("train"), "dataset")
    assert f"The task hello needs {what}, and `sandbox: bubblewrap` builds no images" in str(refused.value)


@pytest.mark.parametrize("file", ["environment/Dockerfile", "tests/test.sh"])
def test_a_task_without_a_file_that_it_needs_is_refused(make_task, file):
    folder = make_task()
    (folder / file).unlink()
    with pytest.raises(ConfigError, match=f"The task {folder} has no file {file}: write it, or take the task out"):
        read_machine(folder)


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("task.toml", "metadata = 3", "task.toml has `metadata = 3`, which is no table: mend it"),
        ("task.toml", "environment = 3", "task.toml has `environment = 3`, which is no table: mend it"),
        ("task.toml", "[environment]\nmemory_mb = '2G'", r"`memory_mb = '2G'` in `\[environment\]`, which is no nu"),
        (
            "task.toml",
            "[environment]\nmemory_mb = nan",
            r"`memory_mb = nan` in .*, which is no number from 0 on: mend",
        ),
        ("task.toml", "[environment]\nstorage_mb = inf", r"`storage_mb = inf` in .*, which is no number from 0 on"),
        ("task.toml", "[environment]\ndocker_image = 3", "has `docker_image = 3`, which is no name: mend it"),
        ("task.toml", "[verifier]\ntimeout_sec = 'soon'", "has `timeout_sec = 'soon'` in .*, which is no number"),
        ("task.toml", "[verifier]\ntimeout_sec = 0", "has `timeout_sec = 0` in .*, which is no number above 0: mend"),
        ("instruction.md", " \n", "instruction.md is empty: write the task, or take its folder out"),
        ("environment/Dockerfile", "FROM base\nCOPY 'a b", r"cannot be read \(No closing quotation\): mend"),
        ("environment/Dockerfile", "FROM base\nWORKDIR\n", "needs `WORKDIR` in its Dockerfile"),
        ("environment/Dockerfile", "FROM base\nENV\n", "needs `ENV` in its Dockerfile"),
    ],
)
def test_files_of_a_task_that_cannot_be_read_are_refused(make_task, file, text, fault):
    folder = make_task()
    (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=fault):
        tasks = HarborTasks(HarborEnv("bubblewrap"), str(folder))
        tasks.check(tasks.rows("train"), "dataset")


def test_a_task_without_an_instruction_is_none(make_task):
    folder = make_task()
    (folder / "instruction.md").unlink()
    for given in (str(folder), 5):
        with pytest.raises(ConfigError, match="has no tasks of Harbor: a task is a folder with `task.toml` and"):
            HarborTasks(HarborEnv("bubblewrap"), given)


def test_of_fetched_tasks_those_with_an_instruction_are_rows(make_task, tmp_path, monkeypatch):
    async def fetched(name):  # as Harbor's tasks of several steps are
        return {bare: "of steps", make_task(): "hello"}

    bare = write_task(tmp_path / "steps", "")
    (bare / "instruction.md").unlink()
    monkeypatch.setattr(harbor, "_downloaded", fetched)
    monkeypatch.setattr(harbor, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: True)))
    assert HarborTasks(HarborEnv("bubblewrap"), "own@1").rows("train")["name"][:] == ["hello"]


def test_a_folder_that_is_not_there_is_no_dataset_to_ask_for(make_task, monkeypatch):
    async def fetched(name):
        asked.append(name)
        raise ValueError("Unknown dataset")

    asked: list[str] = []
    monkeypatch.chdir(make_task().parents[1])
    monkeypatch.setattr(harbor, "_downloaded", fetched)
    monkeypatch.setattr(harbor, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: True)))
    for given, rest in (
        ("tasks/helo", "a task is"),
        (
            "org/helo",
            r"nor can Harbor fetch such a dataset of its registry \(ValueError: Unknown dataset\): a task is",
        ),
        ("tasks/helo@latest", "nor can Harbor fetch"),
    ):
        with pytest.raises(
            ConfigError, match=f"`tasks: {given}` has no tasks of Harbor, and no such .* there[,:] {rest}"
        ):
            HarborTasks(HarborEnv("bubblewrap"), given)
    assert asked == ["org/helo", "tasks/helo@latest"]


def test_tasks_are_rows_with_metadata_of_one_type_each(tmp_path):
    told = {"a": "level = 1\nhours = 1", "b": "level = 'hard'\nhours = 0.5", "c": "hours = 2"}
    for task, (name, metadata) in zip(write_tasks(tmp_path / "tasks", 3), told.items(), strict=True):
        (task / "task.toml").write_text(f"[metadata]\n{metadata}\n")
        (task / "instruction.md").write_text(f"Do {name}.\n")
        task.rename(task.parent / name)
    tasks = HarborTasks(HarborEnv("bubblewrap"), str(tmp_path / "tasks"))
    rows = tasks.rows("train")
    assert (rows["prompt"][:], rows["name"][:]) == (["Do a.", "Do b.", "Do c."], ["a", "b", "c"])
    assert (rows["level"][:], rows["hours"][:]) == (["1", "hard", None], [1.0, 0.5, 2.0])
    with pytest.raises(ConfigError, match="The dataset has no column `task`: give the folder"):
        tasks.check(rows.remove_columns("task"), "dataset")


def test_slices_and_filters_choose_among_tasks(tmp_path):
    write_tasks(tmp_path / "tasks", 4)
    tasks = HarborTasks(HarborEnv("bubblewrap"), *[str(tmp_path / "tasks")] * 2)
    rates = [
        {"rate": rate, "attempts": 2, "digest": fingerprint(row)[1]}
        for rate, row in zip(range(2), tasks.rows("train"), strict=False)
    ]
    (file := tmp_path / "rates").write_text("".join(json.dumps(each) + "\n" for each in rates))
    chosen = {"dataset_filter": {"file": str(file), "between": [1, 1]}, "dataset_test_split": "test[1:]"}

    def names(split, do_eval=True):
        script = SimpleNamespace(dataset_train_split=split, **chosen)
        recipe = SimpleNamespace(script=script, training=SimpleNamespace(do_eval=do_eval))
        return [rows and rows["name"][:] for rows in _own_rows(recipe, tasks)]

    every = tasks.rows("train")["name"][:]
    assert names("train[:2]") == [every[1:2], every[1:]] and names("train[:2]", do_eval=False)[1] is None
    with pytest.raises(DatasetError, match=r"The split 'train\[4:\]' has none of the 4 rows of the environment"):
        names("train[4:]")


def test_a_machine_without_bwrap_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="`sandbox: bubblewrap` needs `bwrap`: install the package bubblewrap"):
        check_usable()


def test_harbor_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "harbor", None)
    mend = r"`pip install mt-grpo\[harbor\]` with Python 3.12 or later, or take `sandbox: bubblewrap`"
    with pytest.raises(ConfigError, match=f"needs `harbor`, which is not installed: {mend}"):
        HarborEnv("podman")


@pytest.fixture
def build(make_task):
    """Builds what `env: {type: harbor, sandbox: bubblewrap, ...}` stands for."""

    def run(**own):
        options = {field.name: field.default for field in fields(RunOptions)}
        env = {"type": "harbor", "tasks": str(make_task()), "sandbox": "bubblewrap", **own}
        return build_environment(with_env_options({**options, "env": env}))

    return run


def test_keys_of_harbors_agents_are_refused(build):
    with pytest.raises(ConfigError, match="`agent: codex` is Harbor's and needs its containers: use another `sandbox"):
        build(agent="codex")
    with pytest.raises(ConfigError, match="`host` is for Harbor's own agents, and `agent: bash` asks from no contai"):
        build(host="10.0.0.1")
    unset = dict.fromkeys(("agent", "eval_tasks", "host", "verify_every", "sandbox_pool"))
    assert build(**unset).rows("eval") is None


def test_a_killed_run_leaves_nothing_after_the_next_begins(make_task, nothing_is_left):
    async def talk(sandbox):
        await sandbox.exec("sleep 12345", 60)

    async def begin_and_talk(task):
        begun = await begin_trial("bubblewrap", task)
        await begun.talk_in(talk)

    def sleeps():
        return subprocess.run(["pgrep", "-f", "^sleep 12345$"], stdout=-3).returncode == 0

    def work():
        owner.cache_clear()  # it is another process
        asyncio.run(begin_and_talk(str(make_task())))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    until(sleeps)
    process.kill()
    process.join()
    until(lambda: not sleeps())
    assert list(nothing_is_left.iterdir())
    check_usable()
    assert not list(nothing_is_left.iterdir())


@pytest.mark.slow
def test_the_quickstart_trains_and_its_sandboxes_are_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)  # the tasks stay, for other runs
    recipe = str(Path(__file__).parents[2] / "recipes" / "terminal" / "quickstart.yaml")
    own = ["--output_dir", str(tmp_path / "run")]
    assert main(["doctor", recipe, *own]) == 0
    out = capsys.readouterr().out
    assert "sandbox         `bubblewrap` is here and answers\nok    sandbox         96 tasks need no image\n" in out
    assert "GB of disk are free for" in out
    small = ["--max_steps", "1", "--per_device_train_batch_size", "4", "--num_generations", "4", "--do_eval", "false"]
    small += ["--dataset_train_split", "train[5:6]"]
    assert main(["train", recipe, *own, *small]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollouts/failed"] for row in rows if "rollouts/failed" in row] == [0.0]
    asked = HarborTasks(HarborEnv("bubblewrap"), "embedded").rows("train")[5]["prompt"]
    assert {row["prompt"][:60] for row in open_run(tmp_path / "run").rows} == {" ".join(asked.split())[:60]}
