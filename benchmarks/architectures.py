"""
What `forward: tree` makes of every architecture of transformers that can be made small.

Each causal language model of `MODEL_FOR_CAUSAL_LM_MAPPING` is made with a few thousand parameters: random sizes,
random windows, random kinds of rotary positions, and weights large enough to show what they do. A run would train it
over packed trees, in padded rows, or not at all. That verdict, in float32 and in bfloat16, is held against an oracle
that shares no code with it: on larger random trees the model itself, never taught trees, scores each turn alone. A
forward is right if it is no further off than 1e-4 nats, or than four times what a rounding step of the embeddings
changes (1e-2 nats at most). No verdict may be wrong. One may be needless: padded rows where trees are right, or a
refusal where padded rows are. The last column is the verdict on the weights that transformers makes.

    python benchmarks/architectures.py              # runs what has not run, then prints and writes the results
    python benchmarks/architectures.py --quick      # two configurations; writes nothing
    python benchmarks/architectures.py --report     # the results alone, from benchmarks/results/architectures.json

Every configuration leaves a file in `runs/architectures` and is skipped where that is there, so the command can be
interrupted and given again.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jobs
import numpy as np
import torch
from common import RESULTS, write
from jobs import Row
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mt_grpo.app.train import write_json
from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward import model as forward
from mt_grpo.forward.model import ForwardPlan, enable_trees, score
from mt_grpo.forward.probe import EXACT, prove
from mt_grpo.token_tree import TokenTree

FOLDER = Path(__file__).parent.parent / "runs" / "architectures"
RESULT = RESULTS / "architectures.json"
PRECISIONS = ("float32", "bfloat16", "as initialised")
QUICK = ("LlamaConfig",)
LARGEST = 8_000_000  # parameters
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
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "laurel_rank"), [2]),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), [1024]),
    **dict.fromkeys(("sliding_window", "local_attention", "attention_window_size"), [16, 40, 200]),
    **dict.fromkeys(("window_size", "attention_chunk_size"), [32]),
    "index_n_heads": [16],  # with few, many scores of an indexer are 0, and which of equal ones it takes is chance
    "rotary_dim": [4],
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


FAMILIES = {
    # TRL's test models and chat templates
    "Llama 3": "LlamaConfig",
    "Mistral": "MistralConfig",
    "Qwen2": "Qwen2Config",
    "Qwen3": "Qwen3Config",
    "Qwen3-MoE": "Qwen3MoeConfig",
    "Qwen3.5": "Qwen3_5TextConfig",
    "Qwen3.5-MoE": "Qwen3_5MoeTextConfig",
    "Gemma": "GemmaConfig",
    "Gemma 2": "Gemma2Config",
    "Gemma 3": "Gemma3TextConfig",
    "Gemma 4": "Gemma4TextConfig",
    "Phi-3": "Phi3Config",
    "gpt-oss": "GptOssConfig",
    "GLM-4-MoE": "Glm4MoeConfig",
    "DeepSeek V3": "DeepseekV3Config",
    "DeepSeek V4": "DeepseekV4Config",
    "Cohere": "CohereConfig",
    "Cohere 2": "Cohere2Config",
    "LFM2": "Lfm2Config",
    "Nemotron-H": "NemotronHConfig",
    "Falcon-Mamba": "FalconMambaConfig",
    "Olmo 3": "Olmo3Config",
    "OPT": "OPTConfig",
    "GPT-2": "GPT2Config",
    "GPT-NeoX": "GPTNeoXConfig",
    # others with weights that people train
    "Qwen3-Next": "Qwen3NextConfig",
    "Llama 4": "Llama4TextConfig",
    "Mixtral": "MixtralConfig",
    "Granite": "GraniteConfig",
    "Granite 4": "GraniteMoeHybridConfig",
    "Kimi-Linear": "KimiLinearConfig",
    "MiniMax": "MiniMaxConfig",
    "Mamba 2": "Mamba2Config",
    "Nemotron": "NemotronConfig",
    "SmolLM3": "SmolLM3Config",
    "Seed-OSS": "SeedOssConfig",
    "StableLM": "StableLmConfig",
    "ERNIE 4.5": "Ernie4_5Config",
    "Exaone 4": "Exaone4Config",
    "Phi": "PhiConfig",
    "PhiMoE": "PhimoeConfig",
    "BLOOM": "BloomConfig",
    "MPT": "MptConfig",
    "Falcon": "FalconConfig",
}
"""The families that people train with TRL, or with the systems that this one is compared with."""


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


class Oracle(NamedTuple):
    """
    Largest differences in nats from turns alone.

    Args:
        tree, padded (`float`, *optional*): Of packed trees, and of padded rows; `None` where these cannot be scored.
        rounding (`float`): Of turns alone whose embeddings are off by about one rounding step.
    """

    tree: float | None
    padded: float | None
    rounding: float


@torch.no_grad()
def oracle(plain: PreTrainedModel, taught: PreTrainedModel) -> Oracle:
    """What a model scores over trees and in rows, against what it scores for each turn alone."""
    shaken = copy.deepcopy(plain)
    embeddings = shaken.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    embeddings.mul_(1 + torch.finfo(embeddings.dtype).eps * torch.randn(embeddings.shape, generator=generator))
    rounding = 0.0
    largest: dict[str, float] = {"tree": 0.0, "padded": 0.0}
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
        ways = {
            "tree": lambda trees=trees: of_turns(taught, trees, "tree"),
            "padded": lambda trees=trees: of_turns(plain, trees, "padded"),
        }
        for name in [name for name in ways if name in largest]:
            try:
                difference = (ways[name]() - torch.cat(alone)).abs().max().item()
            except (UnsupportedModelError, RuntimeError, ValueError, TypeError, AttributeError):
                difference = np.inf
            largest[name] = max(largest[name], difference)
            if not np.isfinite(difference):
                del largest[name]
    return Oracle(largest.get("tree"), largest.get("padded"), rounding)


def of_turns(model: PreTrainedModel, trees: list[TokenTree], forward: str) -> Tensor:
    found = score(model, ForwardPlan(trees, forward=forward)).by_turn([tree.num_turns for tree in trees])
    return torch.cat([logps for of_tree in found for logps in of_tree])


def verdict(model: PreTrainedModel) -> tuple[str, str]:
    """What a run trains a model over: `tree`, `padded`, or `refused`; and why it is not a tree."""
    sentence = ""
    try:
        try:
            enable_trees(model)
            prove(model, LENGTH)
        except UnsupportedModelError as error:
            sentence = str(error)
            prove(model, LENGTH, ForwardPlan(forward="padded"))
    except UnsupportedModelError as error:
        return "refused", str(error)
    except Exception as error:  # what our own checks should have said in a sentence
        return "crash", f"{type(error).__name__}: {error}"
    return ("padded" if sentence else "tree"), sentence.partition(", so trees cannot be packed")[0]


@torch.no_grad()
def runs(model: PreTrainedModel) -> bool:
    """Whether a model's own forward runs in its precision. Some mix types."""
    try:
        model(input_ids=3 + torch.arange(LENGTH)[None] % 100, use_cache=False)
    except RuntimeError:
        return False
    return True


def examine(kind: type[PreTrainedConfig], seed: int) -> Row:
    """The verdicts on an architecture, and the truth."""
    model, rotary = small_model(kind, seed)
    fresh = copy.deepcopy(model)
    speak_up(model, seed)
    taught = copy.deepcopy(model)
    with patch.object(forward, "check_model", lambda model: None):  # the oracle asks also what is on the list
        enable_trees(taught)
    tree, padded, rounding = oracle(model, taught)
    allowed = max(EXACT, min(4 * rounding, 1e-2))
    row: Row = {
        "model": type(model).__name__,
        "seed": seed,
        "rotary": rotary,
        "window": getattr(model.config.get_text_config(), "sliding_window", None),
        "oracle": {"tree": tree, "padded": padded},
        "rounding": rounding,
        "right": [name for name, off in (("tree", tree), ("padded", padded)) if off is not None and off <= allowed],
    }
    for name, candidate in (
        ("float32", copy.deepcopy(model)),
        ("bfloat16", copy.deepcopy(model).bfloat16()),
        ("as initialised", fresh),
    ):
        start = time.process_time()
        if not runs(candidate):
            row[name] = "cannot run"
            continue
        row[name], sentence = verdict(candidate)
        row["seconds"] = row.get("seconds", 0.0) + time.process_time() - start
        if name == "float32":
            row["sentence"] = sentence
    return row


class Job(NamedTuple):
    """One configuration."""

    kind: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / f"{self.kind}-{self.seed}.json"


def work(job: Job, folder: Path) -> Job:
    """Examines a configuration and writes its file."""
    kind = next(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING if kind.__name__ == job.kind)
    row: Row = {"kind": job.kind, "length": LENGTH}
    try:
        row |= examine(kind, job.seed)
    except Exception as error:  # transformers refuses sizes in every way there is
        row |= {"seed": job.seed, "unbuilt": f"{type(error).__name__}: {error}"[:200]}
    write_json(job.file(folder), row)
    return job


def prepare() -> None:
    jobs.prepare()
    warnings.simplefilter("ignore")


def wrong(row: Row, name: str) -> bool:
    return row[name] in ("tree", "padded") and row[name] not in row["right"]


def needless(row: Row, name: str) -> bool:
    best = (row["right"] or ["refused"])[0]
    return row[name] not in (best, "cannot run") and not wrong(row, name)


def show(rows: list[Row]) -> None:
    table = Table(title="Architectures: what a run would train them over, and what is true")
    for column in ("model", "rotary", "tree, nats", "rows, nats", "float32", "bfloat16", "as initialised"):
        table.add_column(column)
    for row in sorted(rows, key=lambda row: (row["right"] != ["tree", "padded"], row["model"], row["seed"])):
        off = ["cannot" if value is None else f"{value:.1e}" for value in row["oracle"].values()]
        table.add_row(row["model"], row["rotary"], *off, row["float32"], row["bfloat16"], row["as initialised"])
    Console(width=150).print(table)
    print(f"{len(rows)} configurations of {len({row['model'] for row in rows})} architectures")
    counts = Counter((row["right"][0] if row["right"] else "none", row["float32"]) for row in rows)
    for (truth, said), count in sorted(counts.items()):
        print(f"right: {truth}; float32: {said}: {count}")
    for name in PRECISIONS:
        slipped = [f"{row['model']} {row['seed']}" for row in rows if wrong(row, name)]
        lost = [f"{row['model']} {row['seed']} ({row[name]})" for row in rows if needless(row, name)]
        print(f"{name}: wrong: {', '.join(slipped) or 'none'}")
        print(f"{name}: needless: {', '.join(lost) or 'none'}")


def families(rows: list[Row]) -> str:
    """A sentence on the families that people train, each by its first configuration."""
    first = {row["kind"]: row for row in rows if row["seed"] == 0}
    found = {name: first[kind]["float32"] if kind in first else "not made" for name, kind in FAMILIES.items()}
    others = [f"{name} ({said})" for name, said in found.items() if said != "tree"]
    trees = len(found) - len(others)
    return f"{trees} of {len(found)} families are trained over packed trees; others: {', '.join(others) or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one configuration; nothing is written")
    parser.add_argument("--report", action="store_true", help="print what is in the results; nothing is run")
    parser.add_argument("--seeds", type=int, default=2, help="configurations of each architecture")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    if args.report:
        rows = json.loads(RESULT.read_text())["rows"]
        show(rows)
        print(families(rows))
        return
    kinds = [kind.__name__ for kind in MODEL_FOR_CAUSAL_LM_MAPPING]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if args.quick else FOLDER
        chosen = QUICK if args.quick else [*dict.fromkeys([*FAMILIES.values(), *kinds])]
        seeds, workers = (1, 0) if args.quick else (args.seeds, args.workers)
        given = [Job(kind, seed) for kind in chosen for seed in range(seeds)]
        waiting = [job for job in given if not job.file(folder).exists()]
        jobs.run_all(work, waiting, folder=folder, workers=workers, prepare=prepare)
        found = jobs.finished(given, folder, length=LENGTH)
    unbuilt = {f"{row['kind']} {row['seed']}": row["unbuilt"] for row in found if "unbuilt" in row}
    made = {(row["model"], row["seed"]): row for row in reversed(found) if "model" in row}  # two names of one model
    rows = [row for row in found if any(row is other for other in made.values())]
    show(rows)
    if not args.quick:
        print(families(rows))
    print(f"{len(unbuilt)} configurations could not be made small.")
    if not args.quick:
        write("architectures", {"seeds": args.seeds, "length": LENGTH, "unbuilt": unbuilt}, rows)
    if any(wrong(row, name) for row in rows for name in ("float32", "bfloat16")):
        raise SystemExit("An architecture would be trained wrongly.")


if __name__ == "__main__":
    main()
