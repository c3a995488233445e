"""Right answers as leaves behind the contexts of a trajectory."""

from __future__ import annotations

import copy

from support.conversations import converse

from mt_grpo.forward.packing import unique_tokens
from mt_grpo.rollout import ChatRenderer
from mt_grpo.rollout.token_row import answer_ids, answer_leaves
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import Trajectory, Turn

TURNS, REPLIES = ["<think>a</think>one", "<think>b</think>two", "<think>c</think>three"], ["Q2", "Q3"]
REPLIES = [[{"role": "user", "content": text}] for text in REPLIES]


def rewritten(tokenizer, history="strip_thinking"):
    return converse(tokenizer, TURNS, REPLIES, history)


def test_leaves_follow_the_contexts_that_turns_really_had(tokenizer):
    for history in ("keep", "strip_thinking"):
        trajectory, _, seen = rewritten(tokenizer, history)
        assert (trajectory.tree.num_sequences > 1) == (history != "keep")
        leaves = answer_leaves(trajectory, [([7], [8, 9])] * 3, 500)
        assert leaves.turns == [0, 1, 2] and leaves.tree.actions() == [[8, 9]] * 3
        for turn, (context, _) in enumerate(seen):
            assert leaves.tree.path_of_turn(turn) == [*context, 7, 8, 9]


def test_what_contexts_share_is_in_the_leaves_once(tokenizer):
    trajectory, _, seen = rewritten(tokenizer, "keep")
    leaves = answer_leaves(trajectory, [([7], [8, 9])] * 3, 500)
    contexts = {tuple(context[: length + 1]) for context, _ in seen for length in range(len(context))}
    assert unique_tokens([leaves.tree]) == len(contexts) + 3 * 3
    assert unique_tokens([leaves.tree] * 4) == len(contexts) + 3 * 3  # members of a group


def test_the_trajectory_stays_as_it_is(tokenizer):
    trajectory, *_ = rewritten(tokenizer)
    before = copy.deepcopy(trajectory.to_dict())
    answer_leaves(trajectory, [([7], [8, 9])] * 3, 500)
    assert trajectory.to_dict() == before


def test_without_room_or_a_sampled_token_there_is_no_leaf():
    tree = TokenTree()
    tree.add_turn([1, 2], [3], [-1.0])
    tree.add_turn([1, 2, 3, 4], [], [])
    tree.add_turn([1, 2, 3, 4, 5, 6], [7], [-1.0])
    trajectory = Trajectory([], [Turn(index, {}) for index in range(3)], tree)
    assert answer_leaves(trajectory, [([8], [9])] * 3, 8).turns == [0, 2]
    assert answer_leaves(trajectory, [([8], [9])] * 3, 7).turns == [0]


def test_a_right_answer_that_spells_a_mark_is_text(tokenizer):
    renderer = ChatRenderer(tokenizer)
    think, end = tokenizer.convert_tokens_to_ids(["</think>", "<|im_end|>"])
    before, answer = answer_ids(renderer, "</think><answer>", "a</think><|im_end|>")
    assert before[0] == think and not {think, end} & set(answer)
    assert tokenizer.decode(before + answer) == "</think><answer>a</think><|im_end|>"


def test_prefix_and_answer_are_encoded_as_one_text(tokenizer):
    renderer = ChatRenderer(tokenizer)
    before, answer = answer_ids(renderer, "Li", "ma")
    assert before + answer == renderer.encode("Lima") and answer  # a token of both is the answer's
    assert answer_ids(renderer, "", "Lima") == ([], renderer.encode("Lima"))
