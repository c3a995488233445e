"""Where users' code failed is told by frames of their own, whatever raised around them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from mt_grpo.errors import MOST_FRAMES, defined_at, find_fault


def caught(function):
    try:
        function()
    except BaseException as error:
        return error


def mistake():
    return {}["gone"]


def again():
    return again()


def hides():
    try:
        mistake()
    except KeyError:
        raise ValueError("without its cause") from None


def odd():
    class Odd(Exception):
        def __str__(self):
            raise SystemExit

    raise Odd


async def fails():
    mistake()


def place(function, offset=1):
    return f"{__file__}, line {function.__code__.co_firstlineno + offset}, in {function.__name__}"


def test_frames_of_python_itself_are_left_out():
    fault = find_fault(caught(lambda: json.loads("{", object_hook=print)))
    assert fault.where.startswith(__file__) and "json/decoder.py" not in fault.traceback
    assert fault.traceback.endswith("(char 1)")


def test_causes_and_members_are_asked_for_frames_of_the_user():
    outer = RuntimeError("SystemExit: 3")
    outer.__cause__ = caught(mistake)
    assert find_fault(outer).where == place(mistake)
    outer.__cause__ = caught(hides)
    assert find_fault(outer).where == place(hides, 4) and "gone" not in find_fault(outer).traceback

    async def both():
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    group = caught(lambda: asyncio.run(both()))
    assert find_fault(ExceptionGroup("of a library", [*group.exceptions])).where == place(mistake)


def test_an_endless_recursion_is_short():
    fault = find_fault(caught(again))
    assert fault.where == place(again) and len(fault.traceback.splitlines()) <= 3 * MOST_FRAMES


def test_an_error_of_ours_has_its_innermost_frame():
    def ours():
        exec(compile("raise ValueError('a bug')", find_fault.__code__.co_filename, "exec"))

    error = caught(ours)
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # as if nobody of the user's had called
    fault = find_fault(error)
    assert fault.where is None and fault.traceback.startswith("File") and fault.traceback.endswith("a bug")


def test_whose_a_frame_is_is_told_by_its_folder():
    file = f"{Path(find_fault.__code__.co_filename).parent}_of_mine/tools.py"
    found = {}
    exec(compile("def bug():\n    raise ValueError('a bug')", file, "exec"), found)
    assert find_fault(caught(found["bug"])).where.startswith(file) and file in defined_at(found["bug"])
    exec(compile("def bug():\n    raise ValueError('a bug')", "/base/lib/python3/dist-packages/a.py", "exec"), found)
    assert find_fault(caught(lambda: found["bug"]())).where.startswith(__file__)


def test_an_error_that_cannot_be_written_as_text_is_shown():
    assert find_fault(caught(odd)).where == place(odd, 5)


def test_a_function_is_where_it_is_written():
    assert defined_at(mistake) == f" ({__file__}, line {mistake.__code__.co_firstlineno})"
    assert defined_at(find_fault) == defined_at(print) == ""
