"""Where users' code failed is told by frames of their own, whatever raised around them."""

from __future__ import annotations

import asyncio
import json

from mt_grpo.errors import MOST_FRAMES, defined_at, find_fault


def caught(function):
    try:
        function()
    except BaseException as error:
        return error


def mistake():
    return {}["gone"]


def place(function, offset=1):
    return f"{__file__}, line {function.__code__.co_firstlineno + offset}, in {function.__name__}"


def test_frames_of_python_itself_are_left_out():
    fault = find_fault(caught(lambda: json.loads("{", object_hook=print)))
    assert fault.where.startswith(__file__) and "json/decoder.py" not in fault.traceback
    assert fault.traceback.endswith("(char 1)")


def test_the_cause_is_asked_where_no_frame_is_the_users():
    error = RuntimeError("SystemExit: 3")
    error.__cause__ = caught(mistake)
    assert find_fault(error).where == place(mistake)


def test_what_raise_from_none_hides_stays_hidden():
    def raises():
        try:
            mistake()
        except KeyError:
            raise ValueError("without its cause") from None

    outer = RuntimeError("of a library")
    outer.__cause__ = caught(raises)
    assert find_fault(outer).where == place(raises, 4) and "gone" not in find_fault(outer).traceback


def test_a_group_is_asked_for_its_members():
    async def both():
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    async def fails():
        mistake()

    group = caught(lambda: asyncio.run(both()))
    outer = ExceptionGroup("of a library", [*group.exceptions])
    assert find_fault(outer).where == place(mistake)


def test_an_endless_recursion_is_short():
    def again():
        return again()

    fault = find_fault(caught(again))
    assert fault.where == place(again)
    assert len(fault.traceback.splitlines()) <= 3 * MOST_FRAMES


def test_an_error_of_ours_has_its_innermost_frame():
    def ours():
        exec(compile("raise ValueError('a bug')", find_fault.__code__.co_filename, "exec"))

    error = caught(ours)
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # as if nobody of the user's had called
    fault = find_fault(error)
    assert fault.where is None and fault.traceback.startswith("File") and fault.traceback.endswith("a bug")


def test_an_error_that_cannot_be_written_as_text_is_shown():
    class Odd(Exception):
        def __str__(self):
            raise SystemExit

    def raises():
        raise Odd

    assert find_fault(caught(raises)).where == place(raises)


def test_a_function_is_where_it_is_written():
    assert defined_at(mistake) == f" ({__file__}, line {mistake.__code__.co_firstlineno})"
    assert defined_at(find_fault) == defined_at(print) == ""
