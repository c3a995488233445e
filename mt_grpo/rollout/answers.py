"""The right answer as an extra leaf after each context of a trajectory, to ask how likely the policy finds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.token_tree import TokenTree, common_prefix
from mt_grpo.trajectory import Trajectory


@dataclass
class AnswerLeaves:
    """
    What is to be scored for one trajectory.

    Args:
        tree (`TokenTree`): The contexts of the turns, each followed by a leaf. Turn `n` of this tree is leaf `n`; its
            action is the answer. The trajectory's own tree has no part in it and is trained as it is.
        turns (`list[int]`): Turn of the trajectory whose context each leaf follows.
    """

    tree: TokenTree = field(default_factory=TokenTree)
    turns: list[int] = field(default_factory=list)


def answer_ids(renderer: ChatRenderer, prefix: str, answer: str) -> tuple[list[int], list[int]]:
    """
    Ids of what stands before an answer, and of the answer. They are encoded as one text, as the model would write
    them; a token that holds the end of the prefix and the beginning of the answer is the answer's.

    Args:
        renderer (`ChatRenderer`): The conversation's.
        prefix (`str`): Text in which marks of the chat template are marks.
        answer (`str`): Text in which they are text, since it comes from a dataset.
    """
    before = renderer.encode(prefix)
    whole = renderer.encode(renderer.marks.tidy(prefix + renderer.marks.shield_all(answer)))
    length = common_prefix(before, whole, 0)
    return whole[:length], whole[length:]


def answer_leaves(trajectory: Trajectory, prefix: list[int], answer: list[int], most: int) -> AnswerLeaves:
    """
    The contexts that a trajectory's turns really had, each followed by the answer.

    Args:
        trajectory (`Trajectory`): It stays as it is.
        prefix (`list[int]`), answer (`list[int]`): As `answer_ids` returns them.
        most (`int`): Tokens that a context and its leaf may have; there is no leaf where they have more, nor for a
            turn that sampled nothing.
    """
    leaves = AnswerLeaves()
    for turn, action in enumerate(trajectory.tree.actions()):
        path = trajectory.tree.path_of_turn(turn)
        context = path[: len(path) - len(action)] + prefix
        if action and len(context) + len(answer) <= most:
            leaves.tree.add_turn(context, answer, [0.0] * len(answer))
            leaves.turns.append(turn)
    return leaves
