import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_grpo.token_tree import TokenTree, common_prefix
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn, visible


def make_tree(*timesteps):
    tree = TokenTree()
    for context, action in timesteps:
        tree.add_turn(context, action, [-0.5 - token for token in action])
    return tree


def rows(tree):
    return [(sequence.tokens, sequence.mask, sequence.turns) for sequence in tree.sequences()]


# Worked examples


def test_a_context_that_extends_the_path_stays_one_sequence():
    tree = make_tree(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]))
    assert rows(tree) == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1], [-1, -1, 0, -1, 1, 1])]
    assert tree.sequences()[0].logprobs == [0.0, 0.0, -3.5, 0.0, -5.5, -6.5]
    assert tree.num_tokens == 6 and tree.num_turns == 2
    assert tree.path() == [1, 2, 3, 4, 5, 6]


def test_a_rewritten_history_forks_at_the_longest_common_prefix():
    tree = make_tree(([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 4], [6]))
    assert rows(tree) == [
        ([1, 2, 3, 4, 5], [0, 0, 1, 0, 1], [-1, -1, 0, -1, 1]),
        ([1, 2, 4, 6], [0, 0, 0, 1], [-1, -1, -1, 2]),
    ]
    assert tree.num_tokens == 7


def test_an_action_cut_by_a_later_context_is_trained_once():
    tree = make_tree(([1], [2, 3, 4]), ([1, 2, 9], [5]))
    assert rows(tree) == [([1, 2, 3, 4], [0, 1, 1, 1], [-1, 0, 0, 0]), ([1, 2, 9, 5], [0, 0, 0, 1], [-1, 0, -1, 1])]
    assert [sequence.logprobs for sequence in tree.sequences()] == [[0.0, -2.5, -3.5, -4.5], [0.0, -2.5, 0.0, -5.5]]
    assert tree.actions() == [[2, 3, 4], [5]]


def test_the_same_action_sampled_twice_is_trained_twice():
    tree = make_tree(([1, 2], [3]), ([1, 2], [3]))
    assert rows(tree) == [([1, 2, 3], [0, 0, 1], [-1, -1, 0]), ([1, 2, 3], [0, 0, 1], [-1, -1, 1])]
    assert tree.num_tokens == 4


def test_a_copy_of_an_action_in_a_later_context_is_context():
    tree = make_tree(([1, 2], [3]), ([7, 3], [4]))
    assert rows(tree)[1] == ([7, 3, 4], [0, 0, 1], [-1, -1, 1])


def test_sequences_are_ordered_by_their_latest_turn():
    tree = make_tree(([1], [2]), ([5], [6]), ([1, 2, 3], [4]))
    assert [sequence.tokens for sequence in tree.sequences()] == [[5, 6], [1, 2, 3, 4]]
    tree = make_tree(([1], [2, 3]), ([5], [6]), ([1, 2, 9], [7]))  # the rest of the cut action is stored last
    assert [sequence.tokens for sequence in tree.sequences()] == [[1, 2, 3], [5, 6], [1, 2, 9, 7]]


def test_a_turn_without_tokens_counts_as_a_turn():
    tree = make_tree(([1, 2], []), ([1, 2], [3]))
    assert tree.num_turns == 2 and tree.actions() == [[], [3]]
    assert rows(tree) == [([1, 2, 3], [0, 0, 1], [-1, -1, 1])]


def test_an_empty_tree_has_no_sequence():
    tree = TokenTree()
    assert (tree.sequences(), tree.num_tokens, tree.actions(), tree.path()) == ([], 0, [], [])


def test_paths_of_inner_nodes_end_at_the_node():
    tree = make_tree(([1, 2], [3]), ([1, 2, 3, 4], [5]))
    assert [tree.path(index) for index in range(4)] == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("length", range(8))
def test_the_tail_is_the_end_of_the_latest_path_as_long_as_asked(length):
    tree = TokenTree()
    tree.add_turn([1, 2, 3], [4, 5], [0.0, 0.0])
    tree.add_turn([1, 2, 3, 4, 5, 6], [7], [0.0])
    assert tree.tail(length) == [1, 2, 3, 4, 5, 6, 7][7 - length :]
    assert tree.tail(100) == tree.path()


def test_what_is_added_as_a_turn_may_be_changed_afterwards():
    tree, context, action, logprobs = TokenTree(), [1, 2], [3], [-0.1]
    tree.add_turn(context, action, logprobs)
    for values in (context, action, logprobs):
        values.append(9)
    assert tree.path() == [1, 2, 3] and tree.sequences()[0].logprobs == [0.0, 0.0, -0.1]


@pytest.mark.parametrize("add", ["add_turn", "extend"])
def test_an_action_with_missing_log_probs_leaves_the_tree_alone(add):
    tree = make_tree(([1, 2], [3, 4]))
    with pytest.raises(ValueError, match="An action of 2 tokens came with 1 log-probabilities"):
        getattr(tree, add)([1, 2, 3, 9], [5, 6], [-0.5])  # `add_turn` has cut the action 3 4 by then
    assert tree.path() == [1, 2, 3, 4] and tree.actions() == [[3, 4]] and tree.num_turns == 1
    tree.extend([7], [8], [-0.5])
    assert tree.path() == [1, 2, 3, 4, 7, 8]


def test_trees_are_equal_when_their_nodes_are():
    assert make_tree(([1], [2])) == make_tree(([1], [2]))
    assert make_tree(([1], [2])) != make_tree(([1], [3]))
    assert make_tree(([1], [2])) != "a tree"


@pytest.mark.parametrize("difference", range(9))
@pytest.mark.parametrize("start", [0, 3])
def test_the_common_prefix_ends_at_the_first_difference(difference, start):
    tokens = list(range(8))
    other = [9] * start + tokens[:difference] + [-1] + tokens[difference + 1 :]
    assert common_prefix(tokens, other, start) == difference


# Properties, over trajectories that extend, rewrite, cut and repeat their history

TOKENS = st.lists(st.integers(0, 2), max_size=4)  # few ids, so that paths often meet by chance
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "rewrite", "truncate", "repeat", "fresh"]), TOKENS, TOKENS, st.integers(0, 40)
    ),
    min_size=1,
    max_size=10,
)


def build_timesteps(steps):
    """[(context, action)] of which most contexts are related to earlier ones."""
    timesteps = []
    for kind, tokens, action, choice in steps:
        context, earlier = list(tokens), timesteps[-1] if timesteps else ([], [])
        path = earlier[0] + earlier[1]
        cut = choice % (len(path) + 1)
        if kind == "extend":
            context = path + tokens
        elif kind == "rewrite":
            context = path[:cut] + tokens + path[cut + 1 :]
        elif kind == "truncate":
            context = path[:cut]
        elif kind == "repeat" and timesteps:
            context = list(timesteps[choice % len(timesteps)][0])
        timesteps.append((context, action))
    return timesteps


def build_tree(timesteps):
    tree = TokenTree()
    for turn, (context, action) in enumerate(timesteps):
        tree.add_turn(context, action, [-float(turn) - position / 10 for position in range(len(action))])
    return tree


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


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_actions_are_what_was_added_in_order(steps):
    timesteps = build_timesteps(steps)
    assert build_tree(timesteps).actions() == [action for _, action in timesteps]


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_every_action_token_is_trained_in_exactly_one_sequence(steps):
    timesteps = build_timesteps(steps)
    trained = {}
    for sequence in build_tree(timesteps).sequences():
        lists = zip(sequence.tokens, sequence.mask, sequence.turns, sequence.logprobs, strict=True)
        for token, mask, turn, logprob in lists:
            assert turn >= 0 or (mask == 0 and logprob == 0.0)
            if mask:
                trained.setdefault(turn, []).append((token, logprob))
    assert trained == {
        turn: [(token, -float(turn) - position / 10) for position, token in enumerate(action)]
        for turn, (_, action) in enumerate(timesteps)
        if action
    }


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_every_turn_is_a_path_of_the_tree(steps):
    timesteps = build_timesteps(steps)
    sequences = build_tree(timesteps).sequences()
    for turn, (context, action) in enumerate(timesteps):
        end = len(context) + len(action)
        assert not end or any(
            sequence.tokens[:end] == context + action
            and (not action or sequence.turns[len(context) : end] == [turn] * len(action))
            for sequence in sequences
        )


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_shared_prefixes_are_stored_once(steps):
    timesteps, trie = build_timesteps(steps), BruteForceTrie()
    for context, action in timesteps:
        trie.add(context, action)
    assert build_tree(timesteps).num_tokens == len(trie.children) - 1


@settings(max_examples=60, deadline=None)
@given(STEPS, TOKENS, TOKENS)
def test_extend_equals_a_turn_with_the_full_context(steps, suffix, action):
    timesteps = build_timesteps(steps)
    path = timesteps[-1][0] + timesteps[-1][1]
    paths = [context + earlier for context, earlier in timesteps[:-1]]
    if any(earlier[: len(path)] == path for earlier in paths):
        suffix = [7, *suffix]  # another branch goes on from the same tokens: only new tokens leave no choice of branch
    by_suffix, by_context = build_tree(timesteps), build_tree(timesteps)
    by_suffix.extend(suffix, action, [-1.0] * len(action))
    by_context.add_turn(path + suffix, action, [-1.0] * len(action))
    assert by_suffix.path() == by_context.path() == path + suffix + action
    assert by_suffix.num_tokens == by_context.num_tokens
    assert sorted(map(str, by_suffix.sequences())) == sorted(map(str, by_context.sequences()))


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_tree_survives_json_and_still_grows_the_same(steps):
    tree = build_tree(build_timesteps(steps))
    copy = TokenTree.from_dict(json.loads(json.dumps(tree.to_dict())))
    assert copy == tree
    for each in (tree, copy):
        each.extend([1], [2], [-1.0])
        each.add_turn([0, 1, 2], [1], [-1.0])
    assert copy == tree and copy.sequences() == tree.sequences()


def test_a_long_random_trajectory_equals_the_brute_force_trie():
    rng, trie, timesteps, path = random.Random(0), BruteForceTrie(), [], []
    for _ in range(60):
        cut = len(path) if rng.random() < 0.7 else rng.randint(0, len(path))
        context, action = path[:cut] + [rng.randint(0, 9) for _ in range(5)], [rng.randint(0, 9) for _ in range(5)]
        timesteps.append((context, action))
        trie.add(context, action)
        path = context + action
    assert build_tree(timesteps).num_tokens == len(trie.children) - 1


# Turns and trajectories


def test_a_turn_without_content_has_no_text():
    assert Turn(0, {"role": "assistant", "content": None}).text == ""
    assert Turn(0, {"role": "assistant", "content": "hi"}).text == "hi"


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


def test_only_the_reply_of_a_tool_that_ran_is_a_result():
    reply, ran, refused = {"role": "tool", "content": "x"}, ToolCall("f", executed=True), ToolCall("f", error="no")
    assert Turn(0, {}, [refused, ran], [reply]).has_result
    assert not Turn(0, {}, [ran]).has_result
    assert not Turn(0, {}, [refused], [reply]).has_result
    assert not Turn(0, {}, [], [reply]).has_result


@pytest.mark.parametrize(
    ("calls", "error", "attempts", "failures"),
    [
        ([], None, 0, 0),
        ([], "not JSON", 1, 1),
        ([None], None, 1, 0),
        ([None, "boom", "boom"], None, 3, 2),
    ],
)
def test_attempts_are_parsed_calls_or_one_that_was_not_parsed(calls, error, attempts, failures):
    turn = Turn(0, {}, [ToolCall("f", error=each) for each in calls], error=error)
    assert (turn.num_attempts, turn.num_failures) == (attempts, failures)


def make_trajectory(**kwargs):
    call = ToolCall("search", {"query": "Lima"}, "Peru", None, True, 0.1, "id-1")
    reply = {"role": "tool", "content": "Peru"}
    return Trajectory(
        prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        turns=[
            Turn(0, {"role": "assistant", "content": "a"}, [call], [reply], "stop", None, 3, 0.5, 7),
            Turn(1, {"role": "assistant", "content": "b"}),
        ],
        tree=make_tree(([1, 2], [3]), ([1, 4], [5])),
        answer="Peru",
        session="s-1",
        row={"answer": ["Peru"]},
        rewards={"outcome": {"em": 1.0}, "turn": {"tool": [0.2, None]}},
        seconds=1.5,
        **kwargs,
    )


def test_the_completion_is_every_message_after_the_prompt():
    trajectory = make_trajectory()
    assert [message["content"] for message in trajectory.completion] == ["a", "Peru", "b"]
    assert [message["content"] for message in trajectory.messages] == ["s", "q", "a", "Peru", "b"]


@pytest.mark.parametrize("reason", [None, *StopReason])
def test_a_trajectory_survives_json(reason):
    trajectory = make_trajectory(stop_reason=reason, error="x" if reason else None)
    copy = Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict())))
    assert copy == trajectory
    assert copy.stop_reason is reason and isinstance(copy.turns[0].tool_calls[0], ToolCall)


def test_a_record_has_the_whole_conversation_as_messages():
    trajectory = make_trajectory(stop_reason=StopReason.ANSWERED)
    record = json.loads(json.dumps(trajectory.to_dict()))
    assert [message["content"] for message in record["messages"]] == ["s", "q", "a", "Peru", "b"]
    del record["messages"]
    assert Trajectory.from_dict(record) == trajectory


def test_a_limit_truncates_and_an_end_or_a_failure_does_not():
    truncated = {reason for reason in StopReason if reason.is_truncated}
    assert truncated == {StopReason.LENGTH, StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL, StopReason.TIMEOUT}
