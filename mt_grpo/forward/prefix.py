"""The tree that the common prefixes of token sequences form, described by a few numbers per sequence. Pure numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def sort_by_prefix(sequences: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """An order that puts common prefixes side by side, and the length each sequence shares with the one before it."""
    # bytes do not compare as the ids do, but any total order of the ids puts common prefixes side by side
    keys = [sequence.tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    if not order:
        return [], []
    everywhere = _common(sequences[order[0]], sequences[order[-1]], 0)
    return order, [0, *(_common(sequences[one], sequences[next], everywhere) for one, next in pairwise(order))]


def _common(one: np.ndarray, other: np.ndarray, known: int) -> int:
    """Length of the longest common prefix of two sequences whose first `known` tokens are equal."""
    end = min(len(one), len(other))
    # on bytes `find` costs a fraction of numpy's `argmax`, and says where there is none
    first = (one[known:end] != other[known:end]).tobytes().find(1)
    return end if first < 0 else known + first


def lay_out(sizes: list[int], shared: list[int]) -> tuple[list[int], list[int], np.ndarray]:
    """
    Lays out the tree of sorted sequences depth first. Each sequence adds what follows its common prefix with the one
    before.

    Args:
        sizes (`list[int]`): Lengths of the sequences.
        shared (`list[int]`): Length that each shares with the one before it.

    Returns:
        Two lists and an array: per sequence, index minus depth of the tokens that it adds; per sequence, the sequence
        that added the last token of the shared prefix (-1 if there is none); per added token, the last index of its
        subtree.
    """
    total = sum(sizes) - sum(shared)
    subtree_end = np.full(total, total - 1)
    shifts: list[int] = []
    parent: list[int] = []
    path: list[int] = []  # the sequences that added the tokens from the root to the last one
    start = depth = 0
    for number, (size, common) in enumerate(zip(sizes, shared, strict=True)):
        while depth > common:  # closes the subtrees that this sequence leaves, from the leaf up
            last = path[-1]
            cut = max(common, shared[last])
            shift = shifts[last]
            subtree_end[shift + cut : shift + depth] = start - 1
            depth = cut
            if cut == shared[last]:
                path.pop()
        shifts.append(start - common)
        parent.append(path[-1] if path else -1)
        if size > common:
            path.append(number)
        start += size - common
        depth = size
    return shifts, parent, subtree_end


def locate(
    depth: np.ndarray, sequence: np.ndarray, shifts: list[int], parent: list[int], shared: list[int]
) -> np.ndarray:
    """Indices, in the layout of `lay_out`, of the tokens at given depths of given sequences."""
    parent_of, common = np.array(parent), np.array(shared)
    while (higher := depth < common[sequence]).any():
        sequence = np.where(higher, parent_of[sequence], sequence)
    found: np.ndarray = depth + np.array(shifts)[sequence]
    return found
