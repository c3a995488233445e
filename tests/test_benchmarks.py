"""Every benchmark that has a quick mode runs to its end in it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
SOURCES = {path.name: path.read_text() for path in sorted(BENCHMARKS.glob("*.py"))}
QUICK = [name for name, source in SOURCES.items() if '"--quick"' in source]
NEEDS_SERVER = pytest.mark.skipif(
    not (ROOT / ".venv-vllm" / "bin" / "python").exists(),
    reason="there is no .venv-vllm: make it with `make server-cpu`",
)


def marks(name: str) -> list:
    return [NEEDS_SERVER] if "\nfrom server import" in SOURCES[name] else []


@pytest.mark.parametrize("script", [pytest.param(name, marks=marks(name)) for name in QUICK])
def test_a_quick_run_ends_and_leaves_the_results_alone(script):
    results = BENCHMARKS / "results" / Path(script).with_suffix(".json")
    before = results.read_bytes()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, BENCHMARKS / script, "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert results.read_bytes() == before


def test_these_have_a_quick_mode():
    served = {name for name in QUICK if marks(name)}
    assert {"history.py", "methods.py", "rollout.py"} <= set(QUICK) - served
    assert served == {"parity.py", "prefix_cache.py", "weight_sync.py"}


@pytest.mark.parametrize("block", [1, 4])
def test_what_a_cache_can_reuse_is_the_longest_shared_prefix_in_whole_blocks(block, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from prefix_cache import Prefixes

    draw = random.Random(0)
    seen, prefixes = [], Prefixes(block)
    for _ in range(200):
        base = draw.choice(seen)[: draw.randrange(40)] if seen else []
        tokens = base + [draw.randrange(3) for _ in range(draw.randrange(1, 20))]
        shared = max((len(os.path.commonprefix([tokens, other])) // block * block for other in seen), default=0)
        assert prefixes.match(tokens) == shared
        prefixes.add(tokens)
        seen.append(tokens)
