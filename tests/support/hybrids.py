"""Tiny models whose layers carry a state from token to token, of every kind."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support.architectures import build_random

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE = {**TOKENS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
HEADS = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 2}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
CONVOLVED = {"layer_types": ["conv", "full_attention"]}
DELTA = {**HEADS, **MIXED, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {**MOE, "shared_expert_intermediate_size": 16}
KIMI = {**HEADS, **MIXED, **LOCAL, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8}
KIMI |= {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
}
MAMBA = {**HEADS, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8}
NEMOTRON = {**HEADS, "num_hidden_layers": 3, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2}
NEMOTRON |= {"ssm_state_size": 8, "head_dim": 8, "chunk_size": 16}
NEMOTRON |= {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}
ZAMBA = {**HEADS, "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 8}
ZAMBA |= {"layers_block_type": ["linear_attention", "hybrid"]}
JAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 next": ("qwen3_next", {**DELTA, **SHARED}),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "qwen3.5 moe": ("qwen3_5_moe_text", {**DELTA, **SHARED}),
    "olmo hybrid": ("olmo_hybrid", DELTA),
    "kimi linear": ("kimi_linear", KIMI),
    "lfm2": ("lfm2", {**HEADS, **CONVOLVED}),
    "lfm2 moe": ("lfm2_moe", {**HEADS, **MOE, **CONVOLVED}),
    "nemotron h": ("nemotron_h", NEMOTRON),
    "mamba 2": ("mamba2", {**SIZE, "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 16}),
    "falcon h1": ("falcon_h1", {**MAMBA, "mamba_d_ssm": 64, "head_dim": 8}),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "zamba 2": ("zamba2", ZAMBA),
    "mamba": ("mamba", {**SIZE, "state_size": 8}),
    "jamba": ("jamba", {**HEADS, **JAMBA}),
    "minimax": ("minimax", {**HEADS, **MIXED, **LOCAL, "head_dim": 8, "block_size": 16, "router_aux_loss_coef": 0.0}),
}
"""By name: transformers' name, and its sizes."""
ONE_OF_EACH_KIND = ("qwen3.5", "kimi linear", "lfm2", "mamba 2", "mamba", "minimax")


def build_hybrid(kind: str, **options: Any) -> PreTrainedModel:
    """A model of a kind in `CONFIGS`, with random weights and some of its configuration's options."""
    torch.manual_seed(0)
    name, sizes = CONFIGS[kind]
    config = AutoConfig.for_model(name, **sizes)
    for option, value in options.items():
        setattr(config, option, value)
    return AutoModelForCausalLM.from_config(config).eval()


def build_kind(kind: str, **options: Any) -> PreTrainedModel:
    """The same of any kind, here or in `support.architectures`."""
    return (build_hybrid if kind in CONFIGS else build_random)(kind, **options)
