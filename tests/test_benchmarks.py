"""Every benchmark that has a quick mode runs to its end in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
QUICK = sorted(path.name for path in BENCHMARKS.glob("*.py") if '"--quick"' in path.read_text())


@pytest.mark.parametrize("script", QUICK)
def test_the_benchmark_runs_and_leaves_the_committed_results_alone(script):
    before = {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()}
    run = subprocess.run([sys.executable, BENCHMARKS / script, "--quick"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()} == before


def test_the_comparison_of_methods_has_a_quick_mode():
    assert {"history.py", "methods.py", "rollout.py"} <= set(QUICK)
