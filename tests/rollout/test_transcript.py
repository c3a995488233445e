"""What the model is shown of its past, and what of it is trained."""

from __future__ import annotations

import random

import pytest
import torch
from support.conversations import converse, user
from support.models import build_model, build_tokenizer

from mt_grpo.rollout.transcript import strip_thinking


def thought(number: int) -> str:
    return f"<think>T{number}</think>A{number}"


def texts(tokenizer, trajectory) -> list[str]:
    return [tokenizer.decode(sequence.tokens) for sequence in trajectory.tree.sequences()]


def said(*parts: str) -> str:
    """A ChatML conversation of alternating user and assistant parts."""
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[i % 2]}\n{part}<|im_end|>\n" for i, part in enumerate(parts)).rstrip("\n")


TURNS = [thought(number) for number in range(1, 7)]
REPLIES = [user(f"Q{number}") for number in range(2, 7)]


def test_thinking_kept_is_one_sequence(tokenizer):
    trajectory, _, _ = converse(tokenizer, TURNS[:2], REPLIES[:1], "keep")
    assert texts(tokenizer, trajectory) == [said("Q1", thought(1), "Q2", thought(2))]


def test_thinking_hidden_is_one_sequence_a_turn(tokenizer):
    trajectory, _, _ = converse(tokenizer, TURNS[:2], REPLIES[:1], "strip_thinking")
    assert texts(tokenizer, trajectory) == [said("Q1", thought(1)), said("Q1", "A1", "Q2", thought(2))]


def test_compaction_every_three_turns_forks_every_three_turns(tokenizer):
    trajectory, _, _ = converse(tokenizer, TURNS, REPLIES, "compact", compact_every=3)
    assert texts(tokenizer, trajectory) == [
        said("Q1", thought(1), "Q2", thought(2), "Q3", thought(3)),
        said("Q1", "A1", "Q2", "A2", "Q3", "A3", "Q4", thought(4), "Q5", thought(5), "Q6", thought(6)),
    ]


def test_qwen3_hides_thinking_before_the_last_question(tokenizer):
    trajectory, _, _ = converse(tokenizer, TURNS[:3], REPLIES[:2], "template")
    assert texts(tokenizer, trajectory) == [
        said("Q1", thought(1)),
        said("Q1", "A1", "Q2", thought(2)),
        said("Q1", "A1", "Q2", "A2", "Q3", thought(3)),
    ]


def test_qwen3_keeps_thinking_between_tool_results(tokenizer):
    turns = ["<think>\nT1\n</think>\n\nA1", "<think>\nT2\n</think>\n\nA2"]
    tool = [{"role": "tool", "name": "f", "content": "R1"}]
    trajectory, _, _ = converse(tokenizer, turns, [tool], "template")
    assert len(trajectory.tree.sequences()) == 1  # what it renders is what was sampled


def test_a_template_that_strips_past_turns_forks_at_tool_results():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tool = [{"role": "tool", "name": "f", "content": "R1"}]
    trajectory, _, _ = converse(tokenizer, TURNS[:2], [tool], "template")
    second = said("Q1", "A1") + "\n<|im_start|>tool\nR1<|im_end|>\n<|im_start|>assistant\n" + thought(2) + "<|im_end|>"
    assert texts(tokenizer, trajectory) == [said("Q1", thought(1)), second]


def test_without_thinking_nothing_forks(tokenizer):
    for history in ("strip_thinking", "compact", "template"):
        trajectory, _, _ = converse(tokenizer, ["A1", "A2", "A3"], REPLIES[:2], history, compact_every=1)
        assert len(trajectory.tree.sequences()) == 1


def test_stripping_leaves_other_messages_alone():
    assert strip_thinking({"role": "user", "content": "<think>a</think>b"})["content"] == "<think>a</think>b"
    message = {"role": "assistant", "reasoning_content": "a", "content": "b"}
    assert strip_thinking(message) == {"role": "assistant", "content": "b"}


TEMPLATES = [
    *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
    *("lfm2", "lfm2_2_5", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
]

APPEND_ONLY = ("qwen2_5", "qwen3_instruct_2507", "lfm2")


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
        replies = [
            user(f"Q{rng.randint(1, 3)}") if rng.random() < 0.7 else [{"role": "tool", "name": "f", "content": "R"}]
            for _ in range(count - 1)
        ]
        end = rng.choice(["<|im_end|>", ""])
        trajectory, runner, seen = converse(tokenizer, turns, replies, history, rng.randint(1, 3), end=end)
        sequences = trajectory.tree.sequences()
        if template in APPEND_ONLY and history == "keep":
            for turn, (context, _) in enumerate(seen):
                earlier = trajectory.turns[:turn]
                messages = trajectory.prompt + [m for t in earlier for m in (t.message, *t.replies)]
                assert context == runner.renderer.prompt_ids(messages)
        for turn, (context, action) in enumerate(seen):
            whole = context + action
            (sequence,) = [s for s in sequences if s.tokens[: len(whole)] == whole and s.turns[len(context)] == turn][
                :1
            ]
            assert sequence.turns[len(context) : len(whole)] == [turn] * len(action)
            assert trajectory.turns[turn].context_length == len(context)
        trained = [
            token for sequence in sequences for token, mask in zip(sequence.tokens, sequence.mask, strict=True) if mask
        ]
        assert len(trained) == sum(len(action) for _, action in seen)
        row = runner.completion(trajectory)
        for turn, (context, action) in enumerate(seen):
            column = max(i for i, (t, m) in enumerate(zip(row.turns, row.mask, strict=True)) if t == turn and m)
            path = []
            while column >= 0:
                path.append(row.ids[column])
                column = row.parent[column]
            kept = len(row.prompt_ids) + 1 + column
            assert row.prompt_ids[:kept] + path[::-1] == context + action


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


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
@pytest.mark.parametrize(
    ("history", "every"), [("keep", None), ("strip_thinking", None), ("compact", 2), ("template", None)]
)
def test_each_reply_of_the_environment_is_trained_once(tokenizer, history, every, end):
    trajectory, runner, seen = converse(tokenizer, TURNS[:4], REPLIES[:3], history, every, end=end)
    runner.env.env_mask = 1
    row = runner.completion(trajectory)
    missing = "" if end else "<|im_end|>"
    assert sorted(trained_text(tokenizer, row)) == [(turn, missing + observation(turn + 2)) for turn in range(3)]
    replied = sum(len(tokenizer.encode(missing + observation(number))) for number in (2, 3, 4))
    assert sum(row.mask) == replied + sum(len(action) for _, action in seen)
    runner.env.env_mask = 0
    assert sum(runner.completion(trajectory).mask) == sum(len(action) for _, action in seen)


def test_the_mask_of_a_rewritten_history_worked_out_by_hand(tokenizer):
    """
    Two branches after the prompt: the first turn as it was sampled, and a copy of it without its thought, with the
    environment's reply and the second turn behind it. All but the copy is trained.
    """
    trajectory, runner, _ = converse(tokenizer, TURNS[:2], REPLIES[:1], "strip_thinking")
    runner.env.env_mask = 1
    row = runner.completion(trajectory)
    pieces = [
        (f"{thought(1)}<|im_end|>", 1, 0),
        ("A1<|im_end|>", 0, 0),
        (observation(2), 1, 0),
        (f"{thought(2)}<|im_end|>", 1, 1),
    ]
    encoded = [(tokenizer.encode(text), mask, turn) for text, mask, turn in pieces]
    assert row.ids == [token for ids, _, _ in encoded for token in ids]
    assert row.mask == [mask for ids, mask, _ in encoded for _ in ids]
    assert row.turns == [turn for ids, _, turn in encoded for _ in ids]


def test_the_wrong_policy_is_refused_with_the_nearest(tokenizer):
    with pytest.raises(ValueError, match="strip_thinking"):
        converse(tokenizer, ["A1"], [], "strip_thinkin")
    with pytest.raises(ValueError, match="compact_every"):
        converse(tokenizer, ["A1"], [], "compact")


def test_logps_of_forked_rows_are_those_of_each_turn_alone(tokenizer):
    from mt_grpo.forward.logps import token_logps
    from mt_grpo.forward.model import ForwardPlan, enable_trees, score
    from mt_grpo.training.rollout_batch import row_tree

    model = build_model(tokenizer)
    rows, trees = [], []
    for history in ("keep", "strip_thinking", "compact"):
        trajectory, runner, _ = converse(tokenizer, TURNS[:4], REPLIES[:3], history, compact_every=2)
        rows.append(runner.completion(trajectory))
        trees.append(trajectory.tree)
    expected = token_logps(model, trees, forward="turn_by_turn")
    enable_trees(model)
    found = score(model, ForwardPlan([row_tree(row) for row in rows])).by_turn([4] * len(rows))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_reply_before_an_empty_turn_is_trained_too(tokenizer):
    for turns in (["A1<|im_end|>", "", "A3<|im_end|>"], ["A1<|im_end|>", "", ""]):
        trajectory, runner, _ = converse(tokenizer, turns, REPLIES[:2], "keep", end="")
        assert [turn.num_tokens == 0 for turn in trajectory.turns] == [not turn for turn in turns]
        runner.env.env_mask = 1
        row = runner.completion(trajectory)
        assert row.mask == [1] * len(row.ids)
        replied = [tokenizer.encode(text) for text in (observation(2), "<|im_end|>" + observation(3))]
        environment = [turn for turn, value in zip(row.turns, row.logprobs, strict=True) if value != value]
        assert environment == [0] * len(replied[0]) + [1] * len(replied[1])
