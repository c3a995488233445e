from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forests import make_tree, timestep

from mt_grpo.forward.packing import FlatTree, flatten, pack, split, unique_tokens
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.rollout_batch import _balance

forests = st.lists(st.lists(timestep, max_size=4), max_size=4)


def path_of(packed, index):
    tokens = []
    while index >= 0:
        tokens.append(int(packed.input_ids[index]))
        index = packed.parent[index]
    return tuple(tokens[::-1])


def chain(tokens, trained=()):
    turns = np.full(len(tokens), -1)
    turns[list(trained)] = 0
    return FlatTree(np.array(tokens), turns)


def test_a_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="no token before it"):
        pack([chain([1, 2], [0])])


@pytest.mark.parametrize("trees", [[], [TokenTree()]])
def test_nothing_packs_to_nothing(trees):
    packed = pack(trees)
    assert not any(map(len, (packed.input_ids, packed.subtree_end, packed.label, packed.turn)))


@settings(max_examples=300, deadline=None)
@given(forests)
def test_every_prefix_is_forwarded_exactly_once_at_its_depth(forest):
    trees = list(map(make_tree, forest))
    packed = pack(trees)
    paths = [path_of(packed, index) for index in range(len(packed.input_ids))]
    # the nodes of the trie: every prefix of every sequence from a root to a leaf
    sequences = [tuple(tree.tokens[path].tolist()) for tree in map(flatten, trees) for path in tree.paths()]
    counted = Counter(sequence[: end + 1] for sequence in sequences for end in range(len(sequence)))
    assert len(paths) == len(set(paths)) == unique_tokens(trees)
    assert set(paths) == set(counted) and [counted[path] for path in paths] == packed.copies.tolist()
    assert packed.position_ids.tolist() == [len(path) - 1 for path in paths]
    for k, above in enumerate(paths):  # who sees whom
        seen_by = [k <= q <= packed.subtree_end[k] for q in range(len(paths))]
        assert seen_by == [path[: len(above)] == above for path in paths]


@settings(max_examples=300, deadline=None)
@given(forests)
def test_every_sampled_token_is_scored_once_with_its_own_history(forest):
    packed = pack(trees := list(map(make_tree, forest)))
    scored, seen = {}, Counter()
    for index in np.lexsort((packed.position_ids[packed.predictor], packed.turn, packed.tree)).tolist():
        turn = int(packed.tree[index]), int(packed.turn[index])
        flat, column, label = flatten(trees[turn[0]]), packed.column[index], int(packed.label[index])
        assert (flat.tokens[column], flat.turns[column]) == (label, turn[1])
        scored[*turn, seen[turn]] = path_of(packed, packed.predictor[index]), label
        seen[turn] += 1
    assert len(packed.label) == len(scored)
    assert scored == {
        (number, turn, offset): (tuple(context + action[:offset]), action[offset])
        for number, timesteps in enumerate(forest)
        for turn, (context, action) in enumerate(timesteps)
        for offset in range(len(action))
    }


@given(st.lists(timestep, max_size=5))
def test_flattening_keeps_tokens_turns_and_ancestry(timesteps):
    flat = flatten(tree := make_tree(timesteps))
    assert len(flat.tokens) == tree.num_tokens
    found = sorted(tuple(flat.tokens[path].tolist()) for path in flat.paths())
    assert found == sorted(tuple(sequence.tokens) for sequence in tree.sequences())
    actions = [{} for _ in timesteps]
    for column in (column for path in flat.paths() for column in path if flat.turns[column] >= 0):
        actions[flat.turns[column]][int(column)] = int(flat.tokens[column])
    assert [list(action.values()) for action in actions] == tree.actions()


# Rows and ranks


def test_trees_that_begin_alike_share_a_row_when_they_fit():
    trees = [chain([7, 8, number]) for number in (5, 6, 9)] + [chain([1, 2, 3, number]) for number in (5, 6)]
    assert split(trees, budget=5) == [[3, 4], [0, 1, 2]]
    assert split(trees, budget=10) == [[3, 4, 0, 1, 2]]


@given(forests, st.integers(1, 30))
def test_rows_hold_every_tree_once_and_keep_to_the_budget(forest, budget):
    trees = [flatten(make_tree(timesteps)) for timesteps in forest]
    rows = split(trees, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(trees)))
    assert all(len(row) == 1 or unique_tokens([trees[index] for index in row]) <= budget for row in rows)


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 5))
def test_bins_are_even_in_count_and_near_the_best_load(weights, num_bins):
    bins = _balance(weights, num_bins)
    assert sorted(item for bin in bins for item in bin) == list(range(len(weights)))
    assert max(map(len, bins)) - min(map(len, bins)) <= 1
    loads = [sum(weights[item] for item in bin) for bin in bins]
    assert max(loads) - min(loads) <= 2 * max(weights, default=0)


def test_two_heavy_items_go_to_different_bins():
    assert sorted(map(sorted, _balance([9, 1, 8, 2], 2))) == [[0, 1], [2, 3]]
