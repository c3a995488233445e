"""What `state.json` says of a run that goes on, ends, fails or is killed, and what is said during long work."""

import json
import subprocess
import sys
import threading
import time

import pytest
from support.waiting import until

from mt_grpo.errors import UserError
from mt_grpo.runlog.files import Heartbeat, Silence, read_state

AT = {"step": 3, "of": 9, "waits_for": "sampling", "under_way": []}


def test_a_run_that_goes_on_is_running_and_then_finished(tmp_path):
    at = dict(AT)
    with Heartbeat(tmp_path, lambda: at).beating():
        assert read_state(tmp_path)["state"] == "running"
        at["step"] = 9
    state = read_state(tmp_path)
    assert (state["state"], state["step"], state["of"]) == ("finished", 9, 9)


@pytest.mark.parametrize(
    ("raised", "state", "reason"),
    [
        (None, "stopped", None),  # before its last step
        (KeyboardInterrupt(2), "stopped", "Ctrl-C"),
        (KeyboardInterrupt(15), "stopped", "SIGTERM"),
        (ValueError("no\nroom"), "failed", "ValueError: no room"),
    ],
)
def test_what_ended_it_is_said(tmp_path, raised, state, reason):
    ended = None
    try:
        with Heartbeat(tmp_path, lambda: AT).beating():
            if raised:
                raise raised
    except (KeyboardInterrupt, ValueError) as error:
        ended = error
    assert ended is raised
    assert (read_state(tmp_path)["state"], read_state(tmp_path)["reason"]) == (state, reason)


LIVES = """
import sys, time
from mt_grpo.runlog.files import Heartbeat
with Heartbeat(sys.argv[1], lambda: {"step": 3, "of": 9, "waits_for": "", "under_way": []}).beating():
    print("there", flush=True)
    time.sleep(600)
"""


def test_a_run_that_was_killed_has_died(tmp_path):
    command = [sys.executable, "-c", LIVES, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "there\n"
        assert read_state(tmp_path)["state"] == "running"
        process.kill()
        process.wait()
    assert read_state(tmp_path)["state"] == "died"


SET = """
import sys, time, psutil
from mt_grpo.runlog import files
files._BEAT_SECONDS, now = 0.01, psutil._psplatform.boot_time
psutil._psplatform.boot_time = lambda: now() - 3600
with files.Heartbeat(sys.argv[1], lambda: {"step": 3, "of": 9, "waits_for": "", "under_way": []}).beating():
    psutil._psplatform.boot_time = now
    print("set", flush=True)
    time.sleep(600)
"""


def test_a_run_lives_on_after_the_clock_was_set(tmp_path):
    with subprocess.Popen([sys.executable, "-c", SET, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "set\n"
            until(lambda: read_state(tmp_path)["state"] == "running")
        finally:
            process.kill()


@pytest.mark.parametrize(("age", "said"), [(10, "running"), (600, "died")])
def test_on_another_machine_the_last_sign_of_life_counts(tmp_path, age, said):
    with Heartbeat(tmp_path, lambda: AT).beating():
        state = json.loads((tmp_path / "state.json").read_text())
    elsewhere = {**state, "state": "running", "host": "elsewhere", "beat": time.time() - age}
    (tmp_path / "state.json").write_text(json.dumps(elsewhere))
    assert read_state(tmp_path)["state"] == said


@pytest.mark.parametrize("text", ["{", "[]", '{"state": "lost"}'])
def test_a_damaged_state_is_refused_in_a_sentence(tmp_path, text):
    assert read_state(tmp_path) is None
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UserError, match="state.json is damaged .*: remove it; a run that goes on writes it again"):
        read_state(tmp_path)


def test_a_long_silence_is_ended_again_and_again():
    said = threading.Semaphore(0)
    with Silence(said.release, seconds=0.01):
        assert all(said.acquire(timeout=30) for _ in range(3))


def test_nothing_is_said_after_the_work_or_its_failure():
    said = []
    with pytest.raises(ValueError), Silence(lambda: said.append(1), seconds=60):
        raise ValueError
    assert not said and not [thread for thread in threading.enumerate() if thread.name == "silence"]
