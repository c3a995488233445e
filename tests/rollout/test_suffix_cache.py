"""The suffix cache: letter for letter what the template writes, whatever it does with a content, mostly without it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from support.conversations import NAMES, renderer

from mt_grpo.rollout.chat_template import ChatTemplate
from mt_grpo.rollout.rendering import SuffixCache

PASSAGES = [f"Lima is the capital of Perú.\n{number} llamas" for number in range(40)]
EACH = "{% for m in messages %}<user>{{ EXPRESSION }}</user>{% endfor %}"


@lru_cache
def words(name: str) -> list[str]:
    tokens = Environment().lexer.tokenize(renderer(name).tokenizer.chat_template)
    return sorted({token.value for token in tokens if token.type == "string"})


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
    chat = renderer(name)
    template = ChatTemplate(chat.tokenizer, {}, calls=False)
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
        self.cache = SuffixCache(template, self)

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
    cache = SuffixCache("", render)
    for number in range(3000):
        assert cache.text([text("x", tool_call_id=str(number))]) == "x"
    assert render.times == 3000 + 1024


def test_a_content_that_is_no_text_is_rendered():
    cache = Counted("{% for m in messages %}{{ m.content[0].text }}{% endfor %}").cache
    assert cache.text([{"role": "user", "content": [{"type": "text", "text": "Lima"}]}]) == "Lima"
