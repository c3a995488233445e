"""Projected gradients of turns keep the inner products of the gradients themselves."""

from __future__ import annotations

import pytest
import torch
from support.forests import FOREST, make_tree
from support.models import build_model

from mt_grpo.forward.logps import _PERIOD, SIZE, Projection, TurnGradients, token_logps


def test_inner_products_are_kept_in_the_mean_over_signs():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(700, 40, generator=generator) for _ in range(2))
    other = other + one
    wanted, size = (one * other).sum().item(), (one.norm() * other.norm()).item()
    found = torch.tensor(
        [(Projection([one], seed)([one]) @ Projection([one], seed)([other])).item() for seed in range(40)]
    )
    assert found.mean().item() == pytest.approx(wanted, abs=size / SIZE**0.5)
    assert found.std().item() < 2 * size / SIZE**0.5


def test_matrices_of_low_rank_lose_no_more_than_others():
    """Gradients of linear layers are such: all rows are multiples of one, and heavy columns lie in one place."""
    generator = torch.Generator().manual_seed(1)
    heavy = torch.ones(512)
    heavy[3] = 30.0
    row = torch.randn(512, generator=generator) * heavy
    one, other = (torch.outer(torch.randn(512, generator=generator), row) for _ in range(2))
    size, wanted = (one.norm() * other.norm()).item(), (one * other).sum().item()
    errors = [
        abs((Projection([one], seed)([one]) @ Projection([one], seed)([other])).item() - wanted) for seed in range(20)
    ]
    assert sum(errors) / 20 < 2 * size / SIZE**0.5


def test_what_is_longer_than_the_signs_is_projected_whole():
    longer = torch.zeros(_PERIOD + 7)
    longer[-1] = 2.0
    assert Projection([longer])([longer]).abs().sum().item() == 2.0
    assert Projection([longer])([None]).abs().sum().item() == 0.0


@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_the_gradient_of_a_turn_is_that_of_its_log_probs(tokenizer, forward):
    """In a tree whose history was rewritten too; a masked token adds nothing."""
    model = build_model(tokenizer).eval()
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradients = TurnGradients(model, forward=forward, temperature=0.7)
    project = Projection(parameters)
    for tree in map(make_tree, FOREST):
        wanted = token_logps(model, [tree], forward="turn_by_turn", temperature=0.7)[0]
        for turn, logps in enumerate(wanted):
            found, ours = gradients.of_turn(tree, turn)
            assert found.shape == (SIZE,)
            if not len(logps):
                assert not found.any()
                continue
            exact = project(torch.autograd.grad(logps.sum(), parameters, retain_graph=True, allow_unused=True))
            torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(ours, logps.detach(), rtol=1e-4, atol=1e-5)
            assert not gradients.of_turn(tree, turn, [0] * len(logps))[0].any()
