from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forests import make_tree

from mt_grpo.forward.packing import FlatTree, flatten, pack, split, unique_tokens
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.rollout_batch import balance

token = st.integers(1, 3)  # few ids, so that prefixes meet often
timestep = st.tuples(st.lists(token, min_size=1, max_size=6), st.lists(token, max_size=4))
forests = st.lists(st.lists(timestep, max_size=4), max_size=4)


def prefixes(trees):
    """The nodes of the trie: every prefix of every root-to-leaf sequence."""
    sequences = [tuple(sequence.tokens) for tree in trees for sequence in tree.sequences()]
    return {sequence[: end + 1] for sequence in sequences for end in range(len(sequence))}


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


# The layout


def test_a_shared_prompt_is_laid_out_once():
    packed = pack([chain([1, 2, 3, 4], [2, 3]), chain([1, 2, 5], [2])])
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert packed.parent.tolist() == [-1, 0, 1, 2, 1]
    assert packed.subtree_end.tolist() == [4, 4, 3, 3, 4]
    assert list(zip(packed.predictor.tolist(), packed.label.tolist(), packed.tree.tolist(), strict=True)) == [
        (1, 3, 0),
        (2, 4, 0),
        (1, 5, 1),
    ]


def test_a_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="no token before it"):
        pack([chain([1, 2], [0])])


def test_nothing_packs_to_nothing():
    for packed in (pack([]), pack([TokenTree()])):
        assert len(packed.input_ids) == len(packed.subtree_end) == len(packed.label) == len(packed.turn_order) == 0


@settings(max_examples=300, deadline=None)
@given(forests)
def test_every_prefix_is_forwarded_exactly_once_at_its_depth(forest):
    trees = [make_tree(timesteps) for timesteps in forest]
    packed = pack(trees)
    paths = [path_of(packed, index) for index in range(len(packed.input_ids))]
    assert len(paths) == len(set(paths)) == unique_tokens(trees)
    assert set(paths) == prefixes(trees)
    assert packed.position_ids.tolist() == [len(path) - 1 for path in paths]
    sequences = [tuple(tree.tokens[path].tolist()) for tree in map(flatten, trees) for path in tree.paths()]
    counted = Counter(sequence[: end + 1] for sequence in sequences for end in range(len(sequence)))
    assert [counted[path] for path in paths] == packed.copies.tolist()
    for k, above in enumerate(paths):  # who sees whom
        seen_by = [k <= q <= packed.subtree_end[k] for q in range(len(paths))]
        assert seen_by == [path[: len(above)] == above for path in paths]


def places_in_turns(packed) -> list[int]:
    """Which token of its turn each scored token is."""
    seen, places = Counter(), [0] * len(packed.label)
    for index in packed.turn_order.tolist():
        turn = int(packed.tree[index]), int(packed.turn[index])
        places[index] = seen[turn]
        seen[turn] += 1
    return places


@settings(max_examples=300, deadline=None)
@given(forests)
def test_every_sampled_token_is_scored_once_with_its_own_history(forest):
    trees = [make_tree(timesteps) for timesteps in forest]
    packed = pack(trees)
    scored = {}
    places = places_in_turns(packed)
    for index in range(len(packed.label)):
        key = (int(packed.tree[index]), int(packed.turn[index]), places[index])
        assert key not in scored
        flat, column = flatten(trees[key[0]]), packed.column[index]
        assert (flat.tokens[column], flat.turns[column]) == (packed.label[index], key[1])
        scored[key] = (path_of(packed, packed.predictor[index]), int(packed.label[index]))
    expected = {
        (number, turn, offset): (tuple(context + action[:offset]), action[offset])
        for number, timesteps in enumerate(forest)
        for turn, (context, action) in enumerate(timesteps)
        for offset in range(len(action))
    }
    assert scored == expected


@given(st.lists(timestep, max_size=5))
def test_flattening_keeps_tokens_turns_and_ancestry(timesteps):
    tree = make_tree(timesteps)
    flat = flatten(tree)
    assert len(flat.tokens) == tree.num_tokens
    found = sorted(tuple(flat.tokens[path].tolist()) for path in flat.paths())
    assert found == sorted(tuple(sequence.tokens) for sequence in tree.sequences())
    actions = [[] for _ in timesteps]
    for path in flat.paths():
        for column in path:
            if flat.turns[column] >= 0 and column not in actions[flat.turns[column]]:
                actions[flat.turns[column]].append(int(column))
    assert [[int(flat.tokens[column]) for column in columns] for columns in actions] == tree.actions()


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
    for row in rows:
        assert len(row) == 1 or unique_tokens([trees[index] for index in row]) <= budget


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 5))
def test_bins_are_even_in_count_and_near_the_best_load(weights, num_bins):
    bins = balance(weights, num_bins)
    assert sorted(item for bin in bins for item in bin) == list(range(len(weights)))
    assert max(map(len, bins)) - min(map(len, bins)) <= 1
    loads = [sum(weights[item] for item in bin) for bin in bins]
    assert max(loads) - min(loads) <= 2 * max(weights, default=0)


def test_two_heavy_items_go_to_different_bins():
    assert sorted(map(sorted, balance([9, 1, 8, 2], 2))) == [[0, 1], [2, 3]]
