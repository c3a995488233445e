"""Call protocols: what a turn's text means, and how results are written back."""

from __future__ import annotations

import json

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
    "arguments",
    [{"query": "Lima"}, {"query": "Perú – 東京 🙂"}, {"filter": {"where": {"a": [{"b": {}}]}}}, {}],
    ids=["plain", "unicode", "nested braces", "empty"],
)
def test_a_tag_call_is_read_with_its_arguments(arguments):
    text = f"<reasoning>why</reasoning>\n{call_text('search', **arguments)}"
    parsed = TAGS.parse(text, None)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("search", arguments)]
    assert parsed.message == {"role": "assistant", "content": text}
    assert parsed.answer is None and parsed.error is None


def test_a_tag_call_without_args_has_none():
    assert TAGS.parse('<tool>{"name": "now"}</tool>', None).calls == [ToolCall("now")]


def test_several_tag_calls_keep_their_order():
    parsed = TAGS.parse(call_text("b", x=1) + "\n" + call_text("a", x=2), None)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("b", {"x": 1}), ("a", {"x": 2})]


def test_a_tag_call_comes_before_an_answer_in_the_same_turn():
    parsed = TAGS.parse(f"{call_text('search', query='x')}<answer>early</answer>", None)
    assert parsed.answer is None and len(parsed.calls) == 1


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
    ],
)
def test_a_malformed_tag_turn_is_told_what_is_wrong(text, says):
    parsed = TAGS.parse(text, None)
    assert says in parsed.error
    assert parsed.calls == [] and parsed.answer is None
    assert parsed.message["content"] == text


def test_one_malformed_call_fails_the_whole_turn():
    parsed = TAGS.parse(call_text("good") + "<tool>bad</tool>", None)
    assert parsed.calls == [] and parsed.error


def test_half_a_character_in_arguments_becomes_writable_text():
    parsed = TAGS.parse('<tool>{"name": "search", "args": {"query": "a\\ud83d", "ok": "\\ud83d\\ude42"}}</tool>', None)
    assert parsed.calls[0].arguments == {"query": "a?", "ok": "🙂"}


def test_tag_results_come_back_in_call_order():
    turn = turn_of(ToolCall("b", result='{"n": null}'), ToolCall("a", result="Error: no"))
    assert TAGS.replies(turn) == [
        {"role": "user", "content": '<result>{"n": null}</result>\n<result>Error: no</result>'}
    ]


def test_a_tag_error_comes_back_as_a_result():
    assert TAGS.replies(turn_of(error="bad.")) == [{"role": "user", "content": "<result>Error: bad.</result>"}]


def test_the_tag_prompt_shows_tools_only_when_there_are_some(search_tool):
    prompt = TAGS.instructions([Tool.from_function(search_tool)])
    assert '"name": "lookup"' in prompt and "<tool>" in prompt and "<answer>" in prompt
    assert "<tool>" not in TAGS.instructions([])


# Native


def native_call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_native_call_is_read(native_tokenizer):
    parsed = NATIVE.parse(f"Let me look.\n{native_call('lookup', query='x')}", native_tokenizer)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("lookup", {"query": "x"})]
    assert parsed.message["content"] == "Let me look." and parsed.answer is None and parsed.error is None


def test_parallel_native_calls_keep_order_and_have_their_own_ids(native_tokenizer):
    parsed = NATIVE.parse(f"{native_call('b', n=1)}\n{native_call('a', n=2)}", native_tokenizer)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("b", {"n": 1}), ("a", {"n": 2})]
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


def test_a_native_turn_without_a_call_is_the_answer(native_tokenizer):
    parsed = NATIVE.parse(" Lima.\n", native_tokenizer)
    assert (parsed.answer, parsed.calls, parsed.error) == ("Lima.", [], None)


def test_native_thinking_is_reasoning_not_part_of_the_answer(native_tokenizer):
    parsed = NATIVE.parse("<think>\nPeru, so\n</think>\n\nLima", native_tokenizer)
    assert parsed.answer == "Lima"
    assert parsed.message["reasoning_content"] == "Peru, so" and parsed.message["content"] == "Lima"


def test_thinking_that_the_template_opened_is_read_as_thinking(native_tokenizer):
    context = native_tokenizer.encode(HEADER + "<think>\n")
    parsed = NATIVE.parse("Peru, so\n</think>\n\nLima", native_tokenizer, context)
    assert parsed.answer == "Lima" and parsed.message["reasoning_content"] == "Peru, so"


def test_a_native_message_always_has_content(native_tokenizer):
    assert NATIVE.parse(native_call("lookup"), native_tokenizer).message["content"] == ""


def test_half_a_character_in_a_native_call_becomes_writable_text(native_tokenizer):
    parsed = NATIVE.parse(native_call("lookup", query="a\ud83d"), native_tokenizer)
    assert parsed.calls[0].arguments == {"query": "a?"}
    json.dumps(parsed.message, ensure_ascii=False).encode()


# Both: whatever a model writes is read

PIECES = st.sampled_from(
    ["<tool>", "</tool>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>",
     "\n", '{"name": "a", ', '"args": {', '"arguments": {', "}", "{", "[", "]", '"', "null", "1e999", "NaN", "\\ud800"]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
@example('<tool>{"name": "a", "args": {"b": NaN}}</tool>')
def test_no_text_makes_parsing_raise(native_tokenizer, text):
    for protocol in (TAGS, NATIVE):
        parsed = protocol.parse(text, native_tokenizer)
        assert (bool(parsed.calls), parsed.answer is not None, parsed.error is not None).count(True) == 1
        assert parsed.message["role"] == "assistant"
        json.dumps(parsed.message, ensure_ascii=False).encode()
        if parsed.answer is None:
            replies = protocol.replies(turn_of(*parsed.calls, error=parsed.error))
            native_tokenizer.apply_chat_template([parsed.message, *replies], tokenize=True)
