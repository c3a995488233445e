"""Tiny models whose layers carry a state from token to token, of every kind."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE = {**TOKENS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
HEADS = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {
    **HEADS,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MIXED = ["linear_attention", "full_attention"]
MAMBA = {**HEADS, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8}
CONFIGS = {
    "qwen3 next": lambda: Qwen3NextConfig(**DELTA, **MOE, shared_expert_intermediate_size=16, layer_types=MIXED),
    "qwen3.5": lambda: Qwen3_5TextConfig(**DELTA, layer_types=MIXED),
    "qwen3.5 moe": lambda: Qwen3_5MoeTextConfig(**DELTA, **MOE, shared_expert_intermediate_size=16, layer_types=MIXED),
    "olmo hybrid": lambda: OlmoHybridConfig(**DELTA, layer_types=MIXED),
    "kimi linear": lambda: KimiLinearConfig(
        **{**HEADS, "num_key_value_heads": 4},
        linear_num_heads=4,
        linear_head_dim=8,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        layer_types=MIXED,
    ),
    "lfm2": lambda: Lfm2Config(**HEADS, layer_types=["conv", "full_attention"]),
    "lfm2 moe": lambda: Lfm2MoeConfig(**HEADS, **MOE, layer_types=["conv", "full_attention"]),
    "nemotron h": lambda: NemotronHConfig(
        **{**HEADS, "num_hidden_layers": 3},
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        head_dim=8,
        chunk_size=16,
        layers_block_type=["linear_attention", "mlp", "full_attention"],
    ),
    "mamba 2": lambda: Mamba2Config(**SIZE, num_heads=4, head_dim=16, n_groups=2, state_size=8, chunk_size=16),
    "falcon h1": lambda: FalconH1Config(**MAMBA, mamba_d_ssm=64, head_dim=8),
    "bamba": lambda: BambaConfig(**MAMBA, attn_layer_indices=[1]),
    "zamba 2": lambda: Zamba2Config(
        **HEADS, n_mamba_heads=4, mamba_ngroups=2, mamba_d_state=8, layers_block_type=["linear_attention", "hybrid"]
    ),
    "mamba": lambda: MambaConfig(**SIZE, state_size=8),
    "jamba": lambda: JambaConfig(
        **HEADS, mamba_d_state=8, mamba_dt_rank=4, num_experts=2, attn_layer_period=2, attn_layer_offset=1
    ),
    "minimax": lambda: MiniMaxConfig(
        **HEADS,
        head_dim=8,
        block_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=MIXED,
        router_aux_loss_coef=0.0,
    ),
}
ONE_OF_EACH_KIND = ("qwen3.5", "kimi linear", "lfm2", "mamba 2", "mamba", "minimax")


def build_hybrid(kind: str, **options: Any) -> PreTrainedModel:
    """A model of a kind in `CONFIGS`, with random weights and some of its configuration's options."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    for name, value in options.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config).eval()
