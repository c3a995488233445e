"""The modules of `benchmarks/`, for tests that forget what these register."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from support.registered import keep_estimators

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
REPORTS = BENCHMARKS / "reports"


class Benchmarks:
    """Has each module as an attribute, imported when it is first asked for."""

    def __getattr__(self, name: str) -> ModuleType:
        return import_module(name)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Benchmarks:
    monkeypatch.syspath_prepend(BENCHMARKS)
    keep_estimators(monkeypatch)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{BENCHMARKS}/"):
            monkeypatch.delitem(sys.modules, name)
    return Benchmarks()


def between(page: Path, begin: str, end: str) -> str:
    """What a page has between two marks."""
    return page.read_text().split(begin)[1].split(end)[0].strip()
