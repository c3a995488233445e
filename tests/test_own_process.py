"""Tests that end their process: they fail alone."""

from __future__ import annotations

import subprocess
import sys

TESTS = """
import os, signal
import pytest

pytestmark = pytest.mark.own_process
tests = os.getpid() if "MT_GRPO_TEST_REPORTS" not in os.environ else None


def test_ends():
    os._exit(9)


def test_interrupts_itself():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def test_is_elsewhere():
    assert tests is None


def test_is_skipped():
    pytest.skip("for a reason")


def test_is_wrong():
    assert 1 == 2
"""


def test_a_test_that_ends_its_process_ends_no_other_test(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -rA\nmarkers =\n    own_process: as here\n")
    (tmp_path / "conftest.py").write_text("from support.own_process import pytest_pyfunc_call\n")
    (tmp_path / "test_them.py").write_text(TESTS)
    ignores = "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.exit(pytest.main())"
    run = subprocess.run([sys.executable, "-c", ignores], cwd=tmp_path, capture_output=True, text=True)
    assert "3 failed, 2 passed, 1 skipped" in run.stdout, run.stdout + run.stderr
    for said in ("its process ended with the status 9", "its process ended with the status -9", "assert 1 == 2"):
        assert said in run.stdout
    assert "for a reason" in run.stdout
