"""Tests that signal or end their process run in another one, as in a terminal; and how xdist is sent what they say."""

import json
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support.forking import Forked

TERMINAL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
"""How a program begins that is sent signals."""

COMMAND = f"{TERMINAL}from mt_grpo.cli import main\nsys.exit(main())"
"""`mt-grpo` as a program that is sent signals."""

_REPORTS = "MT_GRPO_TEST_REPORTS"
_OUTCOMES: dict[str, tuple[str, str]] = {}


class _Reports:
    """Writes the outcome of each test as a line of JSON."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            outcome = [report.nodeid, report.outcome, f"{report.longreprtext}\n{report.capstdout}{report.capstderr}"]
            with open(os.environ[_REPORTS], "a") as file:
                file.write(json.dumps(outcome) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is marked `own_process`, and those of its file that come after it, in one more process."""
    if pyfuncitem.get_closest_marker("own_process") is None or _REPORTS in os.environ:
        return None
    if pyfuncitem.nodeid not in _OUTCOMES:
        _run(pyfuncitem)
    outcome, text = _OUTCOMES[pyfuncitem.nodeid]
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)
    return True


def _run(first: pytest.Function) -> None:
    items = first.session.items
    items = [item for item in items[items.index(first) :] if item.path == first.path]
    nodes = [item.nodeid for item in items if item.get_closest_marker("own_process") is not None]
    with tempfile.TemporaryDirectory() as folder:
        reports, log = Path(folder) / "reports.jsonl", Path(folder) / "log"
        environment = {**os.environ, _REPORTS: str(reports)}
        command = ["-m", "support.own_process", str(first.config.rootpath), *nodes]
        status = Forked(command, log, environment).wait()
        said = log.read_text(errors="replace")
        lines = reports.read_text().splitlines() if reports.exists() else []
    for node, outcome, text in map(json.loads, lines):
        _OUTCOMES.setdefault(node, (outcome, text))
    ended = f"its process ended with the status {status}:\n{said[-8000:]}"
    _OUTCOMES.setdefault(first.nodeid, ("failed", ended))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Halves of characters are sent as their escapes: reports travel as UTF-8, where one would end the whole run."""
    return _whole((yield))


def _whole(sent: Any) -> Any:
    if isinstance(sent, str):
        return sent.encode("utf-8", "backslashreplace").decode()
    if isinstance(sent, dict):
        return {_whole(key): _whole(value) for key, value in sent.items()}
    return type(sent)(map(_whole, sent)) if isinstance(sent, (list, tuple)) else sent


def main() -> None:
    """The other process."""
    os.chdir(sys.argv[1])
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[2:]], plugins=[_Reports()]))


if __name__ == "__main__":
    main()
