"""`mt-grpo doctor`: runs all checks, and prints a line for each thing that they find."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from mt_grpo.app.doctor import memory_plan, time_plan
from mt_grpo.app.doctor.case import FAIL, WARN, Case, Check, Finding, examine
from mt_grpo.app.doctor.checks import CHECKS
from mt_grpo.app.recipe import build_recipe
from mt_grpo.app.request import Request
from mt_grpo.trajectory import visible

PLAN: dict[str, Check] = {
    "training memory": memory_plan.training,
    "server memory": memory_plan.serving,
    "files": memory_plan.files,
    "step": time_plan.step,
}
"""The plan's parts by name. They come after the checks, which measure what tools cost."""

WIDTH = 16


def diagnose(request: Request) -> int:
    """
    Examines a run, and prints what was found.

    Args:
        request (`Request`): What the command was asked.

    Returns:
        `int`: 1 if anything fails, else 0.
    """
    case = Case(request, build_recipe(request))
    checks = CHECKS | PLAN
    if request.own["probe"]:
        from mt_grpo.app.doctor.probe import probe

        checks = checks | {"probe": probe}
    out = sys.stdout
    with _quiet(), contextlib.redirect_stdout(sys.stderr):  # tools and libraries may print
        found = examine(case, checks)
        findings = list(found if request.own["json"] else _print(found, out))
    failed = [one for one in findings if one.status == FAIL]
    if request.own["json"]:
        content = {"ok": not failed, "findings": [vars(one) for one in findings], "plan": case.plan}
        print(json.dumps(content, indent=2))
    else:
        warned = sum(one.status == WARN for one in findings)
        verdict = "nothing stands in the way of this run" if not failed else f"{len(failed)} of these must be mended"
        print(f"{verdict}; {warned} to look at" if warned else verdict)
    return 1 if failed else 0


def _print(findings: Iterable[Finding], out: TextIO) -> Iterable[Finding]:
    for one in findings:
        mend = f"\n{'':{WIDTH + 6}}→ {one.mend}" if one.mend else ""
        print(visible(f"{one.status:<5} {one.check:<{WIDTH}}{one.what}{mend}"), file=out, flush=True)
        yield one


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the log lines of libraries, and our own, beside the report."""
    ours = logging.getLogger("mt_grpo")
    level, verbosity = ours.level, get_verbosity()
    disable_progress_bar()
    set_verbosity_error()
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(level)
        set_verbosity(verbosity)
