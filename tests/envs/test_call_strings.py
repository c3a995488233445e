"""
Whatever a model writes is read and checked: some strings in the suite, and as many as one likes with

    MT_GRPO_CALL_STRINGS=100000 pytest tests/envs/test_call_strings.py
"""

from __future__ import annotations

import os
import random

import pytest
from support.call_strings import SCHEMA, WRITTEN_WELL, arguments, good_arguments, text
from support.models import build_tokenizer
from trl.chat_template_utils import add_response_schema

from mt_grpo.envs.protocols import NativeProtocol, TagProtocol
from mt_grpo.tools import Tool
from mt_grpo.trajectory import Turn

COUNT = int(os.environ.get("MT_GRPO_CALL_STRINGS", "2000"))
WORK = Tool("work", "Works.", SCHEMA, lambda **arguments: arguments)


@pytest.fixture(scope="module")
def readers():
    """Each protocol with what it reads by."""
    native = add_response_schema(build_tokenizer("qwen3"))
    return {"tags": (TagProtocol(), None), "native": (NativeProtocol(), native)}


def test_any_text_is_a_call_an_answer_or_an_error(readers):
    for seed in range(COUNT):
        written = text(seed)
        for protocol, tokenizer in readers.values():
            parsed = protocol.parse(written, tokenizer)
            assert [bool(parsed.calls), parsed.answer is not None, bool(parsed.error)].count(True) == 1, written
            for call in parsed.calls:
                problem = WORK.check(call.arguments)
                assert problem is None or (problem.startswith("work: ") and len(problem) < 2000), written
            if parsed.answer is None:
                turn = Turn(0, parsed.message, parsed.calls, error=parsed.error)
                assert all(reply["content"].encode() is not None for reply in protocol.replies(turn))


@pytest.mark.parametrize("name", WRITTEN_WELL)
def test_a_call_written_well_is_read_as_it_was_meant(readers, name):
    protocol, tokenizer = readers[name]
    for seed in range(COUNT // 2):
        meant = good_arguments(random.Random(seed))
        [call] = protocol.parse(WRITTEN_WELL[name]("work", meant), tokenizer).calls
        assert (call.name, call.arguments) == ("work", meant)
        assert WORK.check(call.arguments) is None


def test_any_arguments_are_checked():
    for seed in range(COUNT):
        problem = WORK.check(arguments(random.Random(seed)))
        assert problem is None or problem.startswith("work: ")
