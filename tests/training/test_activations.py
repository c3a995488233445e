"""What training keeps for its backward: the same gradients, however it is kept."""

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
from mt_grpo.forward import token_logps
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training import model as module
from mt_grpo.training.model import _layers_in_groups

TREES = [make_tree(timesteps) for timesteps in FOREST]


def gradients(trainer, inputs) -> list[torch.Tensor]:
    trainer.model.zero_grad()
    trainer.model.train()
    trainer.compute_loss(trainer.model, inputs).backward()
    return [parameter.grad.clone() for parameter in trainer.model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_a_loss_is_learnt_the_same_by_layers_in_groups(build, tokenizer, forward):
    model = build_model(tokenizer, num_hidden_layers=4)
    trainer = build(model=model, forward=forward, gradient_checkpointing_layers=2, gradient_checkpointing=True)
    trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    inputs, times = batch(trainer), []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: times.append(1))
    grouped = gradients(trainer, dict(inputs))
    assert len(times) == 3  # for the loss, for the inputs of its group, for its gradient
    hook.remove()
    trainer.args.gradient_checkpointing_layers = 1
    assert all(map(torch.equal, grouped, gradients(trainer, dict(inputs))))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_offloaded_activations_give_the_same_gradients(build, monkeypatch, checkpointing):
    """On a device that computes as a CPU does: TRL's hooks are called and bring everything back."""
    options, trackers, enter = {"use_pin_memory": False, "use_streams": False}, {}, OffloadActivations.__enter__

    def watched(self):
        trackers[id(self.tracker)] = self.tracker
        return enter(self)

    made = functools.partial(get_act_offloading_ctx_manager, min_offload_size=1, **options)
    monkeypatch.setattr(module, "get_act_offloading_ctx_manager", made)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(OffloadActivations, "__enter__", watched)
    trainer = build(gradient_checkpointing=checkpointing)
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = batch(trainer)
    expected = gradients(trainer, dict(inputs))
    trainer.args.activation_offloading = True
    for _ in range(2):  # micro-batches
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, dict(inputs))
        (moved,) = trackers.values()
        assert sum(was_moved for _, was_moved, *_ in moved.values()) >= len(trainer.model.model.layers)
        loss.backward()
        assert all(map(torch.equal, expected, [parameter.grad for parameter in trainer.model.parameters()]))


def test_nothing_is_offloaded_from_a_cpu(build):
    with pytest.raises(ConfigError, match="`activation_offloading: true` moves activations from a GPU .* on a CPU"):
        build(activation_offloading=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_shared_keys_are_not_checkpointed_reentrantly(build, reentrant):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    with pytest.raises(ConfigError, match="loses gradients of this model") if reentrant else nullcontext():
        build(model=build_random("gemma 4", vocab_size=400), **options)


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


@pytest.fixture(scope="module")
def deep(tokenizer):
    return build_model(tokenizer, num_hidden_layers=13, attention_dropout=0.1)


def trained(model: nn.Module, reentrant: bool = False) -> nn.Module:
    model = copy.deepcopy(model).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    token_logps(model, TREES[:1])  # proves the model first
    return model


def grouped(model: nn.Module, size: int) -> torch.Tensor:
    torch.manual_seed(0)
    with _layers_in_groups(model, size):
        return measure(model, TREES)[1]


BARE = {"num_hidden_layers": 4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
MODELS = {
    **{
        kind: functools.partial(build_random, kind, num_hidden_layers=6) for kind in ("gemma 2", "gpt-oss", "cohere 2")
    },
    "gpt-2": lambda: build_random("gpt-2", n_layer=6),
    "a hybrid": lambda: build_hybrid("qwen3.5"),
    "a mixture": build_mixture,
    "layers that are given nothing else": lambda: build_random("gemma 4", **BARE),
}


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_groups_are_those_of_single_layers(kind):
    model = trained(MODELS[kind]())
    expected = grouped(model, 1)
    torch.manual_seed(0)
    with _layers_in_groups(model, 4) as groups:
        assert distance(measure(model, TREES)[1], expected) <= 1e-6
    largest = min(4, model.config.num_hidden_layers)
    assert groups.largest == (0 if kind == "gpt-2" else largest)  # its layers make none


class Shifts(nn.Module):
    """Changes what a layer returned in place, as models do that add what they saw to some layers' states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor, **options: object) -> torch.Tensor:
        return self.layer(states, **options).mul_(1.5)


def shifting(model: nn.Module) -> nn.Module:
    model = trained(model)
    model.model.layers[2] = Shifts(model.model.layers[2])
    return model


def adapted(model: nn.Module) -> nn.Module:
    options = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    return trained(get_peft_model(copy.deepcopy(model), options))


@pytest.mark.parametrize(
    ("size", "make"),
    [
        (2, trained),
        (5, functools.partial(trained, reentrant=True)),
        (40, trained),
        (4, adapted),
        (6, shifting),  # begins another group
        (4, lambda model: copy.deepcopy(model).train()),  # has no checkpoints, and is left alone
    ],
)
def test_groups_of_any_size_draw_the_same_dropout(deep, size, make):
    model = make(deep)
    expected = grouped(model, 1)
    assert torch.equal(grouped(model, size), expected)
    assert not torch.equal(grouped(model.eval(), 1), expected)


def test_groups_under_autocast_learn_as_single_layers(deep):
    model, found = trained(deep), []
    for size in (1, 4):
        model.zero_grad()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16), _layers_in_groups(model, size):
            logps = torch.cat([turn for tree in token_logps(model, TREES) for turn in tree])
        logps.sum().backward()  # outside, as a trainer's is
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("size", "kept", "largest"), [(1, 12, 0), (2, 6, 2), (4, 3, 4), (13, 0, 13), (40, 0, 13)])
def test_only_the_first_input_of_a_group_is_kept(deep, size, kept, largest):
    """Outputs of layers that are there after a forward; the last one's is another matter."""
    model, outputs = trained(deep), []
    for layer in model.model.layers[:-1]:
        layer.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
    with _layers_in_groups(model, size) as groups:
        logps = token_logps(model, TREES)
    assert logps[0][0].requires_grad and len(outputs) == 12
    assert (sum(output() is not None for output in outputs), groups.largest) == (kept, largest)
