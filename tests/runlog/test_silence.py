"""Work that takes long says how far it is."""

from __future__ import annotations

import threading

from mt_grpo.runlog.heartbeat import Silence


def test_a_long_silence_is_ended_again_and_again():
    said = threading.Semaphore(0)
    with Silence(said.release, seconds=0.01):
        assert all(said.acquire(timeout=30) for _ in range(3))


def test_nothing_is_said_after_the_work():
    said = []
    with Silence(lambda: said.append(1), seconds=60):
        pass
    assert not said


def test_a_failure_of_the_work_is_not_kept_back():
    try:
        with Silence(lambda: None, seconds=60):
            raise ValueError
    except ValueError:
        assert not [thread for thread in threading.enumerate() if thread.name == "silence"]
