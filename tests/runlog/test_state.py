"""What `state.json` says of a run that goes on, ends, fails or is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from mt_grpo.errors import UserError
from mt_grpo.runlog.heartbeat import Heartbeat, read_state

AT = {"step": 3, "of": 9, "waits_for": "sampling", "under_way": []}


def pulse(folder, **at):
    return Heartbeat(folder, lambda: {**AT, **at}).beating()


def test_a_run_that_goes_on_is_running_and_then_finished(tmp_path):
    at = dict(AT)
    with Heartbeat(tmp_path, lambda: at).beating():
        assert read_state(tmp_path)["state"] == "running"
        at["step"] = 9
    state = read_state(tmp_path)
    assert (state["state"], state["step"], state["of"]) == ("finished", 9, 9)


def test_one_that_ends_before_its_last_step_is_stopped(tmp_path):
    with pulse(tmp_path):
        pass
    assert (read_state(tmp_path)["state"], read_state(tmp_path)["reason"]) == ("stopped", None)


@pytest.mark.parametrize(
    ("raised", "state", "reason"),
    [
        (KeyboardInterrupt(2), "stopped", "Ctrl-C"),
        (KeyboardInterrupt(15), "stopped", "SIGTERM"),
        (ValueError("no\nroom"), "failed", "ValueError: no room"),
    ],
)
def test_what_ended_it_is_said(tmp_path, raised, state, reason):
    with pytest.raises(type(raised)), pulse(tmp_path):
        raise raised
    assert (read_state(tmp_path)["state"], read_state(tmp_path)["reason"]) == (state, reason)


LIVES = """
import sys, time
from mt_grpo.runlog.heartbeat import Heartbeat
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


def test_on_another_machine_the_last_sign_of_life_counts(tmp_path):
    with pulse(tmp_path):
        state = json.loads((tmp_path / "state.json").read_text())
    for age, said in ((10, "running"), (600, "died")):
        (tmp_path / "state.json").write_text(
            json.dumps({**state, "state": "running", "host": "elsewhere", "beat": time.time() - age})
        )
        assert read_state(tmp_path)["state"] == said


@pytest.mark.parametrize("text", ["{", "[]", '{"state": "lost"}'])
def test_a_damaged_state_is_refused_in_a_sentence(tmp_path, text):
    assert read_state(tmp_path) is None
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UserError, match="state.json is damaged .*: remove it; a run that goes on writes it again"):
        read_state(tmp_path)
