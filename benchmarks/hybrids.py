"""
A whole policy step of models whose layers carry a state: TRL's stock `_compute_loss` on padded rows against the packed
tree on the same rows, as in `step.py`. Past thinking is stripped over 12 turns. Loss and gradient are compared first.

    python benchmarks/hybrids.py [--quick]              # small random models, CPU
    python benchmarks/hybrids.py --device cuda          # the same, with the kernels that are installed
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from common import write
from measure import stripped_rows
from step import TreeTrainer, build_batch, build_trainer, compare
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
)
from trl import GRPOTrainer

from mt_grpo.forward.model import enable_trees

TOKENS = {"vocab_size": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
MODELS: dict[str, PreTrainedConfig] = {
    "Qwen3.5: Gated DeltaNet": Qwen3_5TextConfig(
        **SIZE,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    ),
    "Nemotron-H: Mamba 2": NemotronHConfig(
        **SIZE,
        head_dim=32,
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=2,
        layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention"],
    ),
    "LFM2: short convolutions": Lfm2Config(**SIZE, layer_types=["conv", "conv", "conv", "full_attention"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two turns, to see that it runs; nothing is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompt, turns, repeats = (32, 2, 1) if args.quick else (512, 12, args.repeats)
    batch = build_batch(stripped_rows(prompt, 2, turns), args.device)
    settings = {"device": args.device, "group": 2, "turns": turns, "seed": 0, "repeats": repeats, "threads": 1}
    results = []
    print("| model | padded / unique | trained | TRL | tree | time ratio | ratio / limit | memory, MiB | gradient |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).to(args.device)
            model = model.to(torch.bfloat16) if args.device == "cuda" else model
            stock = build_trainer(GRPOTrainer, copy.deepcopy(model), args.device, folder)
            tree = build_trainer(TreeTrainer, model, args.device, folder)
            enable_trees(model)
            results.append(compare(name, batch, stock, tree, args.device, repeats))
            if not args.quick:
                write("hybrids" if args.device == "cpu" else "hybrids_cuda", settings, results)


if __name__ == "__main__":
    main()
