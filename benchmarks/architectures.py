"""
The probe of `forward: tree` on every architecture of transformers that can be made small.

Each causal language model of `MODEL_FOR_CAUSAL_LM_MAPPING` is made with a few thousand parameters: random sizes,
random windows, random kinds of rotary positions, and weights large enough to show what they do. What the probe says of
it, in float32 and in bfloat16, is held against an oracle that shares no code with it: on larger random trees the model
itself, never taught trees, scores each turn alone. The probe is right if it accepts none that is further off than 1e-4
nats, or than four times what a rounding step of the embeddings changes (1e-2 nats at most). It may refuse one that is
not. The last column is the verdict on the weights that transformers makes.

    python benchmarks/architectures.py [--quick] [--seeds 2]

Prints a table and writes `benchmarks/results/architectures.json`.
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import time
import warnings
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import write
from rich.console import Console
from rich.table import Table
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import model as forward
from mt_grpo.forward.model import check_model, enable_trees, score_packed
from mt_grpo.forward.packing import pack
from mt_grpo.forward.probe import EXACT, prove
from mt_grpo.token_tree import TokenTree

QUICK = ("LlamaConfig", "ModernBertDecoderConfig", "Qwen3NextConfig", "GptOssConfig")
LARGEST = 3_000_000  # parameters
LENGTH = 480  # tokens of the oracle's longest path
LOUD = 0.1  # what is added to norms, biases and the like

SIZES: dict[str, list[int]] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), [131]),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "lru_width"), [32]),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), [2, 4]),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), [2]),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), [4]),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_linear_attention_heads"), [4]),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner"), [48]),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), [48]),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), [16]),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), [4]),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "num_kv_heads"), [2]),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "zero_expert_num"), [1]),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "global_head_dim", "index_head_dim", "qk_head_dim"), [16]),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "index_topk"), [8]),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "state_size", "mamba_d_state"), [8]),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads", "laurel_rank"), [2]),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), [1024]),
    **dict.fromkeys(("sliding_window", "local_attention", "attention_window_size"), [16, 40, 200]),
    **dict.fromkeys(("window_size", "attention_chunk_size"), [32]),
    "num_key_value_heads": [1, 2, 4],
    "pad_token_id": [0],
    "bos_token_id": [1],
    "eos_token_id": [2],
    "num_kv_shared_layers": [0],
    "hidden_size_per_layer_input": [8],
    "mamba_n_heads": [4],
    "mamba_d_head": [16],
    "mamba_headdim": [32],
    "mamba_n_groups": [1, 2],
    "mamba_ngroups": [1, 2],
    "mamba_num_heads": [4],
    "mamba_head_dim": [16],
    "n_mamba_heads": [2],
    "mamba_dt_rank": [8],
    "ssm_state_size": [8],
    "n_groups": [1, 2],
    "expand": [1],
    "linear_num_heads": [4],
    "linear_head_dim": [8],
    "moe_shared_expert_intermediate_size": [16],
    "num_expert_group": [1],
    "num_shared_experts": [1],
    "layer_group_size": [2],
    "chunk_size": [16, 64],
    "block_size": [16],
    "mamba_d_ssm": [64],
}
"""Values for whatever option of a configuration is a number, by its name."""

LAYERS: dict[str, tuple[str, list[str]]] = {
    "Lfm2MoeConfig": ("layer_types", ["conv", "full_attention"]),
    "ZambaConfig": ("layers_block_type", ["linear_attention", "hybrid"]),
    "Zamba2Config": ("layers_block_type", ["linear_attention", "hybrid"]),
}
"""Kinds of four layers, in turns, for configurations that have none for so few."""

ROTARY: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 128},
    "longrope": {
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
    },
}


def small_config(kind: type[PreTrainedConfig], seed: int, rotary: str) -> PreTrainedConfig:
    """A configuration of that kind with small random sizes."""
    draw = random.Random(f"{kind.__name__}{seed}")
    known = kind().to_dict()
    options: dict[str, Any] = {}
    for name, choices in SIZES.items():
        if name in known and not isinstance(known[name], (bool, list, dict)):
            options[name] = draw.choice(choices)
    for name in known:
        if "drop" in name and isinstance(known[name], float):
            options[name] = 0.0
    if "qk_rope_head_dim" in known:
        options.pop("head_dim", None)
    if known.get("tie_word_embeddings") is not None:
        options["tie_word_embeddings"] = draw.random() < 0.5
    if "is_decoder" in known:
        options["is_decoder"] = draw.random() < 0.5
    if "layer_types" in known:
        options["layer_types"] = None
    if kind.__name__ in LAYERS:
        name, pattern = LAYERS[kind.__name__]
        options |= {"num_hidden_layers": 4, name: pattern * 2}
    if rotary != "default":
        options["rope_parameters"] = {"rope_type": rotary, "rope_theta": 10000.0, **ROTARY[rotary]}
        options["max_position_embeddings"] = 128
    return kind(**options)


def small_model(kind: type[PreTrainedConfig], seed: int) -> tuple[PreTrainedModel, str]:
    """A model of that kind with random weights, and its rotary positions."""
    draw = random.Random(f"{kind.__name__}{seed} rotary")
    rotary = draw.choice(list(ROTARY)) if seed and "rope_parameters" in kind().to_dict() else "default"
    config = small_config(kind, seed, rotary)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        model(input_ids=torch.arange(3, 40)[None], use_cache=False)
    return model, rotary


@torch.no_grad()
def speak_up(model: PreTrainedModel, seed: int) -> None:
    """Weights of a size at which every part matters: transformers' own are small, and most hide in a residual."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = model.get_input_embeddings().weight
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter is embeddings:
            parameter.copy_(0.5 * noise)
        elif parameter.dim() < 2:
            parameter.add_(LOUD * noise)
        else:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def random_turns(vocabulary: int, seed: int) -> list[list[tuple[list[int], list[int]]]]:
    """Trajectories of one prompt with six turns, which fork anywhere: for each turn its context and its action."""
    draw = np.random.default_rng(seed)

    def take(most: int) -> list[int]:
        return draw.integers(vocabulary, size=int(draw.integers(1, most))).tolist()

    prompt, trajectories = take(40), []
    for _ in range(3):
        turns, history = [], prompt
        for _ in range(6):
            cut = len(history) if draw.random() < 0.5 else int(draw.integers(1, len(history) + 1))
            context, action = history[:cut] + take(120), take(24)
            context = context[: LENGTH - len(action)]
            turns.append((context, action))
            history = context + action
        trajectories.append(turns)
    return trajectories


@torch.no_grad()
def oracle(plain: PreTrainedModel, taught: PreTrainedModel) -> tuple[float | None, float]:
    """
    Largest difference in nats between packed trees and turns alone, `None` where packed trees cannot be scored; and
    between turns alone and the same with embeddings that are off by about one rounding step.
    """
    shaken = copy.deepcopy(plain)
    embeddings = shaken.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    embeddings.mul_(1 + torch.finfo(embeddings.dtype).eps * torch.randn(embeddings.shape, generator=generator))
    largest = rounding = 0.0
    for seed in range(3):
        trajectories = random_turns(plain.config.get_text_config().vocab_size, 100 + seed)
        trees = [TokenTree() for _ in trajectories]
        alone = []
        for tree, turns in zip(trees, trajectories, strict=True):
            for context, action in turns:
                tree.add_turn(context, action, [0.0] * len(action))
                ids = torch.tensor([context + action])
                exact, off = (
                    model(input_ids=ids, use_cache=False)
                    .logits[0, len(context) - 1 : -1]
                    .log_softmax(dim=-1)
                    .gather(1, torch.tensor(action)[:, None])[:, 0]
                    for model in (plain, shaken)
                )
                alone.append(exact)
                rounding = max(rounding, (exact - off).abs().max().item())
        packed = pack(trees)
        try:
            scores = score_packed(taught, packed).logps[torch.from_numpy(packed.turn_order)]
        except (UnsupportedModelError, RuntimeError, ValueError, TypeError, AttributeError):
            return None, rounding
        difference = (scores - torch.cat(alone)).abs().max().item()
        if not np.isfinite(difference):
            return None, rounding
        largest = max(largest, difference)
    return largest, rounding


def verdict(model: PreTrainedModel) -> tuple[str, str]:
    """Who refuses a model (`list`, `first forward`, `probe`, or a `crash`), or `accepted`, and the sentence."""
    try:
        check_model(model)
    except UnsupportedModelError as error:
        return "list", str(error)
    try:
        enable_trees(model)
        prove(model, LENGTH)
    except UnsupportedModelError as error:
        return ("probe" if "nats" in str(error) else "first forward"), str(error)
    except Exception as error:  # what our own checks should have said in a sentence
        return "crash", f"{type(error).__name__}: {error}"
    return "accepted", ""


def examine(kind: type[PreTrainedConfig], seed: int) -> dict[str, Any]:
    """What the probe and the oracle say of an architecture."""
    model, rotary = small_model(kind, seed)
    fresh = copy.deepcopy(model)
    speak_up(model, seed)
    taught = copy.deepcopy(model)
    with patch.object(forward, "check_model", lambda model: None):  # the oracle asks also what is on the list
        enable_trees(taught)
    row = {
        "model": type(model).__name__,
        "seed": seed,
        "rotary": rotary,
        "window": getattr(model.config.get_text_config(), "sliding_window", None),
    }
    row["oracle"], row["rounding"] = oracle(model, taught)
    allowed = max(EXACT, min(4 * row["rounding"], 1e-2))
    row["right"] = row["oracle"] is not None and row["oracle"] <= allowed
    for name, candidate in (
        ("float32", copy.deepcopy(model)),
        ("bfloat16", copy.deepcopy(model).bfloat16()),
        ("as initialised", fresh),
    ):
        start = time.process_time()
        row[name], sentence = verdict(candidate)
        row["seconds"] = row.get("seconds", 0.0) + time.process_time() - start
        if name == "float32":
            row["sentence"] = sentence
    return row


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Architectures: what the probe says, and what is true")
    for column in ("model", "rotary", "oracle, nats", "float32", "bfloat16", "as initialised"):
        table.add_column(column)
    for row in sorted(rows, key=lambda row: (not row["right"], row["model"], row["seed"])):
        cells = [row["model"], row["rotary"], "cannot" if row["oracle"] is None else f"{row['oracle']:.1e}"]
        table.add_row(*cells, row["float32"], row["bfloat16"], row["as initialised"])
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four architectures; nothing is written")
    parser.add_argument("--seeds", type=int, default=2, help="configurations of each architecture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    unbuilt: dict[str, str] = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        if args.quick and kind.__name__ not in QUICK:
            continue
        for seed in range(1 if args.quick else args.seeds):
            try:
                row = examine(kind, seed)
            except Exception as error:  # transformers refuses sizes in every way there is
                unbuilt[f"{kind.__name__} {seed}"] = f"{type(error).__name__}: {error}"[:200]
                continue
            if all((row["model"], seed) != (other["model"], other["seed"]) for other in rows):
                rows.append(row)
                print(f"{row['model']} {seed}: {row['float32']}", flush=True)
    show(rows)
    kinds = {row["model"] for row in rows}
    print(f"{len(rows)} configurations of {len(kinds)} architectures; {len(unbuilt)} could not be made small.")
    wrong = [row for row in rows if not row["right"]]
    for name in ("float32", "bfloat16", "as initialised"):
        slipped = [row["model"] for row in wrong if row[name] == "accepted"]
        lost = [f"{row['model']} ({row[name]})" for row in rows if row["right"] and row[name] != "accepted"]
        print(f"{name}: accepted though wrong: {', '.join(slipped) or 'none'}")
        print(f"{name}: refused though right: {', '.join(lost) or 'none'}")
    if not args.quick:
        write("architectures", {"seeds": args.seeds, "length": LENGTH, "unbuilt": unbuilt}, rows)
    if any(row[name] == "accepted" for row in wrong for name in ("float32", "bfloat16")):
        raise SystemExit("An architecture is accepted that is scored wrongly.")


if __name__ == "__main__":
    main()
