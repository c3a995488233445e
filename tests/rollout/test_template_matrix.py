"""Conversations under each chat template of TRL's, turn by turn against the template's own rendering of the whole."""

from __future__ import annotations

import pytest
from support.template_matrix import FAMILIES, PAGE, WORDS_ONLY, row, tokenizer_of, verdict
from trl.chat_template_utils import supports_tool_calling

from mt_grpo.rollout import ChatRenderer, TemplateError

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
KINDS = ("qwen3_5_think", "glm4moe", "gptoss", "gemma4", "deepseekv3", "llama3_1", "lfm2", "idefics3")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_becomes_of_a_conversation_is_as_the_page_says(family):
    assert row(family) in PAGE.read_text(encoding="utf-8"), "run python tests/support/template_matrix.py"


@pytest.mark.parametrize("family", KINDS)
def test_three_exchanges_with_tools_are_what_the_template_renders(family):
    assert verdict(family, "two calls", "template") in ("exact", "fork")
    assert verdict(family, "two calls, thinking", "keep") in ("exact", "kept")


@pytest.mark.parametrize("family", KINDS)
def test_three_replies_are_what_the_template_renders(family):
    assert verdict(family, "replies, thinking", "template") in ("exact", "fork")
    assert verdict(family, "replies", "keep") in ("exact", "fork", "kept")


@pytest.mark.parametrize("family", WORDS_ONLY)
def test_a_template_without_results_is_refused_in_a_sentence(family):
    with pytest.raises(TemplateError, match=r"^The chat template cannot hold tool calls: [^\n]+\.$"):
        ChatRenderer(tokenizer_of(family), [TOOL])


def test_more_templates_take_tools_than_trl_says():
    ours = [family for family in FAMILIES if family not in WORDS_ONLY]
    theirs = [family for family in FAMILIES if supports_tool_calling(tokenizer_of(family))]
    assert len(FAMILIES) == 41 and len(ours) == 34 and set(theirs) < set(ours)
