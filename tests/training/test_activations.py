"""What training keeps for its backward: the same gradients, however it is kept."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext

import pytest
import torch
from support.architectures import build_random
from support.models import CPU_RUN, build_model
from support.trainers import batch
from trl.models import get_act_offloading_ctx_manager
from trl.models.activation_offloading import OffloadActivations

from mt_grpo.errors import ConfigError
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training import model as module

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
