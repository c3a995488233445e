"""What training keeps for its backward: the same gradients, however it is kept."""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.architectures import build_random
from support.forests import FOREST, distance, make_tree, measure
from support.hybrids import build_hybrid
from support.mixtures import build_mixture
from support.models import CPU_RUN, build_model
from support.trainers import batch
from torch import nn
from trl.models import get_act_offloading_ctx_manager
from trl.models.activation_offloading import OffloadActivations

from mt_grpo.errors import ConfigError
from mt_grpo.forward.logps import token_logps
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training import model as module
from mt_grpo.training.model import layers_in_groups

CHECKPOINTS = {"gradient_checkpointing": True, "num_generations": 4, "per_device_train_batch_size": 4}


def gradients(trainer, inputs) -> list[torch.Tensor]:
    trainer.model.zero_grad()
    trainer.model.train()
    trainer.compute_loss(trainer.model, inputs).backward()
    return [parameter.grad.clone() for parameter in trainer.model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_a_loss_is_learnt_the_same_by_layers_in_groups(build, tokenizer, forward):
    model = build_model(tokenizer, num_hidden_layers=4)
    trainer = build(model=model, forward=forward, gradient_checkpointing_layers=2, **CHECKPOINTS)
    trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    inputs, times = batch(trainer), []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: times.append(1))
    grouped = gradients(trainer, dict(inputs))
    assert len(times) == 3  # for the loss, for the inputs of its group, for its gradient
    hook.remove()
    trainer.args.gradient_checkpointing_layers = 1
    assert all(map(torch.equal, grouped, gradients(trainer, dict(inputs))))


@pytest.fixture
def gpu_of_cpus(monkeypatch):
    """A device that computes as a CPU does, of which TRL moves activations to another memory."""
    options = {"use_pin_memory": False, "use_streams": False, "min_offload_size": 1}
    made = functools.partial(get_act_offloading_ctx_manager, **options)
    monkeypatch.setattr(module, "get_act_offloading_ctx_manager", made)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    moved = []
    enter = OffloadActivations.__enter__

    def watched(self):
        moved.append(self.tracker)
        return enter(self)

    monkeypatch.setattr(OffloadActivations, "__enter__", watched)
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_offloaded_activations_give_the_same_gradients(build, gpu_of_cpus, checkpointing):
    """TRL's hooks are called and bring everything back; that a GPU then holds less is not to be seen on a CPU."""
    trainer = build(**{**CHECKPOINTS, "gradient_checkpointing": checkpointing})
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = batch(trainer)
    expected = gradients(trainer, dict(inputs))
    trainer.args.activation_offloading = True
    for _ in range(2):  # micro-batches
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, dict(inputs))
        (moved,) = {id(each): each for each in gpu_of_cpus}.values()
        kept = [tensor for tensor, was_moved, *_ in moved.values() if was_moved]
        assert len(kept) >= len(trainer.model.model.layers)
        loss.backward()
        assert all(map(torch.equal, expected, [parameter.grad for parameter in trainer.model.parameters()]))


def test_nothing_is_offloaded_from_a_cpu(build):
    with pytest.raises(ConfigError, match="`activation_offloading: true` moves activations from a GPU .* on a CPU"):
        build(activation_offloading=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_shared_keys_are_not_checkpointed_reentrantly(build, reentrant):
    model = build_random("gemma 4", vocab_size=400)
    options = {**CHECKPOINTS, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    with pytest.raises(ConfigError, match="loses gradients of this model") if reentrant else nullcontext():
        build(model=model, **options)


def test_a_model_whose_layers_make_no_groups_is_named(tmp_path, caplog):
    model = build_random("gemma 4").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    args = MTGRPOConfig(str(tmp_path), **{**CPU_RUN, "gradient_checkpointing": True}, gradient_checkpointing_layers=2)
    kept = module.Activations(args, torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with kept.kept(model):
                model(torch.tensor([[1, 2, 3]]))
    (said,) = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert "`gradient_checkpointing_layers: 2` has no effect" in said


# Layers in groups that keep one input between them

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


def grouped(model: nn.Module, size: int, **options: object) -> torch.Tensor:
    torch.manual_seed(0)
    with layers_in_groups(model, size):
        return measure(model, TREES, **options)[1]


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_groups_are_those_of_single_layers(kind):
    model = trained(MODELS[kind]())
    assert distance(grouped(model, 4), grouped(model, 1)) <= 1e-6


def test_layers_that_are_given_nothing_else_make_groups():
    """As those of a Gemma 4 without inputs of layers, which are given None."""
    layers = {"num_hidden_layers": 4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    model = trained(build_random("gemma 4", **layers))
    expected = grouped(model, 1)
    with layers_in_groups(model, 4) as groups:
        assert distance(measure(model, TREES)[1], expected) <= 1e-6
    assert groups.largest == 4


@pytest.mark.parametrize(("size", "reentrant"), [(2, False), (5, True), (40, False)])
def test_groups_of_any_size_draw_the_same_dropout(deep, size, reentrant):
    model = trained(deep, reentrant)
    expected = grouped(model, 1)
    assert torch.equal(grouped(model, size), expected)
    assert not torch.equal(grouped(trained(deep).eval(), 1), expected)


def test_groups_of_an_adapter_learn_as_single_layers(deep):
    adapted = get_peft_model(copy.deepcopy(deep), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    model = trained(adapted)
    assert torch.equal(grouped(model, 4), grouped(model, 1))


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
    expected = grouped(model, 1)
    assert torch.equal(grouped(model, 6), expected)


def test_a_model_without_checkpoints_is_left_alone(deep):
    model = copy.deepcopy(deep).train()
    assert torch.equal(grouped(model, 4), grouped(model, 1))
