"""Layers in groups that keep one input between them: the same gradients, and fewer inputs kept."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.architectures import build_random
from support.forests import FOREST, distance, make_tree, measure
from support.hybrids import build_hybrid
from support.mixtures import build_mixture
from support.models import build_model
from torch import nn

from mt_grpo.forward.logps import token_logps
from mt_grpo.training.model import layers_in_groups

TREES = [make_tree(timesteps) for timesteps in FOREST]
MODELS = {
    **{kind: lambda kind=kind: build_random(kind, num_hidden_layers=6) for kind in ("gemma 2", "gpt-oss", "cohere 2")},
    "gpt-2": lambda: build_random("gpt-2", n_layer=6),
    "a hybrid": lambda: build_hybrid("qwen3.5"),
    "a mixture": lambda: build_mixture(),
}


@pytest.fixture(scope="module")
def deep(tokenizer):
    return build_model(tokenizer, num_hidden_layers=13, attention_dropout=0.1)


def trained(model: nn.Module, reentrant: bool = False) -> nn.Module:
    model = copy.deepcopy(model).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    token_logps(model, TREES[:1])  # proves the model first
    return model


def gradient(model: nn.Module, size: int, **options: object) -> torch.Tensor:
    torch.manual_seed(0)
    with layers_in_groups(model, size):
        return measure(model, TREES, **options)[1]


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_groups_are_those_of_single_layers(kind):
    model = trained(MODELS[kind]())
    assert distance(gradient(model, 4), gradient(model, 1)) <= 1e-6


def test_layers_that_are_given_nothing_else_make_groups():
    """As those of a Gemma 4 without inputs of layers, which are given None."""
    layers = {"num_hidden_layers": 4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    model = trained(build_random("gemma 4", **layers))
    expected = gradient(model, 1)
    with layers_in_groups(model, 4) as groups:
        assert distance(measure(model, TREES)[1], expected) <= 1e-6
    assert groups.largest == 4


@pytest.mark.parametrize(("size", "reentrant"), [(2, False), (5, True), (40, False)])
def test_groups_of_any_size_draw_the_same_dropout(deep, size, reentrant):
    model = trained(deep, reentrant)
    expected = gradient(model, 1)
    assert torch.equal(gradient(model, size), expected)
    assert not torch.equal(gradient(trained(deep).eval(), 1), expected)


def test_groups_of_an_adapter_learn_as_single_layers(deep):
    adapted = get_peft_model(copy.deepcopy(deep), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    model = trained(adapted)
    assert torch.equal(gradient(model, 4), gradient(model, 1))


def test_groups_under_autocast_learn_as_single_layers(deep):
    model = trained(deep)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        logps = {}
        for size in (1, 4):
            torch.manual_seed(0)
            with layers_in_groups(model, size):
                logps[size] = torch.cat([turn for tree in token_logps(model, TREES) for turn in tree])
    found = []
    for size in (1, 4):  # the backward is outside, as a trainer's is
        model.zero_grad()
        logps[size].sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def kept_inputs(model: nn.Module, size: int) -> int:
    """Outputs of layers that are there after a forward; the last one's is another matter."""
    outputs = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
        for layer in model.model.layers[:-1]
    ]
    with layers_in_groups(model, size) as groups:
        logps = token_logps(model, TREES)
    assert groups.largest == (min(size, 13) if size > 1 else 0)
    for hook in hooks:
        hook.remove()
    kept = sum(output() is not None for output in outputs)
    assert logps[0][0].requires_grad and len(outputs) == len(hooks)
    return kept


@pytest.mark.parametrize(("size", "kept"), [(1, 12), (2, 6), (4, 3), (13, 0)])
def test_only_the_first_input_of_a_group_is_kept(deep, size, kept):
    assert kept_inputs(trained(deep), size) == kept


class Shifts(nn.Module):
    """Changes what a layer returned in place, as models do that add what they saw to some layers' states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor, **options: object) -> torch.Tensor:
        output = self.layer(states, **options)
        return output.mul_(1.5)


def test_what_is_changed_between_layers_begins_another_group(deep):
    model = trained(deep)
    model.model.layers[2] = Shifts(model.model.layers[2])
    expected = gradient(model, 1)
    assert torch.equal(gradient(model, 6), expected)


def test_a_model_without_checkpoints_is_left_alone(deep):
    model = copy.deepcopy(deep).train()
    assert torch.equal(gradient(model, 4), gradient(model, 1))
