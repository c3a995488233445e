"""Token trees that meet and fork, and the log-probs and gradients of a model on them."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st

from mt_grpo.forward import Truncation, token_logps
from mt_grpo.forward import attention as kernels
from mt_grpo.token_tree import TokenTree

token = st.integers(1, 3)  # few ids, so that prefixes meet often
timestep = st.tuples(st.lists(token, min_size=1, max_size=8), st.lists(token, max_size=4))
forests = st.lists(st.lists(timestep, min_size=1, max_size=4), min_size=1, max_size=4)
truncations = st.builds(
    Truncation, st.sampled_from([0, 1, 3, 60]), st.sampled_from([1.0, 0.9, 0.4]), st.sampled_from([0.0, 0.05, 0.5])
)
FOREST = [
    [([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6, 7], [8]), ([1, 2, 3, 4, 6, 7, 7], [9, 9, 9])],
    [([1, 2, 3, 4], [5, 6, 9]), ([1, 2, 3, 4, 5, 8, 7], [8, 2])],
    [([1, 2, 3, 4], [5, 6])],
]


def make_tree(timesteps):
    tree = TokenTree()
    for context, action in timesteps:
        tree.add_turn(context, action, [-1.0] * len(action))
    return tree


def measure(model, trees, **options):
    """Log-probabilities of all turns in a row, and the gradient of a weighted sum of them."""
    model.zero_grad()
    logps = token_logps(model, trees, **options)
    assert [[len(turn) for turn in tree] for tree in logps] == [list(map(len, tree.actions())) for tree in trees]
    flat = torch.cat([turn for tree in logps for turn in tree])
    (flat * torch.linspace(1, 2, len(flat))).sum().backward()
    return flat.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def distance(ours, oracle):
    return ((ours - oracle).norm() / oracle.norm()).item()


def assert_same_gradient(found, expected):
    """Gradients by name: to four digits all together and to three each, since one may be a sum of many that cancel."""
    assert found.keys() == expected.keys()
    off = {name: (found[name] - expected[name]).norm() for name in found}
    sizes = {name: expected[name].norm() for name in found}
    whole = torch.stack(list(sizes.values())).norm()
    assert torch.stack(list(off.values())).norm() <= 2e-5 * whole
    assert not {name for name in found if off[name] > 1e-3 * sizes[name] + 1e-6 * whole}


def assert_as_turn_by_turn(model, trees, *ways, within=1e-6, **options):
    """Holds some ways to score trees against one forward a turn: log-probs and gradients."""
    expected = measure(model, trees, forward="turn_by_turn", **options)
    for way in ways or [{}]:
        for ours, theirs in zip(measure(model, trees, **way, **options), expected, strict=True):
            assert distance(ours, theirs) <= within, way


@contextmanager
def flex_on_a_cpu():
    """FlexAttention is compiled on GPUs only, and warns where it is not."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(kernels, "_compiled_flex", lambda device: kernels._uncompiled_flex)
        yield
