"""Models of every kind of attention, layer with a state and output layer score packed trees as a forward per turn."""

import copy
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from support.architectures import KINDS
from support.forests import (
    FOREST,
    assert_as_turn_by_turn,
    distance,
    flex_on_a_cpu,
    forests,
    make_tree,
    measure,
    truncations,
)
from support.forked import run_processes
from support.hybrids import CONFIGS, ONE_OF_EACH_KIND
from support.hybrids import build_kind as make
from support.images import build_processor, build_vision_model
from support.models import build_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers.models.qwen3_5 import modeling_qwen3_5

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import probe, token_logps
from mt_grpo.forward.model import ForwardPlan, check_sequence_parallel, enable_trees, score
from mt_grpo.forward.packing import unique_tokens

SEGMENT, DENSE = ({"attention": kernel} for kernel in ("segment", "dense"))
CLOSE = {"rtol": 1e-5, "atol": 5e-6}
SOME = ("gpt-oss", "gemma 2", "llama 4", "bloom")
kept, exact = cache(make), cache(lambda kind: make(kind).double())


def drawn_trees(seed=0) -> list:
    """Trajectories of one prompt whose turns fork anywhere, longer than every window and chunk of attention."""
    draw, trees = torch.Generator().manual_seed(seed), []

    def number(least, below):
        return int(torch.randint(least, below, (), generator=draw))

    def take(count):
        return torch.randint(3, 60, (count,), generator=draw).tolist()

    prompt = take(12)
    for _ in range(3):
        turns, history = [], prompt
        for _ in range(5):
            history = history[: number(1, len(history) + 1)] if number(0, 2) else history
            turns.append((history + take(number(1, 14)), take(8)))
            history = sum(turns[-1], [])
        trees.append(make_tree(turns))
    return trees


def long_trees() -> list:
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
    return list(map(make_tree, [*forest, [(take(90), take(1))]]))


TREES, DRAWN = list(map(make_tree, FOREST)), drawn_trees()


def logps(model, trees=DRAWN[:1], **options):
    return torch.cat([turn for tree in token_logps(model, trees, **options) for turn in tree]).detach()


@pytest.mark.parametrize("kind", KINDS)
def test_every_attention_scores_trees_as_a_forward_per_turn(kind):
    model = make(kind)
    expected, gradient = measure(copy.deepcopy(model), DRAWN, forward="turn_by_turn")
    enable_trees(model)
    probe.prove(model, 300)
    assert probe.measure(model, 256).difference <= probe.EXACT / 10
    for way in (SEGMENT, DENSE):
        found, ours = measure(model, DRAWN, **way)
        torch.testing.assert_close(found, expected, **CLOSE)
        assert distance(ours, gradient) <= 1e-5
    # rows that are not packed are what they were
    torch.testing.assert_close(logps(model, DRAWN, forward="turn_by_turn"), expected)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_state_scores_trees_as_a_forward_per_turn(kind):
    for trees in (TREES, long_trees()):
        assert_as_turn_by_turn(kept(kind), trees, within=1e-5)
    probe.prove(kept(kind), 300)


@pytest.mark.parametrize("kind", ["qwen 3", *ONE_OF_EACH_KIND])
@settings(max_examples=20, deadline=None)
@given(forests, st.sampled_from([1.0, 0.7]), st.none() | truncations)
def test_random_trees_score_as_one_forward_a_turn(kind, forest, temperature, cut):
    if any(action for timesteps in forest for _, action in timesteps):
        trees, heat = list(map(make_tree, forest)), {"temperature": temperature}
        if kind in KINDS:
            assert_as_turn_by_turn(exact(kind), trees, SEGMENT, DENSE, {"forward": "padded"}, truncation=cut, **heat)
        else:  # a gated norm makes much of rounding where an output is almost 0, and so does a cut
            assert_as_turn_by_turn(kept(kind), trees, within=5e-5, **heat)


@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2", "mamba 2"])
def test_short_chains_are_convolved_with_what_is_above_them(kind):
    """A chain of one token, which is a second child, has children: their history is not what stands before it."""
    prompt = [3, 4, 5, 6]
    turns = [([*prompt, 7, 8], [9, 10]), ([*prompt, 11, 12], [13, 14]), ([*prompt, 11, 15], [16, 17, 18])]
    assert_as_turn_by_turn(kept(kind), [make_tree(turns)], within=1e-5)


@pytest.mark.parametrize("kind", ["gpt-oss", "bloom", "nemotron", "gpt-2", *ONE_OF_EACH_KIND])
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "of FSDP", "adapted"])
def test_changed_layers_run_over_the_tree_as_a_forward_per_turn(kind, way):
    """Computed again, or with an adapter."""
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) if kind == "gpt-2" else {}
    model = make(kind, **dropouts).train()
    if way == "adapted":
        adapter = LoraConfig(
            target_modules="all-linear", exclude_modules=["out_proj", "router"], init_lora_weights=False
        )
        model = get_peft_model(model, adapter)
    elif way == "of FSDP":
        enable_trees(model)
        layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
        for number, block in enumerate(layers):
            layers[number] = checkpoint_wrapper(block)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
        model.enable_input_require_grads()  # else a reentrant checkpoint has no gradient
    assert_as_turn_by_turn(model, TREES, within=1e-5)


@pytest.mark.parametrize("kind", ["qwen 3", *ONE_OF_EACH_KIND])
def test_a_model_for_trees_runs_over_sequences_as_before(kind):
    model, plain = make(kind), make(kind)
    ids = torch.tensor([[3, 4, 5, 6, 7]] if kind in CONFIGS else [[0, 5, 6, 7], [3, 4, 5, 6]])
    prompt = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    token_logps(model, TREES[:1])
    assert torch.equal(model(**prompt).logits, plain(**prompt).logits)
    texts = [each.generate(**prompt, max_new_tokens=8, do_sample=False) for each in (model, plain)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", ["qwen 3", "qwen3.5"])
def test_a_copy_of_a_model_runs_with_its_own_weights(kind):
    model = make(kind)
    expected = measure(model, TREES, forward="turn_by_turn")
    token_logps(model, TREES[:1])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for ours, theirs in zip(measure(copied, TREES), expected, strict=True):
        assert distance(ours, theirs) <= 1e-5
    assert logps(model, TREES[:1]).unique().numel() == 1


@pytest.mark.parametrize("kind", ["qwen 3", "qwen3.5"])
def test_bfloat16_is_within_the_noise_of_padding(kind):
    exact, _ = measure(kept(kind), TREES, forward="turn_by_turn")

    def noise(**way):
        return distance(measure(kept(kind), TREES, **way)[0], exact)

    with torch.autocast("cpu", torch.bfloat16):
        most = max(noise(forward=way) for way in ("padded", "turn_by_turn") if way != "padded" or kind in KINDS)
        assert all(noise(**way) <= 2 * most for way in ((SEGMENT, DENSE) if kind in KINDS else ({},)))


# What some kinds have


@pytest.mark.parametrize("kind", SOME)
def test_flex_scores_as_one_forward_per_turn(kind):
    model = make(kind)
    expected = logps(copy.deepcopy(model), forward="turn_by_turn")
    enable_trees(model)
    with torch.no_grad(), flex_on_a_cpu():
        found = score(model, ForwardPlan(DRAWN[:1], attention="flex"))  # the proof would take longer
    torch.testing.assert_close(torch.cat(found.by_turn([5])[0]), expected, **CLOSE)


def test_llama_4_scales_queries_by_depth_in_long_rows():
    """Its scale rises every `floor_scale` tokens of a row; a packed row is longer than any of its sequences."""
    model, trees = make("llama 4"), [drawn_trees(seed)[0] for seed in range(4)]
    alone = [logps(model, [tree]) for tree in trees]
    torch.testing.assert_close(logps(model, trees), torch.cat(alone), **CLOSE)


@pytest.mark.parametrize(
    ("kind", "dropouts"),
    [
        ("gpt-2", {"n_layer": 1, "attn_pdrop": 0.5, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
        ("bloom", {"attention_dropout": 0.5, "hidden_dropout": 0.0}),  # scores are written out
        ("gemma 2", {"attention_dropout": 0.5}),
    ],
)
@pytest.mark.parametrize("attention", ["segment", "dense"])
def test_weights_of_attention_are_dropped_in_training(kind, dropouts, attention):
    model = make(kind, **dropouts)
    for training in (True, False):
        first, again = (logps(model.train(training), attention=attention) for _ in range(2))
        assert torch.equal(first, again) == (not training)


def test_a_state_space_with_a_smallest_step_is_exact():
    assert_as_turn_by_turn(make("mamba 2", time_step_limit=(0.3, 1.0)), long_trees(), within=1e-5)


def test_tokens_are_seen_projected_and_convolved_at_once(monkeypatch):
    model, trees = make("qwen3.5"), long_trees()
    token_logps(model, trees)  # proves the model first
    seen, scanned, convolved = [], [], []
    model.model.layers[0].linear_attn.in_proj_z.register_forward_hook(lambda *given: seen.append(given[2].shape[1]))
    model.model.layers[1].register_forward_hook(lambda *given: seen.append(given[2].shape[1]))
    for name, sizes in (("torch_chunk_gated_delta_rule", scanned), ("causal_conv1d_fn", convolved)):
        function = getattr(modeling_qwen3_5, name)

        def counted(first, *args, function=function, sizes=sizes, **kwargs):
            sizes.append(tuple(first.shape))
            return function(first, *args, **kwargs)

        monkeypatch.setattr(modeling_qwen3_5, name, counted)
    token_logps(model, trees)
    assert seen == [unique_tokens(trees)] * 2 and len(convolved) == 1
    assert len(scanned) < sum(chains for chains, *_ in scanned)
    assert unique_tokens(TREES) == 19


def test_a_layer_that_adds_other_biases_is_refused():
    model = make("seed-oss")
    layer = model.model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, position_bias=torch.zeros(1), **kwargs)
    with pytest.raises(UnsupportedModelError, match="SeedOssAttention attends by `position_bias` too"):
        token_logps(model, TREES)


# Several processes compute a row together


@pytest.mark.slow
def test_processes_that_share_a_row_find_what_one_finds(tmp_path):
    """Scores, losses and gradients, on random forked trees, for every kind of attention; see the script."""
    run_processes(["-m", "support.sequence_ranks", "4"], 4, tmp_path / "log", {})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((partial(make, kind), "computes its attention itself") for kind in ("bloom", "mpt", "falcon")),
        *((partial(make, kind), "whose state runs along the row") for kind in ("qwen3.5", "lfm2")),
        (lambda: build_vision_model(build_processor().tokenizer), "takes images"),
    ],
)
def test_a_model_whose_rows_cannot_be_shared_is_refused(make, words):
    with pytest.raises(UnsupportedModelError, match=f"{words}.*leave `sp_size` out"):
        check_sequence_parallel(make(), 2)


def test_heads_that_processes_cannot_share_are_refused(tokenizer):
    model = build_model(tokenizer, num_attention_heads=6, num_key_value_heads=2)
    for each in (model, get_peft_model(model, LoraConfig(target_modules=["q_proj"]))):
        check_sequence_parallel(each, 3)
        with pytest.raises(UnsupportedModelError, match="has 6 attention heads, which 4 .*to 2 or 3 or 6, or leave"):
            check_sequence_parallel(each, 4)
