"""Every benchmark that has a quick mode runs to its end in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
QUICK = sorted(path.name for path in BENCHMARKS.glob("*.py") if '"--quick"' in path.read_text())


@pytest.mark.parametrize("script", QUICK)
def test_a_quick_run_ends_and_leaves_the_results_alone(script):
    results = BENCHMARKS / "results" / Path(script).with_suffix(".json")
    before = results.read_bytes()
    run = subprocess.run([sys.executable, BENCHMARKS / script, "--quick"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert results.read_bytes() == before


def test_these_have_a_quick_mode():
    assert {"history.py", "methods.py", "rollout.py"} <= set(QUICK)
