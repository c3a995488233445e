"""Layers that carry a state from token to token run over packed trees, exactly."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from support.forests import FOREST, distance, forests, make_tree, measure
from support.hybrids import CONFIGS, ONE_OF_EACH_KIND, build_hybrid
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from mt_grpo.forward.logps import token_logps
from mt_grpo.forward.model import enable_trees
from mt_grpo.forward.packing import unique_tokens


@cache
def make(kind: str) -> PreTrainedModel:
    return build_hybrid(kind)


def long_forest() -> list:
    """Chains longer than any chunk, forks in the middle, turns of one token, histories that were rewritten."""
    draw = torch.Generator().manual_seed(0)

    def take(count: int) -> list[int]:
        return torch.randint(3, 60, (count,), generator=draw).tolist()

    prompt, forest = take(70), []
    for _ in range(2):
        history, turns = prompt, []
        for size in (1, 40, 5, 130):
            context, action = history + take(size), take(size % 7 + 1)
            turns.append((context, action))
            history = context[:-1] + action[-1:] if size != 40 else context + action
        forest.append([*turns, (prompt[:30] + take(3), take(2))])
    return [*forest, [(take(90), take(1))]]


def assert_equal(model: PreTrainedModel, forest: list, bound: float = 1e-5, **options: object) -> None:
    trees = [make_tree(timesteps) for timesteps in forest]
    values, gradient = measure(model, trees, forward="turn_by_turn", **options)
    ours, ours_gradient = measure(model, trees, **options)
    assert distance(ours, values) <= bound
    assert distance(ours_gradient, gradient) <= bound


@pytest.mark.parametrize("kind", CONFIGS)
def test_long_and_short_chains_score_as_one_forward_a_turn(kind):
    model = make(kind)
    assert_equal(model, FOREST)
    assert_equal(model, long_forest())


@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2", "mamba 2"])
def test_short_chains_are_convolved_with_what_is_above_them(kind):
    """A chain of one token, which is a second child, has children: their history is not what stands before it."""
    prompt = [3, 4, 5, 6]
    forest = [[([*prompt, 7, 8], [9, 10]), ([*prompt, 11, 12], [13, 14]), ([*prompt, 11, 15], [16, 17, 18])]]
    assert_equal(make(kind), forest)


@pytest.mark.parametrize("kind", ONE_OF_EACH_KIND)
@settings(max_examples=10, deadline=None)
@given(forests, st.sampled_from([1.0, 0.7]))
def test_random_trees_score_as_one_forward_a_turn(kind, forest, temperature):
    if any(action for timesteps in forest for _, action in timesteps):
        # a gated norm makes much of rounding where an output is almost 0
        assert_equal(make(kind), forest, bound=5e-5, temperature=temperature)


@pytest.mark.parametrize("kind", ONE_OF_EACH_KIND)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_runs_over_the_tree_again(kind, reentrant):
    model = copy.deepcopy(make(kind)).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equal(model, FOREST)


@pytest.mark.parametrize("kind", ONE_OF_EACH_KIND)
def test_fsdps_activation_checkpointing_runs_over_the_tree_again(kind):
    model = copy.deepcopy(make(kind)).train()
    enable_trees(model)
    layers = model.base_model.layers
    for number, block in enumerate(layers):
        layers[number] = checkpoint_wrapper(block)
    assert_equal(model, FOREST)


@pytest.mark.parametrize("kind", ONE_OF_EACH_KIND)
def test_an_adapter_learns_as_one_forward_a_turn(kind):
    adapter = LoraConfig(target_modules="all-linear", exclude_modules=["out_proj"], init_lora_weights=False)
    assert_equal(get_peft_model(copy.deepcopy(make(kind)), adapter), FOREST)


@pytest.mark.parametrize("kind", ONE_OF_EACH_KIND)
def test_a_model_for_trees_runs_over_sequences_as_before(kind):
    model, prompt = copy.deepcopy(make(kind)), torch.tensor([[3, 4, 5, 6, 7]])
    plain = build_hybrid(kind)
    enable_trees(model)
    with torch.no_grad():
        token_logps(model, [make_tree(FOREST[0])])
    assert torch.equal(model(prompt).logits, plain(prompt).logits)
    texts = [each.generate(prompt, max_new_tokens=8, do_sample=False) for each in (model, plain)]
    assert torch.equal(*texts)


def test_a_copy_of_a_model_runs_with_its_own_weights():
    model = build_hybrid("qwen3.5")
    token_logps(model, [make_tree(FOREST[0])])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal(copied, FOREST)


def test_a_state_space_with_a_smallest_step_is_exact():
    assert_equal(build_hybrid("mamba 2", time_step_limit=(0.3, 1.0)), long_forest())


def test_autocast_is_within_the_noise_of_bfloat16():
    trees = [make_tree(timesteps) for timesteps in FOREST]
    exact, _ = measure(make("qwen3.5"), trees, forward="turn_by_turn")
    with torch.autocast("cpu", torch.bfloat16):
        oracle, _ = measure(make("qwen3.5"), trees, forward="turn_by_turn")
        ours, _ = measure(make("qwen3.5"), trees)
    assert distance(ours, exact) <= 2 * distance(oracle, exact)


def test_tokens_are_projected_and_convolved_at_once(monkeypatch):
    model, trees = build_hybrid("qwen3.5"), [make_tree(timesteps) for timesteps in long_forest()]
    token_logps(model, trees)  # proves the model first
    projected, scanned, convolved = [], [], []
    layer = model.model.layers[0].linear_attn
    layer.in_proj_z.register_forward_hook(lambda module, args, output: projected.append(output.shape[1]))
    for name, sizes in (("torch_chunk_gated_delta_rule", scanned), ("causal_conv1d_fn", convolved)):
        function = getattr(modeling_qwen3_5, name)

        def counted(first, *args, function=function, sizes=sizes, **kwargs):
            sizes.append(tuple(first.shape))
            return function(first, *args, **kwargs)

        monkeypatch.setattr(modeling_qwen3_5, name, counted)
    token_logps(model, trees)
    assert projected == [unique_tokens(trees)] and len(convolved) == 1
    assert len(scanned) < sum(chains for chains, *_ in scanned)
