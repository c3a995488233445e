"""What checks find, and how they are run: one after another, whatever an earlier one found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mt_grpo.errors import ConfigError, UserError

if TYPE_CHECKING:
    from mt_grpo.app.doctor.case import Case

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """
    One line of the report.

    Args:
        check (`str`): Which check found it.
        status (`str`): `ok`, `warn` (the run begins, but look at this) or `fail` (it does not).
        what (`str`): What was found, one sentence without a full stop.
        mend (`str`, *optional*, defaults to `""`): What to do about it.
    """

    check: str
    status: str
    what: str
    mend: str = ""


class NotKnown(ConfigError):
    """Something cannot be found out on this machine, e.g. without a network; the run may know it where it runs."""


OF_THIS_MACHINE = ("server", ".venv-vllm", "ports", "files")
"""Checks whose fails are a `warn` where the run is for another machine."""

Check = Callable[["Case"], Iterator[tuple[str, str, str]]]
"""Yields status, what and mend, for each line of a check."""


def examine(case: Case, checks: Mapping[str, Check]) -> Iterator[Finding]:
    """
    Runs checks. What a check is refused with is a `fail`, or a `warn` where it is only not known; a refusal that stops
    several checks is told once, and the others are listed in the end.

    Args:
        case (`Case`): The run.
        checks (`Mapping[str, Check]`): By name, in the order in which they are run.
    """
    told: set[str] = set()
    left_out = []
    for name, check in checks.items():
        try:
            for status, what, mend in check(case):
                yield _placed(case, Finding(name, status, what, mend))
        except UserError as error:
            words = " ".join(str(error).split()).removesuffix(".")
            if words in told:
                left_out.append(name)
                continue
            told.add(words)
            yield _placed(case, Finding(name, WARN if isinstance(error, NotKnown) else FAIL, words))
    if left_out:
        yield Finding("left out", WARN, f"not checked, for the reasons above: {', '.join(left_out)}")


def _placed(case: Case, found: Finding) -> Finding:
    """A finding about this machine, weighed by whether the run is for this machine."""
    if found.status != FAIL or found.check not in OF_THIS_MACHINE or not case.elsewhere:
        return found
    return Finding(found.check, WARN, f"here, which is not the machine of the run: {found.what}", found.mend)
