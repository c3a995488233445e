"""Conversations under each chat template of TRL's, turn by turn against the template's own rendering of the whole."""

from collections.abc import Sequence
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from support import template_matrix
from support.conversations import NAMES, renderer
from support.template_matrix import FAMILIES, PAGE, WORDS_ONLY, row, tokenizer_of
from trl.chat_template_utils import supports_tool_calling

from mt_grpo.envs.protocols import NativeProtocol
from mt_grpo.rollout import ChatRenderer
from mt_grpo.rollout.chat_template import ChatTemplate
from mt_grpo.rollout.rendering import _SuffixCache
from mt_grpo.rollout.token_row import token_row

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "Q"}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_becomes_of_a_conversation_is_as_the_page_says(family):
    name, verdicts = row(family).removeprefix("| ").split(" | ", 1)
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.startswith("|") and name in line and line.endswith(verdicts)]
    assert len(found) == 1, "run python tests/support/template_matrix.py"


def test_more_templates_take_tools_than_trl_says():
    ours = [family for family in FAMILIES if family not in WORDS_ONLY]
    theirs = [family for family in FAMILIES if supports_tool_calling(tokenizer_of(family))]
    assert len(FAMILIES) == 41 and len(ours) == 34 and set(theirs) < set(ours)


def test_the_past_ends_in_the_token_of_the_past():
    trajectory, _ = template_matrix.sampled("gptoss", "replies", "keep")
    seen = template_matrix.run("gptoss", "replies", "keep")
    assert [turn.fork_cause for turn in trajectory.turns] == [None] + ["end_of_turn"] * 3
    assert seen.contexts == seen.rendered and all("<|return|>" not in context for context in seen.contexts)
    row = token_row(trajectory, template_matrix.renderer_of("gptoss", True))
    assert sum(row.mask) == sum(map(len, trajectory.tree.actions())) == seen.sampled
    assert row.ids.count(tokenizer_of("gptoss").convert_tokens_to_ids("<|return|>")) == 4


def called(name: str) -> dict:
    return {"type": "function", "id": name, "function": {"name": name, "arguments": {"query": f"for {name}"}}}


def test_only_one_call_a_message_shown_means_one_message_a_call():
    turn = {"role": "assistant", "content": "", "tool_calls": [called("look"), called("find")]}
    results = [{"role": "tool", "tool_call_id": name, "content": f"By {name}."} for name in ("find", "look")]
    texts = {
        family: ChatRenderer(tokenizer_of(family), [TOOL]).prompt_text([QUESTION, turn, *results])
        for family in ("gptoss", "llama3_1", "lfm2", "llama3")
    }
    for family, named in {"gptoss": "functions.look", "llama3_1": '"name": "look"'}.items():
        parts = [texts[family].rindex(part) for part in (named, "for look", "By look.", "for find", "By find.")]
        assert parts[1:] == sorted(parts[1:])
    for family in ("lfm2", "llama3"):
        assert '<tool_call>\n{"name": "find", "arguments": {"query": "for find"}}\n</tool_call>' in texts[family]


@pytest.mark.parametrize("family", ["gemma4", "gemma4_v5"])
def test_a_turn_begins_behind_words_that_stand_behind_results(family):
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [called("look")]}
    result = {"role": "tool", "tool_call_id": "look", "content": "Rain."}
    text = ChatRenderer(tokenizer_of(family), [TOOL]).prompt_text([QUESTION, turn, result])
    assert text.endswith("Let me see.<turn|>\n<|turn>model\n")


@pytest.mark.parametrize("family", ["qwen3_5_think", "glm4moe", "nemotron_3_nano", "lfm2_2_5"])
def test_arguments_written_as_text_have_the_types_of_the_schema(family):
    tools = template_matrix.Exchange("calls").tool_schemas
    said = template_matrix.Said(calls=(("look", {"city": "75001", "days": 3}),))
    text = template_matrix.written(family, "", said)
    chat = ChatRenderer(tokenizer_of(family), tools)
    end = chat.decode(chat.encode(text)[-1:])
    (call,) = NativeProtocol().parse(text.removesuffix(end), tokenizer_of(family), (), tools, end).calls
    assert call.arguments == {"city": "75001", "days": 3}


def test_a_call_that_the_end_of_the_turn_closes_is_read():
    text = '{"name": "look", "parameters": {"city": "Lima"}}'
    tokenizer = tokenizer_of("llama3_1")
    assert NativeProtocol().parse(text, tokenizer).error
    (call,) = NativeProtocol().parse(text, tokenizer, end="<|eot_id|>").calls
    assert (call.name, call.arguments) == ("look", {"city": "Lima"})


# The suffix cache: letter for letter what the template writes, whatever it does with a content, mostly without it

PASSAGES = [f"Lima is the capital of Perú.\n{number} llamas" for number in range(40)]
EACH = "{% for m in messages %}<user>{{ EXPRESSION }}</user>{% endfor %}"


@lru_cache
def words(name: str) -> list[str]:
    tokens = Environment().lexer.tokenize(renderer(name).tokenizer.chat_template)
    return sorted({token.value for token in tokens if token.type == "string"})


@lru_cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(renderer(name).tokenizer, {}, calls=False)


def outcome(function, *arguments):
    """What a call returns, or the kind of what it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


def test_most_templates_are_among_those_compared():
    assert len(NAMES) > 50 and {"qwen3", "llama3_1", "gemma3", "gptoss", "gemma4", "nemotron_3_nano"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_reply_ids_equal_the_full_rendering_of_every_template(name, data):
    chat, template = renderer(name), template_of(name)
    pieces = st.sampled_from([*words(name), " ", "\n", '{"a": [1, "b"]}', "Perú 🙂 北京", chat.end_of_turn, "<b>&\\"])
    contents = st.lists(pieces | st.text(max_size=8), max_size=4).map("".join)
    for content in data.draw(st.lists(contents, min_size=1, max_size=4)):
        result = {"role": "tool", "name": "lookup", "content": content}
        for replies in (
            [{"role": "user", "content": content}],
            [{**result, "tool_call_id": "call_0"}],
            [result, {"role": "tool", "name": "a", "content": "ok"}],
        ):
            called = [reply["name"] for reply in replies if reply["role"] == "tool"]
            full = outcome(lambda replies=replies, called=called: template.suffix(chat.escaped(replies), called))
            full = chat.encode(chat.special_tokens.tidy(full)) if isinstance(full, str) else full
            assert outcome(chat.reply_ids, replies, -1) == full


class Counted:
    """Renders through a template of one message, and counts."""

    def __init__(self, template: str) -> None:
        self._template = Environment().from_string(template)
        self.times = 0
        self.cache = _SuffixCache(template, self)

    def __call__(self, replies: list[dict], called: Sequence[str] = ()) -> str:
        self.times += 1
        return self._template.render(messages=replies)


def text(content: str, **fields: str) -> dict:
    return {"role": "user", "content": content, **fields}


@pytest.mark.parametrize(
    "expression",
    [
        *(f"m.content | {each}" for each in ("trim", "tojson", "upper", "capitalize", "e")),
        "m.content | replace('llama', 'alpaca')",
        "m.content[:200]",
        "m.content.split('</think>')[-1]",
        "'/no_think' if '/no_think' in m.content else m.content",
        "m.content + ('!' if m.content.endswith('.') else '')",
        "m.content + ('!' if m.content.startswith('<a>') and m.content.endswith('</a>') else '')",
        "m.content + ('!' if m.content == 'same' else '')",
        "m.content + ('!' if not m.content else '')",
        "m.content ~ m.content",
        "m.name + m.content",
        "loop.index ~ m.content",
    ],
)
def test_whatever_a_template_does_with_a_content_is_done(expression):
    render = Counted(EACH.replace("EXPRESSION", expression))
    contents = ["plain", " spaced\n", 'say "a"\\b', "one llama", "<a>x</a>", "<a>x", "x</a>", "ends.", "same", ""]
    contents += ["é<b>", "x" * 300, "</think>", "a</think>b", "/no_think please", "user", *PASSAGES]
    for content in contents * 2:
        for replies in ([text(content, name="a")], [text(content, name="b"), text("plain", name="c")]):
            assert render.cache.text(replies) == render(replies)


def test_a_kind_of_reply_that_is_known_is_not_rendered():
    render = Counted(EACH.replace("EXPRESSION", "m.role ~ ':' ~ m.content"))
    for passage in PASSAGES:
        render.cache.text([text(passage)])
        render.cache.text([text(passage), text(passage)])
    assert render.times == 4  # two kinds: the first of each, and its probe


def test_names_without_end_do_not_fill_the_memory():
    render = Counted("{% for m in messages %}{{ m.content }}{% endfor %}")
    cache = _SuffixCache("", render)
    for number in range(3000):
        assert cache.text([text("x", tool_call_id=str(number))]) == "x"
    assert render.times == 3000 + 1024


def test_a_content_that_is_no_text_is_rendered():
    cache = Counted("{% for m in messages %}{{ m.content[0].text }}{% endfor %}").cache
    assert cache.text([{"role": "user", "content": [{"type": "text", "text": "Lima"}]}]) == "Lima"
