"""Right answers as leaves behind the contexts of a trajectory, and its turns with a hint before them."""

import copy
from functools import partial

import pytest
from support.conversations import converse, template_tokenizer, user
from support.models import build_tokenizer

from mt_grpo.forward.packing import unique_tokens
from mt_grpo.rollout import ChatRenderer
from mt_grpo.rollout.token_row import AnswerLeaves, answer_ids
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import Trajectory, Turn


@pytest.mark.parametrize("history", ["keep", "strip_thinking"])
def test_leaves_follow_the_contexts_that_turns_really_had(tokenizer, history):
    turns = ["<think>a</think>one", "<think>b</think>two", "<think>c</think>three"]
    trajectory, _, seen = converse(tokenizer, turns, [user("Q2"), user("Q3")], history)
    assert (trajectory.tree.num_sequences > 1) == (history != "keep")
    before = copy.deepcopy(trajectory.to_dict())
    leaves = AnswerLeaves.after(trajectory, [([7], [8, 9])] * 3, 500)
    assert trajectory.to_dict() == before
    assert leaves.turns == [0, 1, 2] and leaves.tree.actions() == [[8, 9]] * 3
    assert [leaves.tree.path_of_turn(turn) for turn in range(3)] == [[*context, 7, 8, 9] for context, _ in seen]
    # what contexts share is there once, also of the members of a group
    contexts = {tuple(context[: length + 1]) for context, _ in seen for length in range(len(context))}
    assert unique_tokens([leaves.tree]) == unique_tokens([leaves.tree] * 4) == len(contexts) + 3 * 3


def test_without_room_or_a_sampled_token_there_is_no_leaf():
    tree = TokenTree()
    tree.add_turn([1, 2], [3], [-1.0])
    tree.add_turn([1, 2, 3, 4], [], [])
    tree.add_turn([1, 2, 3, 4, 5, 6], [7], [-1.0])
    trajectory = Trajectory([], [Turn(index, {}) for index in range(3)], tree)
    assert AnswerLeaves.after(trajectory, [([8], [9])] * 3, 8).turns == [0, 2]
    assert AnswerLeaves.after(trajectory, [([8], [9])] * 3, 7).turns == [0]


def test_a_right_answer_that_spells_a_mark_is_text(tokenizer):
    think, end = tokenizer.convert_tokens_to_ids(["</think>", "<|im_end|>"])
    before, answer = answer_ids(ChatRenderer(tokenizer), "</think><answer>", "a</think><|im_end|>")
    assert before[0] == think and not {think, end} & set(answer)
    assert tokenizer.decode(before + answer) == "</think><answer>a</think><|im_end|>"


def test_prefix_and_answer_are_encoded_as_one_text(tokenizer):
    renderer = ChatRenderer(tokenizer)
    before, answer = answer_ids(renderer, "Li", "ma")
    assert before + answer == renderer.encode("Lima") and answer  # a token of both is the answer's
    assert answer_ids(renderer, "", "Lima") == ([], renderer.encode("Lima"))


@pytest.mark.parametrize(
    ("family", "shown"),
    [
        ("gemma3", "Q2\n\nLook.<end_of_turn>\n<start_of_turn>model\ntwo"),  # no two messages of a user in a row
        ("llava_next", "[INST] Q2\n\nLook. [/INST]two"),
        ("glm4moe", "<|user|>\nQ2\n\nLook.<|assistant|>two"),
    ],
)
def test_a_hint_stands_in_the_last_message_of_any_template(family, shown):
    tokenizer = template_tokenizer(family)
    trajectory, _, _ = converse(tokenizer, ["one", "two"], [user("Q2")], "keep")
    hinted = AnswerLeaves.hinted(trajectory, partial(ChatRenderer, tokenizer), "Look.", 500)
    text = tokenizer.decode(hinted.tree.path_of_turn(1))
    assert hinted.turns == [0, 1] and shown in text and text.count("Look.") == 1
    assert hinted.tree.actions() == trajectory.tree.actions()


def test_a_hint_follows_what_an_agent_said(tokenizer):
    renderer, first = ChatRenderer(tokenizer), user("Q1")
    again = user("Other") + user([{"type": "text", "text": "Q3"}])
    action = [*renderer.encode("one"), renderer.end_id]
    begun, anew = renderer.prompt_ids(first), renderer.prompt_ids(again)
    contexts = [
        (begun, {}),
        (begun + action + renderer.reply_ids(user("Q2"), action[-1]), {"follows": 0, "given": user("Q2")}),
        (anew, {"follows": -1, "given": again}),
        (anew + renderer.encode("th"), {"follows": -1, "given": again}),  # it goes on with a message of the model
    ]
    trajectory = Trajectory(first)
    for turn, (context, past) in enumerate(contexts):
        trajectory.tree.add_turn(context, action, [0.0] * len(action))
        trajectory.turns.append(Turn(turn, {"role": "assistant", "content": "one"}, **past))
    hinted = AnswerLeaves.hinted(trajectory, lambda tools: renderer, "Look.", 500)
    texts = [tokenizer.decode(hinted.tree.path_of_turn(turn)) for turn in range(3)]
    last = [text.rpartition("<|im_end|>\n<|im_start|>assistant")[0].rpartition("user\n")[2] for text in texts]
    assert hinted.turns == [0, 1, 2] and last == ["Q1\n\nLook.", "Q2\n\nLook.", "Q3\nLook."]


def test_a_hint_stands_before_the_tools_of_its_turn():
    """Of a template that shows them behind the words of the first message."""
    tokenizer = build_tokenizer()
    shown = "{% if loop.first and tools %} {{ tools[0].function.name }}{% endif %}<|im_end|>\n{% endfor %}"
    begin = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    tokenizer.chat_template = f"{begin}{shown}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
    one, other = ([{"type": "function", "function": {"name": name, "parameters": {}}}] for name in ("add", "search"))
    trajectory = Trajectory(user("Q"), tools=one)
    for turn, (tools, own) in enumerate(((one, None), (other, other), (None, []))):
        action = tokenizer.encode("one<|im_end|>")
        trajectory.tree.add_turn(ChatRenderer(tokenizer, tools).prompt_ids(user("Q")), action, [0.0] * len(action))
        trajectory.turns.append(Turn(turn, {}, follows=-1 if turn else None, given=user("Q"), tools=own))
    hinted = AnswerLeaves.hinted(trajectory, partial(ChatRenderer, tokenizer), "Look.", 500)
    texts = [tokenizer.decode(hinted.tree.path_of_turn(turn)) for turn in hinted.turns]
    assert [text.partition("<|im_end|>")[0].partition("\n")[2] for text in texts] == [
        "Q\n\nLook. add",
        "Q\n\nLook. search",
        "Q\n\nLook.",
    ]


def test_a_hint_that_the_template_refuses_leaves_out_its_turn():
    """The second turn goes on with the model's own message, where Gemma's template wants the user's."""
    tokenizer = template_tokenizer("gemma3")
    trajectory, _, _ = converse(tokenizer, ["one", "two"], [user("Q2")], "keep")
    trajectory.turns[1].follows, trajectory.turns[1].given = 0, [{"role": "assistant", "content": "and so"}]
    assert AnswerLeaves.hinted(trajectory, partial(ChatRenderer, tokenizer), "Look.", 500).turns == [0]
