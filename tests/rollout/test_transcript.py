"""What the model is shown of its past, what of it is trained, and how that differs from the whole as rendered."""

import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conversations import Talk, converse, template_tokenizer, user
from support.models import build_tokenizer

from mt_grpo.rollout import ChatRenderer
from mt_grpo.rollout.rendering import _strip_thinking
from mt_grpo.rollout.token_row import SanityCheck, examine_template, token_row
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import Trajectory, Turn

END = "<|im_end|>"


def thought(number: int) -> str:
    return f"<think>T{number}</think>A{number}"


def said(*parts: str) -> str:
    """A ChatML conversation of alternating user and assistant parts."""
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[i % 2]}\n{part}{END}\n" for i, part in enumerate(parts)).rstrip("\n")


TURNS = [thought(number) for number in range(1, 7)]
REPLIES = [user(f"Q{number}") for number in range(2, 7)]
RESULT = [{"role": "tool", "name": "f", "content": "R"}]
HIDES = "m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content"


def chatml(content: str):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ " + content + " }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize(
    ("history", "turns", "expected"),
    [
        ("keep", 2, [said("Q1", thought(1), "Q2", thought(2))]),
        ("strip_thinking", 2, [said("Q1", thought(1)), said("Q1", "A1", "Q2", thought(2))]),
        (
            "compact",
            6,
            [
                said("Q1", thought(1), "Q2", thought(2), "Q3", thought(3)),
                said("Q1", "A1", "Q2", "A2", "Q3", "A3", "Q4", thought(4), "Q5", thought(5), "Q6", thought(6)),
            ],
        ),
        (  # Qwen3 hides thinking before the last question
            "template",
            3,
            [
                said("Q1", thought(1)),
                said("Q1", "A1", "Q2", thought(2)),
                said("Q1", "A1", "Q2", "A2", "Q3", thought(3)),
            ],
        ),
    ],
)
def test_thinking_is_kept_hidden_or_compacted(tokenizer, history, turns, expected):
    trajectory, _, _ = converse(tokenizer, TURNS[:turns], REPLIES[: turns - 1], history, compact_every=3)
    assert [tokenizer.decode(sequence.tokens) for sequence in trajectory.tree.sequences()] == expected
    trajectory, _, _ = converse(tokenizer, ["A1", "A2", "A3"], REPLIES[:2], history, compact_every=1)
    assert trajectory.tree.num_sequences == 1  # without thinking nothing forks


def test_what_a_template_does_at_tool_results_is_done(tokenizer):
    turns = ["<think>\nT1\n</think>\n\nA1", "<think>\nT2\n</think>\n\nA2"]
    trajectory, _, _ = converse(tokenizer, turns, [RESULT], "template")
    assert trajectory.tree.num_sequences == 1  # Qwen3 keeps thinking between them: it renders what was sampled
    trajectory, _, _ = converse(chatml(HIDES), TURNS[:2], [RESULT], "template")
    second = f"{said('Q1', 'A1')}\n<|im_start|>tool\nR{END}\n<|im_start|>assistant\n{thought(2)}{END}"
    texts = [tokenizer.decode(sequence.tokens) for sequence in trajectory.tree.sequences()]
    assert texts == [said("Q1", thought(1)), second]


def test_stripping_leaves_other_messages_alone():
    assert _strip_thinking(user("<think>a</think>b")[0])["content"] == "<think>a</think>b"
    message = {"role": "assistant", "reasoning_content": "a", "content": "b"}
    assert _strip_thinking(message) == {"role": "assistant", "content": "b"}


def test_the_wrong_policy_or_mode_is_refused_with_the_nearest(tokenizer):
    for policy, says in (("strip_thinkin", "strip_thinking"), ("compact", "compact_every")):
        with pytest.raises(ValueError, match=says):
            converse(tokenizer, ["A1"], [], policy)
    with pytest.raises(ValueError, match="'strict'"):
        SanityCheck(ChatRenderer(tokenizer), "strikt")


APPEND_ONLY = ("qwen2_5", "qwen3_instruct_2507", "lfm2")
TEMPLATES = [
    *(*APPEND_ONLY, "qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "lfm2_2_5"),
    *("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
]


@pytest.mark.parametrize("history", ["keep", "strip_thinking", "compact", "template"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_engine_is_given_exactly_the_paths_of_the_tree(template, history):
    """And, where the template only appends, exactly the full rendering."""
    tokenizer = build_tokenizer(template)
    tokenizer.bos_token = "<|endoftext|>"  # lfm2 writes one
    rng = random.Random(f"{template}/{history}")
    for _ in range(42):  # 2,016 conversations over all templates and policies
        count = rng.randint(1, 6)
        turns = [thought(rng.randint(1, 3)) if rng.random() < 0.6 else f"A{rng.randint(1, 3)}" for _ in range(count)]
        replies = [user(f"Q{rng.randint(1, 3)}") if rng.random() < 0.7 else RESULT for _ in turns[1:]]
        end = rng.choice([END, ""])
        trajectory, runner, seen = converse(tokenizer, turns, replies, history, rng.randint(1, 3), end=end)
        sequences, row = trajectory.tree.sequences(), runner.completion(trajectory)
        messages = list(trajectory.prompt)
        for turn, (context, action) in enumerate(seen):
            if template in APPEND_ONLY and history == "keep":
                assert context == runner.renderer.prompt_ids(messages)
            messages += [trajectory.turns[turn].message, *trajectory.turns[turn].replies]
            whole = context + action
            sequence = next(s for s in sequences if s.tokens[: len(whole)] == whole and s.turns[len(context)] == turn)
            assert sequence.turns[len(context) : len(whole)] == [turn] * len(action)
            assert trajectory.turns[turn].context_length == len(context)
            column = max(i for i, (t, m) in enumerate(zip(row.turns, row.mask, strict=True)) if t == turn and m)
            path = []
            while column >= 0:
                path.append(row.ids[column])
                column = row.parent[column]
            assert row.prompt_ids[: len(row.prompt_ids) + 1 + column] + path[::-1] == whole
        assert sum(sum(sequence.mask) for sequence in sequences) == sum(len(action) for _, action in seen)


# What of the environment's words is trained with `env_mask: 1`


def trained_text(tokenizer, row) -> list[tuple[int, str]]:
    """The runs of trained tokens that no engine sampled, each with the turn it belongs to."""
    runs, last = [], None
    for column, (token, mask, turn) in enumerate(zip(row.ids, row.mask, row.turns, strict=True)):
        if mask and row.logprobs[column] != row.logprobs[column]:
            if last == column - 1:
                runs[-1][1].append(token)
            else:
                runs.append((turn, [token]))
            last = column
    return [(turn, tokenizer.decode(ids)) for turn, ids in runs]


def observation(number: int) -> str:
    return f"\n<|im_start|>user\nQ{number}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("end", [END, ""])
@pytest.mark.parametrize(
    ("history", "every"), [("keep", None), ("strip_thinking", None), ("compact", 2), ("template", None)]
)
def test_each_reply_of_the_environment_is_trained_once(tokenizer, history, every, end):
    trajectory, runner, seen = converse(tokenizer, TURNS[:4], REPLIES[:3], history, every, end=end)
    sampled = sum(len(action) for _, action in seen)
    assert sum(runner.completion(trajectory).mask) == sampled
    runner.env.env_mask = 1
    row = runner.completion(trajectory)
    texts = [("" if end else END) + observation(number) for number in (2, 3, 4)]
    assert sorted(trained_text(tokenizer, row)) == list(enumerate(texts))
    assert sum(row.mask) == sum(len(tokenizer.encode(text)) for text in texts) + sampled


def test_the_mask_of_a_rewritten_history_worked_out_by_hand(tokenizer):
    """Two branches: as sampled, and with a copy of the first turn without its thought, which is not trained."""
    trajectory, runner, _ = converse(tokenizer, TURNS[:2], REPLIES[:1], "strip_thinking")
    runner.env.env_mask = 1
    row = runner.completion(trajectory)
    pieces = [(thought(1) + END, 1, 0), ("A1" + END, 0, 0), (observation(2), 1, 0), (thought(2) + END, 1, 1)]
    expected = [(token, mask, turn) for text, mask, turn in pieces for token in tokenizer.encode(text)]
    assert [*zip(row.ids, row.mask, row.turns, strict=True)] == expected
    trajectory.environment = runner.env
    for runner.env in (lambda: trajectory.environment, type("Env", (Talk,), {"env_mask": 1})):  # a factory and a class
        assert runner.completion(trajectory).mask == row.mask
        trajectory.environment = None  # as in a replay


def test_an_image_of_a_reply_has_no_token_to_train(tokenizer):
    tree = TokenTree()
    tree.add_turn([1, -4, 2], [3], [-0.5])
    tree.add_turn([1, -4, 2, 3, 4, -4, -4, 5], [6], [-0.5])
    turns = [Turn(0, {}, num_tokens=1, context_length=3), Turn(1, {}, num_tokens=1, observation_length=4)]
    row = token_row(Trajectory([], turns, tree), ChatRenderer(tokenizer), env_mask=1)
    assert (row.ids, row.mask) == ([3, 4, -4, -4, 5, 6], [1, 1, 0, 0, 1, 1])


def test_a_reply_before_an_empty_turn_is_trained_too(tokenizer):
    for turns in (["A1<|im_end|>", "", "A3<|im_end|>"], ["A1<|im_end|>", "", ""]):
        trajectory, runner, _ = converse(tokenizer, turns, REPLIES[:2], "keep", end="")
        assert [turn.num_tokens == 0 for turn in trajectory.turns] == [not turn for turn in turns]
        runner.env.env_mask = 1
        row = runner.completion(trajectory)
        assert row.mask == [1] * len(row.ids)
        replied = [len(tokenizer.encode(text)) for text in (observation(2), END + observation(3))]
        environment = [turn for turn, value in zip(row.turns, row.logprobs, strict=True) if value != value]
        assert environment == [0] * replied[0] + [1] * replied[1]


# The check of what is trained against the whole as it is rendered


def checked(tokenizer, mode, *turns):
    trajectory, runner, _ = converse(tokenizer, list(turns), [user("Q2")], "keep")
    sanity = SanityCheck(runner.renderer, mode)
    return sanity, sanity.check(trajectory), trajectory


def test_a_difference_names_role_and_texts_and_is_logged_once(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        sanity, difference, trajectory = checked(tokenizer, "strict", "<think>\nT\n</think>\n\nA1", "A2")
        for _ in range(2):
            sanity.check(trajectory)
    assert difference.cause == "text of the assistant message"
    assert "<think>" in difference.trained and "A1" in difference.rendered and "<think>" not in difference.rendered
    assert len(caplog.records) == 1 and "assistant message" in caplog.text
    assert sanity.causes == {"text of the assistant message": 3}


def test_white_space_is_ignored_on_request_only():
    tokenizer = chatml("m.content | trim")
    assert checked(tokenizer, "strict", "A1 \n", "A2")[1] is not None
    sanity, difference, changed = checked(tokenizer, "ignore_strippable", "A1 \n", "A2")
    assert difference is None
    changed.turns[0].message = {"role": "assistant", "content": "other"}
    assert sanity.check(changed).cause.endswith("assistant message")


def test_other_tokens_of_one_text_are_counted_without_a_word(caplog):
    tokenizer = build_tokenizer("qwen2_5")
    strict, _, trajectory = checked(tokenizer, "strict", "reasoning", "A2")
    letters = [tokenizer.encode(letter)[0] for letter in "reasoning"]
    node = trajectory.tree.nodes[1]
    node.tokens = [*letters, tokenizer.eos_token_id]
    node.logprobs = [0.0] * len(node.tokens)
    with caplog.at_level(logging.DEBUG):
        difference = strict.check(trajectory)
    assert not caplog.records and strict.causes == {difference.cause: 1}
    assert difference.cause == "the same text in other tokens"
    shown = [f"{token} {letter!r}" for letter, token in zip("reasonin", letters, strict=False)]
    assert difference.trained == f"ids {', '.join(shown)}"
    assert difference.rendered.startswith(f"ids {tokenizer.encode('reasoning')[0]} 'reasoning', ")
    assert SanityCheck(ChatRenderer(tokenizer), "ignore_strippable").check(trajectory) is None


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


def test_a_template_that_refuses_what_a_model_wrote_ends_no_run(tokenizer):
    sanity, _, trajectory = checked(tokenizer, "strict", "A1", "A2")
    trajectory.turns[0].message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}
    difference = sanity.check(trajectory)
    assert difference.cause == "the template refuses the conversation"
    assert "The chat template refuses these messages" in difference.rendered


TOOL = {"type": "function", "function": {"name": "look_it_up", "description": "", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("template", "tools", "expected"),
    [
        ("qwen3", None, ["after tool results it appends and keeps", "after user replies it appends and drops"]),
        ("qwen2_5", None, ["after tool results it appends and keeps", "after user replies it appends and keeps"]),
        ("glm4moe", [TOOL], ["after tool results it appends", "after user replies it appends"]),
        ("deepseekv3", [TOOL], ["after tool results it rewrites", "after user replies it rewrites"]),
        ("diffusion_gemma", [TOOL], ["after tool results it rewrites"]),  # from the second exchange on
        ("gptoss", [TOOL], ["after tool results it appends", "shows one call of an assistant message"]),
        ("llama3", [TOOL], ["it shows no call of an assistant message; it does not show the tools, so describe them"]),
    ],
)
def test_a_template_is_examined_over_three_exchanges(template, tools, expected):
    tokenizer = template_tokenizer(template) if tools else build_tokenizer(template)
    verdict = examine_template(ChatRenderer(tokenizer, tools))
    assert all(finding in verdict for finding in expected), verdict
