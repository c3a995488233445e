"""Finds the tokens of a conversation that its environment wrote, where they were first shown."""

from __future__ import annotations

from mt_grpo.trajectory import Trajectory


def observed(trajectory: Trajectory) -> dict[int, tuple[int, int]]:
    """
    The nodes of a trajectory's tree that hold what the environment wrote between two turns. Copies of a past in a
    rewritten context are left out.

    Returns:
        `dict`: Per such node, the number of these tokens at its end, and the turn that they answer.
    """
    nodes, held = trajectory.tree.nodes, {}
    for index in trajectory.tree.depth_first():
        turn, parent = nodes[index].turn, nodes[index].parent
        if turn < 0 or (parent >= 0 and nodes[parent].turn == turn):  # the lower part of an action
            continue
        left = trajectory.turns[turn].observation_length
        while left > 0:
            size = len(nodes[parent].tokens)
            held[parent] = (min(left, size), turn - 1)
            left, parent = left - size, nodes[parent].parent
    return held
