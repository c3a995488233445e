"""A model is trained over packed trees only if it scores a small one as it scores each turn alone."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV4Config,
    DeepseekV32Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
    RwkvConfig,
    WhisperConfig,
    XLNetConfig,
)

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import probe
from mt_grpo.forward.logps import token_logps
from mt_grpo.forward.model import ForwardPlan, enable_trees
from mt_grpo.forward.probe import EXACT, MOST_NOISE, measure, probe_depth, probe_trees, prove, rounding_step
from mt_grpo.forward.recurrence import FUNCTIONS
from mt_grpo.token_tree import TokenTree

ROWS = ForwardPlan(forward="padded")
SIZE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
TINY = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROBERTA = {**SIZE, "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPARSE = {
    **SIZE,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_topk", "index_head_dim"), 8),
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "index_n_heads": 2, "moe_intermediate_size": 16},
    **{"num_experts_per_tok": 2, **TOKENS},
}
COMPRESSED = {
    **{"vocab_size": 96, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, **TOKENS},
    **{"num_attention_heads": 4, "q_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "qk_rope_head_dim": 8, "head_dim": 32},
}
WHISPER = {"vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, **TOKENS}
WHISPER |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
WHISPER |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


def make(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


RIGHT = {
    "qwen3": lambda: Qwen3Config(**TINY),
    "llama": lambda: LlamaConfig(**TINY),
    "gemma": lambda: GemmaConfig(**TINY),
    "gemma3, two windows": lambda: Gemma3TextConfig(**{**TINY, "num_hidden_layers": 6}, sliding_window=20),
    "mistral, a window": lambda: MistralConfig(**TINY, sliding_window=20),
    "mixtral": lambda: MixtralConfig(**TINY, **EXPERTS),
    "qwen3 moe": lambda: Qwen3MoeConfig(**TINY, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "gpt2": lambda: GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0),
    "opt": lambda: OPTConfig(**SIZE, ffn_dim=32, num_attention_heads=4, word_embed_proj_dim=32),
    "convolutions": lambda: Lfm2Config(**TINY, layer_types=["conv", "full_attention"]),
    "state spaces": lambda: BambaConfig(
        **SIZE,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=4,
        mamba_d_head=16,
        attn_layer_indices=[1],
    ),
}
WRONG = {
    "positions that begin elsewhere": lambda: RobertaConfig(**ROBERTA, is_decoder=True, pad_token_id=0),
}
CANNOT = {
    "both directions": lambda: RobertaConfig(**ROBERTA),
    "compressed keys": lambda: DeepseekV4Config(**COMPRESSED),
    "sparse attention": lambda: DeepseekV32Config(**SPARSE),
    "layers that run along a sequence only": lambda: RwkvConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_model_that_scores_trees_right_is_accepted(kind):
    model = make(RIGHT[kind]())
    enable_trees(model)
    prove(model, 300)
    assert measure(model, 256).difference <= EXACT / 10


@pytest.mark.parametrize("kind", WRONG)
def test_a_model_that_scores_trees_wrong_is_refused(kind):
    model = make(WRONG[kind]())
    enable_trees(model)
    with pytest.raises(UnsupportedModelError) as refusal:
        prove(model, 100)
    message = str(refusal.value)
    assert message.startswith(type(model).__name__) and message.endswith("set `forward: padded`.")
    assert "nats" in message and "where its precision explains 1.0e-04" in message


@pytest.mark.parametrize("kind", CANNOT)
def test_what_cannot_run_over_trees_is_refused(kind):
    with pytest.raises(UnsupportedModelError, match="set `forward: padded`"):
        token_logps(make(CANNOT[kind]()), [deep_tree(40)])


def test_a_model_with_sparse_attention_is_left_as_it_is():
    model, ids = make(DeepseekV32Config(**{**SPARSE, "index_n_heads": 8})), torch.arange(40)[None]
    expected = model(ids).logits
    with pytest.raises(UnsupportedModelError, match="picks the tokens that it attends to"):
        enable_trees(model)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("layer", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"])
def test_a_layer_of_which_half_can_run_over_trees_is_refused(monkeypatch, layer):
    monkeypatch.delitem(FUNCTIONS, layer)
    model = make(Qwen3_5TextConfig(**TINY, layer_types=["linear_attention", "full_attention"]))
    with pytest.raises(UnsupportedModelError, match="nats"):
        token_logps(model, [deep_tree(40)])


@pytest.mark.parametrize("kind", ["llama", "mistral, a window", "mixtral", "gpt2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_coarser_precisions_are_held_against_two_paddings(kind, autocast):
    model = make(RIGHT[kind]())
    model = model if autocast else model.bfloat16()
    enable_trees(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        proof = measure(model, 256)
    assert proof.holds and 10 * EXACT < proof.allowed <= MOST_NOISE


@pytest.mark.parametrize("kind", ["positions that begin elsewhere"])
def test_coarser_precisions_hide_no_wrong_model(kind):
    model = make(WRONG[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    model = model.bfloat16()
    enable_trees(model)
    with pytest.raises(UnsupportedModelError, match="nats"):
        prove(model, 100)


def deep_tree(length: int) -> TokenTree:
    tree = TokenTree()
    tree.add_turn([token % 90 for token in range(length)], [5, 6], [0.0, 0.0])
    return tree


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 300,
}


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE])
def test_rows_that_turn_positions_by_their_length_are_refused(rope):
    model = make(LlamaConfig(**TINY, max_position_embeddings=300, rope_parameters=rope))
    token_logps(model, [deep_tree(290)])  # with weights that make little use of it
    prove(model, 290, ROWS)
    with pytest.raises(UnsupportedModelError, match="rows of more than 300 tokens and in shorter ones, so trees"):
        token_logps(model, [deep_tree(310)])
    with pytest.raises(UnsupportedModelError, match="completion within 300 tokens, or set `forward: turn_by_turn`"):
        prove(model, 310, ROWS)


def test_padding_needs_no_position_that_a_model_lacks():
    model = make(WhisperConfig(**WHISPER, max_target_positions=448)).bfloat16()  # takes no `position_ids`
    enable_trees(model)
    prove(model, 440)


def test_a_model_is_proven_once_for_each_depth_and_wrapper(monkeypatch):
    monkeypatch.setattr(probe, "DEEPEST", 512)
    model = make(RIGHT["llama"]())
    enable_trees(model)
    forwards = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: forwards.append(output.shape[1]))
    prove(model, 100)
    assert forwards
    for length, repeated in ((256, False), (257, True), (512, False), (3, False), (99_999, False)):
        forwards.clear()
        prove(model, length)
        assert bool(forwards) == repeated
    adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    prove(adapter, 100)
    assert forwards


def test_a_proof_leaves_nothing_behind():
    model = make(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0)).train()
    enable_trees(model)
    state, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    name = model.config._attn_implementation
    prove(model, 100)
    assert model.training and model.config._attn_implementation == name
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_trees_that_score_what_is_not_a_number_are_refused():
    model = make(RIGHT["llama"]())
    enable_trees(model)
    forward = model.forward

    def spoilt(*args, tree=None, **kwargs):
        output = forward(*args, tree=tree, **kwargs)
        return output if tree is None else (output[0] * float("nan"), output[1])

    model.forward = spoilt
    with pytest.raises(UnsupportedModelError, match="inf nats"):
        prove(model, 100)
    with pytest.raises(UnsupportedModelError, match="inf nats"):
        prove(model.bfloat16(), 1000)


def test_spoilt_weights_are_not_blamed_on_trees():
    model = make(RIGHT["llama"]())
    enable_trees(model)
    model.model.norm.weight.data.fill_(float("nan"))
    prove(model, 100)
    prove(model.bfloat16(), 1000)


def test_the_probe_tree_forks_and_is_as_deep_as_asked():
    for depth in (17, 64, 1024):
        trees = probe_trees(50, depth)
        lengths = sorted(len(path) for tree in trees for path in tree.paths())
        assert lengths[-2:] == [depth, depth] and len(lengths) == 4
        assert sum(int(tree.turns.max()) + 1 for tree in trees) == 6
    assert {token for tree in trees for token in tree.tokens.tolist()} == set(range(50))


def test_a_probe_is_no_deeper_than_the_positions_a_model_has():
    table = GPT2Config(n_positions=300)
    assert [probe_depth(table, length) for length in (10, 257, 400)] == [256, 300, 300]
    assert probe_depth(XLNetConfig(), 300) == 512  # whose number of positions is -1
    rotary = LlamaConfig(max_position_embeddings=300)
    assert [probe_depth(rotary, length) for length in (10, 257, 400, 1025)] == [256, 300, 512, 2048]


def test_a_probe_of_long_rows_has_a_few_thousand_tokens():
    lengths = (100, 2500, 5000, 262_144)
    plain, windowed = LlamaConfig(max_position_embeddings=300_000), MistralConfig(sliding_window=4096)
    assert [probe_depth(plain, length) for length in lengths] == [256, 4096, 4096, 4096]
    # beyond a window, where rows are longer than that
    assert [probe_depth(windowed, length) for length in lengths] == [256, 4096, 8192, 8192]
    assert probe_depth(Llama4TextConfig(attention_chunk_size=8192), 262_144) == 16_384


def test_the_rounding_step_is_that_of_the_coarsest_part():
    model = make(RIGHT["llama"]())
    enable_trees(model)
    assert rounding_step(model) == torch.finfo(torch.float32).eps
    assert rounding_step(model, "bf16") == rounding_step(copy.deepcopy(model).bfloat16()) == 2**-7
    with torch.autocast("cpu", torch.bfloat16):
        assert rounding_step(model) == 2**-7
    model.lm_head.half()
    assert rounding_step(model) == 2**-10


# In the trainer


def roberta(tokenizer):
    options = {**ROBERTA, "vocab_size": len(tokenizer), "pad_token_id": 0, "max_position_embeddings": 2048}
    return make(RobertaConfig(**options, eos_token_id=tokenizer.eos_token_id, is_decoder=True))


def test_a_model_that_trees_are_wrong_for_trains_in_rows(build, tokenizer, caplog):  # noqa: F811
    trainer = build(model=roberta(tokenizer))
    trainer.train()
    assert trainer.args.forward == "padded" and trainer.state.global_step == trainer.args.max_steps
    (said,) = {record.message for record in caplog.records if "not packed in this run" in record.message}
    assert said.startswith("RobertaForCausalLM scores packed trees") and "`forward: padded`" in said


def test_rows_that_are_wrong_too_are_refused(build, tokenizer):  # noqa: F811
    model = roberta(tokenizer)
    model.config.is_decoder = model.roberta.config.is_decoder = False  # which reads in both directions
    trainer = build(model=model)
    with pytest.raises(UnsupportedModelError, match="neither over packed trees nor in padded rows"):
        trainer.train()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "state spaces"])
def test_padded_rows_are_proven(kind):
    prove(make(RIGHT[kind]()), 300, ROWS)


def test_an_evaluation_needs_no_proof(build, tokenizer):  # noqa: F811
    trainer = build(model=roberta(tokenizer))
    assert "eval_reward" in trainer.evaluate()


def test_policy_and_reference_are_proven_for_the_longest_rows(build, model, tmp_path):  # noqa: F811
    model.save_pretrained(tmp_path / "model")
    trainer = build(model=str(tmp_path / "model"), beta=0.1, max_completion_length=400)
    trainer.train()
    for policy in (trainer.model, trainer.ref_model):
        assert list(vars(policy)["_proven_lengths"].values()) == [512]


@pytest.mark.parametrize("length", [300, None])
def test_longer_rows_are_proven_before_they_are_trained(build, length):  # noqa: F811
    def script(session, turn):
        return "<answer>" + "of Peru " * 140 + "</answer>"  # 280 tokens and more

    trainer = build(script, max_completion_length=length, max_steps=1)
    proven = []
    forward = trainer.model.forward

    def watched(*args, tree=None, **kwargs):
        if trainer.model.training:
            proven.append(list(vars(trainer.model)["_proven_lengths"].values()))
        return forward(*args, tree=tree, **kwargs)

    trainer.model.forward = watched
    trainer.train()
    longest = max(len(row.prompt_ids) + len(row.ids) for row in trainer.batch.token_rows)
    assert longest > 256 and proven == [[512]]
