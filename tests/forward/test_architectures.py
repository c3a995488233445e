"""Every kind of attention and of output layer scores packed trees as one forward per turn does."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from support.architectures import KINDS, build_random
from transformers import GPT2Config, GPT2LMHeadModel

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import kernels
from mt_grpo.forward.logps import token_logps
from mt_grpo.forward.model import enable_trees
from mt_grpo.token_tree import TokenTree


def forest(seed=0, prompt=12):
    """Three trajectories of one prompt whose turns fork anywhere, longer than every window and chunk."""
    draw = np.random.default_rng(seed)

    def take(count):
        return draw.integers(3, 96, size=count).tolist()

    trees, first = [], take(prompt)
    for _ in range(3):
        tree, history = TokenTree(), first
        for _ in range(5):
            if draw.random() < 0.5:
                history = history[: int(draw.integers(1, len(history) + 1))]
            context, action = history + take(int(draw.integers(1, 14))), take(8)
            tree.add_turn(context, action, [0.0] * 8)
            history = context + action
        trees.append(tree)
    return trees


def score(model, trees, **options):
    model.zero_grad()
    logps = torch.cat([turn for tree in token_logps(model, trees, **options) for turn in tree])
    (logps * torch.linspace(0.5, 1.5, len(logps))).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logps.detach(), gradient


@pytest.fixture(scope="module")
def trees():
    return forest()


@pytest.mark.parametrize("kind", KINDS)
def test_trees_score_as_one_forward_per_turn(kind, trees):
    model = build_random(kind)
    untouched = copy.deepcopy(model)
    expected, gradient = score(untouched, trees, forward="turn_by_turn")
    for attention in ("segment", "dense"):
        logps, ours = score(model, trees, attention=attention)
        torch.testing.assert_close(logps, expected, rtol=1e-5, atol=5e-6)
        assert (ours - gradient).norm() <= 1e-5 * gradient.norm()
    # rows that are not packed are what they were
    torch.testing.assert_close(score(model, trees, forward="turn_by_turn")[0], expected)


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma 2", "llama 4", "bloom"])
def test_flex_scores_as_one_forward_per_turn(kind, trees, monkeypatch):
    monkeypatch.setattr(kernels, "compiled_flex", lambda device: kernels.uncompiled_flex)  # compiled on GPUs only
    model = build_random(kind)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch.cat(token_logps(copy.deepcopy(model), trees[:1], forward="turn_by_turn")[0])
        logps = torch.cat(token_logps(model, trees[:1], attention="flex")[0])
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma 2", "llama 4", "bloom", "nemotron", "gpt-2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_sees_the_same_tree(kind, reentrant, trees):
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) if kind == "gpt-2" else {}
    model = build_random(kind, **dropouts).train()
    expected = score(model, trees)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # else a reentrant checkpoint has no gradient
    for ours, theirs in zip(score(model, trees), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_llama_4_scales_queries_by_depth_in_long_rows():
    """Its scale rises every `floor_scale` tokens of a row; a packed row is longer than any of its sequences."""
    model = build_random("llama 4")
    trees = [forest(seed)[0] for seed in range(4)]
    enable_trees(model)
    logps = [torch.cat(turns) for turns in token_logps(model, trees)]
    for tree, together in zip(trees, logps, strict=True):
        torch.testing.assert_close(torch.cat(token_logps(model, [tree])[0]), together, rtol=1e-5, atol=5e-6)


DROPPING = {
    "gpt-2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4, attn_pdrop=0.5, embd_pdrop=0.0, resid_pdrop=0.0)
    ),
    "bloom": lambda: build_random("bloom", attention_dropout=0.5, hidden_dropout=0.0),  # scores are written out
    "gemma 2": lambda: build_random("gemma 2", attention_dropout=0.5),
}


@pytest.mark.parametrize("kind", DROPPING)
@pytest.mark.parametrize("attention", ["segment", "dense"])
def test_weights_of_attention_are_dropped_in_training(kind, attention, trees):
    model = DROPPING[kind]().train()
    first, again = (torch.cat(token_logps(model, trees[:1], attention=attention)[0]) for _ in range(2))
    assert not torch.equal(first, again)
    model.eval()
    first, again = (torch.cat(token_logps(model, trees[:1], attention=attention)[0]) for _ in range(2))
    assert torch.equal(first, again)


def test_a_layer_that_adds_other_biases_is_refused(trees):
    model = build_random("seed-oss")
    layer = model.model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, position_bias=torch.zeros(1), **kwargs)
    with pytest.raises(UnsupportedModelError, match="SeedOssAttention attends by `position_bias` too"):
        token_logps(model, trees)
