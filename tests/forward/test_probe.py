"""A model is trained over packed trees only if it scores a small one as it scores each turn alone."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.architectures import build_random
from support.forests import make_tree
from support.hybrids import build_kind
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    XLNetConfig,
)

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import probe, token_logps
from mt_grpo.forward.model import ForwardPlan, enable_trees
from mt_grpo.forward.probe import EXACT, MOST_NOISE, _probe_depth, _probe_trees, measure, prove, rounding_step
from mt_grpo.forward.recurrence import FUNCTIONS

ROWS = ForwardPlan(forward="padded")
SIZE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
TINY = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPARSE = {
    **SIZE,
    **TOKENS,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_topk", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 16),
    **dict.fromkeys(("index_n_heads", "num_experts_per_tok"), 2),
}
COMPRESSED = {
    **{"vocab_size": 96, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, **TOKENS},
    **{"num_attention_heads": 4, "q_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "qk_rope_head_dim": 8, "head_dim": 32},
}
BOTH_WAYS = {**SIZE, "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WRONG = {**BOTH_WAYS, "is_decoder": True, "pad_token_id": 0}  # its positions begin elsewhere
NEO = {"vocab_size": 96, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
CANNOT = {
    "roberta": (BOTH_WAYS, "has a mask that is neither causal nor a window"),
    "deepseek_v4": (COMPRESSED, "joins its mask with another"),
    "deepseek_v32": (SPARSE, "picks the tokens that it attends to"),
    "rwkv": ({"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}, "does not go through .* attention interf"),
    "gpt_neo": (NEO, "does not go through transformers' attention interface"),
    "doge": (TINY, "has a mask of its own making"),
}
WHISPER = {"vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, **TOKENS}
WHISPER |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
WHISPER |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 300}


def make(kind: str, **options) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).eval()


def over_trees(kind: str = "llama") -> PreTrainedModel:
    enable_trees(model := build_random(kind))
    return model


def deep_tree(length: int):
    return make_tree([([token % 90 for token in range(length)], [5, 6])])


@pytest.mark.parametrize("coarse", [False, True])
def test_a_model_that_scores_trees_wrong_is_refused(coarse):
    model = make("roberta", **WRONG)
    if coarse:  # its noise hides nothing
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5 if parameter.dim() > 1 else 1)
        model = model.bfloat16()
    enable_trees(model)
    precision = "" if coarse else "1.0e-04"
    words = rf"(?s)^RobertaFor.* nats .*where its precision explains {precision}.*set `forward: padded`\.$"
    with pytest.raises(UnsupportedModelError, match=words):
        prove(model, 100)


@pytest.mark.parametrize("kind", CANNOT)
def test_what_cannot_run_over_trees_is_refused_and_left_alone(kind):
    options, words = CANNOT[kind]
    model, ids = make(kind, **options), torch.arange(40)[None]
    expected = model(ids).logits
    with pytest.raises(UnsupportedModelError, match=f"{words}.*set `forward: padded`"):
        token_logps(model, [deep_tree(40)])
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("layer", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"])
def test_a_layer_of_which_half_can_run_over_trees_is_refused(monkeypatch, layer):
    monkeypatch.delitem(FUNCTIONS, layer)
    with pytest.raises(UnsupportedModelError, match="nats"):
        token_logps(build_kind("qwen3.5"), [deep_tree(40)])


@pytest.mark.parametrize("kind", ["llama", "gemma 2", "phimoe", "gpt-2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_coarser_precisions_are_held_against_two_paddings(kind, autocast):
    model = build_random(kind)
    enable_trees(model if autocast else model.bfloat16())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        proof = measure(model, 256)
    assert proof.holds and 10 * EXACT < proof.allowed <= MOST_NOISE


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE])
def test_rows_that_turn_positions_by_their_length_are_refused(rope):
    model = make("llama", **TINY, max_position_embeddings=300, rope_parameters=rope)
    token_logps(model, [deep_tree(290)])  # with weights that make little use of it
    prove(model, 290, ROWS)
    with pytest.raises(UnsupportedModelError, match="rows of more than 300 tokens and in shorter ones, so trees"):
        token_logps(model, [deep_tree(310)])
    with pytest.raises(UnsupportedModelError, match="completion within 300 tokens, or set `forward: turn_by_turn`"):
        prove(model, 310, ROWS)


def test_padding_needs_no_position_that_a_model_lacks():
    model = make("whisper", **WHISPER, max_target_positions=448).bfloat16()  # takes no `position_ids`
    enable_trees(model)
    prove(model, 440)


@pytest.mark.parametrize("kind", ["llama", "gpt-2", "opt", "bamba"])
def test_padded_rows_are_proven(kind):
    prove(build_kind(kind), 300, ROWS)


def test_a_model_is_proven_once_for_each_depth_and_wrapper(monkeypatch):
    monkeypatch.setattr(probe, "DEEPEST", 512)
    model, forwards, repeated = over_trees(), [], []
    model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))
    for length in (100, 256, 257, 512, 3, 99_999):
        forwards.clear()
        prove(model, length)
        repeated.append(bool(forwards))
    assert repeated == [True, False, True, False, False, False]
    prove(get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)), 100)
    assert forwards


def test_a_proof_leaves_nothing_behind():
    model = over_trees("gpt-2").train()
    state, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    name = model.config._attn_implementation
    prove(model, 100)
    assert model.training and model.config._attn_implementation == name
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_trees_that_score_what_is_not_a_number_are_refused():
    model = over_trees()
    forward = model.forward

    def spoilt(*args, tree=None, **kwargs):
        output = forward(*args, tree=tree, **kwargs)
        return output if tree is None else (output[0] * float("nan"), output[1])

    model.forward = spoilt
    for each, length in ((model, 100), (model.bfloat16(), 1000)):
        with pytest.raises(UnsupportedModelError, match="inf nats"):
            prove(each, length)


def test_spoilt_weights_are_not_blamed_on_trees():
    model = over_trees()
    model.model.norm.weight.data.fill_(float("nan"))
    prove(model, 100)
    prove(model.bfloat16(), 1000)


def test_the_probe_tree_forks_and_is_as_deep_as_asked():
    for depth in (17, 64, 1024):
        trees = _probe_trees(50, depth)
        lengths = sorted(len(path) for tree in trees for path in tree.paths())
        assert lengths[-2:] == [depth, depth] and len(lengths) == 4
        assert sum(int(tree.turns.max()) + 1 for tree in trees) == 6
    assert {token for tree in trees for token in tree.tokens.tolist()} == set(range(50))


@pytest.mark.parametrize(
    ("config", "depths"),
    [
        # no deeper than a table of positions, or what was asked for
        (GPT2Config(n_positions=300), {10: 256, 257: 300, 400: 300}),
        (XLNetConfig(), {300: 512}),  # whose number of positions is -1
        (LlamaConfig(max_position_embeddings=300), {10: 256, 257: 300, 400: 512, 1025: 2048}),
        # a few thousand tokens for long rows, and beyond a window where rows are longer than that
        (LlamaConfig(max_position_embeddings=300_000), {100: 256, 2500: 4096, 5000: 4096, 262_144: 4096}),
        (MistralConfig(sliding_window=4096), {100: 256, 2500: 4096, 5000: 8192, 262_144: 8192}),
        (MistralConfig(sliding_window=65_536), {262_144: 4096}),  # a mask of whose probe would fill the memory
        (Llama4TextConfig(attention_chunk_size=8192), {262_144: 16_384}),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_probe_is_as_deep_as_a_model_and_its_rows_need(config, depths):
    assert {length: _probe_depth(config, length) for length in depths} == depths


def test_the_rounding_step_is_that_of_the_coarsest_part():
    model = over_trees()
    assert rounding_step(model) == torch.finfo(torch.float32).eps
    assert rounding_step(model, "bf16") == rounding_step(copy.deepcopy(model).bfloat16()) == 2**-7
    with torch.autocast("cpu", torch.bfloat16):
        assert rounding_step(model) == 2**-7
    model.lm_head.half()
    assert rounding_step(model) == 2**-10


# In the trainer


@pytest.fixture
def wrong(tokenizer):
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    return make("roberta", **{**WRONG, **ids, "max_position_embeddings": 2048})


def test_a_model_that_trees_are_wrong_for_trains_in_rows(build, wrong, caplog):
    trainer = build(model=wrong)
    assert "eval_reward" in trainer.evaluate() and not caplog.text  # which needs no proof
    trainer.train()
    assert trainer.args.forward == "padded" and trainer.state.global_step == trainer.args.max_steps
    (said,) = {record.message for record in caplog.records if "not packed in this run" in record.message}
    assert said.startswith("RobertaForCausalLM scores packed trees") and "`forward: padded`" in said


def test_rows_that_are_wrong_too_are_refused(build, wrong):
    wrong.config.is_decoder = wrong.roberta.config.is_decoder = False  # which reads in both directions
    with pytest.raises(UnsupportedModelError, match="neither over packed trees nor in padded rows"):
        build(model=wrong).train()


def proven(model) -> list[int]:
    return list(vars(model)["_proven_lengths"].values())


def test_policy_and_reference_are_proven_for_the_longest_rows(build, model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    (trainer := build(model=str(tmp_path / "model"), beta=0.1, max_completion_length=400)).train()
    assert proven(trainer.model) == proven(trainer.ref_model) == [512]


@pytest.mark.parametrize("length", [300, None])
def test_longer_rows_are_proven_before_they_are_trained(build, length):
    trainer = build(lambda *_: f"<answer>{'of Peru ' * 140}</answer>", max_completion_length=length, max_steps=1)
    forward, seen = trainer.model.forward, []

    def watched(*args, **kwargs):
        if trainer.model.training:
            seen.append(proven(trainer.model))
        return forward(*args, **kwargs)

    trainer.model.forward = watched
    trainer.train()
    assert max(len(row.prompt_ids) + len(row.ids) for row in trainer.batch.token_rows) > 256 and seen == [[512]]
