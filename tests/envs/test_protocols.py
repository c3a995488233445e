"""Call protocols: what a turn's text means, and how results are written back."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.models import build_tokenizer
from trl.chat_template_utils import add_response_schema

from mt_grpo.envs.protocols import NativeProtocol, TagProtocol
from mt_grpo.tools import Tool
from mt_grpo.trajectory import ToolCall, Turn

TAGS, NATIVE = TagProtocol(), NativeProtocol()
HEADER = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def native_tokenizer():
    return add_response_schema(build_tokenizer("qwen3"))


def call_text(name: str, **args: object) -> str:
    return f"<tool>{json.dumps({'name': name, 'args': args}, ensure_ascii=False)}</tool>"


def turn_of(*calls: ToolCall, error: str | None = None) -> Turn:
    return Turn(0, {"role": "assistant", "content": ""}, list(calls), error=error)


# Tags


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool>{"name": "now"}</tool>', [("now", {})]),
        (
            "<reasoning>why</reasoning>\n" + call_text("search", query="Perú – 東京 🙂"),
            [("search", {"query": "Perú – 東京 🙂"})],
        ),
        (call_text("find", where={"a": [{"b": {}}]}), [("find", {"where": {"a": [{"b": {}}]}})]),
        (call_text("b", x=1) + "\n" + call_text("a", x=2), [("b", {"x": 1}), ("a", {"x": 2})]),
        (f"{call_text('search', query='x')}<answer>early</answer>", [("search", {"query": "x"})]),
        # half a character becomes text that can be written
        (
            '<tool>{"name": "search", "args": {"query": "a\\ud83d", "ok": "\\ud83d\\ude42"}}</tool>',
            [("search", {"query": "a?", "ok": "🙂"})],
        ),
    ],
)
def test_all_calls_of_a_turn_are_read_before_an_answer(text, calls):
    parsed = TAGS.parse(text, None)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert parsed.message == {"role": "assistant", "content": text}
    assert parsed.answer is None and parsed.error is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [("<answer>Lima</answer>", "Lima"), ("<answer>\n Lima \n</answer>", "Lima"), ("<answer></answer>", ""),
     ("<answer>a</answer> no: <answer>b</answer>", "b"), ('<answer>{"a": 1}</answer>', '{"a": 1}')],
)  # fmt: skip
def test_the_last_tag_answer_counts_and_is_stripped(text, answer):
    parsed = TAGS.parse(text, None)
    assert (parsed.answer, parsed.calls, parsed.error) == (answer, [], None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<tool>{"name": "search", "args": }</tool>', "not valid JSON"),
        ("<tool>search(Lima)</tool>", "not valid JSON"),
        ("<tool></tool>", "not valid JSON"),
        ('<tool>{"name": "search", "args": ["Lima"]}</tool>', "args of the tool call are not a JSON object"),
        ('<tool>{"name": "search", "args": "Lima"}</tool>', "args of the tool call are not a JSON object"),
        ('<tool>{"name": "search", "args": null}</tool>', "args of the tool call are not a JSON object"),
        ('<tool>{"args": {"query": "Lima"}}</tool>', "not a JSON object with a name"),
        ('<tool>{"name": 3, "args": {}}</tool>', "not a JSON object with a name"),
        ('<tool>["search"]</tool>', "not a JSON object with a name"),
        (f"<tool>{'[' * 100_000}</tool>", "brackets too deep"),
        (f'<tool>{{"name": "f", "args": {{"n": {"1" * 5000}}}}}</tool>', "number too long"),
        ('<tool>{"name": "search", "args": {}}', "not closed"),
        ("<answer>Lima", "neither a tool call"),
        ("Lima", "neither a tool call"),
        ("", "neither a tool call"),
        (call_text("good") + "<tool>bad</tool>", "not valid JSON"),  # one fails the whole turn
    ],
)
def test_a_malformed_tag_turn_is_told_what_is_wrong(text, says):
    parsed = TAGS.parse(text, None)
    assert says in parsed.error
    assert parsed.calls == [] and parsed.answer is None
    assert parsed.message["content"] == text


def test_tag_results_come_back_in_call_order_and_errors_as_one():
    turn = turn_of(ToolCall("b", result='{"n": null}'), ToolCall("a", result="Error: no"))
    for made, text in ((turn, '{"n": null}</result>\n<result>Error: no'), (turn_of(error="bad."), "Error: bad.")):
        assert TAGS.replies(made) == [{"role": "user", "content": f"<result>{text}</result>"}]


def test_the_tag_prompt_shows_tools_only_when_there_are_some(search_tool):
    prompt = TAGS.instructions([Tool.from_function(search_tool)])
    assert '"name": "lookup"' in prompt and "<tool>" in prompt and "<answer>" in prompt
    assert "<tool>" not in TAGS.instructions([])


# Native


def native_call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_parallel_native_calls_keep_order_and_have_their_own_ids(native_tokenizer):
    parsed = NATIVE.parse(f"Let me look.\n{native_call('b', n=1)}\n{native_call('a', n=2)}", native_tokenizer)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("b", {"n": 1}), ("a", {"n": 2})]
    assert parsed.message["content"] == "Let me look." and parsed.answer is None and parsed.error is None
    assert len({call.id for call in parsed.calls}) == 2
    parsed.calls[0].result, parsed.calls[1].result = "one", "two"
    replies = NATIVE.replies(turn_of(*parsed.calls))
    assert [(reply["role"], reply["name"], reply["content"]) for reply in replies] == [
        ("tool", "b", "one"), ("tool", "a", "two")
    ]  # fmt: skip
    assert [reply["tool_call_id"] for reply in replies] == [call.id for call in parsed.calls]


@pytest.mark.parametrize(
    "block",
    ['{"name": "lookup", "arg', "", "[1]", "3", "null", '{"arguments": {}}', '{"name": "lookup", "arguments": "x"}',
     '{"name": "lookup", "arguments": null}', '{"name": 3, "arguments": {}}', "[" * 100_000, "1" * 5000],
)  # fmt: skip
def test_a_malformed_native_call_is_an_error_and_not_an_answer(native_tokenizer, block):
    text = f"<tool_call>{block}</tool_call>"
    parsed = NATIVE.parse(text, native_tokenizer)
    assert "tool call" in parsed.error
    assert parsed.calls == [] and parsed.answer is None
    assert parsed.message == {"role": "assistant", "content": text}
    assert NATIVE.replies(turn_of(error=parsed.error)) == [{"role": "user", "content": f"Error: {parsed.error}"}]


@pytest.mark.parametrize(
    ("opened", "text", "answer", "reasoning"),
    [
        ("", " Lima.\n", "Lima.", None),
        ("", "<think>\nPeru, so\n</think>\n\nLima", "Lima", "Peru, so"),
        ("<think>\n", "Peru, so\n</think>\n\nLima", "Lima", "Peru, so"),  # by the template itself
    ],
)
def test_a_native_turn_without_a_call_is_the_answer(native_tokenizer, opened, text, answer, reasoning):
    parsed = NATIVE.parse(text, native_tokenizer, native_tokenizer.encode(HEADER + opened))
    assert (parsed.answer, parsed.calls, parsed.error) == (answer, [], None)
    assert parsed.message.get("reasoning_content") == reasoning and parsed.message["content"].strip() == answer


def test_a_native_call_is_a_message_that_can_be_written(native_tokenizer):
    parsed = NATIVE.parse(native_call("lookup", query="a\ud83d"), native_tokenizer)
    assert parsed.calls[0].arguments == {"query": "a?"} and parsed.message["content"] == ""
    json.dumps(parsed.message, ensure_ascii=False).encode()


# Both: whatever a model writes is read, and what it calls is checked

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0},
        "half": {"type": "number", "multipleOf": 0.5},
        "unit": {"type": "string", "enum": ["km", "mi"], "nullable": True},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "uniqueItems": True},
        "tree": {"$ref": "#/$defs/tree"},
        "any": {},
    },
    "required": ["n"],
    "$defs": {"tree": {"type": "object", "properties": {"children": {"items": {"$ref": "#/$defs/tree"}}}}},
}
WORK = Tool("work", "Works.", SCHEMA, lambda **arguments: arguments)
WRITTEN_WELL = {"tags": call_text, "native": native_call}

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.sampled_from([-0.0, 1e308, 5e-324, math.inf, -math.inf, math.nan, 10**18, 10**400, -(10**400)])
NAMES = st.sampled_from([*SCHEMA["properties"], "name", "args", "", "é", "n\n", "$ref", "__class__"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-100, 100) | NUMBERS | TEXT,
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(NAMES | TEXT, parts, max_size=4),
    max_leaves=8,
)
GOOD = st.fixed_dictionaries(
    {"n": st.integers(0, 9)},
    optional={
        "half": st.integers(-100, 100).map(lambda number: number / 2),
        "unit": st.sampled_from(["km", "mi", None]),
        "tags": st.lists(TEXT, max_size=4, unique=True),
        "tree": st.integers(0, 2).map(lambda number: {"children": [{"children": []}] * number}),
        "any": st.dictionaries(TEXT, st.just([1, 2.5, None, True, {"x": "y"}]), max_size=2),
    },
)
PIECES = st.sampled_from(
    ["<tool>", "</tool>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>",
     "\n", '{"name": "work", ', '"args": {', '"arguments": {', "}", "{", "[", "]", '"', "null", "1e999", "NaN",
     "\\ud800", '{"name": "work", "args": {"n": 1}}', '{"name": "work", "arguments": {"n": 1}}', "\ufeff", "\x00"]
)  # fmt: skip
GARBAGE = st.lists(PIECES | TEXT, max_size=12).map("".join)
CALLS = st.builds(
    lambda marks, call: f"{marks[0]}{json.dumps(call)}{marks[1]}",
    st.sampled_from([("<tool>", "</tool>"), ("<tool_call>\n", "\n</tool_call>")]),
    st.fixed_dictionaries({"name": JSON | st.just("work")}, optional={"args": JSON, "arguments": JSON}),
)
SPOILT = st.builds(
    lambda text, place, piece: text[:place] + piece + text[place + 1 :], CALLS, st.integers(0, 80), PIECES
)
REPEATED = st.builds(lambda pieces, times: "".join(pieces) * times, st.lists(PIECES, max_size=3), st.integers(50, 300))


@settings(max_examples=600, deadline=None)
@given(GARBAGE | CALLS | SPOILT | SPOILT | REPEATED)
@example('<tool>{"name": "a", "args": {"b": NaN}}</tool>')
@example('<tool_call>{"name": "work", "args": {"any": ' + '{"a":' * 900 + "1" + "}" * 900 + "}}</tool>")
def test_any_text_is_a_call_an_answer_or_an_error(native_tokenizer, text):
    for protocol in (TAGS, NATIVE):
        parsed = protocol.parse(text, native_tokenizer)
        assert (bool(parsed.calls), parsed.answer is not None, bool(parsed.error)).count(True) == 1
        assert parsed.message["role"] == "assistant"
        json.dumps(parsed.message, ensure_ascii=False).encode()
        for call in parsed.calls:
            problem = WORK.check(call.arguments)
            assert problem is None or (problem.startswith("work: ") and len(problem) < 2000)
        if parsed.answer is None:
            replies = protocol.replies(turn_of(*parsed.calls, error=parsed.error))
            native_tokenizer.apply_chat_template([parsed.message, *replies], tokenize=True)


@pytest.mark.parametrize("name", WRITTEN_WELL)
@settings(deadline=None)
@given(GOOD)
def test_a_call_written_well_is_read_as_it_was_meant(native_tokenizer, name, meant):
    protocol = {"tags": TAGS, "native": NATIVE}[name]
    [call] = protocol.parse(WRITTEN_WELL[name]("work", **meant), native_tokenizer).calls
    assert (call.name, call.arguments) == ("work", meant) and WORK.check(call.arguments) is None


@settings(deadline=None)
@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_any_arguments_are_checked(arguments):
    problem = WORK.check(arguments)
    assert problem is None or problem.startswith("work: ")
