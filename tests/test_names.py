"""What the suite asks of itself: short names, tests that end their process and fail alone, reports that arrive."""

import ast
import subprocess
import sys
from pathlib import Path

MOST = 60
"""Characters of a test's name."""


def test_names_of_tests_are_short():
    functions = (
        node
        for path in sorted(Path(__file__).parent.rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = [node.name for node in functions if node.name.startswith("test_") and len(node.name) > MOST]
    assert not long, f"at most {MOST} characters, in plain words: {long}"


ENDING = """
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
HALVES = r"""
def test_half_a_character():
    print("printed \udfff")
    assert "said \ud83d" == ""


def test_another():
    assert 1 == 2
"""


def outcome(folder, hook, tests, *command):
    """What pytest says of some tests in a folder, with one of our hooks."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -rA\nmarkers =\n    own_process: as here\n")
    (folder / "conftest.py").write_text(f"from support.{hook}\n")
    (folder / "test_them.py").write_text(tests)
    run = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    return run.stdout + run.stderr


def test_a_test_that_ends_its_process_ends_no_other_test(tmp_path):
    ignores = "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.exit(pytest.main())"
    said = outcome(tmp_path, "own_process import pytest_pyfunc_call", ENDING, "-c", ignores)
    assert "3 failed, 2 passed, 1 skipped" in said, said
    for words in ("its process ended with the status 9", "ended with the status -9", "assert 1 == 2", "for a reason"):
        assert words in said


def test_half_a_character_hides_no_other_failure(tmp_path):
    """Where xdist's workers send their reports."""
    hook = "own_process import pytest_report_to_serializable"
    said = outcome(tmp_path, hook, HALVES, "-m", "pytest", "--numprocesses=1")
    assert "2 failed" in said, said
    assert r"said \ud83d" in said and r"printed \udfff" in said and "assert 1 == 2" in said
