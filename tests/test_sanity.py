"""What is trained against the conversation rendered as a whole, and the verdict on a template."""

from __future__ import annotations

import logging

import pytest
from conftest import build_tokenizer
from test_history import converse, user

from mt_grpo.rollout import ChatRenderer
from mt_grpo.rollout.sanity import SanityCheck, examine_template


def check(tokenizer, turns, replies, mode, end="<|im_end|>"):
    trajectory, runner, _ = converse(tokenizer, turns, replies, "keep", end=end)
    sanity = SanityCheck(runner.renderer, mode)
    return sanity, sanity.check(trajectory), trajectory


@pytest.mark.parametrize("mode", ["strict", "ignore_strippable"])
def test_a_conversation_that_renders_as_it_was_sampled_passes(mode):
    sanity, difference, _ = check(build_tokenizer("qwen2_5"), ["A1", "A2"], [user("Q2")], mode)
    assert difference is None and not sanity.causes


def test_a_difference_names_the_role_and_the_text_on_both_sides(tokenizer):
    _, difference, _ = check(tokenizer, ["<think>\nT\n</think>\n\nA1", "A2"], [user("Q2")], "strict")
    assert difference.cause == "text of the assistant message"
    assert "<think>" in difference.trained and "A1" in difference.rendered and "<think>" not in difference.rendered


def test_white_space_is_ignored_on_request_only():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert check(tokenizer, ["A1 \n", "A2"], [user("Q2")], "strict")[1] is not None
    assert check(tokenizer, ["A1 \n", "A2"], [user("Q2")], "ignore_strippable")[1] is None
    changed = check(tokenizer, ["A1", "A2"], [user("Q2")], "ignore_strippable")[2]
    changed.turns[0].message = {"role": "assistant", "content": "other"}
    assert SanityCheck(ChatRenderer(tokenizer), "ignore_strippable").check(changed).cause.endswith("assistant message")


def test_the_same_text_in_other_tokens_is_told_apart_from_other_text():
    tokenizer = build_tokenizer("qwen2_5")
    trajectory, runner, _ = converse(tokenizer, ["reasoning", "A2"], [user("Q2")], "keep")
    node = trajectory.tree.nodes[1]
    node.tokens = [*(tokenizer.encode(letter)[0] for letter in "reasoning"), tokenizer.eos_token_id]
    node.logprobs = [0.0] * len(node.tokens)
    assert SanityCheck(runner.renderer, "strict").check(trajectory).cause == "the same text in other tokens"
    assert SanityCheck(runner.renderer, "ignore_strippable").check(trajectory) is None


def test_a_cause_is_logged_once_and_counted_each_time(tokenizer, caplog):
    trajectory, runner, _ = converse(tokenizer, ["<think>\nT\n</think>\n\nA1", "A2"], [user("Q2")], "keep")
    sanity = SanityCheck(runner.renderer, "strict")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sanity.check(trajectory)
    assert len(caplog.records) == 1 and "assistant message" in caplog.text
    assert sanity.causes["text of the assistant message"] == 3


def test_an_unknown_mode_is_refused(tokenizer):
    with pytest.raises(ValueError, match="'strict'"):
        SanityCheck(ChatRenderer(tokenizer), "strikt")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("qwen3", ["after tool results it appends and keeps", "after user replies it appends and drops"]),
        ("qwen2_5", ["after tool results it appends and keeps", "after user replies it appends and keeps"]),
    ],
)
def test_the_template_is_examined(template, expected):
    verdict = examine_template(ChatRenderer(build_tokenizer(template)))
    assert all(finding in verdict for finding in expected), verdict
