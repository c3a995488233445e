"""The modules of `benchmarks/`, for tests that forget what these register, and conversations of their tasks."""

import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from mt_grpo.concurrency import run
from mt_grpo.envs import Step, StepEnv
from mt_grpo.trajectory import Turn
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


def steps_of(env: StepEnv, row: dict, turns: Iterable[Turn]) -> list[Step]:
    """What an environment answers to some turns, until it ends the conversation."""

    async def play() -> list[Step]:
        await env.reset(row)
        steps: list[Step] = []
        for turn in turns:
            steps.append(await env.step(turn))
            if steps[-1].done:
                break
        return steps

    return run(play())


def between(page: Path, begin: str, end: str) -> str:
    """What a page has between two marks."""
    return page.read_text().split(begin)[1].split(end)[0].strip()
