"""A trajectory as one row of tokens, for trainers."""

from __future__ import annotations

from dataclasses import dataclass

from mt_grpo.rollout.observations import observed
from mt_grpo.rollout.rendering import ChatRenderer
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
    """

    prompt_ids: list[int]
    ids: list[int]
    mask: list[int]
    turns: list[int]
    logprobs: list[float]
    parent: list[int]


def token_row(trajectory: Trajectory, renderer: ChatRenderer, env_mask: int = 0) -> TokenRow:
    """
    The tokens of a trajectory as one row: its tree in depth-first order.

    Args:
        trajectory (`Trajectory`): The conversation.
        renderer (`ChatRenderer`): Renders the prompt if nothing was sampled.
        env_mask (`int`, *optional*, defaults to `0`): Mask of tokens that the environment wrote.
    """
    tree = trajectory.tree
    order = tree.depth_first()
    first = next((index for index in order if tree.nodes[index].turn == 0), None)
    sampled = any(node.turn >= 0 for node in tree.nodes)
    if not sampled:
        began = trajectory.stop_reason not in (None, StopReason.ENV_ERROR)  # else the prompt may have no rendering
        ids = renderer.prompt_ids(trajectory.prompt) if began else [renderer.end_id]
        return TokenRow(list(ids), [], [], [], [], [])
    prompt = _first_context(trajectory) if first is None else tree.ancestors(first)[:-1]
    prompt_ids = [token for index in prompt for token in tree.nodes[index].tokens]
    ends = {-1: -len(prompt_ids) - 1}  # column of each node's last token; the prompt's are below 0
    for index in prompt:
        ends[index] = ends[tree.nodes[index].parent] + len(tree.nodes[index].tokens)
    row = TokenRow(prompt_ids, [], [], [], [], [])
    replied = observed(trajectory)
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
    return row


def _first_context(trajectory: Trajectory) -> list[int]:
    """Nodes of the context of a first turn that sampled nothing."""
    # where other contexts leave it, the node is split, and its own rest is the first child
    nodes, length = trajectory.tree.nodes, trajectory.turns[0].context_length
    path = [0]
    while sum(len(nodes[index].tokens) for index in path) < length:
        path.append(next(index for index, node in enumerate(nodes) if node.parent == path[-1]))
    return path
