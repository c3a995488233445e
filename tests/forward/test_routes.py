"""Routes of mixtures: what was recorded is replayed, on trees, in every layer and for every kind of router."""

import copy
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mixtures import MIXTURES, build_mixture, with_other_routers
from support.models import build_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import NemotronHConfig

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import token_logps
from mt_grpo.forward.attention import CURRENT, TreeLayout
from mt_grpo.forward.model import enable_trees
from mt_grpo.forward.packing import FlatTree, flatten, pack
from mt_grpo.forward.routes import NO_ROUTE, Recorder, route_shape
from mt_grpo.token_tree import Routes, TokenTree

CONTEXT, ACTION = [1, 2, 3, 4, 5], [6, 7, 8]
LATER, LAST = [9, 10], [11, 12]
LEFT = [*CONTEXT[:3], 20, 21]


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request):
    return build_mixture(request.param)


def recorded(model, ids: list[int]) -> np.ndarray:
    """Routes of all tokens but the last, which an engine has not sent anywhere yet."""
    with Recorder(model) as recorder:
        model(torch.tensor([ids]))
    return recorder.routes(1)[0, :-1]


def as_routes(found: np.ndarray, first: int = 0) -> Routes:
    return Routes(first, found.shape[1], found[first:].tobytes())


def conversation(sampler) -> TokenTree:
    """Two turns, the second of which goes on, and a third whose context leaves the first one's."""
    tree = TokenTree()
    tree.add_turn(CONTEXT, ACTION, [0.0] * 3, as_routes(recorded(sampler, CONTEXT + ACTION)))
    whole = recorded(sampler, CONTEXT + ACTION + LATER + LAST)
    tree.extend(LATER, LAST, [0.0] * 2, as_routes(whole, tree.routed))
    tree.add_turn(LEFT, [22], [0.0], as_routes(recorded(sampler, [*LEFT, 22])))
    return tree


@contextmanager
def by_routes(model, routes: np.ndarray):
    """Has a forward that is no tree choose by routes."""
    layout = TreeLayout(pack([FlatTree(np.arange(len(routes)), np.full(len(routes), -1))]))
    token = CURRENT.set(layout)
    with model._replayer.replaying(layout, routes, (0, 0)):
        yield
    CURRENT.reset(token)


def assert_replayed(model, sampler, logps: torch.Tensor, ids: list[int]) -> None:
    """Holds a turn's log-probs against one sequence, each layer of which is given the routes: no tree, no packing."""
    routes = recorded(sampler, ids)
    with by_routes(model, np.concatenate([routes, np.full((1, routes.shape[1]), NO_ROUTE, np.uint8)])):
        logits = model(torch.tensor([ids])).logits
    expected = logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(logps, expected[-len(logps) :], rtol=0, atol=1e-5)


def test_a_model_replays_its_own_routes_without_a_difference(mixture):
    ids = torch.randint(64, (2, 9))
    with Recorder(mixture) as recorder:
        plain = mixture(ids).logits
    enable_trees(model := copy.deepcopy(mixture))
    with by_routes(model, recorder.routes(2).reshape(18, -1)):
        torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=1e-6)
    counts = model._replayer.take_counts()
    assert counts.differing == 0 and counts.routed > 0


def test_a_tree_takes_the_experts_that_sampled_its_tokens(mixture):
    sampler, model = with_other_routers(mixture, noise=0.5), copy.deepcopy(mixture)
    tree = conversation(sampler)
    logps = token_logps(model, [tree])[0]
    assert model._replayer.take_counts().differing > 0
    for turn, ids in ((1, CONTEXT + ACTION + LATER + LAST), (2, [*LEFT, 22])):
        assert_replayed(model, sampler, logps[turn], ids)
    plain = TokenTree.from_dict(tree.to_dict())
    for node in plain.nodes:
        node.routes = b""
    assert max((one - two).abs().max() for one, two in zip(logps, token_logps(model, [plain])[0], strict=True)) > 1e-3


def test_a_router_of_one_group_chooses_once():
    """It scores its group by the best two experts, as many as it chooses."""
    model = build_mixture("deepseek_v3", n_group=1, topk_group=1)
    sampler = with_other_routers(model, noise=0.5)
    assert_replayed(model, sampler, token_logps(model, [conversation(sampler)])[0][2], [*LEFT, 22])


@pytest.mark.parametrize("of_fsdp", [False, True])
def test_a_layer_that_is_computed_again_replays_its_own_row(mixture, of_fsdp):
    trees, gradients = [conversation(with_other_routers(mixture, noise)) for noise in (0.3, 0.9)], []
    for checkpointed in (False, True):
        enable_trees(model := copy.deepcopy(mixture).train())
        if checkpointed and of_fsdp:
            for number, block in enumerate(model.model.layers):
                model.model.layers[number] = checkpoint_wrapper(block)
        elif checkpointed:
            model.gradient_checkpointing_enable()
        # both forwards come before the backward of either
        sum(logps.sum() for tree in trees for logps in token_logps(model, [tree])[0]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_a_forward_that_is_no_tree_is_left_to_its_own_routers(mixture):
    model, ids = copy.deepcopy(mixture), torch.tensor([CONTEXT])
    plain = model(ids).logits
    token_logps(model, [conversation(with_other_routers(mixture))])
    torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0)


def test_the_first_conversation_routes_what_conversations_share(mixture):
    one, other = (conversation(with_other_routers(mixture, noise)) for noise in (0.5, 1.5))
    packed = pack([one, other])
    np.testing.assert_array_equal(packed.routes, pack([one]).routes)
    seen, differing = packed.shared_routes
    assert seen == (flatten(other).routes != NO_ROUTE).any(axis=1).sum() and 0 < differing <= seen
    assert pack([one, one]).shared_routes == (seen, 0)


def test_a_token_without_a_route_goes_where_its_router_sends_it(mixture):
    tree = TokenTree()
    tree.add_turn(CONTEXT, ACTION, [0.0] * 3)
    expected = token_logps(copy.deepcopy(mixture), [tree])[0][0]
    found = recorded(mixture, CONTEXT + ACTION)
    tree.nodes[0].routes = found[:2].tobytes() + b"\xff" * found.shape[1] * 3
    torch.testing.assert_close(token_logps(copy.deepcopy(mixture), [tree])[0][0], expected, rtol=0, atol=1e-5)


def test_routes_of_another_model_are_refused(mixture):
    tree = TokenTree()
    tree.add_turn(CONTEXT, ACTION, [0.0] * 3, Routes(0, 5, bytes(35)))
    with pytest.raises(UnsupportedModelError, match="routes have 5 bytes for each token"):
        token_logps(copy.deepcopy(mixture), [tree])


def test_a_model_has_routes_where_it_has_experts(tokenizer):
    model = build_model(tokenizer)
    with Recorder(model) as recorder:
        model(torch.tensor([CONTEXT]))
    assert route_shape(model.config) is None and recorder.routes(1) is None
    blocks = ["linear_attention", "mlp", "full_attention"]  # of a Nemotron H
    for layers in (blocks, [*blocks, "moe"]):
        assert (route_shape(NemotronHConfig(layers_block_type=layers)) is None) == ("moe" not in layers)


def test_many_experts_have_indices_of_two_bytes():
    model = build_mixture(num_experts=300)
    assert route_shape(model.config).width == 3 * 2 * 2
    logps = token_logps(model, [conversation(model)])[0]
    assert model._replayer.take_counts().differing == 0 and all(each.isfinite().all() for each in logps)


def test_a_tree_counts_its_first_tokens_that_have_routes():
    tree, routed = TokenTree(), []
    tree.add_turn([1, 2], [3], [0.0], Routes(0, 2, b"ab" * 3))
    routed.append(tree.routed)
    for turn in (([4], [5, 6], [0.0] * 2, Routes(3, 2, b"ab" * 2)), ([7], [8], [0.0])):
        tree.extend(*turn)
        routed.append(tree.routed)
    assert routed == [3, 5, 5]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tree_keeps_the_route_that_a_token_had_first(data):
    """Against a dictionary from paths to routes, for turns that go on, leave each other, and know only some routes."""
    tree, known = TokenTree(), {}
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    for turn in range(data.draw(st.integers(1, 5))):
        context, action = data.draw(tokens), data.draw(tokens)
        goes_on = bool(turn) and data.draw(st.booleans())
        whole = (tree.path() if goes_on else []) + context + action
        first = data.draw(st.integers(0, tree.routed)) if goes_on else 0
        size = data.draw(st.integers(0, len(whole) - first))
        add = tree.extend if goes_on else tree.add_turn
        add(context, action, [0.0] * len(action), Routes(first, 2, bytes([turn, 7]) * size))
        for place in range(first, first + size):
            known.setdefault(tuple(whole[: place + 1]), bytes([turn, 7]))
    assert TokenTree.from_dict(tree.to_dict()) == tree
    for index, node in enumerate(tree.nodes):
        assert len(node.routes) in (0, 2 * len(node.tokens))
        path = tuple(tree.path(index))
        for place in range(len(node.routes) // 2):
            route = node.routes[2 * place : 2 * place + 2]
            end = len(path) - len(node.tokens) + place + 1
            assert route == b"\xff\xff" or route[1] == 7 and path[:end] in known
