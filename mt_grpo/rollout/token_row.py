"""
A trajectory as the trainer reads it: its tokens as one row. For rewards that ask for it also the right answer, as an
extra leaf of the tree after each context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mt_grpo.forward.media import Media
from mt_grpo.rollout.rendering import ChatRenderer
from mt_grpo.token_tree import NO_ROUTE, TokenTree, common_prefix
from mt_grpo.trajectory import StopReason, Trajectory


@dataclass
class TokenRow:
    """
    The tokens of a trajectory for a trainer. All lists except `prompt_ids` have the completion's length.

    Args:
        prompt_ids (`list[int]`): The first context.
        ids (`list[int]`): Token ids after it.
        mask (`list[int]`): 1 for a sampled token, or what `Turn.mask` says; `env_mask` for the environment's; 0 for
            copies of the past.
        turns (`list[int]`): Turn that a token belongs to; a reply belongs to the turn that it answers.
        logprobs (`list[float]`): As sampled; NaN for the environment's tokens.
        parent (`list[int]`): Position of the token that each token follows. It is the one before, except where the
            history was rewritten. -1 is the last token of the prompt, -2 the one before, and so on.
        prompt_routes, routes (`bytes`): The routes of both parts, see `Routes`; empty where no token has one.
        media (`Media`): The media of both parts. Their tokens have ids below 0.
    """

    prompt_ids: list[int]
    ids: list[int]
    mask: list[int]
    turns: list[int]
    logprobs: list[float]
    parent: list[int]
    prompt_routes: bytes = b""
    routes: bytes = b""
    media: Media = field(default_factory=dict)


def token_row(trajectory: Trajectory, renderer: ChatRenderer, env_mask: int = 0) -> TokenRow:
    """The tokens of a trajectory as one row: its tree in depth-first order. `env_mask` masks the environment's."""
    tree = trajectory.tree
    order = tree.depth_first()
    first = next((index for index in order if tree.nodes[index].turn == 0), None)
    sampled = any(node.turn >= 0 for node in tree.nodes)
    if not sampled:
        began = trajectory.stop_reason not in (None, StopReason.ENV_ERROR)  # else the prompt may have no rendering
        ids = renderer.prompt_ids(trajectory.prompt) if began else [renderer.end_id]
        # no token of it is trained, so nobody looks at its media
        return TokenRow([token for token in ids if token >= 0], [], [], [], [], [])
    prompt = _first_context(trajectory) if first is None else tree.ancestors(first)[:-1]
    prompt_ids = [token for index in prompt for token in tree.nodes[index].tokens]
    ends = {-1: -len(prompt_ids) - 1}  # column of each node's last token; the prompt's are below 0
    for index in prompt:
        ends[index] = ends[tree.nodes[index].parent] + len(tree.nodes[index].tokens)
    row = TokenRow(prompt_ids, [], [], [], [], [])
    row.media = {number: each.inputs for number, each in trajectory.media.items()}
    replied = _observations(trajectory)
    answered = {-1: 0} | dict.fromkeys(prompt, 0)  # latest turn on the path to each node
    masks = {turn.index: list(turn.mask) for turn in trajectory.turns if turn.mask is not None}
    for index in order:
        if index in ends:
            continue
        node = tree.nodes[index]
        begin, size = len(row.ids), len(node.tokens)
        trained = node.turn >= 0
        answered[index] = max(node.turn, answered[node.parent])
        row.ids += node.tokens
        tail, turn = (size, node.turn) if trained else replied.get(index, (0, 0))
        row.mask += [0] * (size - tail) + [1 if trained else env_mask] * tail
        if trained and node.turn in masks:  # the parts of an action that was split come in order
            row.mask[begin:], masks[node.turn] = masks[node.turn][:size], masks[node.turn][size:]
        row.turns += [answered[index]] * (size - tail) + [turn] * tail
        row.logprobs += node.logprobs if trained else [float("nan")] * size
        row.parent += [ends[node.parent], *range(begin, begin + size - 1)]
        ends[index] = begin + size - 1
    width = max(len(node.routes) // len(node.tokens) for node in tree.nodes)
    routes = {index: node.routes or NO_ROUTE * width * len(node.tokens) for index, node in enumerate(tree.nodes)}
    row.prompt_routes = b"".join(routes.pop(index) for index in prompt)
    row.routes = b"".join(routes[index] for index in order if index in routes)
    return row


def _first_context(trajectory: Trajectory) -> list[int]:
    """Nodes of the context of a first turn that sampled nothing."""
    # where other contexts leave it, the node is split, and its own rest is the first child
    nodes, length = trajectory.tree.nodes, trajectory.turns[0].context_length
    path = [0]
    while sum(len(nodes[index].tokens) for index in path) < length:
        path.append(next(index for index, node in enumerate(nodes) if node.parent == path[-1]))
    return path


def _observations(trajectory: Trajectory) -> dict[int, tuple[int, int]]:
    """
    The nodes of a trajectory's tree that hold what the environment wrote between two turns. Copies of a past in a
    rewritten context are left out.
    """
    tree, turns = trajectory.tree, trajectory.turns
    nodes, held = tree.nodes, {}
    contexts = [(nodes[index].turn, nodes[index].parent) for index in tree.depth_first() if nodes[index].turn >= 0]
    if not turns[-1].num_tokens:  # it has no node, but a context
        contexts.append((len(turns) - 1, tree.tip))
    for turn, node in contexts:
        if node >= 0 and nodes[node].turn == turn:  # the lower part of an action
            continue
        while turn > 0:
            left = turns[turn].observation_length
            while left > 0:
                size = len(nodes[node].tokens)
                held[node] = (min(left, size), turn - 1)
                left, node = left - size, nodes[node].parent
            if turns[turn].fork_cause is not None or turns[turn - 1].num_tokens:
                break
            turn -= 1  # it sampled nothing, so its context goes on here
    return held


@dataclass
class AnswerLeaves:
    """What is to be scored for one trajectory."""

    tree: TokenTree = field(default_factory=TokenTree)
    turns: list[int] = field(default_factory=list)


def answer_ids(renderer: ChatRenderer, prefix: str, answer: str) -> tuple[list[int], list[int]]:
    """
    Ids of what stands before an answer, and of the answer. They are encoded as one text, as the model would write
    them; a token that holds the end of the prefix and the beginning of the answer is the answer's.
    """
    before = renderer.encode(prefix)
    whole = renderer.encode(renderer.special_tokens.tidy(prefix + renderer.special_tokens.escape_all(answer)))
    length = common_prefix(before, whole, 0)
    return whole[:length], whole[length:]


def answer_leaves(
    trajectory: Trajectory, answers: Sequence[tuple[list[int], list[int]] | None], most: int
) -> AnswerLeaves:
    """The contexts that a trajectory's turns really had, each followed by its right answer."""
    leaves = AnswerLeaves()
    for turn, (action, ids) in enumerate(zip(trajectory.tree.actions(), answers, strict=True)):
        if not action or ids is None:
            continue
        prefix, answer = ids
        path = trajectory.tree.path_of_turn(turn)
        context = path[: len(path) - len(action)] + prefix
        if len(context) + len(answer) <= most:
            leaves.tree.add_turn(context, answer, [0.0] * len(answer))
            leaves.turns.append(turn)
    return leaves
