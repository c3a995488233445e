"""Random models of a few thousand parameters: one for each kind of attention and of output layer."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {**SIZE, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA4 = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 20, "global_head_dim": 16}
GEMMA4 |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
LLAMA4 = {"intermediate_size_mlp": 32, "num_experts_per_tok": 1, "num_local_experts": 4, "num_hidden_layers": 4}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("gpt_oss", {**TINY, **EXPERTS, "sliding_window": 20}),
    "gemma 2": ("gemma2", {**TINY, **CAPS, "sliding_window": 20}),
    "gemma 4": ("gemma4_text", {**TINY, **GEMMA4}),
    "cohere": ("cohere", {**SIZE, "logit_scale": 0.3}),
    "cohere 2": ("cohere2", {**SIZE, "num_hidden_layers": 4, "sliding_window": 20}),
    "granite": ("granite", {**SIZE, "logits_scaling": 4.0, "attention_multiplier": 0.5}),
    "llama 4": ("llama4_text", {**TINY, **LLAMA4, "attention_chunk_size": 24, "floor_scale": 16}),
    "gpt-2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "opt": ("opt", {**SIZE, "ffn_dim": 32, "word_embed_proj_dim": 32}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}),
    "falcon": ("falcon", FALCON),
    "falcon with biases": ("falcon", {**FALCON, "alibi": True}),
    "falcon 40b": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "stablelm": ("stablelm", {**TINY, "use_parallel_residual": True, "qk_layernorm": True}),
    "nemotron": ("nemotron", TINY),
    "seed-oss": ("seed_oss", TINY),
    "phimoe": ("phimoe", {**TINY, **EXPERTS, "sliding_window": 20}),
    "llama": ("llama", TINY),
    "qwen 2": ("qwen2", {**SIZE, "num_key_value_heads": 1}),
    "qwen 3": ("qwen3", {**TINY, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "modernbert decoder": ("modernbert-decoder", {**SIZE, "local_attention": 32}),
}
"""By name: transformers' name, and its sizes."""


def build_random(kind: str, **overrides: Any) -> PreTrainedModel:
    """A model of a kind, in evaluation mode, with weights at which every part of it matters."""
    name, sizes = KINDS[kind]
    tokens = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**tokens, **sizes, **overrides})
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model
