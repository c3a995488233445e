"""Random models of a few thousand parameters: one for each kind of attention and of output layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    ModernBertDecoderConfig,
    MptConfig,
    NemotronConfig,
    OPTConfig,
    PhimoeConfig,
    PreTrainedModel,
    SeedOssConfig,
    StableLmConfig,
)

SIZE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {**SIZE, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA4 = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 20,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}
LLAMA4 = {"intermediate_size_mlp": 32, "num_experts_per_tok": 1, "num_local_experts": 4, "num_hidden_layers": 4}

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "gpt-oss": (GptOssConfig, {**TINY, **EXPERTS, "sliding_window": 20}),
    "gemma 2": (Gemma2Config, {**TINY, **CAPS, "sliding_window": 20}),
    "gemma 4": (Gemma4TextConfig, {**TINY, **GEMMA4}),
    "cohere": (CohereConfig, {**SIZE, "logit_scale": 0.3}),
    "cohere 2": (Cohere2Config, {**SIZE, "num_hidden_layers": 4, "sliding_window": 20}),
    "granite": (GraniteConfig, {**SIZE, "logits_scaling": 4.0, "attention_multiplier": 0.5}),
    "llama 4": (Llama4TextConfig, {**TINY, **LLAMA4, "attention_chunk_size": 24, "floor_scale": 16}),
    "gpt-2": (GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "opt": (OPTConfig, {**SIZE, "ffn_dim": 32, "word_embed_proj_dim": 32}),
    "bloom": (BloomConfig, {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": (MptConfig, {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}),
    "falcon": (FalconConfig, {**FALCON, "num_attention_heads": 4}),
    "falcon with biases": (FalconConfig, {**FALCON, "alibi": True}),
    "falcon 40b": (FalconConfig, {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "stablelm": (StableLmConfig, {**TINY, "use_parallel_residual": True, "qk_layernorm": True}),
    "nemotron": (NemotronConfig, TINY),
    "seed-oss": (SeedOssConfig, TINY),
    "phimoe": (PhimoeConfig, {**TINY, **EXPERTS, "sliding_window": 20}),
    "modernbert decoder": (ModernBertDecoderConfig, {**SIZE, "local_attention": 32}),
}
"""By name: a configuration and its sizes."""


def build_random(kind: str, **overrides: Any) -> PreTrainedModel:
    """A model of a kind, in evaluation mode, with weights at which every part of it matters."""
    configuration, sizes = KINDS[kind]
    tokens = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(**{**tokens, **sizes, **overrides})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model
