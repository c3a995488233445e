"""What is computed on a device that is not the CPU is what the CPU computes, with nothing left behind there."""

import os

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import other_device
from support.architectures import KINDS, build_random
from support.forests import FOREST, flex_on_a_cpu, make_tree
from support.hybrids import ONE_OF_EACH_KIND, build_kind
from support.mixtures import MIXTURES, build_mixture
from support.models import build_model, build_tokenizer
from support.trainers import thinking, trainer_builder, weights
from torch.nn.attention import flex_attention

from mt_grpo.forward import Truncation, token_logps

pytestmark = pytest.mark.skipif(
    "OTHER_DEVICE" not in os.environ, reason="`make interop-device` builds the device, for a process of its own"
)

MODELS = {
    **{kind: lambda kind=kind: build_random(kind) for kind in KINDS},
    **{kind: lambda kind=kind: build_kind(kind) for kind in ONE_OF_EACH_KIND},
    **{kind: lambda kind=kind: build_mixture(kind) for kind in MIXTURES},
}


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    return other_device.make(tmp_path_factory.mktemp("device"))


def learnt(model, **options):
    """Log-probs of all turns, and the gradient of their weighted sum, on the CPU."""
    model.zero_grad()
    turns = token_logps(model, [make_tree(timesteps) for timesteps in FOREST], **options)
    flat = torch.cat([turn for tree in turns for turn in tree])
    (flat * torch.linspace(1, 2, len(flat), device=flat.device)).sum().backward()
    gradients = [parameter.grad.flatten().cpu() for parameter in model.parameters() if parameter.grad is not None]
    return flat.detach().cpu(), torch.cat(gradients)


def assert_alike(device, model, **options):
    expected = learnt(model, **options)
    for found, right in zip(learnt(model.to(device), **options), expected, strict=True):
        assert (found - right).norm() <= 1e-5 * right.norm()


@pytest.mark.parametrize("kind", MODELS)
def test_a_forest_is_scored_and_learnt(device, kind):
    assert_alike(device, MODELS[kind]())


@pytest.mark.parametrize("kind", ["llama", "gemma 2", "qwen 3", "falcon with biases", "llama 4"])
@pytest.mark.parametrize(
    "options",
    [
        {"attention": "dense"},
        {"attention": "segment"},
        {"forward": "padded"},
        {"forward": "turn_by_turn"},
        {"truncation": Truncation(3, 0.9, 0.05)},
    ],
    ids=str,
)
def test_each_way_to_score_it(device, kind, options):
    assert_alike(device, build_random(kind), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_scores_and_learns_as_segments(device, kind, monkeypatch):
    """Its gradient, which PyTorch has not on a CPU, by its own reference and not as it is compiled for a GPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # it knows its devices by name
    model = build_random(kind)
    expected = learnt(model, attention="segment")
    with flex_on_a_cpu():
        for found, right in zip(learnt(model.to(device), attention="flex"), expected, strict=True):
            assert (found - right).norm() <= 1e-5 * right.norm()


RUNS = {
    "as it is": {},
    "rows": {"forward": "padded"},
    "a mixture's routes": {"model": lambda: build_mixture("qwen3_moe", 335), "router_replay": True},
    "a reference": {"beta": 0.1},
    "an adapter": {"peft_config": LoraConfig(target_modules=["q_proj"], r=4), "gradient_checkpointing": True},
    "a teacher": {"teacher": {"model": "self", "sees": ["sibling"]}, "distillation_coef": 0.5, "distillation_topk": 3},
    "two passes": {"num_iterations": 2, "top_entropy_quantile": 0.5},
    "sampled by the model": {"script": None, "max_completion_length": 60},
    "sampled ahead": {"script": None, "max_completion_length": 60, "max_staleness": 1},
    "truncated": {"script": None, "max_completion_length": 60, "top_k": 5, "top_p": 0.9},
    "bfloat16": {"bf16": True},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns_what_it_learns_on_the_cpu(device, name, tmp_path):
    def run(folder):
        tokenizer = build_tokenizer()
        questions = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {n}?"}]} for n in range(4)])
        options = dict(RUNS[name])
        model = options.pop("model", lambda: build_model(tokenizer))()
        model.save_pretrained(folder / "begun")  # where a reference is loaded from
        model.name_or_path = model.config._name_or_path = str(folder / "begun")
        trainer = trainer_builder(folder, tokenizer, questions)(
            **{"script": thinking, "save_strategy": "steps", "save_steps": 1, **options}, model=model
        )
        trainer.train()
        return weights(trainer), trainer.evaluate()

    expected, measured = run(tmp_path / "cpu")
    with other_device.training_on(device):
        found, here = run(tmp_path / "other")
    assert {each.device.type for each in found} == {other_device.NAME}
    within = 2e-2 if name == "bfloat16" else 1e-3
    for one, right in zip(found, expected, strict=True):
        assert (one.cpu() - right).norm() <= within * right.norm() + 1e-6
    assert here.keys() == measured.keys()
