"""Reports of tests that xdist's workers send."""

from __future__ import annotations

import subprocess
import sys

TESTS = r"""
def test_half_a_character():
    print("printed \udfff")
    assert "said \ud83d" == ""


def test_another():
    assert 1 == 2
"""


def test_half_a_character_hides_no_other_failure(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text("from support.sent_reports import pytest_report_to_serializable\n")
    (tmp_path / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--numprocesses=1", "-rA"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "2 failed" in run.stdout, run.stdout + run.stderr
    assert r"said \ud83d" in run.stdout and r"printed \udfff" in run.stdout and "assert 1 == 2" in run.stdout
