import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from support.forests import FOREST, distance, forests, make_tree, measure, truncations
from support.models import build_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import lm_head as head
from mt_grpo.forward.lm_head import chunked_logps
from mt_grpo.forward.logps import token_logps
from mt_grpo.forward.model import ForwardPlan, enable_trees, score
from mt_grpo.forward.packing import FlatTree, unique_tokens
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.forward_plan import score_batch
from mt_grpo.training.rollout_batch import batch_trees


def assert_equal(model, forest, bound=1e-6, **options):
    trees = [make_tree(timesteps) for timesteps in forest]
    values, gradient = measure(model, trees, forward="turn_by_turn", **options)
    for choice in ({"attention": "segment"}, {"attention": "dense"}, {"forward": "padded"}):
        ours, ours_gradient = measure(model, trees, **choice, **options)
        assert distance(ours, values) <= bound, choice
        assert distance(ours_gradient, gradient) <= bound, choice


# Every way gives what one forward a turn gives


@settings(max_examples=30, deadline=None)
@given(forests, st.sampled_from([1.0, 0.7]), st.none() | truncations)
def test_random_trees_score_as_one_forward_a_turn(exact_model, forest, temperature, truncation):
    if any(action for timesteps in forest for _, action in timesteps):
        assert_equal(exact_model, forest, temperature=temperature, truncation=truncation)


@pytest.mark.parametrize(
    "decoder",
    [
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        (LlamaConfig, LlamaForCausalLM),
        (Qwen2Config, Qwen2ForCausalLM),
    ],
    ids=str,
)
def test_every_decoder_scores_as_one_forward_a_turn(tokenizer, decoder):
    if isinstance(decoder, dict):
        return assert_equal(build_model(tokenizer, **decoder), FOREST)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    assert_equal(decoder[1](decoder[0](**size, **heads)), FOREST)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_computes_the_tree_again(tokenizer, reentrant):
    model = build_model(tokenizer)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equal(model.train(), FOREST)


def test_an_adapter_scores_and_learns_as_one_forward_a_turn(tokenizer):
    model = get_peft_model(build_model(tokenizer), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    assert_equal(model, FOREST)
    with model.disable_adapter(), torch.no_grad():
        trees = [make_tree(timesteps) for timesteps in FOREST]
        ours, oracle = (token_logps(model, trees, forward=way) for way in ("tree", "turn_by_turn"))
    torch.testing.assert_close(ours, oracle)


def test_bfloat16_is_within_the_noise_of_padding(tokenizer):
    model = build_model(tokenizer)
    trees = [make_tree(timesteps) for timesteps in FOREST]
    exact, _ = measure(model, trees, forward="turn_by_turn")
    with torch.autocast("cpu", torch.bfloat16):
        noise = max(distance(measure(model, trees, forward=way)[0], exact) for way in ("padded", "turn_by_turn"))
        for attention in ("segment", "dense"):
            assert distance(measure(model, trees, attention=attention)[0], exact) <= 2 * noise


def test_the_model_sees_every_unique_token_once(shared_model):
    trees = [make_tree(timesteps) for timesteps in FOREST]
    token_logps(shared_model, trees)  # proves the model first
    seen = []
    hook = shared_model.model.layers[0].register_forward_hook(
        lambda module, args, output: seen.append(output.shape[1])
    )
    token_logps(shared_model, trees)
    hook.remove()
    assert sum(seen) == unique_tokens(trees) == 19


def test_a_model_that_can_run_over_trees_generates_as_before(tokenizer):
    model = build_model(tokenizer)
    prompt = torch.tensor([[0, 5, 6, 7], [3, 4, 5, 6]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    before = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
    logits = model(prompt, attention_mask=mask).logits
    enable_trees(model)
    assert torch.equal(model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False), before)
    assert torch.equal(model(prompt, attention_mask=mask).logits, logits)


def test_a_layer_that_loses_the_tree_is_noticed(tokenizer):
    model = build_model(tokenizer)
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, attention_mask, **kwargs: forward(*args, attention_mask=None, **kwargs)
    with pytest.raises(UnsupportedModelError, match="Qwen3Attention has a mask of its own making.*`forward: padded`"):
        token_logps(model, [make_tree(FOREST[0])])


@pytest.mark.parametrize(
    ("option", "known"), [("forward", "tree, padded, turn_by_turn"), ("attention", "auto, dense, flex, segment")]
)
def test_an_unknown_way_is_refused(shared_model, option, known):
    with pytest.raises(ValueError, match=f"`{option}` is 'fast'; choose one of {known}"):
        token_logps(shared_model, [], **{option: "fast"})


# The head


def test_the_head_holds_no_more_logits_than_a_chunk(monkeypatch):
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", 16 * 1000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            output = function(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor) and output.dim() == 2 and output.size(1) == 1000:
                largest = max(largest, output.size(0))
            return output

    hidden, weight = torch.randn(200, 4, requires_grad=True), torch.randn(1000, 4)
    with Watch():
        sum(chunked_logps(hidden, weight, None, torch.zeros(200, dtype=torch.long))).sum().backward()
    assert largest == 16


def test_logits_in_float32_are_computed_outside_autocast(tokenizer):
    model, seen = build_model(tokenizer), []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].float()))
    enable_trees(model, cast_head_to_fp32=True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logps = score(model, ForwardPlan([make_tree([([1, 2, 3], [1, 2, 3])])])).logps
    expected = (seen[0] @ model.lm_head.weight.T).log_softmax(dim=-1).gather(1, torch.tensor([[1], [2], [3]]))[:, 0]
    torch.testing.assert_close(logps, expected)


def test_a_batch_with_nothing_to_score_has_a_gradient_of_zero(tokenizer):
    model = build_model(tokenizer)
    enable_trees(model)
    trees = [FlatTree(np.array(tokens), np.full(4, -1)) for tokens in ([1, 2, 1, 2], [1, 3, 1, 3])]
    found = score_batch(model, ForwardPlan(trees), torch.ones(2, 4, dtype=torch.long), 2)
    (found.logps + found.entropies).sum().backward()
    assert all(p.grad.abs().max() == 0 for p in model.parameters())


# TRL's batches


def padded_logps(model, input_ids, attention_mask, width):
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -width - 1 : -1]
    return logits.log_softmax(-1).gather(2, input_ids[:, -width:, None]).squeeze(2)


def test_a_padded_batch_gives_the_log_probs_of_trained_tokens(tokenizer):
    model = build_model(tokenizer)
    columns = {
        "prompt_ids": torch.tensor([[0, 1, 2], [0, 1, 2], [3, 1, 2]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[4, 5, 6, 7], [4, 6, 0, 0], [4, 5, 5, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1]] * 3),
        "turn_ids": torch.tensor([[0, 0, 1, 1]] * 3),
    }
    ids, mask = (torch.cat([columns[f"prompt_{name}"], columns[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    trained = columns["completion_mask"] * columns["tool_mask"]
    expected = padded_logps(model, ids, mask, 4)
    enable_trees(model)
    for forward in ("tree", "padded", "turn_by_turn"):
        for size in (None, 2):
            found = score_batch(model, ForwardPlan(batch_trees(columns), forward=forward), mask, 4, size)
            torch.testing.assert_close(found.logps, expected * trained)
            assert (found.entropies > 0).equal(trained.bool())


def test_trees_of_several_rows_come_back_in_their_order(tokenizer, monkeypatch):
    model = build_model(tokenizer)
    trees = [TokenTree(), *(make_tree(timesteps) for timesteps in FOREST), TokenTree()]
    whole = token_logps(model, trees)
    monkeypatch.setattr("mt_grpo.forward.logps.ROW_TOKENS", 9)
    found = token_logps(model, trees)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    assert [len(turn) for turn in found[1]] == [2, 1, 3] and found[0] == found[-1] == []


@pytest.mark.parametrize("forward", ["tree", "padded", "turn_by_turn"])
def test_nothing_has_no_log_probabilities(tokenizer, forward):
    assert token_logps(build_model(tokenizer), [], forward=forward) == []
    assert token_logps(build_model(tokenizer), [TokenTree()], forward=forward) == [[]]


def test_two_models_of_one_configuration_both_run_over_trees(tokenizer):
    """As the reference model that TRL makes from the policy's configuration."""
    model = build_model(tokenizer)
    trees = [make_tree(FOREST[0])]
    first = token_logps(model, trees)
    second = type(model)(model.config)
    second.load_state_dict(model.state_dict())
    for a, b in zip(first[0], token_logps(second, trees)[0], strict=True):
        torch.testing.assert_close(a, b)


def test_a_kernel_of_transformers_still_runs_in_other_forwards(tokenizer):
    model = build_model(tokenizer)
    ids = torch.tensor([[1, 2, 3]])
    expected = model(input_ids=ids).logits
    model.config._attn_implementation = "flash_attention_2"
    enable_trees(model)
    torch.testing.assert_close(model(input_ids=ids).logits, expected)


def test_a_deep_copy_of_a_tree_model_has_its_own_weights(tokenizer):
    model = build_model(tokenizer)
    enable_trees(model)
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        torch.nn.init.zeros_(parameter)
    assert not twin(input_ids=torch.tensor([[1, 2, 3]])).logits.any()
    assert token_logps(twin, [make_tree(FOREST[0])])[0][0].unique().numel() == 1


def test_log_probs_between_steps_keep_the_precision_of_the_head(tokenizer):
    model = build_model(tokenizer)
    enable_trees(model, cast_head_to_fp32=True)
    token_logps(model, [make_tree(FOREST[0])])
    assert model._head_in_float32
