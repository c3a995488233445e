"""Trees of tokens against a trie of one node a token, and what trajectories say of themselves."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_grpo.token_tree import TokenTree, common_prefix
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn, visible


def build_tree(timesteps):
    """Of [(context, action)]; each token has a log-prob of its own."""
    tree = TokenTree()
    for turn, (context, action) in enumerate(timesteps):
        tree.add_turn(context, action, [-float(turn + 1) - place / 10 for place in range(len(action))])
    return tree


@pytest.mark.parametrize(
    ("timesteps", "expected"),
    [
        ([([1, 2], [3]), ([1, 2, 3, 4], [5, 6])], [([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1], [-1, -1, 0, -1, 1, 1])]),
        (
            [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 4], [6])],
            [
                ([1, 2, 3, 4, 5], [0, 0, 1, 0, 1], [-1, -1, 0, -1, 1]),
                ([1, 2, 4, 6], [0, 0, 0, 1], [-1, -1, -1, 2]),
            ],
        ),
        (
            [([1], [2, 3, 4]), ([1, 2, 9], [5])],
            [([1, 2, 3, 4], [0, 1, 1, 1], [-1, 0, 0, 0]), ([1, 2, 9, 5], [0, 0, 0, 1], [-1, 0, -1, 1])],
        ),
        (
            [([1, 2], [3]), ([1, 2], [3])],
            [([1, 2, 3], [0, 0, 1], [-1, -1, 0]), ([1, 2, 3], [0, 0, 1], [-1, -1, 1])],
        ),
        ([([1, 2], [3]), ([7, 3], [4])], [([1, 2, 3], [0, 0, 1], [-1, -1, 0]), ([7, 3, 4], [0, 0, 1], [-1, -1, 1])]),
        ([([1, 2], []), ([1, 2], [3])], [([1, 2, 3], [0, 0, 1], [-1, -1, 1])]),
        ([], []),
    ],
    ids=["goes on", "rewritten", "cut action", "sampled twice", "copied", "without tokens", "empty"],
)
def test_worked_examples(timesteps, expected):
    tree = build_tree(timesteps)
    assert [(each.tokens, each.mask, each.turns) for each in tree.sequences()] == expected
    assert (tree.num_turns, tree.path()) == (len(timesteps), sum(timesteps[-1], []) if timesteps else [])


@pytest.mark.parametrize(
    ("timesteps", "expected"),
    [
        ([([1], [2]), ([5], [6]), ([1, 2, 3], [4])], [[5, 6], [1, 2, 3, 4]]),
        ([([5], [6]), ([1], [2]), ([1, 2, 3], [])], [[5, 6], [1, 2, 3]]),
        # the rest of the cut action is stored last
        ([([1], [2, 3]), ([5], [6]), ([1, 2, 9], [7])], [[1, 2, 3], [5, 6], [1, 2, 9, 7]]),
    ],
)
def test_sequences_are_ordered_by_their_latest_turn(timesteps, expected):
    assert [sequence.tokens for sequence in build_tree(timesteps).sequences()] == expected


def test_paths_and_tails_end_where_they_are_asked_to():
    tree = build_tree([([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7])])
    assert [len(tree.path(index)) for index in range(4)] == [3, 5, 6, 7]
    assert [tree.tail(length) for length in range(8)] == [[1, 2, 3, 4, 5, 6, 7][7 - length :] for length in range(8)]
    assert tree.tail(100) == tree.path() == tree.path(3)


def test_what_is_added_as_a_turn_may_be_changed_afterwards():
    tree, context, action, logprobs = TokenTree(), [1, 2], [3], [-0.1]
    tree.add_turn(context, action, logprobs)
    for values in (context, action, logprobs):
        values.append(9)
    assert tree.path() == [1, 2, 3] and tree.sequences()[0].logprobs == [0.0, 0.0, -0.1]
    tree.add_turn((1, 2, 3, 4), (5,), (-0.2,))  # of any sequence
    assert (tree.path(), tree.num_sequences, tree.tail(2)) == ([1, 2, 3, 4, 5], 1, [4, 5])


@pytest.mark.parametrize("add", ["add_turn", "extend"])
def test_an_action_with_missing_log_probs_leaves_the_tree_alone(add):
    tree = build_tree([([1, 2], [3, 4])])
    with pytest.raises(ValueError, match="An action of 2 tokens came with 1 log-probabilities"):
        getattr(tree, add)([1, 2, 3, 9], [5, 6], [-0.5])  # `add_turn` has cut the action 3 4 by then
    assert (tree.path(), tree.actions(), tree.num_turns) == ([1, 2, 3, 4], [[3, 4]], 1)
    tree.extend([7], [8], [-0.5])
    assert tree.path() == [1, 2, 3, 4, 7, 8]


def test_trees_are_equal_when_their_nodes_are():
    assert build_tree([([1], [2])]) == build_tree([([1], [2])])
    assert build_tree([([1], [2])]) not in (build_tree([([1], [3])]), "a tree")


@pytest.mark.parametrize("difference", range(9))
@pytest.mark.parametrize("start", [0, 3])
def test_the_common_prefix_ends_at_the_first_difference(difference, start):
    tokens = list(range(8))
    other = [9] * start + tokens[:difference] + [-1] + tokens[difference + 1 :]
    assert common_prefix(tokens, other, start) == difference


# Properties, over trajectories that extend, rewrite, cut and repeat their history

TOKENS = st.lists(st.integers(0, 2), max_size=4)  # few ids, so that paths often meet by chance
STEP = st.tuples(
    st.sampled_from(["extend", "rewrite", "truncate", "repeat", "fresh"]), TOKENS, TOKENS, st.integers(0, 40)
)


def as_timesteps(steps):
    """[(context, action)] of which most contexts are related to earlier ones."""
    timesteps = []
    for kind, tokens, action, choice in steps:
        path = sum(timesteps[-1], []) if timesteps else []
        cut = choice % (len(path) + 1)
        contexts = {"extend": path + tokens, "rewrite": path[:cut] + tokens + path[cut + 1 :], "truncate": path[:cut]}
        if kind == "repeat" and timesteps:
            contexts[kind] = list(timesteps[choice % len(timesteps)][0])
        timesteps.append((contexts.get(kind, list(tokens)), action))
    return timesteps


TIMESTEPS = st.lists(STEP, min_size=1, max_size=10).map(as_timesteps)


class BruteForceTrie:
    """One node a token. Contexts share nodes; every action gets a branch of its own."""

    def __init__(self):
        self.children = [[]]  # of each node: [(token, node)]

    def add(self, context, action):
        node, depth = max(self.ends(0, context, 0), key=lambda end: end[1])
        for token in context[depth:] + action:
            self.children.append([])
            self.children[node].append((token, len(self.children) - 1))
            node = len(self.children) - 1

    def ends(self, node, context, depth):
        yield node, depth
        for token, child in self.children[node]:
            if depth < len(context) and token == context[depth]:
                yield from self.ends(child, context, depth + 1)


def check_tree(timesteps):
    tree, trie, trained = build_tree(timesteps), BruteForceTrie(), {}
    sequences = tree.sequences()
    assert tree.actions() == [action for _, action in timesteps]
    for turn, (context, action) in enumerate(timesteps):
        trie.add(context, action)
        end = len(context) + len(action)
        assert not end or any(
            sequence.tokens[:end] == context + action
            and (not action or sequence.turns[len(context) : end] == [turn] * len(action))
            for sequence in sequences
        )
    assert tree.num_tokens == len(trie.children) - 1  # shared prefixes are stored once
    for sequence in sequences:
        for token, mask, turn, logprob in zip(
            sequence.tokens, sequence.mask, sequence.turns, sequence.logprobs, strict=True
        ):
            assert turn >= 0 or (mask == 0 and logprob == 0.0)
            assert turn < 0 or token in timesteps[turn][1] and logprob <= -1.0
            if mask:
                trained.setdefault(turn, []).append((token, logprob))
    assert trained == {  # each token in exactly one sequence
        turn: [(token, -float(turn + 1) - place / 10) for place, token in enumerate(action)]
        for turn, (_, action) in enumerate(timesteps)
        if action
    }


@settings(max_examples=150, deadline=None)
@given(TIMESTEPS)
def test_a_tree_is_the_trie_of_its_turns(timesteps):
    check_tree(timesteps)


def test_a_long_random_trajectory_is_too():
    rng, timesteps, path = random.Random(0), [], []
    for _ in range(60):
        cut = len(path) if rng.random() < 0.7 else rng.randint(0, len(path))
        timesteps.append((path[:cut] + [rng.randint(0, 9) for _ in range(5)], [rng.randint(0, 9) for _ in range(5)]))
        path = sum(timesteps[-1], [])
    check_tree(timesteps)


@settings(max_examples=60, deadline=None)
@given(TIMESTEPS, TOKENS, TOKENS)
def test_extend_equals_a_turn_with_the_full_context(timesteps, suffix, action):
    *paths, path = (context + earlier for context, earlier in timesteps)
    if any(earlier[: len(path)] == path for earlier in paths):
        suffix = [7, *suffix]  # another branch goes on from the same tokens: only new tokens leave no choice of branch
    by_suffix, by_context = build_tree(timesteps), build_tree(timesteps)
    by_suffix.extend(suffix, action, [-1.0] * len(action))
    by_context.add_turn(path + suffix, action, [-1.0] * len(action))
    assert by_suffix.path() == by_context.path() == path + suffix + action
    assert by_suffix.num_tokens == by_context.num_tokens
    assert sorted(map(str, by_suffix.sequences())) == sorted(map(str, by_context.sequences()))


@settings(max_examples=60, deadline=None)
@given(TIMESTEPS)
def test_a_tree_survives_json_and_still_grows_the_same(timesteps):
    tree = build_tree(timesteps)
    copy = TokenTree.from_dict(json.loads(json.dumps(tree.to_dict())))
    assert copy == tree
    for each in (tree, copy):
        each.extend([1], [2], [-1.0])
        each.add_turn([0, 1, 2], [1], [-1.0])
    assert copy == tree and copy.sequences() == tree.sequences()


# Turns and trajectories


def test_a_record_has_what_a_tool_returned_as_json():
    class Found:
        def __str__(self):
            return "found"

    returned = [{"n": 1}, [Found()], {(1, 2): 3}]
    shown = ToolCall("f", parts=[{"type": "text", "text": "x"}], returned=[1])  # its parts are what it returned
    turn = Turn(0, {}, [*(ToolCall("f", returned=value) for value in returned), ToolCall("f"), shown])
    assert [call["returned"] for call in turn.to_dict()["tool_calls"]] == [{"n": 1}, ["found"], None, None, None]
    assert [call.returned for call in turn.tool_calls] == [*returned, None, [1]]


def test_control_characters_are_visible_at_any_depth():
    assert visible({"a\x1b": ["\x07b\n", 1]}) == {"a\\x1b": ["\\x07b\n", 1]}


RAN, REFUSED, REPLY = ToolCall("f", executed=True), ToolCall("f", error="no"), {"role": "tool", "content": "x"}


@pytest.mark.parametrize(
    ("calls", "replies", "has"),
    [([REFUSED, RAN], [REPLY], True), ([RAN], [], False), ([REFUSED], [REPLY], False), ([], [REPLY], False)],
)
def test_only_the_reply_of_a_tool_that_ran_is_a_result(calls, replies, has):
    assert Turn(0, {}, calls, replies).has_result is has


@pytest.mark.parametrize(
    ("calls", "error", "counted"),
    [([], None, (0, 0)), ([], "not JSON", (1, 1)), ([RAN], None, (1, 0)), ([RAN, REFUSED, REFUSED], None, (3, 2))],
)
def test_attempts_are_parsed_calls_or_one_that_was_not_parsed(calls, error, counted):
    turn = Turn(0, {}, calls, error=error)
    assert (turn.num_attempts, turn.num_failures) == counted


@pytest.mark.parametrize("reason", [None, *StopReason])
def test_a_trajectory_survives_json(reason):
    call = ToolCall("search", {"query": "Lima"}, "Peru", None, True, 0.1, "id-1")
    trajectory = Trajectory(
        prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        turns=[
            Turn(0, {"role": "assistant", "content": "a"}, [call], [REPLY], "stop", None, 3, 0.5, 7),
            Turn(1, {"role": "assistant", "content": None}),
        ],
        tree=build_tree([([1, 2], [3]), ([1, 4], [5])]),
        answer="Peru",
        session="s-1",
        row={"answer": ["Peru"]},
        rewards={"outcome": {"em": 1.0}, "turn": {"tool": [0.2, None]}},
        seconds=1.5,
        stop_reason=reason,
        error="x" if reason else None,
    )
    record = json.loads(json.dumps(trajectory.to_dict()))
    copy = Trajectory.from_dict(record)
    assert copy == trajectory
    assert copy.stop_reason is reason and isinstance(copy.turns[0].tool_calls[0], ToolCall)
    assert [turn.text for turn in copy.turns] == ["a", ""]
    assert [message["content"] for message in copy.completion] == ["a", "x", None]
    assert record.pop("messages") == copy.messages == trajectory.prompt + trajectory.completion
    assert Trajectory.from_dict(record) == trajectory


def test_a_limit_truncates_and_an_end_or_a_failure_does_not():
    truncated = {reason for reason in StopReason if reason.is_truncated}
    assert truncated == {StopReason.LENGTH, StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL, StopReason.TIMEOUT}
