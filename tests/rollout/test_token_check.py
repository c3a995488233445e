"""What is trained against the conversation rendered as a whole, and the verdict on a template."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conversations import converse, template_tokenizer, user
from support.models import build_tokenizer

from mt_grpo.rollout import ChatRenderer
from mt_grpo.rollout.token_check import SanityCheck, examine_template


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


def test_other_tokens_of_one_text_are_told_from_other_text():
    tokenizer = build_tokenizer("qwen2_5")
    trajectory, runner, _ = converse(tokenizer, ["reasoning", "A2"], [user("Q2")], "keep")
    node = trajectory.tree.nodes[1]
    node.tokens = [*(tokenizer.encode(letter)[0] for letter in "reasoning"), tokenizer.eos_token_id]
    node.logprobs = [0.0] * len(node.tokens)
    difference = SanityCheck(runner.renderer, "strict").check(trajectory)
    assert difference.cause == "the same text in other tokens"
    letters = [f"{token} {letter!r}" for letter in "reasonin" for token in tokenizer.encode(letter)]
    assert difference.trained == f"ids {', '.join(letters)}"
    assert difference.rendered.startswith(f"ids {tokenizer.encode('reasoning')[0]} 'reasoning', ")
    assert SanityCheck(runner.renderer, "ignore_strippable").check(trajectory) is None


def test_other_tokens_of_one_text_are_counted_without_a_word(caplog):
    tokenizer = build_tokenizer("qwen2_5")
    trajectory, runner, _ = converse(tokenizer, ["reasoning", "A2"], [user("Q2")], "keep")
    trajectory.tree.nodes[1].tokens = [tokenizer.encode(letter)[0] for letter in "reasoning"] + [
        tokenizer.eos_token_id
    ]
    sanity = SanityCheck(runner.renderer, "strict")
    with caplog.at_level(logging.DEBUG):
        assert sanity.check(trajectory).cause == "the same text in other tokens"
    assert not caplog.records and sanity.causes == {"the same text in other tokens": 1}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["qwen2_5", "qwen3"]),
    st.sampled_from(["strict", "ignore_strippable"]),
    st.lists(st.text("\n a<think>Limé", max_size=8), min_size=1, max_size=3),
    st.booleans(),
)
def test_skipping_the_prompt_finds_the_same_differences(template, mode, turns, by_letter):
    trajectory, runner, _ = converse(build_tokenizer(template), turns, [user("Q")] * (len(turns) - 1), "keep")
    if by_letter:  # tokens that nothing but sampling would put together
        for node in trajectory.tree.nodes:
            if node.turn >= 0:
                text = runner.renderer.decode(node.tokens)
                node.tokens = [token for letter in text for token in runner.renderer.encode(letter)]
                trajectory.turns[node.turn].num_tokens = len(node.tokens)
    check, everything = (SanityCheck(runner.renderer, mode) for _ in range(2))
    everything._known = lambda *_: (0, 0)
    found, expected = (one.difference(trajectory) for one in (check, everything))
    assert (found and found.cause) == (expected and expected.cause)


def test_a_cause_is_logged_once_and_counted_each_time(tokenizer, caplog):
    trajectory, runner, _ = converse(tokenizer, ["<think>\nT\n</think>\n\nA1", "A2"], [user("Q2")], "keep")
    sanity = SanityCheck(runner.renderer, "strict")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sanity.check(trajectory)
    assert len(caplog.records) == 1 and "assistant message" in caplog.text
    assert sanity.causes["text of the assistant message"] == 3


def test_a_template_that_refuses_what_a_model_wrote_ends_no_run(tokenizer):
    trajectory, runner, _ = converse(tokenizer, ["A1", "A2"], [user("Q2")], "keep")
    trajectory.turns[0].message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}
    difference = SanityCheck(runner.renderer, "strict").check(trajectory)
    assert difference.cause == "the template refuses the conversation"
    assert "The chat template refuses these messages" in difference.rendered


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


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("glm4moe", ["after tool results it appends", "after user replies it appends"]),
        ("deepseekv3", ["after tool results it rewrites", "after user replies it rewrites"]),
        ("diffusion_gemma", ["after tool results it rewrites"]),  # from the second exchange on
        ("gptoss", ["after tool results it appends", "shows one call of an assistant message"]),
        ("llama3", ["it shows no call of an assistant message; it does not show the tools, so describe them"]),
    ],
)
def test_the_template_is_examined_over_three_exchanges(template, expected):
    tool = {
        "type": "function",
        "function": {"name": "look_it_up", "description": "", "parameters": {"type": "object"}},
    }
    verdict = examine_template(ChatRenderer(template_tokenizer(template), [tool]))
    assert all(finding in verdict for finding in expected), verdict
